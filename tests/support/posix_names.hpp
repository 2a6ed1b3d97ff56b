#ifndef FA_TESTS_SUPPORT_POSIX_NAMES_HPP_
#define FA_TESTS_SUPPORT_POSIX_NAMES_HPP_

// The few names of POSIX that tests use on every system.

#if defined(_WIN32)

#include <direct.h>
#include <process.h>
#include <stdio.h>
#include <stdlib.h>

#include <random>
#include <string>

inline int setenv(const char* name, const char* value, int /*overwrite*/) {
  return _putenv_s(name, value);
}

inline int unsetenv(const char* name) {
  return _putenv_s(name, "");
}

/// `pattern` ends in XXXXXX.
inline char* mkdtemp(char* pattern) {
  static std::mt19937 random{std::random_device{}()};
  std::string name(pattern);
  for (int i = 0; i < 100; ++i) {
    const std::string suffix = std::to_string(100000 + random() % 900000);
    name.replace(name.size() - 6, 6, suffix);
    if (_mkdir(name.c_str()) == 0)
      return static_cast<char*>(std::char_traits<char>::copy(pattern, name.data(), name.size()));
  }
  return nullptr;
}

#define popen _popen
#define pclose _pclose
#define WIFEXITED(status) ((status) >= 0)
#define WEXITSTATUS(status) (status)

#else

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#endif

#endif  // FA_TESTS_SUPPORT_POSIX_NAMES_HPP_
