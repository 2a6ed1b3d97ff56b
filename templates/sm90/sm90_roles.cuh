#ifndef FA_TEMPLATES_SM90_SM90_ROLES_CUH_
#define FA_TEMPLATES_SM90_SM90_ROLES_CUH_

#include <ptx/language.cuh>
#include <sm90/sm90_sizes.cuh>

namespace fa::sm90 {

/// What a warpgroup of a thread block does. The first is the producers', consumers follow.
enum class WarpgroupRole { producer, consumer, dropout_rng };

/// Hardware barriers of a forward, but for that of all threads (0).
enum class NamedBarrier : int {
  pingpong = 1,  // 4, one a consumer: it may feed the tensor cores
  staged_o = 8,  // 4, one a consumer: all of its warps have left Q
};

/// The number of the first consumer's barrier. That of another is added where it is used: as an argument of a function
/// it costs instructions in the main loop.
FA_DEVICE constexpr int first_of(NamedBarrier barrier) {
  return static_cast<int>(barrier);
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_ROLES_CUH_
