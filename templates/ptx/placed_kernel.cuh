#ifndef FA_TEMPLATES_PTX_PLACED_KERNEL_CUH_
#define FA_TEMPLATES_PTX_PLACED_KERNEL_CUH_

#include <ptx/language.cuh>

// FA_KERNEL of a kernel whose place comes from memory: { body using `params` and `place` }
#define FA_PLACED_KERNEL(name, Params, Place, threads, min_blocks)  \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) \
      name(const __grid_constant__ Params params, const __grid_constant__ Place place)
#define FA_PLACED_CLUSTER_KERNEL(name, Params, Place, threads, min_blocks, cluster)                 \
  extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, min_blocks) \
      name(const __grid_constant__ Params params, const __grid_constant__ Place place)

#endif  // FA_TEMPLATES_PTX_PLACED_KERNEL_CUH_
