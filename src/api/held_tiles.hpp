#ifndef FA_SRC_API_HELD_TILES_HPP_
#define FA_SRC_API_HELD_TILES_HPP_

#include <cstdint>

#include <fa/attention.hpp>

#include "api/variants.hpp"

namespace fa::api {

/// Memory that a call gives for tile lists, with what of the call its kernels do not say: the numbers that the mask
/// function captures. What captured tensors hold, the host does not see.
struct GivenTiles : MaskTiles {
  std::uint64_t numbers = 0;
};
GivenTiles given_tiles(const MaskTiles& tiles, const AttentionConfig& config, const Functions& functions,
                       const VariantCall& variant) noexcept;

/// Holds memory that is said to be filled to lists of `tag`. What any call of the process has queued counts. Takes no
/// lock. Throws fa::Error(invalid_argument).
void expect_held(const MaskTiles& tiles, std::uint64_t tag);

/// The tag of what `data` holds; 0: nobody knows. Takes no lock.
std::uint64_t held(const void* data) noexcept;

/// `data` holds lists of `tag`, or a schedule, from now on, in the order of the stream; 0: of nobody knows whom. Takes
/// a lock for memory that is new.
void set_held(const void* data, std::uint64_t tag);

}  // namespace fa::api

#endif  // FA_SRC_API_HELD_TILES_HPP_
