#ifndef FA_TESTS_EMULATOR_PTX_PLACED_KERNEL_CUH_
#define FA_TESTS_EMULATOR_PTX_PLACED_KERNEL_CUH_

#include <ptx/language.cuh>

// FA_KERNEL of a kernel whose place comes from memory; what it is launched with are the addresses of both.
#define FA_PLACED_KERNEL(name, Params, Place, threads, min_blocks)                             \
  static void name(const Params& params, const Place& place);                                  \
  [[maybe_unused]] static void name##_entry(const void* both) {                                \
    const auto* const addresses = static_cast<const void* const*>(both);                       \
    name(*static_cast<const Params*>(addresses[0]), *static_cast<const Place*>(addresses[1])); \
  }                                                                                            \
  [[maybe_unused]] static constexpr int name##_threads = threads;                              \
  [[maybe_unused]] static constexpr int name##_min_blocks = min_blocks;                        \
  static void name(const Params& params, const Place& place)
#define FA_PLACED_CLUSTER_KERNEL(name, Params, Place, threads, min_blocks, cluster) \
  FA_PLACED_KERNEL(name, Params, Place, threads, min_blocks)

#endif  // FA_TESTS_EMULATOR_PTX_PLACED_KERNEL_CUH_
