#ifndef FA_SRC_SUPPORT_SHARD_PLACE_HPP_
#define FA_SRC_SUPPORT_SHARD_PLACE_HPP_

#include <cstdint>

#include <fa/types.hpp>

namespace fa::support {

/// Sizes of a call that has a place.
struct ShardSizes {
  std::int64_t b = 0, h_q = 0, s_q = 0, s_kv = 0;
};

/// Behind the last of `count` entries, `step` apart, from `first` on.
constexpr std::int64_t end_of(std::int64_t first, std::int64_t count, std::int64_t step) noexcept {
  return count == 0 ? first : first + (count - 1) * step + 1;
}

/// `place` of a call of these sizes, with those of the whole filled in where it leaves them out.
constexpr ShardPlace resolved(ShardPlace place, const ShardSizes& call) noexcept {
  if (place.whole_b == 0) place.whole_b = place.b + call.b;
  if (place.whole_h_q == 0) place.whole_h_q = place.h_q + call.h_q;
  if (place.whole_s_q == 0) place.whole_s_q = end_of(place.q, call.s_q, place.q_step);
  if (place.whole_s_kv == 0) place.whole_s_kv = end_of(place.kv, call.s_kv, place.kv_step);
  return place;
}

}  // namespace fa::support

#endif  // FA_SRC_SUPPORT_SHARD_PLACE_HPP_
