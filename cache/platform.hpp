#ifndef FA_CACHE_PLATFORM_HPP_
#define FA_CACHE_PLATFORM_HPP_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

/// What systems do differently: files relative to an open directory, locks, ownership, places for caches.
/// platform_posix.cpp or platform_windows.cpp stands behind it. What fails says why in errno, and nothing throws for
/// what a file system does. No last component of a name is followed through a symbolic link unless said otherwise.
namespace fa::cache::platform {

/// An open file or directory: a descriptor, or a HANDLE of Windows.
using Handle = std::intptr_t;
inline constexpr Handle kNone = -1;
/// As the parent of a name: that is a path, absolute or relative to the working directory.
inline constexpr Handle kHere = -100;

struct Time {
  std::int64_t seconds = 0;  ///< since 1970
  std::int64_t nanoseconds = 0;
  friend auto operator<=>(const Time&, const Time&) = default;
};

enum class Kind : std::uint8_t { regular, directory, link, other };

struct Status {
  Kind kind = Kind::other;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t bytes = 0;
  Time modified;
  std::uint32_t owner = 0;  ///< POSIX alone, as the next
  std::uint32_t mode = 0;
};

/// Who may read a file that is created: its owner, everybody, or whom the system lets by default.
enum class Readers : std::uint8_t { owner, everybody, system_default };

Handle open_directory(Handle parent, const std::filesystem::path& name);
/// Ours alone.
bool make_directory(Handle parent, const std::filesystem::path& name);
enum class Links : std::uint8_t { refuse, follow };
/// To be read, without waiting for anybody. A link is refused with ELOOP.
Handle open_file(Handle parent, const std::filesystem::path& name, Links links = Links::refuse);
/// To be written; fails where the name is taken.
Handle create_file(Handle parent, const std::filesystem::path& name, Readers readers);
/// A file to be locked, made if it is missing. EBUSY: it is on its way out, and may be made anew soon.
Handle open_lock_file(Handle parent, const std::filesystem::path& name);
/// What stands there, to be written to, through links: a device, a FIFO.
Handle open_to_write(const std::filesystem::path& name);
bool close(Handle file);

/// How many bytes, less than asked for too, or -1.
std::ptrdiff_t read(Handle file, std::span<std::byte> bytes);
/// Whether that error of a read says that another host of a network file system has removed the file.
bool removed_elsewhere(int error);
std::ptrdiff_t read_at(Handle file, std::uint64_t offset, std::span<std::byte> bytes);
std::ptrdiff_t write(Handle file, std::span<const std::byte> bytes);
/// Through to the disk, where the file system knows how.
bool flush(Handle file);
/// Sets the time of modification to now, where we may.
void touch(Handle file);

bool status_of(Handle file, Status* status);
bool status_at(Handle parent, const std::filesystem::path& name, Status* status, Links links = Links::refuse);
/// Names in a directory, which is closed.
std::vector<std::string> names_in(Handle directory);

bool remove_file(Handle parent, const std::filesystem::path& name);
/// Takes the new name away from what has it.
bool rename_file(Handle from, const std::filesystem::path& old_name, Handle to, const std::filesystem::path& name);
/// Fails with EEXIST where the new name is taken. The old name may stay, as a second one.
bool name_exclusively(Handle from, const std::filesystem::path& old_name, Handle to, const std::filesystem::path& name);

enum class Lock : std::uint8_t { shared, exclusive };
/// Never waits. EWOULDBLOCK: somebody else has it; EINTR; otherwise locks do not work. Dropped with the file or
/// process.
bool try_lock(Handle file, Lock lock);
void unlock(Handle file);

/// What keeps an open file or directory from being ours alone to write; empty when nothing does.
std::string ownership_problem(Handle file, const Status& status);
/// The same where the system's administrator may write it too.
std::string shipped_problem(Handle file, const Status& status);

/// Whether a file can be written, or files be made in a directory, as far as one can tell without trying.
bool writable(const std::filesystem::path& path, Kind kind);
/// Writing past it would fail, and end a process that does not expect it.
std::uint64_t file_size_limit();
unsigned long process_id();
std::uint64_t random_number();

/// Where caches of a user lie: below the directory that the variable names, in order of preference.
struct CachePlace {
  const char* variable;
  const char* below;
};
std::span<const CachePlace> cache_places();
/// Empty where the variable is not set.
std::filesystem::path environment_path(const char* variable);

}  // namespace fa::cache::platform

#endif  // FA_CACHE_PLATFORM_HPP_
