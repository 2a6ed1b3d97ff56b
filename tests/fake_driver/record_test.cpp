#include <sys/wait.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <fa/error.hpp>

#include "api/recording.hpp"
#include "fake_driver/launches_test.hpp"
#include "tests/unit/cache/support.hpp"

// A program runs with FA_RECORD, `fa pack --record` makes a pack of that, and the program runs with nothing else.
namespace fa {
namespace {

using cache::testing::TemporaryDirectory;
namespace fs = std::filesystem;

constexpr AttentionShape kShape{.b = 2, .h_q = 16, .h_kv = 16, .s_q = 1024, .s_kv = 1024};
constexpr AttentionShape kDecode{.b = 64, .h_q = 32, .h_kv = 8, .s_q = 1, .s_kv = 8192};

struct Program {
  std::string name;
  AttentionConfig config;
  std::function<void(const Attention&)> run;
};

AttentionConfig configured(const std::function<void(AttentionConfig&)>& change = {}) {
  AttentionConfig config;
  config.head_dim = 64;
  config.causal = true;
  if (change) change(config);
  config.tune = TunePolicy::off;
  config.cache.mode = CachePolicy::Mode::memory;
  return config;
}

void train(const Attention& attention) {
  attention.prepare(kShape);
  attention.prepare_backward(kShape);
}

std::vector<Program> programs() {
  std::vector<Program> all;
  all.push_back({"causal", configured(), train});
  all.push_back({"deterministic", configured([](AttentionConfig& c) { c.deterministic = true; }), train});
  all.push_back({"float32", configured([](AttentionConfig& c) { c.dtype = DType::f32; }), train});
  all.push_back({"functions", configured([](AttentionConfig& c) {
                   c.score = {"score + slope[h] * float(kv - q)", {{"slope", DType::f32, true}}};
                   c.mask = {"doc[q] == doc[kv] || kv < 4", {{"doc", DType::i32}}};
                 }),
                 train});
  all.push_back({"distance", configured([](AttentionConfig& c) { c.score = functions::alibi(); }), train});
  all.push_back({"packed", configured([](AttentionConfig& c) {
                   c.varlen = c.zero_padding = true;
                   c.dropout = 0.1f;
                   c.window_left = 100;
                   c.sink = true;
                 }),
                 [](const Attention& attention) {
                   AttentionShape shape = kShape;
                   shape.total_q = shape.total_kv = 2000;
                   attention.prepare(shape);
                   attention.prepare_backward(shape);
                 }});
  all.push_back({"decode", configured([](AttentionConfig& c) { c.page_size = 16; }), [](const Attention& attention) {
                   attention.prepare(kDecode);
                   attention.prepare_append({.rotary_dims = 64});
                   attention.prepare_append({});
                 }});
  all.push_back({"merge", configured(), [](const Attention& attention) {
                   attention.prepare_merge({});
                   attention.prepare_merge({.mixed = true, .result = DType::f32});
                 }});
  return all;
}

/// What a shell prints; "" where the command succeeds.
std::string shell(const std::string& command) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  std::string output;
  std::array<char, 4096> buffer{};
  while (const std::size_t count = fread(buffer.data(), 1, buffer.size(), pipe)) output.append(buffer.data(), count);
  return WEXITSTATUS(pclose(pipe)) == 0 ? "" : output;
}

class Records : public LaunchesTest {
 protected:
  void SetUp() override {
    LaunchesTest::SetUp();
    setenv("FA_RECORD", file_.c_str(), 1);
  }
  void TearDown() override { unsetenv("FA_RECORD"); }

  std::vector<std::string> lines() const {
    std::ifstream stream(file_);
    std::vector<std::string> all;
    for (std::string line; std::getline(stream, line);) all.push_back(line);
    return all;
  }

  /// What `fa pack` prints; "" where it succeeds.
  std::string pack() const {
    return shell(fmt::format("'{}' pack '{}' --record '{}' --directory '{}' --force", FA_CLI, pack_.string(),
                             file_.string(), (folder_.path() / "cache").string()));
  }

  void run_from_pack(const Program& program) const {
    AttentionConfig config = program.config;
    config.compile = CompilePolicy::never;
    config.cache.packs = {pack_.string()};
    const Attention attention = Attention::create(config);
    program.run(attention);
    EXPECT_EQ(attention.cache_counters().compiles, 0U) << program.name;
  }

  TemporaryDirectory folder_;
  fs::path file_ = folder_.path() / "asked.jsonl";
  fs::path pack_ = folder_.path() / "kernels.fapack";
};

TEST_F(Records, APackOfItServesTheProgram) {
  for (const Program& program : programs()) program.run(Attention::create(program.config));
  ASSERT_EQ(pack(), "");
  unsetenv("FA_RECORD");
  for (const Program& program : programs()) EXPECT_NO_THROW(run_from_pack(program)) << program.name;
}

// Each program's requests are in the record: a pack without them misses.
TEST_F(Records, APackOfOthersDoesNot) {
  const std::vector<Program> all = programs();
  all.front().run(Attention::create(all.front().config));
  ASSERT_EQ(pack(), "");
  unsetenv("FA_RECORD");
  run_from_pack(all.front());
  for (std::size_t i = 1; i < all.size(); ++i) {
    EXPECT_THROW(run_from_pack(all[i]), Error) << all[i].name;
  }
}

TEST_F(Records, EachRequestOnceAProcess) {
  for (int i = 0; i < 3; ++i) train(Attention::create(configured()));
  std::vector<std::string> first = lines();
  ASSERT_FALSE(first.empty());
  std::ranges::sort(first);
  EXPECT_EQ(std::ranges::adjacent_find(first), first.end());
  EXPECT_EQ(api::read_recording(file_).size(), first.size());
}

TEST_F(Records, ThreadsWriteWholeLines) {
  const std::vector<Program> all = programs();
  std::vector<std::thread> threads;
  for (const Program& program : all) {
    threads.emplace_back([&program] { program.run(Attention::create(program.config)); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(api::read_recording(file_).size(), all.size());
}

TEST_F(Records, AFileThatCannotBeWrittenCostsNoCall) {
  setenv("FA_RECORD", "/nonexistent/folder/asked.jsonl", 1);
  EXPECT_NO_THROW(train(Attention::create(configured())));
}

TEST_F(Records, BadLinesAreNamed) {
  train(Attention::create(configured()));
  const std::string good = lines().front();
  const std::pair<std::string, std::string> bad[] = {
      {"{", ":2: no request"},
      {R"({"schema":2,"fa":"9.0","kernels":["x"]})", "schema = 2"},
      {R"({"schema":1,"fa":"0.1.0","kernels":[]})", "kernels = nothing"},
      {R"({"schema":1,"fa":"0.1.0","kernels":["sm70_forward arch=sm_70"]})", "kernel = sm70_forward"},
      {R"({"schema":1,"fa":"0.1.0","kernels":[7]})", "must be string"}};
  for (const auto& [line, part] : bad) {
    std::ofstream(file_) << good << "\n" << line << "\n";
    const std::string output = pack();
    EXPECT_NE(output.find(part), std::string::npos) << output;
    EXPECT_NE(output.find(file_.string() + ":2"), std::string::npos) << output;
    EXPECT_FALSE(fs::exists(pack_));
  }
}

/// Calls of one kernel and of several, which a program prepares that must not compile.
std::vector<Program> calls_of_other_kernels() {
  std::vector<Program> all;
  all.push_back({"append", configured([](AttentionConfig& c) { c.page_size = 16; }),
                 [](const Attention& attention) { attention.prepare_append({.rotary_dims = 64}); }});
  all.push_back({"append to 8 and 4 bits", configured([](AttentionConfig& c) {
                   c.page_size = kContiguous;
                   c.k_dtype = DType::e4m3;
                   c.v_dtype = DType::u4x2;
                 }),
                 [](const Attention& attention) { attention.prepare_append({}); }});
  all.push_back({"merge", configured(),
                 [](const Attention& attention) { attention.prepare_merge({.mixed = true, .result = DType::f32}); }});
  all.push_back({"debug merge", configured([](AttentionConfig& c) { c.debug = true; }),
                 [](const Attention& attention) { attention.prepare_merge({}); }});
  all.push_back(
      {"quantize", configured([](AttentionConfig& c) { c.dtype = DType::i8; }), [](const Attention& attention) {
         const auto at = [](std::uintptr_t page) {
           return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (page << 32));
         };
         QuantizeInputs in;
         in.k = TensorView(at(1), DType::bf16, {2, 2, 100, 64});
         in.k_codes = TensorView(at(2), DType::i8, {2, 2, 100, 64});
         in.k_scale = TensorView(at(3), DType::f32, {2, 2, 100});
         in.k_mean = TensorView(at(4), DType::f32, {2, 2, 64});
         attention.prepare_quantize(in);
       }});
  all.push_back({"padding", configured([](AttentionConfig& c) { c.varlen = c.zero_padding = true; }), train});
  return all;
}

// Each miss names a command that makes what was missing, until nothing is.
TEST_F(Records, TheCommandsOfMissesMakeTheirKernels) {
  unsetenv("FA_RECORD");
  for (const Program& program : calls_of_other_kernels()) {
    AttentionConfig config = program.config;
    config.compile = CompilePolicy::never;
    config.cache.mode = CachePolicy::Mode::disk;
    config.cache.directory = (folder_.path() / ("it's " + program.name)).string();
    std::vector<std::string> commands;
    for (bool served = false; !served;) {
      try {
        program.run(Attention::create(config));
        served = true;
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::cache_miss) << program.name << ": " << error.what();
        const std::string command(error.field("command"));
        ASSERT_EQ(command.rfind("fa compile ", 0), 0U) << program.name << ": " << command;
        ASSERT_EQ(std::ranges::count(commands, command), 0) << program.name << ", told again: " << command;
        EXPECT_NE(std::string(error.what()).find(command), std::string::npos) << error.what();
        commands.push_back(command);
        ASSERT_EQ(shell(fmt::format("'{}'{}", FA_CLI, command.substr(2))), "") << command;
      }
    }
    EXPECT_FALSE(commands.empty()) << program.name;
  }
}

TEST_F(Records, AnEmptyRecordingMakesNoPack) {
  std::ofstream(file_) << "";
  EXPECT_NE(pack().find("--record: nothing was recorded"), std::string::npos);
}

}  // namespace
}  // namespace fa
