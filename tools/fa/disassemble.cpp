#include "disassemble.hpp"

#include <array>
#include <filesystem>
#include <sstream>

#include <fa/error.hpp>

#include "support/platform.hpp"
#include "support/text.hpp"
#include "system.hpp"

namespace fa::cli {
namespace {

namespace fs = std::filesystem;

struct Tool {
  const char* name;
  const char* option;
};
constexpr std::array<Tool, 2> kTools{{{"nvdisasm", "-c"}, {"cuobjdump", "-sass"}}};

std::vector<fs::path> directories() {
  std::vector<fs::path> found;
  std::istringstream path(support::environment("PATH"));
  for (std::string directory; std::getline(path, directory, support::platform::list_separator());) {
    if (!directory.empty()) found.emplace_back(directory);
  }
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    const std::string root = support::environment(variable);
    if (!root.empty()) found.push_back(fs::path(root) / "bin");
  }
  found.emplace_back("/usr/local/cuda/bin");
  return found;
}

}  // namespace

std::string disassemble(const std::vector<std::byte>& cubin) {
  for (const fs::path& directory : directories()) {
    for (const Tool& tool : kTools) {
      const fs::path program = program_in(directory, tool.name);
      if (!program.empty()) return output_about(program, tool.option, cubin);
    }
  }
  throw Error(ErrorCode::unsupported,
              "--sass: neither nvdisasm nor cuobjdump is in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda; both come "
              "with the CUDA toolkit, and nvdisasm with `pip install nvidia-cuda-nvdisasm`",
              {{"argument", "--sass"}});
}

}  // namespace fa::cli
