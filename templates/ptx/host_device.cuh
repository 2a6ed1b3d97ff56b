#ifndef FA_TEMPLATES_PTX_HOST_DEVICE_CUH_
#define FA_TEMPLATES_PTX_HOST_DEVICE_CUH_

// Functions that host and kernels call, in headers that both include. NVRTC takes what is not marked for the host's.
#if defined(__CUDACC__)
#define FA_HOST_DEVICE __host__ __device__
#else
#define FA_HOST_DEVICE
#endif

#endif  // FA_TEMPLATES_PTX_HOST_DEVICE_CUH_
