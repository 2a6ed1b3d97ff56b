#include "compile/compiler.hpp"

#include <gtest/gtest.h>
#if !defined(_WIN32)
#if !defined(_WIN32)
#include <sys/resource.h>
#endif
#endif

#include <cstdlib>
#include <fa/error.hpp>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "sources.hpp"
#include "tests/support/posix_names.hpp"

namespace fa::compile {
namespace {

namespace fs = std::filesystem;

/// An empty directory that lives as long as a test.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = (fs::temp_directory_path() / "fa_test_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~ScratchDirectory() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::optional<Error> failure(const render::Source& source, plan::Arch arch) {
  try {
    compile(source, arch);
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

const plan::Arch kHopper{9, 0, 'a'};

using Compile = NeedsNvrtc;

class CompileForArch : public NeedsNvrtc, public testing::WithParamInterface<const char*> {};

TEST_P(CompileForArch, GivesACubin) {
  const Cubin cubin = compile(plain_source(), plan::parse_arch(GetParam()));
  ASSERT_GT(cubin.bytes.size(), 64U);
  EXPECT_EQ(cubin.bytes[0], std::byte{0x7f});
  EXPECT_GT(cubin.facts.registers, 0);
  EXPECT_EQ(cubin.facts.local_bytes, 0);
  EXPECT_EQ(cubin.facts.static_shared, 0);
  EXPECT_EQ(cubin.compiler.rfind("nvrtc ", 0), 0U);
  EXPECT_EQ(cubin.log, "");
  EXPECT_GT(cubin.milliseconds, 0);
}

INSTANTIATE_TEST_SUITE_P(Archs, CompileForArch,
                         testing::Values("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a"),
                         [](const auto& test) { return std::string(test.param); });

TEST_F(Compile, BrokenKernelReportsLogOptionsAndSource) {
  const render::Source source{"fa_broken", "extern \"C\" __global__ void fa_broken() { no_such_thing(); }\n", {}};
  const auto error = failure(source, kHopper);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::compile_failed);
  EXPECT_NE(std::string(error->what()).find("no_such_thing"), std::string::npos) << error->what();
  EXPECT_NE(error->field("log").find("no_such_thing"), std::string_view::npos);
  EXPECT_NE(error->field("options").find("--gpu-architecture=sm_90a"), std::string_view::npos);
  EXPECT_EQ(error->field("source"), source.unit);
  EXPECT_EQ(error->field("source_path"), "");
}

TEST_F(Compile, KeepsTheSourceOnRequest) {
  const ScratchDirectory scratch;
  const fs::path directory = scratch.path() / "kept";
  setenv("FA_KEEP_SOURCE", directory.string().c_str(), 1);
  const render::Source source{"fa_broken", "this is no kernel\n", {}};
  const auto error = failure(source, kHopper);
  unsetenv("FA_KEEP_SOURCE");
  ASSERT_TRUE(error);
  std::ifstream file{std::string(error->field("source_path"))};
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), source.unit);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory), fs::directory_iterator()), 1);
}

TEST_F(Compile, KernelOfAnotherNameIsAnError) {
  render::Source source = plain_source();
  source.kernel_name = "fa_other";
  const auto error = failure(source, kHopper);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::internal);
  EXPECT_NE(std::string(error->what()).find("fa_other"), std::string::npos);
}

TEST_F(Compile, UnknownArchitectureIsNamedWithTheKnownOnes) {
  const auto error = failure(plain_source(), plan::parse_arch("sm_199a"));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::compile_failed);
  EXPECT_NE(std::string(error->what()).find("sm_199a"), std::string::npos);
  EXPECT_NE(std::string(error->what()).find("sm_80"), std::string::npos);
  EXPECT_EQ(error->field("arch"), "sm_199a");
}

/// Before NVRTC sees what it would not understand.
TEST_F(Compile, AnOldCompilerIsToldWhichIsNewEnough) {
  render::Source source = plain_source();
  source.first_nvrtc = 1;
  EXPECT_FALSE(failure(source, kHopper));
  source.first_nvrtc = 9907;
  const auto error = failure(source, kHopper);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::compile_failed);
  EXPECT_NE(std::string(error->what()).find("99.7 or later"), std::string::npos) << error->what();
}

TEST_F(Compile, HeadersIncludeEachOtherByFullName) {
  render::Source source = plain_source();
  source.unit = "#include \"sm80/kernel.cuh\"\n";
  source.headers = {
      {"sm80/kernel.cuh",
       "#pragma once\n#include \"common/factor.cuh\"\n#include \"common/deep/value.cuh\"\n"
       "extern \"C\" __global__ void fa_plain(float* p) { p[threadIdx.x] *= kFactor; }\n"},
      {"common/factor.cuh", "#pragma once\n#include \"common/deep/value.cuh\"\n#define kFactor (kValue + 1.0f)\n"},
      {"common/deep/value.cuh", "#pragma once\n#define kValue 2.0f\n"},
  };
  EXPECT_GT(compile(source, kHopper).bytes.size(), 0U);
}

TEST_F(Compile, MissingHeaderIsNamed) {
  render::Source source = plain_source();
  source.unit = "#include \"common/absent.cuh\"\n" + source.unit;
  const auto error = failure(source, kHopper);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::compile_failed);
  EXPECT_NE(error->field("log").find("common/absent.cuh"), std::string_view::npos);
}

TEST_F(Compile, FilesInTheWorkingDirectoryAreNotHeaders) {
  const ScratchDirectory scratch;
  std::ofstream(scratch.path() / "planted.cuh") << "#define kValue 666.0f\n";
  const fs::path before = fs::current_path();
  fs::current_path(scratch.path());
  render::Source source = plain_source();
  source.unit = "#include \"planted.cuh\"\n" + source.unit;
  const auto missing = failure(source, kHopper);
  source.headers = {{"planted.cuh", "#define kValue 1.0f\n"}};
  source.unit += "static_assert(kValue == 1.0f);\n";
  const auto given = failure(source, kHopper);
  fs::current_path(before);
  ASSERT_TRUE(missing);
  EXPECT_NE(missing->field("log").find("planted.cuh"), std::string_view::npos);
  EXPECT_FALSE(given) << given->field("log");
}

TEST_F(Compile, RepeatsGiveTheSameBytes) {
  EXPECT_EQ(compile(spilling_source(), kHopper).bytes, compile(spilling_source(), kHopper).bytes);
}

TEST_F(Compile, ManyThreadsCompileAtOnce) {
  const auto expected = compile(plain_source(), kHopper).bytes;
  std::vector<Cubin> results(8);
  std::vector<std::thread> threads;
  for (Cubin& result : results) {
    threads.emplace_back([&result] { result = compile(plain_source(), kHopper); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Cubin& result : results) EXPECT_EQ(result.bytes, expected);
}

TEST_F(Compile, FailuresOnOtherThreadsReachThem) {
  std::vector<std::optional<Error>> errors(4);
  std::vector<std::thread> threads;
  for (auto& error : errors) {
    threads.emplace_back([&error] { error = failure({"fa_broken", "no kernel\n", {}}, kHopper); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::compile_failed);
  }
}

#if !defined(_WIN32)
TEST_F(Compile, LeavesTheStackLimitOfTheProcessAlone) {
  rlimit before{};
  rlimit after{};
  getrlimit(RLIMIT_STACK, &before);
  compile(plain_source(), kHopper);
  getrlimit(RLIMIT_STACK, &after);
  EXPECT_EQ(before.rlim_cur, after.rlim_cur);
}
#endif

TEST_F(Compile, CodeOptionsNameOnlyTheTargetAndTheLanguage) {
  EXPECT_EQ(code_options(kHopper), (std::vector<std::string>{"--gpu-architecture=sm_90a", "--std=c++20"}));
}

}  // namespace
}  // namespace fa::compile
