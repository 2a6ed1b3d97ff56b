#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_BLOCKS_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_BLOCKS_CUH_

#include <sm90/sm90_backward_pair.cuh>
#include <sm90/sm90_backward_wide.cuh>

namespace fa::sm90 {

/// Of several blocks a key tile, the kernel of the head dims.
template <class Config>
using BackwardBlocks = typename kernel::Either<BackwardWide<Config>, BackwardPair<Config>,
                                               (Config::kHeadDimQk > 256 || Config::kHeadDimV > 256)>::type;

template <class Config>
FA_DEVICE void backward_blocks(const typename BackwardBlocks<Config>::AllParams& params) {
  BackwardBlocks<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_BLOCKS_CUH_
