#ifndef FA_SRC_SUPPORT_DYNAMIC_LIBRARY_HPP_
#define FA_SRC_SUPPORT_DYNAMIC_LIBRARY_HPP_

#include <string>
#include <utility>

namespace fa::support {

/// A shared library opened at run time.
class DynamicLibrary {
 public:
  DynamicLibrary() = default;
  DynamicLibrary(DynamicLibrary&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  DynamicLibrary& operator=(DynamicLibrary&& other) noexcept;
  DynamicLibrary(const DynamicLibrary&) = delete;
  DynamicLibrary& operator=(const DynamicLibrary&) = delete;
  ~DynamicLibrary();

  /// Opens a path or a SONAME with local binding. Returns an empty object, and the loader's reason, on failure.
  static DynamicLibrary open(const std::string& name, std::string* problem = nullptr);

  /// Only if the process has it loaded already.
  static DynamicLibrary open_loaded(const std::string& name);

  explicit operator bool() const noexcept { return handle_ != nullptr; }

  /// nullptr when the library has no such symbol.
  void* symbol(const char* name) const noexcept;

  template <class Function>
  Function function(const char* name) const noexcept {
    return reinterpret_cast<Function>(symbol(name));
  }

  /// The file that was loaded.
  std::string path() const;

  /// Leaves the library loaded for the life of the process.
  void keep_loaded() noexcept { handle_ = nullptr; }

 private:
  explicit DynamicLibrary(void* handle) noexcept : handle_(handle) {}
  void* handle_ = nullptr;
};

}  // namespace fa::support

#endif  // FA_SRC_SUPPORT_DYNAMIC_LIBRARY_HPP_
