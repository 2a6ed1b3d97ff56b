#ifndef FA_SRC_API_SHARED_PREFIXES_HPP_
#define FA_SRC_API_SHARED_PREFIXES_HPP_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include <fa/attention.hpp>

#include "api/validate.hpp"
#include "api/variants.hpp"

namespace fa::api {

/// Forwards with shared prefixes, composed of others: that of the requests' own keys, one a level over groups, and a
/// merge in place.
class SharedPrefixes {
 public:
  /// `config` and `functions` outlive it. Throws fa::Error(unsupported) for one that levels have no meaning with.
  SharedPrefixes(const AttentionConfig& config, const Functions& functions, Device device);

  /// A call, held to the configuration.
  struct Call {
    ForwardInputs own;  ///< without prefixes
    ForwardOutputs out;
    AttentionState rows;  ///< the same outputs, of rank 4 and 3
    std::array<ForwardInputs, SharedPrefix::kMaxLevels> levels;
    std::array<SharedPrefixShape, SharedPrefix::kMaxLevels> shapes;
    std::size_t count = 0;
    AttentionShape shape;  ///< of the requests' own call
    bool empty = false;
  };
  /// Throws fa::Error(invalid_argument) for anything that the call must not be launched with, but for what arrays hold.
  Call check(const ForwardInputs& inputs, const ForwardOutputs& outputs, const Workspace& workspace) const;

  std::size_t workspace_size(const AttentionShape& shape, std::span<const SharedPrefixShape> prefixes) const;
  void prepare(const AttentionShape& shape, std::span<const SharedPrefixShape> prefixes) const;

  /// Bytes of a call's partial results, in front of what its parts need.
  std::size_t partial_bytes(const Call& call) const;
  /// Throws fa::Error(out_of_memory) where `size` bytes are too few.
  void check_workspace(const Call& call, std::size_t size) const;
  /// `partial`: partial_bytes, 256-byte aligned. `rest` serves the parts, one after the other.
  void run(const Call& call, std::byte* partial, Workspace rest, Stream stream) const;

 private:
  std::size_t partial_bytes(const AttentionShape& shape, std::size_t levels) const;
  AttentionShape level_shape(const AttentionShape& shape, const SharedPrefixShape& prefix) const;
  const Attention& level_of(const AttentionShape& level, bool begins) const;
  ForwardInputs level_inputs(const ForwardCall& call, const ForwardInputs& inputs, std::size_t level) const;
  void check_level(const Call& call, const SharedPrefix& prefix, std::size_t level) const;
  void check_arrays(const Call& call) const;

  const AttentionConfig& config_;
  const Functions& functions_;
  const AttentionConfig level_config_;
  const bool positioned_;  ///< rows of a group do not see the same of their prefix
  const bool host_;
  const Attention own_;
  const Attention many_;                          ///< of levels with enough query tiles for a GPU
  const Attention few_;                           ///< of others: thread blocks share keys
  mutable std::atomic<std::uint64_t> enough_{0};  ///< names a workspace's size and a call that it is enough for
};

}  // namespace fa::api

#endif  // FA_SRC_API_SHARED_PREFIXES_HPP_
