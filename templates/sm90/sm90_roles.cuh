#ifndef FA_TEMPLATES_SM90_SM90_ROLES_CUH_
#define FA_TEMPLATES_SM90_SM90_ROLES_CUH_

#include <ptx/language.cuh>
#include <sm90/sm90_sizes.cuh>

namespace fa::sm90 {

/// What a warpgroup of a thread block does. The first is the producers', consumers follow.
enum class WarpgroupRole { producer, consumer, dropout_rng };

/// Hardware barriers, but for that of all threads (0).
enum class NamedBarrier : int {
  // Of a forward, 4 each, one a consumer.
  pingpong = 1,  // it may feed the tensor cores
  staged_o = 8,  // all of its warps have left Q
  // Of a forward by a schedule, of all consumers.
  partial_rows = 1,   // a part of a query tile is written, and then how many there were before it
  whole_splits = 12,  // the same of fixed splits, beside the ping-pong
  // Of a backward, of all consumers.
  ds = 1,           // dS of all warpgroups is in shared memory
  clean_tiles = 2,  // products may read tiles that were cleared in part; before: none reads them
  dq_given = 3,     // dQ of a step is given to the warp that looks at it
  dq_clean = 4,     // and may be added
};

/// The number of a barrier, or of the first consumer's. That of another is added where it is used: as an argument of a
/// function it costs instructions in the forward's main loop.
FA_DEVICE constexpr int first_of(NamedBarrier barrier) {
  return static_cast<int>(barrier);
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_ROLES_CUH_
