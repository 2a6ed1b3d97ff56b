#ifndef FA_TEMPLATES_PTX_LANGUAGE_CUH_
#define FA_TEMPLATES_PTX_LANGUAGE_CUH_

// How CUDA C++ spells functions, kernels and loop hints. Every kernel goes through these names, so that another
// implementation of templates/ptx can compile the same kernel text for another machine.

#define FA_DEVICE __device__ __forceinline__
#define FA_UNROLL _Pragma("unroll")
// 0 copies: as many as the compiler likes, of which it need not tell.
#pragma nv_diag_suppress 20168
#define FA_UNROLL_BY(count) _Pragma(FA_STRINGIZE(unroll count))
#define FA_STRINGIZE(...) #__VA_ARGS__

// FA_KERNEL(name, Params, threads, min_blocks) { body using `params` }
#define FA_KERNEL(name, Params, threads, min_blocks) \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) name(const __grid_constant__ Params params)
// The same for clusters of so many consecutive blocks.
#define FA_CLUSTER_KERNEL(name, Params, threads, min_blocks, cluster)                               \
  extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, min_blocks) \
      name(const __grid_constant__ Params params)

#endif  // FA_TEMPLATES_PTX_LANGUAGE_CUH_
