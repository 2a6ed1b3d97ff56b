#ifndef FA_SRC_COMPILE_COMPILER_HPP_
#define FA_SRC_COMPILE_COMPILER_HPP_

#include <cstddef>
#include <string>
#include <vector>

#include "plan/arch.hpp"
#include "render/source.hpp"

namespace fa::compile {

/// Facts that ptxas wrote into the cubin; read back without a GPU.
struct KernelFacts {
  int registers = 0;      ///< a thread
  int local_bytes = 0;    ///< stack frame a thread: spills and run-time indexed arrays
  int static_shared = 0;  ///< a thread block
};

struct Cubin {
  std::vector<std::byte> bytes;
  KernelFacts facts;
  std::string compiler;  ///< "nvrtc 13.0"
  /// CUDA version that a driver must support to load it, 13000: cubins run on every driver of the compiler's major
  /// version.
  int min_driver = 0;
  std::string log;  ///< what the compiler said although it succeeded
  double milliseconds = 0;
};

/// The options that change the generated code, in the order they are passed; part of the cache key. Machine-dependent
/// and housekeeping options are not among them.
std::vector<std::string> code_options(plan::Arch arch, bool fuses = true);

/// Compiles with NVRTC on a thread with its own stack, whatever the calling thread's is. Opens NVRTC at first use.
/// Throws fa::Error: no_compiler, compile_failed (fields: log, options, source).
Cubin compile(const render::Source& source, plan::Arch arch);

/// The PTX of what `compile` makes into a cubin. Throws what it throws, and no_compiler where NVRTC hands out none.
std::string compile_to_ptx(const render::Source& source, plan::Arch arch);

/// Reads the facts of `kernel_name` from a cubin. Throws fa::Error(internal) when the bytes are no cubin that holds it.
KernelFacts read_facts(const std::vector<std::byte>& cubin, const std::string& kernel_name);

/// What sets the instructions of two cubins apart, the registers that they ask for included; empty when both take the
/// same time. Constants in memory and names do not count. Throws fa::Error(internal) when the bytes are no cubin.
std::string instruction_difference(const std::vector<std::byte>& a, const std::vector<std::byte>& b);

/// Which NVRTC would serve, for `fa info`.
struct CompilerInfo {
  bool available = false;
  std::string path;
  std::string version;  ///< "13.0"
  int major = 0;
  int minor = 0;
  std::vector<int> architectures;
  std::string problem;  ///< why it is not available, and what to do about it
};
CompilerInfo compiler_info();

}  // namespace fa::compile

#endif  // FA_SRC_COMPILE_COMPILER_HPP_
