// The command line as a shell runs it: what it refuses, what it says, and what it writes where.

#include <gtest/gtest.h>
#if !defined(_WIN32)
#include <sys/stat.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "cache/pack.hpp"
#include "compile/compiler.hpp"
#include "run_program.hpp"
#include "tests/unit/cache/support.hpp"
#include "tools/safetensors.hpp"

namespace fa::cli {
namespace {

using cache::testing::TemporaryDirectory;
namespace fs = std::filesystem;
using tools::Tensor;

using Result = test::Ran;

/// Runs `PREFIX fa ARGUMENTS`; what it prints on standard error is part of the output.
Result run(const std::string& arguments, const std::string& prefix = "") {
  return test::run_program(FA_CLI, arguments, prefix);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

int count_of(const std::string& part, const std::string& text) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

std::string in_quotes(const fs::path& path) {
  return "'" + path.string() + "'";
}

Tensor filled(std::vector<std::int64_t> shape, float value) {
  std::size_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
  Tensor tensor{DType::f32, std::move(shape), std::vector<std::byte>(4 * count)};
  for (std::size_t i = 0; i < count; ++i) {
    const float element = value + static_cast<float>(i % 7) / 8;
    std::memcpy(tensor.bytes.data() + 4 * i, &element, sizeof element);
  }
  return tensor;
}

/// A file with q, k and v of one head, and a command that reads it.
class CliRun : public testing::Test {
 protected:
  void SetUp() override { write(0.5f); }
  void write(float value, std::map<std::string, Tensor> more = {}) {
    for (const char* name : {"q", "k", "v"}) more[name] = filled({1, 2, 5, 8}, value);
    tools::write_safetensors(in_, more);
  }
  Result run_to(const fs::path& output, const std::string& options = "") const {
    return run("run --device host --input " + in_quotes(in_) + " --output " + in_quotes(output) + " " + options);
  }
  void expect_output(const fs::path& file) const {
    EXPECT_EQ(tools::SafetensorsFile::open(file.string()).read("o").shape, (std::vector<std::int64_t>{1, 2, 5, 8}));
  }

  TemporaryDirectory directory_;
  std::string in_ = (directory_ / "in").string();
};

TEST_F(CliRun, WritesThroughALinkThatStays) {
  if (!cache::testing::have_links()) GTEST_SKIP() << "no symbolic links can be made here";
  std::ofstream(directory_ / "target") << "old";
  fs::create_directory(directory_ / "folder");
  fs::create_symlink("../target", directory_ / "folder" / "link");
  fs::create_symlink("folder/link", directory_ / "chain");
  fs::create_symlink("not yet", directory_ / "dangling");
  fs::create_symlink("round", directory_ / "round");
  ASSERT_EQ(run_to(directory_ / "chain").status, 0);
  EXPECT_TRUE(fs::is_symlink(directory_ / "chain") && fs::is_symlink(directory_ / "folder" / "link"));
  expect_output(directory_ / "target");
  ASSERT_EQ(run_to(directory_ / "dangling").status, 0);
  EXPECT_TRUE(fs::is_symlink(directory_ / "dangling"));
  expect_output(directory_ / "not yet");
  EXPECT_EQ(run_to(directory_ / "round").status, 1);
  fs::remove(directory_ / "round");
  EXPECT_EQ(cache::testing::files_under(directory_.path()), 6U)
      << "in, target, not yet, three links: nothing else was left";
}

#if !defined(_WIN32)
TEST_F(CliRun, WritesIntoWhatIsNoFile) {
  struct stat before {
  }, after{};
  ASSERT_EQ(stat("/dev/null", &before), 0);
  EXPECT_EQ(run_to("/dev/null").status, 0);
  ASSERT_EQ(stat("/dev/null", &after), 0);
  EXPECT_TRUE(S_ISCHR(after.st_mode) && before.st_ino == after.st_ino);
  const fs::path fifo = directory_ / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  std::string received;
  std::thread reader([&] {
    std::ifstream stream(fifo, std::ios::binary);
    received.assign(std::istreambuf_iterator<char>(stream), {});
  });
  EXPECT_EQ(run_to(fifo).status, 0);
  reader.join();
  EXPECT_TRUE(fs::is_fifo(fifo));
  std::ofstream(directory_ / "received", std::ios::binary) << received;
  expect_output(directory_ / "received");
  const Result piped =
      run("run --device host --json --input " + in_quotes(in_) + " --output /dev/stdout | tail -c 100");
  EXPECT_EQ(piped.status, 0) << piped.output;
}
#endif

TEST_F(CliRun, RefusesItsInputAsItsOutput) {
  const auto before = cache::testing::read_bytes(in_);
  std::vector<fs::path> outputs = {in_, directory_ / "." / "in"};
  if (cache::testing::have_links()) {
    outputs.push_back(directory_ / "same");
    fs::create_symlink("in", outputs.back());
  }
  for (const fs::path& output : outputs) {
    const Result result = run_to(output);
    EXPECT_EQ(result.status, 1);
    EXPECT_TRUE(contains(result.output, "--force")) << result.output;
  }
  EXPECT_EQ(cache::testing::read_bytes(in_), before);
  EXPECT_EQ(run_to(in_, "--force").status, 0);
  expect_output(in_);
}

/// Before anything is computed: the input is not even read.
TEST_F(CliRun, LooksAtTheOutputFirst) {
  std::ofstream(in_) << "no tensors";
  for (const fs::path& output : {directory_ / "missing" / "out", directory_.path(), fs::path(in_) / "below",
                                 fs::path(directory_.path().string() + "/")}) {
    const Result result = run_to(output);
    EXPECT_EQ(result.status, 1);
    EXPECT_TRUE(contains(result.output, "cannot be written")) << result.output;
  }
}

TEST_F(CliRun, NamesACaptureThatTheFileDoesNotHave) {
  write(0.5f, {{"dout", filled({1, 2, 5, 8}, 1)}});
  for (const char* options : {"--alibi --gradients", "--alibi", "--score 'score + slope[h]' --capture slope:f32:grad",
                              "--documents", "--bias hqk --gradients"}) {
    const Result result = run_to(directory_ / "out", options);
    EXPECT_EQ(result.status, 1);
    EXPECT_TRUE(contains(result.output, "captures[")) << result.output;
    EXPECT_TRUE(contains(result.output, in_)) << result.output;
  }
}

TEST_F(CliRun, SaysWhereAFunctionIsMisspelt) {
  write(0.5f, {{"slope", filled({2}, 1)}});
  for (const char* options : {"--score 'score + slop[h]'", "--score 'score + slop[h]' --capture slope:f32",
                              "--mask 'kv > s_kw' --capture slope:f32"}) {
    const Result result = run_to(directory_ / "out", options);
    EXPECT_EQ(result.status, 1);
    EXPECT_TRUE(contains(result.output, "column ")) << result.output;
  }
  EXPECT_TRUE(contains(run_to(directory_ / "out", "--score 'score + 1' --capture slope:f32").output, "--capture"));
}

TEST_F(CliRun, HoldsNumbersToTheirRange) {
  for (const char* options : {"--seed -1", "--offset -1", "--seed 18446744073709551616", "--seed 1.5", "--lengths ''",
                              "--lengths 3,", "--lengths ,3", "--lengths 3,-1", "--lengths 3x", "--lengths-kv ''"}) {
    const Result result = run_to(directory_ / "out", options);
    EXPECT_NE(result.status, 0) << options;
    EXPECT_TRUE(contains(result.output, "accepted is")) << result.output;
    EXPECT_FALSE(fs::exists(directory_ / "out")) << options;
  }
}

TEST_F(CliRun, NothingButNanIsNoProof) {
  write(std::numeric_limits<float>::quiet_NaN());
  const Result result = run_to(directory_ / "out", "--verify");
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(contains(result.output, "80 of 80 are NaN: FAILED, nothing to compare")) << result.output;
  EXPECT_FALSE(fs::exists(directory_ / "out"));
  EXPECT_EQ(run_to(directory_ / "out").status, 0) << "it is computed all the same";
}

TEST_F(CliRun, WarnsOnce) {
  const Result result =
      run("run --input " + in_quotes(in_) + " --output " + in_quotes(directory_ / "out"), "FA_LOG=loud");
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_TRUE(contains(result.output, "FA_LOG = loud: accepted is")) << result.output;
  EXPECT_EQ(count_of("FA_LOG = loud", result.output), 1) << result.output;
  const Result tune = run("run --device host --input " + in_quotes(in_) + " --output " + in_quotes(directory_ / "out"),
                          "FA_TUNE=maybe");
  EXPECT_EQ(tune.status, 1);
  EXPECT_TRUE(contains(tune.output, "FA_TUNE = maybe")) << tune.output;
  EXPECT_EQ(count_of("FA_TUNE = maybe", tune.output), 1) << tune.output;
}

TEST(CliWords, BudgetsArePositive) {
  for (const char* const option : {"--budget ", "--timing "}) {
    for (const char* const wrong : {"nan", "inf", "-1", "0", "2s", "''"}) {
      const Result result = run(std::string("tune ") + option + wrong);
      EXPECT_EQ(result.status, 2) << option << wrong;
      EXPECT_TRUE(contains(result.output, "accepted is a finite number above 0")) << result.output;
    }
  }
}

TEST(CliWords, AnUnknownCommandIsNamed) {
  const Result command = run("inof");
  EXPECT_EQ(command.status, 2);
  EXPECT_TRUE(contains(command.output, "'inof'")) << command.output;
  EXPECT_TRUE(contains(command.output, "info, run,")) << command.output;
  const Result below = run("cache lits --json");
  EXPECT_EQ(below.status, 2);
  EXPECT_TRUE(contains(below.output, "'lits' is no command of `cache`")) << below.output;
  EXPECT_TRUE(contains(below.output, "verify")) << below.output;
  EXPECT_EQ(run("").status, 2);
  EXPECT_EQ(run("cache").status, 2);
}

TEST(CliWords, HelpIsText) {
  for (const char* command : {"info", "run", "render", "compile", "pack", "bench", "tune", "cache list", "cache gc",
                              "cache why", "cache import"}) {
    const Result help = run(std::string(command) + " --help");
    EXPECT_EQ(help.status, 0);
    for (const char byte : help.output) EXPECT_TRUE(byte == '\n' || (byte >= ' ' && byte < 127)) << command << byte;
  }
  const std::string help = run("compile --help").output;
  const std::string bench = run("bench --help").output;
  for (const char* name : {"decode", "append", "--page-size", "--lengths", "log-uniform:16:32768", "--dry-run"}) {
    EXPECT_TRUE(contains(bench, name)) << name;
  }
  for (const char* name : {"bf16", "fp16", "bfloat16", "top-left", "sm90", "backward"}) {
    EXPECT_TRUE(contains(help, name)) << name;
  }
}

TEST(CliWords, NamesOfElementTypesAreThoseOfOthersToo) {
  const std::string plan = "compile --dry-run --arch sm_80 --head-dim 64 --causal no --dtype ";
  EXPECT_EQ(run(plan + "half,bfloat16,float32").output, run(plan + "f16,bf16,f32").output);
  EXPECT_EQ(run(plan + "f16").status, 0);
  for (const char* wrong : {"fp4", "1", "''"}) {
    const Result result = run(plan + wrong);
    EXPECT_EQ(result.status, 2) << result.output;
    EXPECT_TRUE(contains(result.output, "f16, bf16, f32, f64, e4m3, e5m2 or i8 (also fp16")) << result.output;
  }
}

TEST(CliWords, BoundsAreShort) {
  for (const char* command :
       {"bench --seq 0", "bench --head-dim 0", "bench --rounds 0", "compile --head-dim 0", "compile --jobs -1",
        "tune --candidates 0", "cache gc --max-bytes -1", "cache gc --max-entries -1"}) {
    const Result result = run(command);
    EXPECT_EQ(result.status, 2) << command << result.output;
    EXPECT_TRUE(contains(result.output, "accepted is")) << result.output;
    EXPECT_LT(result.output.size(), 200U) << result.output;
  }
}

/// The lines of a text that name a problem.
std::size_t count_lines(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST(CliBench, DecodesAreAGridOverBatchesLengthsAndPages) {
  const Result all = run("bench --op decode --dry-run");
  EXPECT_EQ(all.status, 0) << all.output;
  EXPECT_TRUE(contains(all.output, "decode bf16 b=1 h_q=32 h_kv=8 s_q=1 s_kv=131072 d_qk=128 d_v=128\n")) << all.output;
  EXPECT_TRUE(contains(all.output, "b=256 h_q=32 h_kv=8 s_q=1 s_kv=8192 d_qk=128 d_v=128 page_size=64\n"));
  EXPECT_FALSE(contains(all.output, "b=256 h_q=32 h_kv=8 s_q=1 s_kv=32768")) << "34 GB of K and V";
  EXPECT_EQ(count_lines(all.output), 3U * 17);
  const Result one = run("bench --op decode --dry-run --batch 3 --seq-kv 300 --seq 1,4 --heads 6 --page-size 7");
  EXPECT_EQ(one.output,
            "decode bf16 b=3 h_q=6 h_kv=6 s_q=1 s_kv=300 d_qk=128 d_v=128 page_size=7\n"
            "decode bf16 b=3 h_q=6 h_kv=6 s_q=4 s_kv=300 d_qk=128 d_v=128 causal page_size=7\n");
  EXPECT_EQ(count_lines(run("bench --op decode --dry-run --batch 256 --seq-kv 32768").output), 3U) << "as asked for";
}

TEST(CliBench, RequestsHaveLengths) {
  const std::string decode = "bench --op decode --dry-run --page-size 0,16 --lengths ";
  EXPECT_EQ(run(decode + "'40,7*2'").output,
            "decode bf16 b=3 h_q=32 h_kv=8 s_q=1 s_kv=40 d_qk=128 d_v=128 page_size=-1 lengths=40,7,7\n"
            "decode bf16 b=3 h_q=32 h_kv=8 s_q=1 s_kv=40 d_qk=128 d_v=128 page_size=16 lengths=40,7,7\n");
  // A cache of the longest request's rows would take 69 GB.
  EXPECT_NE(run(decode + "'131072,512*127'").output.find("varlen lengths=131072"), std::string::npos);
  const auto drawn = [&](const std::string& law) {
    const Result result = run(decode + law + " --batch 500 --json");
    EXPECT_EQ(result.status, 0) << result.output;
    auto lengths = nlohmann::json::parse(result.output)["problems"][1]["lengths"].get<std::vector<std::int64_t>>();
    std::sort(lengths.begin(), lengths.end());
    return lengths;
  };
  const std::vector<std::int64_t> logarithmic = drawn("log-uniform:16:32768"), even = drawn("uniform:16:32768");
  ASSERT_EQ(logarithmic.size(), 500U);
  EXPECT_GE(logarithmic.front(), 16);
  EXPECT_LE(logarithmic.back(), 32768);
  EXPECT_GT(logarithmic[250], 300) << "the median of the law is 724";
  EXPECT_LT(logarithmic[250], 1700);
  EXPECT_GT(even[250], 13000);
  EXPECT_TRUE(contains(run(decode + "uniform:9:9 --batch 2").output, "b=2 h_q=32 h_kv=8 s_q=1 s_kv=9 "))
      << "not ragged";
  for (const char* wrong : {"''", "0", "5,", "a", "5*0", "5*2*3", "uniform:9", "uniform:9:8", "log-uniform:0:8",
                            "2147483648", "2147483647*2,5"}) {
    const Result result = run(decode + wrong);
    EXPECT_NE(result.status, 0) << wrong;
    EXPECT_TRUE(contains(result.output, "--lengths")) << wrong << result.output;
  }
  EXPECT_EQ(run(decode + "5,6 --batch 3").status, 1);
}

TEST(CliBench, WhatHasAMethodOfItsOwnRefusesOthers) {
  for (const char* wrong : {"--op decode --flush-l2", "--op append --host-cost", "--op mla --host-cost",
                            "--op decode --latency", "--op decode --sweep tile_m=64", "--op append --sweep tile_m=64",
                            "--op append --latency", "--op append --dry-run", "--op decode --varlen",
                            "--op forward --lengths 5", "--op decode --dry-run --seq-kv 0"}) {
    const Result result = run(std::string("bench ") + wrong);
    EXPECT_EQ(result.status, 1) << wrong << result.output;
    EXPECT_TRUE(contains(result.output, "accepted")) << wrong << result.output;
  }
}

/// What an append has no use for is refused by its name, GPU or not.
TEST(CliBench, AppendsRefuseOtherSizes) {
  for (const char* option :
       {"--k-dtype", "--v-dtype", "--group-size", "--head-dim-v", "--seq", "--seq-kv", "--batch"}) {
    const bool dtype = std::string(option).ends_with("dtype");
    const Result result = run(std::string("bench --op append ") + option + (dtype ? " e4m3" : " 64"));
    EXPECT_EQ(result.status, 1) << option << result.output;
    EXPECT_TRUE(contains(result.output, "--op = append: accepted is forward")) << result.output;
    EXPECT_TRUE(contains(result.output, std::string("with ") + option)) << result.output;
  }
}

TEST(CliBench, AForwardTakesPages) {
  const Result result =
      run("bench --dry-run --head-dim 64 --causal yes --seq 512,1024 --seq-kv 0,2048 --page-size 0,16");
  EXPECT_EQ(count_lines(result.output), 8U);
  EXPECT_TRUE(contains(result.output, "s_q=512 s_kv=2048 d_qk=64 d_v=64 causal page_size=16\n")) << result.output;
  EXPECT_TRUE(contains(result.output, "s_q=1024 s_kv=1024 d_qk=64 d_v=64 causal\n")) << result.output;
}

TEST(CliWords, AColdCacheIsOfTheGridAlone) {
  for (const char* instead : {"--latency", "--host-cost"}) {
    const Result result = run(std::string("bench --flush-l2 ") + instead);
    EXPECT_EQ(result.status, 2) << result.output;
    EXPECT_TRUE(contains(result.output, "--flush-l2 excludes")) << result.output;
  }
}

/// Kernels for sm_90 would lie there for ever: Hopper asks for sm_90a.
TEST(CliCompileWords, TakesTargetsThatAGpuLooksUp) {
  for (const char* command : {"compile --dry-run", "pack unused --dry-run", "cache why", "render"}) {
    const Result result = run(std::string(command) + " --arch sm_90");
    EXPECT_EQ(result.status, 1) << command;
    EXPECT_TRUE(contains(result.output, "sm_90a")) << result.output;
  }
}

TEST(CliRender, PrintsWhatWasCompiled) {
  const std::string render = "render --arch sm_80 --head-dim 64 ";
  EXPECT_EQ(run(render + "--ptx --unit-only").status, 2);
  EXPECT_EQ(run(render + "--sass --unit-only").status, 2);
  if (!compile::compiler_info().available) GTEST_SKIP() << "no NVRTC to go on with";
  const Result ptx = run(render + "--ptx");
  EXPECT_EQ(ptx.status, 0);
  EXPECT_TRUE(contains(ptx.output, ".target sm_80")) << ptx.output.substr(0, 400);
  EXPECT_TRUE(contains(ptx.output, ".entry fa_sm80_forward"));
  EXPECT_TRUE(contains(ptx.output, "mma.sync"));

#if !defined(_WIN32)
  const TemporaryDirectory directory;  // with a disassembler that shows what it was given
  const fs::path tool = directory / "nvdisasm";
  const auto write_tool = [&](const char* script) {
    std::ofstream(tool) << "#!/bin/sh\n" << script;
    fs::permissions(tool, fs::perms::owner_all);
  };
  const std::string path = "PATH=" + in_quotes(tool.parent_path()) + ":\"$PATH\"";
  write_tool("echo \"option $1\"; head -c 4 \"$2\" | tail -c 3; echo ' disassembled'\n");
  const Result sass = run(render + "--sass", path);
  EXPECT_EQ(sass.status, 0);
  EXPECT_EQ(sass.output, "option -c\nELF disassembled\n");
  EXPECT_EQ(run(render + "--ptx --sass", path).output, ptx.output + sass.output);
  write_tool("exit 3\n");
  const Result refused = run(render + "--sass", path);
  EXPECT_EQ(refused.status, 1);
  EXPECT_TRUE(contains(refused.output, "nvdisasm cannot read the kernel")) << refused.output;
  if (fs::exists("/usr/local/cuda/bin/nvdisasm") || fs::exists("/usr/local/cuda/bin/cuobjdump")) return;
  const Result missing = run(render + "--sass", "PATH=/nowhere CUDA_HOME= CUDA_PATH=");
  EXPECT_EQ(missing.status, 1);
  EXPECT_TRUE(contains(missing.output, "neither nvdisasm nor cuobjdump")) << missing.output;
#endif
}

TEST(CliCompileWords, DebugKernelsAreAskedForByOptionOrEnvironment) {
  const std::string plan = "compile --dry-run --arch sm_90a --head-dim 64 --causal no ";
  const std::string plain = run(plan).output;
  EXPECT_FALSE(contains(plain, "debug=1")) << plain;
  const std::string debug = run(plan + "--debug").output;
  EXPECT_TRUE(contains(debug, "debug=1")) << debug;
  EXPECT_EQ(run(plan, "FA_DEBUG_KERNELS=1").output, debug);
  const std::string unit = "render --arch sm_90a --head-dim 64 --unit-only ";
  EXPECT_FALSE(contains(run(unit).output, "#define FA_DEBUG_KERNELS 1"));
  EXPECT_TRUE(contains(run(unit, "FA_DEBUG_KERNELS=1").output, "#define FA_DEBUG_KERNELS 1"));
  EXPECT_EQ(run(plan, "FA_DEBUG_KERNELS=0").output, plain);
  for (const char* const wrong : {"yes", "no", "2"}) {
    const Result result = run(plan, std::string("FA_DEBUG_KERNELS=") + wrong);
    EXPECT_EQ(result.status, 1) << wrong;
    EXPECT_TRUE(contains(result.output, "accepted is 0 or 1")) << result.output;
  }
}

TEST(CliCompileWords, ADryRunSpeaksJsonToo) {
  const std::string plan = "compile --dry-run --arch sm_90a --head-dim 64 ";
  const Result json = run(plan + "--json");
  ASSERT_EQ(json.status, 0);
  std::string specs;
  const auto parsed = nlohmann::json::parse(json.output);
  for (const auto& kernel : parsed["kernels"]) {
    specs += kernel["spec"].get<std::string>() + "\n";
  }
  EXPECT_EQ(specs, run(plan).output);
}

TEST(CliCompileWords, MakeKernelsByTheirTexts) {
  const std::string kernel =
      "append arch=sm_90a dtype=bf16 d_qk=128 d_v=128 page_size=16 rotary_dims=128 interleaved=0 "
      "table=0 aligned=1 warps=8 min_blocks=3";
  const std::string forward = run("compile --dry-run --arch sm_80 --head-dim 64 --causal no").output;
  const std::string one = forward.substr(0, forward.find('\n'));
  const Result both = run("compile --dry-run --spec '" + kernel + "' --spec '" + one + "' --spec '" + kernel + "'");
  EXPECT_EQ(both.status, 0);
  EXPECT_EQ(both.output, kernel + "\n" + one + "\n");
  const Result unknown = run("compile --dry-run --spec 'sm70_forward arch=sm_70'");
  EXPECT_NE(unknown.status, 0);
  EXPECT_TRUE(contains(unknown.output, "sm70_forward")) << unknown.output;
  const Result beside = run("compile --dry-run --head-dim 64 --spec '" + kernel + "'");
  EXPECT_NE(beside.status, 0);
  EXPECT_TRUE(contains(beside.output, "--head-dim: accepted is nothing with --spec")) << beside.output;
}

TEST(CliCompileWords, FailsWhereNothingCanBeStored) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "file") << "in the way";
  const Result result =
      run("compile --arch sm_80 --head-dim 8 --causal no --directory " + in_quotes(directory / "file"));
  EXPECT_EQ(result.status, 1) << result.output;
  EXPECT_TRUE(contains(result.output, "no cache directory")) << result.output;
}

TEST(CliCacheWords, AFolderThatIsNotThereIsNoSoundOne) {
  const TemporaryDirectory directory;
  fs::create_directory(directory / "real");
  std::ofstream(directory / "file") << "in the way";
  std::vector<const char*> names = {"missing", "file"};
  if (cache::testing::have_links()) {
    names.push_back("link");
    fs::create_symlink("real", directory / "link");
  }
  for (const char* name : names) {
    for (const std::string& command :
         std::vector<std::string>{"verify", "list", "stat", "gc", "export " + (directory / "pack").string()}) {
      const Result result = run("cache " + command + " --directory " + in_quotes(directory / name));
      EXPECT_EQ(result.status, 1) << command << name;
      EXPECT_TRUE(contains(result.output, "cannot be used")) << result.output;
    }
  }
  const std::string fresh = "FA_CACHE_DIR=" + in_quotes(directory / "fresh");
  EXPECT_EQ(run("cache verify", fresh).status, 0) << "nothing has been stored there yet";
  EXPECT_FALSE(fs::exists(directory / "fresh"));
}

/// A pack may say anything about itself.
TEST(CliCacheWords, TextOfAPackIsShownAndNotObeyed) {
  const TemporaryDirectory directory;
  cache::Key key = cache::testing::make_key(
      "\x1b]0;title\x07\r\n\xc2\x9b"
      "31m \xe2\x80\xae d\xc3\xa9j\xc3\xa0 \xff");
  key.target = "sm\x1b[2J";
  cache::Entry entry = cache::testing::make_entry(key);
  entry.compiler = "nvrtc\x7f\b13";
  std::string problem;
  ASSERT_TRUE(cache::write_pack(directory / "pack", {entry}, &problem)) << problem;
  const std::string pack = " --pack " + in_quotes(directory / "pack");
  for (const std::string& command : std::vector<std::string>{"list", "stat", "verify", "list --json", "stat --json",
                                                             "why --arch sm_80", "why --arch sm_80 --json"}) {
    const Result result = run("cache " + command + pack, "FA_CACHE_DIR=" + in_quotes(directory / "none"));
    for (const char byte : result.output) {
      EXPECT_TRUE(byte == '\n' || (static_cast<unsigned char>(byte) >= ' ' && byte != 127)) << command;
    }
    EXPECT_FALSE(contains(result.output, "\xc2\x9b") || contains(result.output, "\xe2\x80\xae")) << command;
    EXPECT_FALSE(contains(result.output, "\xff")) << command;
  }
  const std::string list = run("cache list" + pack).output;
  EXPECT_TRUE(contains(list, R"(\x1b]0;title\x07\x0d\x0a\xc2\x9b31m \xe2\x80\xae)")) << list;
  EXPECT_TRUE(contains(list, "d\xc3\xa9j\xc3\xa0 \\xff")) << list;
  EXPECT_TRUE(contains(list, R"(sm\x1b[2J)")) << list;
}

TEST(CliCacheWords, PacksAreWrittenAsOutputsAreAndPinned) {
  const TemporaryDirectory directory;
  const fs::path cache = directory / "cache";
  const cache::Key key = cache::testing::make_key();
  cache::Store({cache, nullptr}).get(key, cache::testing::builder(key));
  const std::string from = " --directory " + in_quotes(cache);
#if !defined(_WIN32)
  EXPECT_EQ(run("cache export /dev/null" + from).status, 0);
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
#endif
  const bool links = cache::testing::have_links();
  const fs::path to = directory / (links ? "link" : "pack");
  if (links) fs::create_symlink("pack", to);
  const Result written = run("cache export " + in_quotes(to) + from);
  EXPECT_EQ(fs::is_symlink(to), links);
  const std::string digest = cache::to_hex(cache::sha256(cache::testing::read_bytes(directory / "pack")));
  EXPECT_TRUE(contains(written.output, digest)) << written.output;
  EXPECT_EQ(run("cache export " + in_quotes(directory / "missing" / "pack") + from).status, 1);
  EXPECT_TRUE(contains(run("pack " + in_quotes(directory / "missing" / "pack")).output, "cannot be written"));
  EXPECT_TRUE(
      contains(run("pack " + in_quotes(directory / "pack"), "FA_CACHE_PACKS=" + in_quotes(to)).output, "--force"));

  const std::string import =
      "cache import " + in_quotes(directory / "pack") + " --directory " + in_quotes(directory / "other") + " --sha256 ";
  const Result refused = run(import + std::string(64, '0'));
  EXPECT_EQ(refused.status, 1);
  EXPECT_TRUE(contains(refused.output, digest)) << refused.output;
  EXPECT_EQ(run(import + "abc").status, 1);
  EXPECT_EQ(run(import + digest + "," + digest).status, 1);
  EXPECT_TRUE(contains(run(import + digest).output, "1 kernels taken"));
}

// What a recording says, a grid does not.
TEST(CliPack, ARecordingTakesNoGrid) {
  const TemporaryDirectory folder;
  const fs::path recording = folder.path() / "asked.jsonl";
  std::ofstream(recording) << "\n";
  for (const char* option : {"--arch sm_80", "--head-dim 64", "--shapes decode", "--varlen", "--score 'score*2'"}) {
    const Result result =
        run("pack " + in_quotes(folder.path() / "k.fapack") + " --record " + in_quotes(recording) + " " + option);
    EXPECT_EQ(result.status, 1) << option;
    const std::string name = std::string(option).substr(0, std::string(option).find(' '));
    EXPECT_TRUE(contains(result.output, name + ": accepted is nothing with --record")) << result.output;
  }
  const Result missing = run("pack " + in_quotes(folder.path() / "k.fapack") + " --record /nonexistent/asked.jsonl");
  EXPECT_EQ(missing.status, 2);
  EXPECT_TRUE(contains(missing.output, "/nonexistent/asked.jsonl")) << missing.output;
}

}  // namespace
}  // namespace fa::cli
