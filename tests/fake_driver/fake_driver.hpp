#ifndef FA_TESTS_FAKE_DRIVER_FAKE_DRIVER_HPP_
#define FA_TESTS_FAKE_DRIVER_FAKE_DRIVER_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fake_driver {

/// A launch that was asked for, or memory of the stream that was to be set, given or taken back.
struct Launch {
  std::string kernel;  ///< or one of the names below
  bool early = false;  ///< with the attribute for it
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  unsigned grid = 0;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
  std::uint64_t params = 0;       ///< digest of the parameters; 0 of a kernel whose parameters are not known
  const void* library = nullptr;  ///< that the kernel is of: each load makes one
  const void* stream = nullptr;   ///< of a kernel
};
inline constexpr const char* kMemset = "memset";
inline constexpr const char* kAllocation = "allocation";
inline constexpr const char* kRelease = "release";

/// Order between streams, copies and settings of memory, as calls of fa_parallel ask for it: what, the stream, and the
/// event or the bytes.
struct StreamCall {
  std::string what;  ///< "record", "wait", "copy", "copy rows", "set", "write value", "wait value"
  const void* stream = nullptr;
  const void* event = nullptr;  ///< or the value's address
  std::size_t bytes = 0;        ///< or the value
};
using StreamCalls = std::vector<StreamCall>& (*)();
inline constexpr const char* kStreamCalls = "fa_fake_driver_stream_calls";
/// Whether streams and events say that they are done: not so, where a rank is late.
using Done = std::atomic<bool>& (*)();
inline constexpr const char* kDone = "fa_fake_driver_done";
/// The one event that is done where the others are not.
using Reached = std::atomic<const void*>& (*)();
inline constexpr const char* kReached = "fa_fake_driver_reached";
/// Streams with a priority and events without timing that there are, and how many more can be made; negative: any
/// number.
struct Handles {
  std::atomic<int> made{0};
  std::atomic<int> left{-1};
};
using GetHandles = Handles& (*)();
inline constexpr const char* kHandles = "fa_fake_driver_handles";
/// What a debug kernel says when it stops, which the next wait for a stream meets once; empty: none stops.
using Stop = std::string& (*)();
inline constexpr const char* kStop = "fa_fake_driver_stop";
/// Whether a library has been loaded, and not unloaded.
using IsLoaded = bool (*)(const void* library);
inline constexpr const char* kIsLoaded = "fa_fake_driver_is_loaded";
using Capturing = std::atomic<bool>& (*)();
inline constexpr const char* kCapturing = "fa_fake_driver_capturing";

/// Where forward kernels have scales, which their names do not tell: bytes from their parameters on, and how many.
struct Scales {
  std::atomic<std::size_t> offset{0};
  std::atomic<std::size_t> bytes{0};
};
using GetScales = Scales& (*)();
inline constexpr const char* kScales = "fa_fake_driver_scales";

/// Memory by its address, from which copies to the host take what they copy; else they leave the host's memory alone.
using Contents = std::map<std::uintptr_t, std::vector<std::byte>>& (*)();
inline constexpr const char* kContents = "fa_fake_driver_contents";

/// With FA_FAKE_DRIVER=idle in the environment nothing is remembered, and maps are not encoded: what calls cost then is
/// the library's own code.
/// What the library exports under kLaunches: all launches so far, which the caller may clear.
using Launches = std::vector<Launch>& (*)();
inline constexpr const char* kLaunches = "fa_fake_driver_launches";

/// Where memory of the stream's pool lies, all of it: calls are served one after the other.
inline constexpr std::uintptr_t kPool = std::uintptr_t{5} << 58;

}  // namespace fake_driver

#endif  // FA_TESTS_FAKE_DRIVER_FAKE_DRIVER_HPP_
