#ifndef FA_TESTS_UNIT_CACHE_SUPPORT_HPP_
#define FA_TESTS_UNIT_CACHE_SUPPORT_HPP_

#include <gtest/gtest.h>
#if !defined(_WIN32)
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cache/files.hpp"
#include "cache/store.hpp"
#include "system.hpp"

namespace fa::cache::testing {

namespace fs = std::filesystem;

/// A new directory that is ours alone, removed with all it holds.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    const fs::path name = fs::path(::testing::TempDir()) / temporary_name("fa_cache");
    if (!platform::make_directory(platform::kHere, name)) throw std::runtime_error("mkdir " + name.string());
    path_ = fs::canonical(name);
  }
  ~TemporaryDirectory() {
    std::error_code error;
    fs::remove_all(path_, error);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const fs::path& path() const { return path_; }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

inline Key make_key(const std::string& spec = "sm80_forward d=128 m=128 n=64") {
  return {"0123456789abcdef0123456789abcdef",
          spec,
          {"--std=c++17", "--use_fast_math"},
          "sm_90a",
          "fedcba9876543210fedcba9876543210"};
}

inline Entry make_entry(const Key& key, std::size_t cubin_bytes = 3000) {
  Entry entry;
  entry.key = key;
  entry.kernel_name = "fa_sm80_forward";
  entry.compiler = "nvrtc 13.0";
  entry.registers = 168;
  entry.local_bytes = 8;
  entry.shared_bytes = 98304;
  entry.threads = 128;
  entry.min_driver = 13000;
  entry.compile_ms = 812.5;
  for (std::size_t i = 0; i < cubin_bytes; ++i) entry.cubin.push_back(static_cast<std::byte>(i * 7 + key.spec.size()));
  return entry;
}

inline void expect_same(const Entry& a, const Entry& b) {
  EXPECT_EQ(a.key, b.key);
  EXPECT_EQ(a.kernel_name, b.kernel_name);
  EXPECT_EQ(a.compiler, b.compiler);
  EXPECT_EQ(a.registers, b.registers);
  EXPECT_EQ(a.local_bytes, b.local_bytes);
  EXPECT_EQ(a.shared_bytes, b.shared_bytes);
  EXPECT_EQ(a.threads, b.threads);
  EXPECT_EQ(a.min_driver, b.min_driver);
  EXPECT_EQ(a.compile_ms, b.compile_ms);
  EXPECT_EQ(a.cubin, b.cubin);
}

/// A build that leaves the key to the store, as builds may.
inline Store::Build builder(const Key& key) {
  return [key] {
    Entry entry = make_entry(key);
    entry.key = {};
    return entry;
  };
}

/// A build that must not be reached.
inline Store::Build no_build() {
  return []() -> Entry { throw std::logic_error("the entry had to be found"); };
}

inline std::string version_folder() {
  return "v" + std::to_string(kSchemaVersion);
}

inline fs::path entry_path(const fs::path& root, const Key& key) {
  const std::string digest = key.digest();
  return root / version_folder() / key.target / digest.substr(0, 2) / (digest + ".fac");
}

inline std::vector<std::byte> read_bytes(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

inline void write_bytes(const fs::path& file, const std::vector<std::byte>& bytes) {
  std::ofstream stream(file, std::ios::binary | std::ios::trunc);
  stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

inline std::size_t files_under(const fs::path& path) {
  std::size_t count = 0;
  std::error_code error;
  for (const auto& item : fs::recursive_directory_iterator(path, error)) count += item.is_directory() ? 0 : 1;
  return count;
}

/// Collects what a store says.
class Listener {
 public:
  std::function<void(const std::string&)> callback() {
    return [this](const std::string& message) {
      const std::scoped_lock lock(mutex_);
      messages_.push_back(message);
    };
  }
  std::vector<std::string> messages() const {
    const std::scoped_lock lock(mutex_);
    return messages_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> messages_;
};

/// Calls `body(0)` to `body(count - 1)` on a thread each and waits for all.
template <typename Body>
void run_in_threads(int count, const Body& body) {
  std::vector<std::jthread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
}

#if !defined(_WIN32)

inline unsigned mode_of(const fs::path& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0 ? static_cast<unsigned>(status.st_mode) & 07777U : ~0U;
}

/// Runs `body` in a forked child, which ends with its result as exit status, or 99 for an exception.
inline pid_t start_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  alarm(120);  // outlives no test that failed
  int status = 99;
  try {
    status = body();
  } catch (const std::exception& error) {
    fprintf(stderr, "child: %s\n", error.what());
  }
  _exit(status);
}

/// The exit status, or minus the signal.
inline int wait_for(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) return -1000;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

inline int run_in_child(const std::function<int()>& body) {
  return wait_for(start_child(body));
}

constexpr uid_t kPlainUser = 65534;

/// The same as a user whom permission bits stop: for root, a child that has become nobody and owns `directory`.
inline int run_as_plain_user(const fs::path& directory, const std::function<int()>& body) {
  if (geteuid() != 0) return run_in_child(body);
  const auto give = [](const fs::path& path) {
    if (lchown(path.c_str(), kPlainUser, kPlainUser) != 0) throw std::runtime_error("lchown " + path.string());
  };
  give(directory);
  for (const auto& item : fs::recursive_directory_iterator(directory)) give(item.path());
  return run_in_child([&body] {
    if (setgid(kPlainUser) != 0 || setuid(kPlainUser) != 0) return 98;
    return body();
  });
}

#endif  // !defined(_WIN32)

}  // namespace fa::cache::testing

#endif  // FA_TESTS_UNIT_CACHE_SUPPORT_HPP_
