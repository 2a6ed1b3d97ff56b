#ifndef FA_SRC_PARALLEL_SHARED_PLACES_HPP_
#define FA_SRC_PARALLEL_SHARED_PLACES_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "parallel/plan.hpp"

namespace fa::parallel {

/// Bytes of an element.
struct ElementSizes {
  std::int64_t own = 2;
  std::int64_t wide = 4;
  std::int64_t of(Element element) const noexcept { return element == Element::own ? own : wide; }
};

/// Tensors that travel, one behind the other in the memory that ranks share. Those that come are first: where they lie
/// does not hang on whether this rank's K and V are sent as the caller has them. Tensors of the caller have no place.
struct SharedLayout {
  static constexpr std::int64_t kNowhere = -1;  ///< of a tensor that does not travel
  std::vector<std::int64_t> offsets;            ///< by tensor, in bytes
  std::int64_t bytes = 0;
};
SharedLayout shared_layout(const Plan& plan, ElementSizes sizes);

/// What one rank has to know of all.
struct SharedPlaces {
  SharedLayout own;
  std::vector<std::int64_t> sends;  ///< of each send of its plan, in order: where it goes in the receiver's memory
  std::int64_t bytes = 0;           ///< that every rank shares: what the rank with most takes
};

/// Of a rank's plan. `plans` are those of all ranks if all copied K and V. Sends and receives of two ranks meet in
/// their order.
SharedPlaces shared_places(const Plan& own, const std::vector<Plan>& plans, int rank, ElementSizes sizes);

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_SHARED_PLACES_HPP_
