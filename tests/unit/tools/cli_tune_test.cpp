// `fa tune --carry`: which rows of a table outlive a change of the templates.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "compile/compiler.hpp"
#include "plan/planner.hpp"
#include "render/templates.hpp"
#include "run_program.hpp"
#include "tests/unit/cache/support.hpp"
#include "tune/bucket.hpp"
#include "tune/record.hpp"

namespace fa::cli {
namespace {

using cache::testing::TemporaryDirectory;
namespace fs = std::filesystem;

constexpr const char* kChanged = "common/online_softmax.cuh";

class CliCarry : public testing::Test {
 protected:
  void SetUp() override {
    if (const compile::CompilerInfo info = compile::compiler_info(); !info.available) GTEST_SKIP() << info.problem;
    for (const render::Header& header : render::templates().headers()) {
      write(old_ / header.name, header.text + (header.name == kChanged ? "// of old\n" : ""));
    }
    plan::Problem problem;
    problem.arch = plan::parse_target("sm_80");
    problem.d_qk = problem.d_v = 64;
    problem.h_q = problem.h_kv = 128;
    problem.s_q = problem.s_kv = 1024;
    spec_ = plan::plan_forward(problem, {}).kernel;
    problem_ = tune::bucket_text(problem, spec_);
  }

  static void write(const fs::path& path, const std::string& text) {
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }

  void change_old(const std::string& before, const std::string& after) const {
    std::ifstream file(old_ / kChanged, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(file), {}};
    const std::size_t at = text.find(before);
    ASSERT_NE(at, std::string::npos) << before;
    write(old_ / kChanged, text.replace(at, before.size(), after));
  }

  std::string digest_of_old() const {
    return render::read_templates(old_, "old").included_by(render::unit_of(spec_)).digest;
  }

  /// What is left of a table with a row that was measured with templates of that digest.
  std::optional<tune::Table> carried(const std::string& digest, std::string* output) const {
    const tune::Table table{"NVIDIA Test",
                            108,
                            tune::kMethod,
                            {{problem_, {canonical(spec_), digest}, 0.75}, {"s_q=7 rubbish", {"x", digest}}}};
    write(directory_ / "table.json", tune::write_table(table));
    const test::Ran ran = test::run_program(FA_CLI, "tune --carry '" + old_.string() + "' --table '" +
                                                        (directory_ / "table.json").string() + "' --output '" +
                                                        (directory_ / "carried.json").string() + "'");
    *output += ran.output;
    if (ran.status != 0) return std::nullopt;
    std::ifstream file(directory_ / "carried.json", std::ios::binary);
    std::string problem;
    return tune::read_table(std::string{std::istreambuf_iterator<char>(file), {}}, &problem);
  }

  TemporaryDirectory directory_;
  fs::path old_ = directory_ / "old";
  plan::KernelSpec spec_;
  std::string problem_;
};

TEST_F(CliCarry, ARowWithTheSameInstructionsTakesTodaysDigest) {
  const std::string today = render::templates_digest(render::unit_of(spec_));
  ASSERT_NE(digest_of_old(), today);
  for (const std::string& measured : {digest_of_old(), today}) {
    std::string output;
    const std::optional<tune::Table> table = carried(measured, &output);
    ASSERT_TRUE(table) << output;
    ASSERT_EQ(table->rows.size(), 1U) << output;
    EXPECT_EQ(table->rows[0].problem, problem_);
    EXPECT_EQ(table->rows[0].winner, (tune::Winner{canonical(spec_), today}));
    EXPECT_EQ(table->rows[0].ratio, 0.75);
    EXPECT_EQ(table->gpu, "NVIDIA Test");
    EXPECT_EQ(table->multiprocessors, 108);
    EXPECT_NE(output.find("left out  s_q=7 rubbish"), std::string::npos) << output;
    EXPECT_NE(output.find("1 of 2 rows"), std::string::npos) << output;
  }
}

TEST_F(CliCarry, OthersAreLeftOutWithTheReason) {
  std::string output;
  std::optional<tune::Table> table = carried(std::string(32, '0'), &output);
  ASSERT_TRUE(table) << output;
  EXPECT_TRUE(table->rows.empty());
  EXPECT_NE(output.find("measured with templates 0000"), std::string::npos) << output;

  change_old("\n}\n\n#endif", "\nstatic_assert(sizeof(int) == 8);\n}\n\n#endif");
  output.clear();
  table = carried(digest_of_old(), &output);
  ASSERT_TRUE(table) << output;
  EXPECT_TRUE(table->rows.empty());
  EXPECT_NE(output.find("with the old templates NVRTC"), std::string::npos) << output;
}

TEST_F(CliCarry, AnotherInstructionIsAnotherKernel) {
  change_old("multiply(row_max, scale_log2)", "multiply(row_max, 2 * scale_log2)");
  std::string output;
  const std::optional<tune::Table> table = carried(digest_of_old(), &output);
  ASSERT_TRUE(table) << output;
  EXPECT_TRUE(table->rows.empty());
  EXPECT_NE(output.find(".text.fa_sm80_forward differs"), std::string::npos) << output;
}

TEST_F(CliCarry, WhatCannotBeReadIsSaid) {
  const auto fails = [](const std::string& arguments) {
    return test::run_program(FA_CLI, "tune " + arguments).status > 0;
  };
  write(directory_ / "table.json", "{}");
  EXPECT_TRUE(fails("--carry '" + old_.string() + "'"));
  EXPECT_TRUE(fails("--table '" + (directory_ / "table.json").string() + "'"));
  EXPECT_TRUE(fails("--carry '" + old_.string() + "' --table '" + (directory_ / "table.json").string() + "'"));
  EXPECT_TRUE(fails("--carry /nonexistent --table '" + (directory_ / "table.json").string() + "'"));
}

}  // namespace
}  // namespace fa::cli
