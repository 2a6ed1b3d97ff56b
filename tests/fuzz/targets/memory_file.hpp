#ifndef FA_TESTS_FUZZ_TARGETS_MEMORY_FILE_HPP_
#define FA_TESTS_FUZZ_TARGETS_MEMORY_FILE_HPP_

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <string_view>

#include "fuzz/targets/target.hpp"

namespace fa::fuzz {

/// A regular file that has a path and no place on a disk.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : descriptor_(memfd_create("fuzz", MFD_CLOEXEC)) {
    require(descriptor_ >= 0 && fchmod(descriptor_, 0600) == 0, "files in memory");
    while (!bytes.empty()) {
      const ssize_t written = write(descriptor_, bytes.data(), bytes.size());
      require(written > 0, "files in memory take bytes");
      bytes.remove_prefix(static_cast<std::size_t>(written));
    }
  }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_TARGETS_MEMORY_FILE_HPP_
