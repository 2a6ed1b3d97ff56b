#ifndef FA_TESTS_EMULATOR_EMULATOR_HPP_
#define FA_TESTS_EMULATOR_EMULATOR_HPP_

#include <cstdint>

#include "emulator/fault.hpp"
#include "emulator/memory.hpp"

/// Runs the kernels of templates/ on the CPU. Kernel text is compiled by the host compiler against
/// tests/emulator/include/ptx, which puts functions of this emulator where templates/ptx has inline PTX; see
/// docs/emulator.md.
namespace emulator {

struct LaunchOptions {
  int grid = 1;            ///< thread blocks
  int threads = 32;        ///< of a block, a multiple of 32
  int shared_bytes = 0;    ///< dynamic shared memory of a block
  std::uint64_t seed = 0;  ///< decides the order of threads and when asynchronous copies arrive
  int workers = 2;         ///< OS threads; clusters are independent
  int cluster = 1;         ///< consecutive blocks that reach each other's shared memory; the grid is a multiple of it
  bool last_first =
      false;           ///< clusters wait for earlier ones, all run at once: each starts when the one after it waits
  bool early = false;  ///< the kernel before it may still run: until griddepcontrol.wait, only inputs can be read
  bool early_inputs = false;  ///< which may write inputs too: until then nothing can be read
  int resident = 1;           ///< blocks that share the registers of a multiprocessor
};

struct LaunchStatistics {
  std::uint64_t instructions = 0;  ///< warp-wide ones, all blocks together
};

/// A kernel whose parameter type has been erased: what FA_KERNEL defines.
using ErasedKernel = void (*)(const void* params);

/// Runs a kernel to its end. Throws the Fault of the first block that has one, std::invalid_argument for a launch that
/// no device accepts.
LaunchStatistics launch(ErasedKernel kernel, const void* params, Memory& memory, const LaunchOptions& options);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_EMULATOR_HPP_
