#ifndef FA_CACHE_FILES_HPP_
#define FA_CACHE_FILES_HPP_

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// POSIX files and directories that belong to us alone. Names are relative to an open directory, and no last component
/// is ever followed through a symbolic link. Nothing here throws for what a file system does.
namespace fa::cache {

/// An owned file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  Descriptor(Descriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  int get() const noexcept { return descriptor_; }
  bool valid() const noexcept { return descriptor_ >= 0; }
  int release() noexcept { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_ = -1;
};

/// "No space left on device".
std::string error_text(int error);

enum class Missing : std::uint8_t { fail, create };

/// Opens a directory that is ours and that nobody else can write to; one that is created has mode 0700.
Descriptor open_private_directory(int parent, const std::string& name, Missing missing, std::string* problem);

/// The same for an absolute path, whose missing parents are created too.
Descriptor open_private_root(const std::filesystem::path& root, Missing missing, std::string* problem);

struct FileBytes {
  enum class Status : std::uint8_t { read, absent, refused };
  Status status = Status::absent;
  std::vector<std::byte> bytes;
  std::string problem;  ///< of a refused file
};

/// Reads a whole regular file that is ours, that nobody else can write to, and that has at most `limit` bytes.
FileBytes read_private_file(int parent, const std::string& name, std::uint64_t limit);

/// Writes a new file of mode 0600 through to the disk; on failure nothing is left behind.
bool write_private_file(int parent, const std::string& name, std::span<const std::byte> bytes, std::string* problem);

}  // namespace fa::cache

#endif  // FA_CACHE_FILES_HPP_
