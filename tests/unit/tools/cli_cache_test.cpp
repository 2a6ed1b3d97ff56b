// `fa cache ...`, `fa pack` and the command that a miss names, as a shell runs them.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "api/build.hpp"
#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "cache/pack.hpp"
#include "compile/compiler.hpp"
#include "plan/backward.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "run_program.hpp"
#include "tests/support/posix_names.hpp"
#include "tests/unit/cache/support.hpp"

namespace fa::cli {
namespace {

using cache::testing::TemporaryDirectory;
namespace fs = std::filesystem;

using Result = test::Ran;

/// Runs `fa ARGUMENTS`; what it prints on standard error is part of the output.
Result run(const std::string& arguments) {
  return test::run_program(FA_CLI, arguments);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

plan::Problem problem_of(AttentionConfig config, AttentionShape shape, const char* arch) {
  return api::make_problem(config, api::checked(config, shape), plan::parse_arch(arch));
}

AttentionConfig config_of(int head_dim) {
  AttentionConfig config;
  config.head_dim = head_dim;
  return config;
}

/// A directory with stand-ins of kernels that the planner asks for.
class CliCacheTest : public testing::Test {
 protected:
  static constexpr AttentionShape kShape{.b = 16, .h_q = 16, .h_kv = 16, .s_q = 1024, .s_kv = 1024};

  void SetUp() override {
    for (const int head_dim : {64, 128}) put(plan::plan_forward(problem_of(config_of(head_dim), kShape, "sm_90a"), {}));
  }
  void put(const plan::ForwardPlan& plan) const {
    const cache::Key key = api::cache_key(plan.kernel);
    cache::Store({cache_, nullptr}).get(key, [&] {
      cache::Entry entry = cache::testing::make_entry(key, 5000);
      entry.local_bytes = 0;
      return entry;
    });
  }
  Result cache_command(const std::string& arguments) const {
    return run("cache " + arguments + " --directory '" + cache_.string() + "'");
  }
  fs::path any_entry() const { return cache::list_stored(cache_).at(0).path; }

  TemporaryDirectory directory_;
  fs::path cache_ = directory_ / "the cache";
};

TEST_F(CliCacheTest, ListAndStatTellWhatIsThere) {
  const Result list = cache_command("list --json");
  ASSERT_EQ(list.status, 0) << list.output;
  const auto json = nlohmann::json::parse(list.output);
  ASSERT_EQ(json["entries"].size(), 2U);
  for (const auto& entry : json["entries"]) {
    EXPECT_EQ(entry["target"], "sm_90a");
    EXPECT_EQ(entry["compiler"], "nvrtc 13.0");
    EXPECT_EQ(entry["min_driver"], 13000);
    EXPECT_EQ(entry["cubin_bytes"], 5000);
    EXPECT_EQ(entry["registers"], 168);
  }
  const auto stat = nlohmann::json::parse(cache_command("stat --json").output);
  EXPECT_EQ(stat["entries"], 2);
  EXPECT_EQ(stat["max_entries"], 4096);
  EXPECT_EQ(stat["groups"][0]["bytes"], 10000);
  EXPECT_TRUE(contains(cache_command("list").output, "2 kernels"));
  EXPECT_TRUE(contains(cache_command("stat").output, "2 of 4096 entries"));
}

TEST_F(CliCacheTest, VerifyFindsDamageAndGcRemovesIt) {
  EXPECT_EQ(cache_command("verify").status, 0);
  const fs::path spoilt = any_entry();
  fs::resize_file(spoilt, 100);
  const Result verify = cache_command("verify");
  EXPECT_EQ(verify.status, 1);
  EXPECT_TRUE(contains(verify.output, spoilt.string())) << verify.output;
  EXPECT_TRUE(contains(cache_command("list").output, "1 kernels")) << "and one damaged";
  EXPECT_TRUE(contains(cache_command("gc").output, "removed 1 entries"));
  EXPECT_EQ(cache_command("verify").status, 0);
  EXPECT_TRUE(contains(cache_command("gc --max-bytes 1KiB").output, "0 are left"));
  EXPECT_EQ(cache::testing::files_under(cache_), 0U);
}

TEST_F(CliCacheTest, ExportAndImportCarryEveryKernel) {
  const fs::path pack = directory_ / "kernels.fapack";
  ASSERT_EQ(cache_command("export '" + pack.string() + "'").status, 0);
  EXPECT_EQ(run("cache verify --pack '" + pack.string() + "'").status, 0);
  EXPECT_TRUE(contains(run("cache list --pack '" + pack.string() + "'").output, "2 kernels"));
  const std::string import =
      "cache import '" + pack.string() + "' --directory '" + (directory_ / "other").string() + "'";
  EXPECT_TRUE(contains(run(import).output, "2 kernels taken"));
  EXPECT_TRUE(contains(run(import).output, "0 kernels taken, 2 were there"));
  EXPECT_EQ(cache::list_entries(directory_ / "other").size(), 2U);
  EXPECT_TRUE(contains(cache_command("export '" + pack.string() + "' --arch sm_80").output, "0 kernels"));
  EXPECT_EQ(run("cache import /nonexistent --directory '" + cache_.string() + "'").status, 1);
}

TEST_F(CliCacheTest, WhyNamesTheFieldsThatDiffer) {
  const Result hit = cache_command("why --arch sm_90a --head-dim 64");
  EXPECT_EQ(hit.status, 0) << hit.output;
  EXPECT_TRUE(contains(hit.output, "directory")) << hit.output;

  const Result miss = cache_command("why --arch sm_90a --head-dim 64 --dtype f16 --json");
  EXPECT_EQ(miss.status, 1) << miss.output;
  const auto kernels = nlohmann::json::parse(miss.output)["kernels"];
  const auto& looked_up = kernels[0]["looked_up"][0];
  EXPECT_EQ(looked_up["state"], "missing");
  const auto& difference = looked_up["nearest"][0]["differences"];
  ASSERT_EQ(difference.size(), 1U) << difference;
  EXPECT_EQ(difference[0], (nlohmann::json{{"field", "dtype"}, {"wanted", "f16"}, {"stored", "bf16"}}));

  const Result arch = cache_command("why --arch sm_80 --head-dim 64");
  EXPECT_TRUE(contains(arch.output, "target               wanted sm_80, stored sm_90a")) << arch.output;
  const Result compiler = cache_command("why --arch sm_90a --head-dim 64 --compilers '>=99.0'");
  EXPECT_EQ(compiler.status, 1);
  EXPECT_TRUE(contains(compiler.output, "refused")) << compiler.output;
  EXPECT_TRUE(contains(compiler.output, "nvrtc 13.0")) << compiler.output;
}

TEST_F(CliCacheTest, WhyTellsWhatServesInTheirPlace) {
  cache::Entry entry = cache::testing::make_entry(
      api::cache_key(plan::plan_forward(problem_of(config_of(64), kShape, "sm_80"), {}).kernel), 5000);
  entry.local_bytes = 0;
  const fs::path pack = directory_ / "pack";
  std::string problem;
  ASSERT_TRUE(cache::write_pack(pack, {entry}, &problem)) << problem;
  const std::string question = "why --head-dim 64 --pack '" + pack.string() + "' --arch ";
  const Result served = cache_command(question + "sm_86");
  EXPECT_EQ(served.status, 0) << served.output;
  EXPECT_TRUE(contains(served.output, "in its place: " + entry.key.spec)) << served.output;
  EXPECT_TRUE(contains(served.output, "is served by " + entry.key.spec)) << served.output;
  const auto json = nlohmann::json::parse(cache_command(question + "sm_89 --json").output);
  EXPECT_EQ(json["kernels"][0]["looked_up"][0]["served_by"], entry.key.digest());
  const Result own = cache_command(question + "sm_80");
  EXPECT_EQ(own.status, 0) << own.output;
  EXPECT_FALSE(contains(own.output, "in its place")) << own.output;
  EXPECT_EQ(cache_command(question + "sm_87").status, 1);

  // Who names a target gets that target's kernel, here from no compiler.
  setenv("FA_CACHE_PACKS", pack.string().c_str(), 1);
  setenv("FA_NVRTC_PATH", "/nonexistent", 1);
  for (const auto& [arch, status] : {std::pair("sm_86", 1), std::pair("sm_80", 0)}) {
    const Result compile =
        run("compile --head-dim 64 --dtype bf16 --causal no --batch 16 --heads 16 --seq 1024 --arch " +
            std::string(arch) + " --directory '" + (directory_ / "empty").string() + "'");
    EXPECT_EQ(compile.status, status) << compile.output;
  }
  unsetenv("FA_CACHE_PACKS");
  unsetenv("FA_NVRTC_PATH");
}

std::string first_choices(const std::vector<plan::Alternatives>& kernels) {
  std::string text;
  for (const plan::Alternatives& specs : kernels) text += canonical(specs.front()) + "\n";
  return text;
}

/// The command of a miss plans the very kernels that were missing.
void expect_command_plans(const plan::Problem& problem, const plan::Fixed& fixed) {
  const auto expect = [](const std::string& command, const std::vector<plan::Alternatives>& kernels) {
    ASSERT_TRUE(command.starts_with("fa ")) << command;
    EXPECT_EQ(run(command.substr(3) + " --dry-run").output, first_choices(kernels)) << command;
  };
  expect(api::compile_command(problem, fixed, ""),
         plan::with_mask_tiles(problem, plan::kernels_of(plan::plan_forward(problem, fixed))));
  plan::Fixed of_both;  // what backward kernels have too
  for (const char* const field : {"tile_m", "tile_n", "splits"}) of_both.set(field, fixed.number(field));
  for (const bool deterministic : {false, true}) {
    expect(api::compile_command(problem, of_both, "", api::Operation::backward, deterministic),
           plan::with_mask_tiles(problem, plan::kernels_of(plan::plan_backward(problem, of_both, deterministic))));
  }
}

TEST(CliCommand, OfAMissBuildsWhatWasMissing) {
  const AttentionShape shapes[] = {{.b = 16, .h_q = 16, .h_kv = 16, .s_q = 1024, .s_kv = 1024},
                                   {.b = 1, .h_q = 8, .h_kv = 2, .s_q = 1, .s_kv = 16384},
                                   {.b = 1, .h_q = 2, .h_kv = 1, .s_q = 40, .s_kv = 2000, .aligned = false}};
  for (const char* arch : {"sm_80", "sm_90a", "sm_120a"}) {
    for (const AttentionShape& shape : shapes) {
      AttentionConfig config = config_of(96);
      expect_command_plans(problem_of(config, shape, arch), {});
      config.head_dim_v = 64;
      config.dtype = DType::f16;
      config.causal = true;
      expect_command_plans(problem_of(config, shape, arch), {});
      config.causal_align = CausalAlign::top_left;
      config.scale = -2.0f;
      expect_command_plans(problem_of(config, shape, arch), {});
    }
  }
  const plan::Fixed fixed(plan::Family::sm80, {{"tile_m", 64},
                                               {"tile_n", 32},
                                               {"warps", 4},
                                               {"stages", 2},
                                               {"q_in_registers", true},
                                               {"loop_bodies", 2},
                                               {"pack_gqa", false},
                                               {"splits", 3}});
  expect_command_plans(problem_of(config_of(64), shapes[0], "sm_80"), fixed);
  expect_command_plans(problem_of(config_of(64), shapes[0], "sm_80"), {{"tile_m", 64}, {"warps", 4}, {"warps_n", 2}});
}

TEST(CliCommand, OfAMissWithVariantsBuildsWhatWasMissing) {
  const AttentionShape shape{.b = 2, .h_q = 8, .h_kv = 2, .s_q = 500, .s_kv = 700};
  const auto expect_planned = [&](const AttentionConfig& config) {
    const api::Functions functions = api::read_functions(config, false);
    for (const char* arch : {"sm_80", "sm_90a"}) {
      expect_command_plans(
          api::make_problem(config, api::checked(config, shape), plan::parse_arch(arch), &functions.variants), {});
    }
  };
  AttentionConfig config = config_of(64);
  config.mask = functions::both(functions::documents(), MaskFunction{"q - kv < 99 || kv == 0"});
  expect_planned(config);
  config.score = ScoreFunction{"score + slope[h] * float(kv - q)", {{"slope", DType::bf16}}};
  config.window_left = 100;
  config.window_right = 3;
  config.sink = true;
  config.dropout = 0.25f;
  expect_planned(config);
  config.varlen = true;
  config.chunk = 64;
  expect_planned(config);
}

/// `fa compile` of a mask function leaves nothing to compile, whichever mode a program runs in.
TEST(CliCompile, BuildsTheKernelsThatListTiles) {
  const std::string options = " --arch sm_80 --head-dim 16 --dtype f16 --mask 'q != kv' --op backward";
  const Result plan = run("compile --dry-run --causal no --deterministic" + options);
  std::size_t last = 0;
  for (const char* kernel : {"backward_preprocess arch", "mask_keys arch", "sm80_backward arch", "mask_rows arch",
                             "sm80_backward_dq arch"}) {
    const std::size_t at = plan.output.find(kernel);
    EXPECT_TRUE(at != std::string::npos && at >= last) << kernel << " is not in its place in\n" << plan.output;
    last = at;
  }
  const Result unit = run("render --unit-only --mask-tiles --arch sm_80 --mask 'q != kv' --head-dim 64");
  EXPECT_EQ(unit.status, 0);
  EXPECT_TRUE(contains(unit.output, "fa_mask_rows")) << unit.output;
  EXPECT_NE(run("render --mask-tiles --arch sm_80 --window-left 3").status, 0);
  if (!compile::compiler_info().available) GTEST_SKIP() << "no NVRTC to go on with";
  const TemporaryDirectory directory;
  const std::string place = " --directory '" + (directory / "cache").string() + "'";
  ASSERT_EQ(run("compile --causal no" + options + place).status, 0);
  const Result why = run("cache why --causal no" + options + place);
  EXPECT_EQ(why.status, 0) << why.output;
  EXPECT_TRUE(contains(why.output, "fa_mask_keys is served")) << why.output;
  AttentionConfig config = config_of(16);
  config.dtype = DType::f16;
  config.mask = MaskFunction{"q != kv"};
  config.compile = CompilePolicy::never;
  config.cache.directory = (directory / "cache").string();
  const AttentionShape shape{.b = 16, .h_q = 16, .s_q = 1024, .s_kv = 1024};
  EXPECT_EQ(find_backward_kernels(config, shape, "sm_80").size(), 4U);
}

TEST(CliPack, TakesVariants) {
  const std::string variants =
      " --arch sm_80 --head-dim 64 --dtype f16 --causal no --softcap 30 --mask 'q != kv' --sink";
  const Result plan = run("pack unused --dry-run --shapes prefill,backward-deterministic" + variants);
  ASSERT_EQ(plan.status, 0) << plan.output;
  for (const char* kernel : {"sm80_forward arch", "mask_rows arch", "mask_keys arch", "sm80_backward arch",
                             "sm80_backward_dq arch", "backward_sink arch"}) {
    EXPECT_TRUE(contains(plan.output, kernel)) << kernel << " is not in\n" << plan.output;
  }
  const Result packed = run("pack unused --dry-run --varlen --dropout 0.1 --zero-padding" + variants);
  EXPECT_TRUE(contains(packed.output, "clear_padding arch")) << packed.output;
  EXPECT_FALSE(contains(packed.output, "mask_rows arch")) << packed.output;
  // Gradients of captures have no deterministic kernels.
  const std::string bias = " --arch sm_80 --head-dim 64 --bias hqk --gradients";
  const Result gradients = run("pack unused --dry-run" + bias);
  EXPECT_EQ(gradients.status, 0) << gradients.output;
  EXPECT_FALSE(contains(gradients.output, "backward_dq")) << gradients.output;
  EXPECT_NE(run("pack unused --dry-run --shapes backward-deterministic" + bias).status, 0);
}

TEST(CliPack, HoldsTheKernelsOfItsGridAndIsReproducible) {
  const std::string grid = " --arch sm_80 --head-dim 16 --dtype f16 --causal no --shapes decode-split";
  const Result plan = run("pack unused --dry-run" + grid);
  ASSERT_EQ(plan.status, 0) << plan.output;
  EXPECT_EQ(std::count(plan.output.begin(), plan.output.end(), '\n'), 2) << plan.output;
  EXPECT_TRUE(contains(plan.output, "forward_combine")) << plan.output;
  const Result full = run("pack unused --dry-run --arch sm_90a");
  EXPECT_GT(std::count(full.output.begin(), full.output.end(), '\n'), 100);
  for (const char* kernel :
       {"backward_preprocess arch", "backward_reduce arch", "backward_convert arch", "write_dq=1", "ordered_dq=1"}) {
    EXPECT_TRUE(contains(full.output, kernel)) << kernel;
  }
  if (!compile::compiler_info().available) GTEST_SKIP() << "no NVRTC to go on with";
  const TemporaryDirectory directory;
  for (const char* name : {"a", "b"}) {
    const Result pack = run("pack '" + (directory / name).string() + "'" + grid + " --directory '" +
                            (directory / (std::string("cache ") + name)).string() + "'");
    ASSERT_EQ(pack.status, 0) << pack.output;
  }
  EXPECT_EQ(cache::testing::read_bytes(directory / "a"), cache::testing::read_bytes(directory / "b"));
  std::string problem;
  EXPECT_EQ(cache::list_pack(directory / "a", &problem).size(), 2U) << problem;
}

TEST(CliPack, HoldsKernelsOverPages) {
  const std::string grid = " --arch sm_80 --head-dim 64 --dtype f16 --causal yes --page-size 12,16 --rotary-dims 32";
  const Result plan = run("pack unused --dry-run" + grid);
  ASSERT_EQ(plan.status, 0) << plan.output;
  for (const char* kernel : {"page_size=12 rotary_dims=32 interleaved=0", "page_size=16 rotary_dims=0"}) {
    EXPECT_TRUE(contains(plan.output, kernel)) << kernel << " is not in\n" << plan.output;
  }
  EXPECT_FALSE(contains(plan.output, "backward")) << plan.output;
  const Result varlen = run("pack unused --dry-run --varlen --shapes decode,append --rotary-interleaved" + grid);
  EXPECT_TRUE(contains(varlen.output, "varlen=1")) << varlen.output;
  EXPECT_TRUE(contains(varlen.output, "rotary_dims=32 interleaved=1")) << varlen.output;
  EXPECT_FALSE(contains(run("pack unused --dry-run --shapes decode" + grid).output, "append arch"));
  EXPECT_TRUE(contains(run("pack unused --dry-run --shapes append --arch sm_80").output, "page_size=0 rotary_dims=0"));
  EXPECT_EQ(run("pack unused --dry-run --page-size 16 --dropout 0.1 --arch sm_80").status, 1);
  EXPECT_EQ(run("pack unused --dry-run --page-size 16 --rotary-dims 7 --arch sm_80").status, 1);
}

/// What a program without a compiler asks for is there.
TEST(CliPack, ServesAProgramOverPages) {
  if (!compile::compiler_info().available) GTEST_SKIP() << "no NVRTC to go on with";
  const TemporaryDirectory directory;
  const std::string file = (directory / "pack").string();
  const Result pack =
      run("pack '" + file + "' --arch sm_80 --head-dim 16 --dtype f16 --causal yes --shapes gqa-decode,append" +
          " --page-size 12 --rotary-dims 16 --directory '" + (directory / "cache").string() + "'");
  ASSERT_EQ(pack.status, 0) << pack.output;
  AttentionConfig config = config_of(16);
  config.dtype = DType::f16;
  config.causal = true;
  config.page_size = 12;
  config.compile = CompilePolicy::never;
  config.cache = {.mode = CachePolicy::Mode::memory, .packs = {file}};
  const std::vector<KernelInfo> found =
      find_kernels(config, {.b = 64, .h_q = 32, .h_kv = 4, .s_q = 1, .s_kv = 2048}, "sm_80");
  ASSERT_EQ(found.size(), 2U);  // and the kernel that makes its schedule
  for (const KernelInfo& info : found) EXPECT_EQ(info.origin, "pack") << info.name;
  EXPECT_EQ(find_append_kernel(config, {.rotary_dims = 16}, "sm_80").origin, "pack");
  EXPECT_EQ(find_append_kernel(config, {}, "sm_80").origin, "pack");
  EXPECT_THROW(find_append_kernel(config, {.rotary_dims = 8}, "sm_80"), Error);
  config.page_size = 16;
  EXPECT_THROW(find_append_kernel(config, {}, "sm_80"), Error);
}

}  // namespace
}  // namespace fa::cli
