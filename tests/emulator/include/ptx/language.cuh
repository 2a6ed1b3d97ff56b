#ifndef FA_TESTS_EMULATOR_PTX_LANGUAGE_CUH_
#define FA_TESTS_EMULATOR_PTX_LANGUAGE_CUH_

// The emulator's templates/ptx/language.cuh: kernels are host functions that every fiber calls.

#define FA_DEVICE inline
#define FA_UNROLL
#define FA_UNROLL_BY(count)

// FA_KERNEL(name, Params, threads, min_blocks) { body using `params` }; name_entry, name_threads and name_min_blocks
// are what a launch needs to know.
#define FA_KERNEL(name, Params, threads, min_blocks)                    \
  static void name(const Params& params);                               \
  [[maybe_unused]] static void name##_entry(const void* params) {       \
    name(*static_cast<const Params*>(params));                          \
  }                                                                     \
  [[maybe_unused]] static constexpr int name##_threads = threads;       \
  [[maybe_unused]] static constexpr int name##_min_blocks = min_blocks; \
  static void name(const Params& params)
#define FA_CLUSTER_KERNEL(name, Params, threads, min_blocks, cluster) FA_KERNEL(name, Params, threads, min_blocks)

#endif  // FA_TESTS_EMULATOR_PTX_LANGUAGE_CUH_
