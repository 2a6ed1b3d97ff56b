#ifndef FA_CACHE_FILES_HPP_
#define FA_CACHE_FILES_HPP_

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/platform.hpp"

/// Files and directories that belong to us alone. Names are relative to an open directory, and no last component
/// is ever followed through a symbolic link. Nothing here throws for what a file system does.
namespace fa::cache {

using platform::Handle;

/// An owned file descriptor, or HANDLE of Windows.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(Handle descriptor) : descriptor_(descriptor) {}
  Descriptor(Descriptor&& other) noexcept : descriptor_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  Handle get() const noexcept { return descriptor_; }
  bool valid() const noexcept { return descriptor_ != platform::kNone; }
  Handle release() noexcept { return std::exchange(descriptor_, platform::kNone); }

 private:
  Handle descriptor_ = platform::kNone;
};

/// "No space left on device".
std::string error_text(int error);

enum class Missing : std::uint8_t { fail, create };

/// Opens a directory that is ours and that nobody else can write to; one that is created has mode 0700.
Descriptor open_private_directory(Handle parent, const std::string& name, Missing missing, std::string* problem);

/// The same for an absolute path, whose missing parents are created too.
Descriptor open_private_root(const std::filesystem::path& root, Missing missing, std::string* problem);

struct FileBytes {
  enum class Status : std::uint8_t { read, absent, refused };
  Status status = Status::absent;
  std::vector<std::byte> bytes;
  std::string problem;  ///< of a refused file
};

/// Whether reading a file counts as using it: its time of modification, which says when it was last used, is then set
/// to now if it is more than an hour old (times of access are off on many file systems).
enum class Reading : std::uint8_t { look, use };

/// Reads a whole regular file that is ours, that nobody else can write to, and that has at most `limit` bytes. Where
/// locks work, `remove_idle_file` leaves it alone meanwhile.
FileBytes read_private_file(Handle parent, const std::filesystem::path& name, std::uint64_t limit,
                            Reading reading = Reading::look);

/// Opens a regular file, through links, that only we or the system's administrator can have written, to be read only.
Descriptor open_shipped_file(const std::filesystem::path& file, platform::Status* status, std::string* problem);

/// Reads `bytes.size()` bytes from `offset` on.
bool read_at(Handle file, std::uint64_t offset, std::span<std::byte> bytes);

/// Removes a file that is not being read and was last used at `used`, as it was found in a list; true when it is gone.
bool remove_idle_file(Handle parent, const std::string& name, const platform::Time& used);

/// Where the bytes of a file that somebody names go.
struct Destination {
  std::filesystem::path path;  ///< behind symbolic links, which stay
  bool in_place = false;       ///< a device, a FIFO, an open file of this process: written to, never replaced
};

/// Nullopt with the reason in `*problem` where nothing can be written: a folder, a missing parent, no permission.
std::optional<Destination> find_destination(const std::filesystem::path& file, std::string* problem);

/// Writes into what stands there.
bool write_in_place(const Destination& destination, std::span<const std::byte> bytes, std::string* problem);

/// Writes a file that others may read; it appears under its name at once or not at all. What is no regular file is
/// written to instead.
bool write_shared_file(const std::filesystem::path& file, std::span<const std::byte> bytes, std::string* problem);

/// Writes all of `bytes`, or says why not in errno.
bool write_all(Handle file, std::span<const std::byte> bytes);

/// Unique among threads by a counter, among processes and hosts by chance.
std::string temporary_name(const std::string& stem);

/// Writes a new file of mode 0600 through to the disk; on failure nothing is left behind.
bool write_private_file(Handle parent, const std::string& name, std::span<const std::byte> bytes, std::string* problem);

}  // namespace fa::cache

#endif  // FA_CACHE_FILES_HPP_
