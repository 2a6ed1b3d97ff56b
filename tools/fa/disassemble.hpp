#ifndef FA_TOOLS_FA_DISASSEMBLE_HPP_
#define FA_TOOLS_FA_DISASSEMBLE_HPP_

#include <cstddef>
#include <string>
#include <vector>

namespace fa::cli {

/// The machine code of `cubin` as text, by nvdisasm or cuobjdump: of PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda.
/// Throws fa::Error: unsupported where there is neither, with what to do; io where the tool fails.
std::string disassemble(const std::vector<std::byte>& cubin);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_DISASSEMBLE_HPP_
