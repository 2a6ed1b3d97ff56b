#include "compile/nvrtc.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fa/compiler.hpp>
#include <fa/error.hpp>
#include <filesystem>

#include "compile/compiler.hpp"
#include "sources.hpp"
#include "tests/support/posix_names.hpp"

namespace fa::compile {
namespace {

/// Whether opening NVRTC fails with no_compiler and a message that holds `part`.
bool refuses_naming(const std::string& part) {
  try {
    nvrtc();
  } catch (const Error& error) {
    return error.code() == ErrorCode::no_compiler && std::string(error.what()).find(part) != std::string::npos;
  }
  return false;
}

bool compiles() {
  return !compile(plain_source(), {8, 0}).bytes.empty();
}

/// Which NVRTC serves is settled once in a process, so each of these runs in a child of its own.
class NvrtcDeathTest : public testing::Test {
 protected:
  NvrtcDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  /// The file that serves, found before any test runs a child: the variable reaches children, which thus need not open
  /// NVRTC to know it. Empty where there is none.
  static std::string file() {
    constexpr const char* kVariable = "FA_TEST_NVRTC_FILE";
    if (std::getenv(kVariable) == nullptr) setenv(kVariable, compiler_info().path.c_str(), 1);
    const char* const known = std::getenv(kVariable);  // Windows keeps no empty variables
    return known == nullptr ? "" : known;
  }
};

TEST_F(NvrtcDeathTest, AWrongVariableIsAnErrorAndCanBeCorrected) {
  if (file().empty()) GTEST_SKIP() << "no NVRTC";
  const auto scenario = [] {
    const char* const given = std::getenv("FA_NVRTC_PATH");
    const std::string right = given == nullptr ? "" : given;
    setenv("FA_NVRTC_PATH", "/nowhere/libnvrtc.so.13", 1);
    const bool refused = refuses_naming("/nowhere/libnvrtc.so.13") && refuses_naming("FA_NVRTC_PATH");
    const bool reported = !compiler_info().available && !compiler_info().problem.empty();
    setenv("FA_NVRTC_PATH", right.c_str(), 1);
    _Exit(refused && reported && compiles() ? 0 : 1);
  };
  EXPECT_EXIT(scenario(), testing::ExitedWithCode(0), "");
}

TEST_F(NvrtcDeathTest, ThePathOfTheApplicationGoesFirst) {
  const auto scenario = [] {
    setenv("FA_NVRTC_PATH", "/nowhere/variable", 1);
    set_nvrtc_path("/nowhere/application");
    const bool refused = refuses_naming("/nowhere/application") && refuses_naming("set_nvrtc_path");
    set_nvrtc_path({});
    _Exit(refused && refuses_naming("/nowhere/variable") ? 0 : 1);
  };
  EXPECT_EXIT(scenario(), testing::ExitedWithCode(0), "");
}

TEST_F(NvrtcDeathTest, ALibraryThatIsNoNvrtcIsRefused) {
  const auto scenario = [] {
#if defined(_WIN32)
    setenv("FA_NVRTC_PATH", "ucrtbase.dll", 1);
#else
    setenv("FA_NVRTC_PATH", "libm.so.6", 1);
#endif
    _Exit(refuses_naming("is not an NVRTC") ? 0 : 1);
  };
  EXPECT_EXIT(scenario(), testing::ExitedWithCode(0), "");
}

TEST_F(NvrtcDeathTest, AFileOrItsDirectoryServesWithItsBuiltins) {
  const std::string path = file();
  if (path.empty()) GTEST_SKIP() << "no NVRTC";
  ASSERT_TRUE(std::filesystem::path(path).is_absolute()) << path;
  const auto by = [](const std::string& order) {
    setenv("FA_NVRTC_PATH", order.c_str(), 1);
    _Exit(compiles() && nvrtc().path == std::getenv("FA_TEST_NVRTC_FILE") ? 0 : 1);
  };
  EXPECT_EXIT(by(path), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(by(std::filesystem::path(path).parent_path().string()), testing::ExitedWithCode(0), "");
}

using NvrtcTest = NeedsNvrtc;

TEST_F(NvrtcTest, InfoDescribesWhatServes) {
  const CompilerInfo info = compiler_info();
  EXPECT_TRUE(std::filesystem::exists(info.path));
  EXPECT_NE(info.version.find('.'), std::string::npos);
  EXPECT_NE(std::find(info.architectures.begin(), info.architectures.end(), 80), info.architectures.end());
}

}  // namespace
}  // namespace fa::compile
