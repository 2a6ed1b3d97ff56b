#include "support/dynamic_library.hpp"

#include <gtest/gtest.h>
#if !defined(_WIN32)
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <string>

namespace fa::support {
namespace {

#if defined(_WIN32)
constexpr const char* kMath = "ucrtbase.dll";
constexpr const char* kLoaded = "kernel32.dll";
#else
constexpr const char* kMath = "libm.so.6";
constexpr const char* kLoaded = "libc.so.6";
#endif

TEST(DynamicLibrary, OpensAndResolves) {
  std::string problem;
  const DynamicLibrary library = DynamicLibrary::open(kMath, &problem);
  ASSERT_TRUE(library) << problem;
  const auto cosine = library.function<double (*)(double)>("cos");
  ASSERT_NE(cosine, nullptr);
  EXPECT_EQ(cosine(0.0), 1.0);
  EXPECT_EQ(library.symbol("fa_no_such_symbol"), nullptr);
  EXPECT_NE(library.path().find(kMath), std::string::npos);
}

TEST(DynamicLibrary, SaysWhyItCannotOpen) {
  std::string problem;
  const DynamicLibrary library = DynamicLibrary::open("libfa_no_such_library.so.1", &problem);
  EXPECT_FALSE(library);
  EXPECT_NE(problem.find("libfa_no_such_library.so.1"), std::string::npos);
  EXPECT_EQ(library.symbol("cos"), nullptr);
  EXPECT_EQ(library.path(), "");
}

#if !defined(_WIN32)
/// The loader would wait for ever for who writes to it.
TEST(DynamicLibrary, OpensNoFifo) {
  char directory[] = "/tmp/fa_library_XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  const std::string path = std::string(directory) + "/libnvrtc.so";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  std::string problem;
  EXPECT_FALSE(DynamicLibrary::open(path, &problem));
  EXPECT_EQ(problem, path + ": is not a regular file");
  unlink(path.c_str());
  rmdir(directory);
}
#endif

TEST(DynamicLibrary, FindsOnlyWhatIsLoaded) {
  EXPECT_TRUE(DynamicLibrary::open_loaded(kLoaded));
  EXPECT_FALSE(DynamicLibrary::open_loaded("libfa_no_such_library.so.1"));
}

}  // namespace
}  // namespace fa::support
