#include <gtest/gtest.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "api/problem.hpp"
#include "api/variants.hpp"
#include "compile/compiler.hpp"
#include "plan/backward.hpp"
#include "plan/catalogue.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "sm90/sm90_backward_params.cuh"
#include "sm90/sm90_forward_params.cuh"

// What the machine code of loads behind tests looks like: a number in the place of a captured tensor has a null
// pointer, which no instruction may read from. Needs nvdisasm or cuobjdump, as tools/sass_diff.py finds it.
namespace fa {
namespace {

namespace fs = std::filesystem;

/// What a command prints.
std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), &pclose);
  std::string text;
  char part[4096];
  while (pipe != nullptr && std::fgets(part, sizeof part, pipe.get()) != nullptr) text += part;
  return text;
}

/// A disassembler, and how it is called; empty where there is none. That of tools/sass_diff.py, which knows Python
/// packages, else one of PATH.
std::string disassembler() {
  const std::string found = output_of("python3 '" FA_TEST_SASS_DIFF "' --find-nvdisasm 2> /dev/null");
  if (const std::string path = found.substr(0, found.find('\n')); !path.empty()) return "'" + path + "' -c";
  std::stringstream folders(std::string(std::getenv("PATH") == nullptr ? "" : std::getenv("PATH")) +
                            ":/usr/local/cuda/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (fs::exists(fs::path(folder) / "nvdisasm")) return (fs::path(folder) / "nvdisasm").string() + " -c";
    if (fs::exists(fs::path(folder) / "cuobjdump")) return (fs::path(folder) / "cuobjdump").string() + " -sass";
  }
  return {};
}

std::vector<std::string> instructions_of(const compile::Cubin& cubin, const std::string& tool) {
  const std::string name = testing::TempDir() + "guarded_loads_" + std::to_string(cubin.bytes.size()) + ".cubin";
  std::ofstream(name, std::ios::binary)
      .write(reinterpret_cast<const char*>(cubin.bytes.data()), static_cast<std::streamsize>(cubin.bytes.size()));
  const std::string text = output_of(tool + " '" + name + "'");
  fs::remove(name);
  const std::regex line(R"(/\*[0-9a-f]{4,}\*/\s+([^;\n]*);)");
  std::vector<std::string> result;
  for (std::sregex_iterator it(text.begin(), text.end(), line), end; it != end; ++it) result.push_back((*it)[1]);
  return result;
}

/// What becomes of a pointer among the launch parameters: loads from it that no predicate guards and that no select
/// stands in front of.
struct PointerUse {
  int mentioned = 0;
  std::vector<std::string> unguarded;
};

/// `constant`: the place of the pointer's low word, as "c[0x0][0x2c8]". Follows copies, one instruction after the
/// other.
PointerUse use_of_pointer(const std::vector<std::string>& instructions, const std::string& constant) {
  static const std::regex copy(
      R"((?:@!?U?P\d+ )?(?:MOV|UMOV|IMAD\.MOV\S*|IMAD\.U32|LDC\S*|ULDC\S*|R2UR\S*) (U?R\d+), (.*))");
  static const std::regex write(R"((?:@!?U?P\d+ )?[A-Z]\S* (U?R\d+)\b.*)");
  static const std::regex load(R"((@!?U?P\d+ )?(?:LDG|LD)\.\S+ .*\[(R\d+)\S*\].*)");
  static const std::regex words(R"(U?R\d+)");
  PointerUse use;
  std::set<std::string> copies;
  for (const std::string& text : instructions) {
    std::smatch match;
    if (text.find(constant) != std::string::npos) ++use.mentioned;
    if (std::regex_match(text, match, load) && !match[1].matched && copies.contains(match[2])) {
      use.unguarded.push_back(text);
    }
    if (std::regex_match(text, match, copy)) {
      const std::string source = match[2];
      bool is_copy = source.find(constant) != std::string::npos;
      for (std::sregex_iterator it(source.begin(), source.end(), words), end; it != end; ++it) {
        is_copy = is_copy || copies.contains(it->str());
      }
      if (is_copy) {
        copies.insert(match[1]);
      } else {
        copies.erase(match[1]);
      }
    } else if (std::regex_match(text, match, write)) {
      copies.erase(match[1]);
    }
  }
  return use;
}

TEST(PointerUse, FollowsCopiesUpToASelect) {
  const std::string pointer = "c[0x0][0x2c8]";
  const auto unguarded = [&](const std::vector<std::string>& text) {
    return use_of_pointer(text, pointer).unguarded.size();
  };
  EXPECT_EQ(unguarded({"IMAD.MOV.U32 R6, RZ, RZ, c[0x0][0x2c8]", "LDG.E.CONSTANT R243, [R6.64]"}), 1U);
  EXPECT_EQ(unguarded({"ULDC.64 UR4, c[0x0][0x2c8]", "MOV R2, UR4", "LD.E R2, desc[UR18][R2.64]"}), 1U);
  EXPECT_EQ(unguarded({"LDC.64 R2, c[0x0][0x2c8]", "@P0 LDG.E R3, desc[UR18][R2.64]"}), 0U);
  EXPECT_EQ(unguarded({"ULDC.64 UR4, c[0x0][0x2c8]", "USEL UR4, UR6, UR4, !UP0", "MOV R2, UR4", "LD.E R3, [R2.64]"}),
            0U);
  EXPECT_EQ(unguarded({"MOV R6, c[0x0][0x2d0]", "LDG.E R7, [R6.64]"}), 0U);
}

struct Case {
  const char* name;
  const char* arch;
  plan::Family family;
  AttentionConfig config;
  plan::Op op = plan::Op::forward;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

AttentionConfig guarded_score() {
  AttentionConfig config;
  config.head_dim = 64;
  config.causal = true;
  config.causal_align = CausalAlign::top_left;
  config.score = {
      "((floor_mod(kv - q, 5) > q) && (kv >= 0)) ? clamp(log(abs((score - 0.5 * gain)) + 1.0), -8.0, 8.0) : -infinity",
      {{"gain", DType::f32}}};
  return config;
}

AttentionConfig packed(AttentionConfig config) {
  config.varlen = true;
  return config;
}

AttentionConfig guarded_twice() {
  AttentionConfig config;
  config.dtype = DType::f16;
  config.head_dim = 112;
  config.head_dim_v = 192;
  config.score = {
      "(q >= ((kv - q) % 3)) ? clamp(((kv != floor_div(q - kv, 16)) ? (3.0 * tanh(log(abs(row[b, q]) + 1.0) / 3.0)) : "
      "sin((3.0 * tanh(gain / 3.0)))), -8.0, 8.0) : -infinity",
      {{"gain", DType::f32}, {"row", DType::f32}}};
  return config;
}

AttentionConfig unguarded_number(DType dtype) {
  AttentionConfig config;
  config.head_dim = 128;
  config.causal = true;
  config.score = {"score * gain", {{"gain", dtype}}};
  return config;
}

/// Rows that a test guards, and a number that the score is multiplied by: its gradient by the score reads both.
AttentionConfig guarded_rows(AttentionConfig config = {}) {
  config.head_dim = 64;
  config.causal = true;
  config.score = {"(q >= kv % 3) ? score * gain : score + row[b, q]", {{"gain", DType::f32}, {"row", DType::f32}}};
  return config;
}

AttentionConfig with_column_sums(AttentionConfig config) {
  config.statistics.column_sums = ColumnSums::query_heads;
  return config;
}

AttentionConfig with_gradients_of_statistics(AttentionConfig config) {
  config.statistics = {.max_logit = MaxLogit::softmax,
                       .entropy = true,
                       .column_sums = ColumnSums::query_heads,
                       .entropy_gradient = true,
                       .max_logit_gradient = true,
                       .column_sums_gradient = true};
  return config;
}

/// Where captures are in `params`, which tensor maps may begin.
template <class Params>
std::size_t place_in(const Params& params, const kernel::VariantParams& variant) {
  return static_cast<std::size_t>(reinterpret_cast<const std::byte*>(variant.captures) -
                                  reinterpret_cast<const std::byte*>(&params));
}

/// Where captures are among the launch parameters of a kernel.
std::size_t place_of_captures(const plan::KernelSpec& spec) {
  static const kernel::Sm90ForwardVariantParams kForward = {};
  static const kernel::Sm90BackwardVariantParams kBackward = {};
  const bool maps = spec.kernel().tensor_maps;
  if (spec.op() == plan::Op::backward) {
    return maps ? place_in(kBackward, kBackward.base.variant) : place_in(kBackward.base, kBackward.base.variant);
  }
  return maps ? place_in(kForward, kForward.base.variant) : place_in(kForward.base, kForward.base.variant);
}

/// The kernel of a call that does `op`.
plan::KernelSpec kernel_of(const plan::Problem& problem, plan::Family family, plan::Op op) {
  if (op == plan::Op::forward) return plan::plan_forward(problem, {family}).kernel;
  const auto all = op == plan::Op::column_sums ? kernels_of(plan::plan_forward(problem, {}))
                                               : kernels_of(plan::plan_backward(problem, {family}, false));
  for (const plan::Alternatives& kernels : all) {
    if (kernels.front().op() == op) return kernels.front();
  }
  throw std::runtime_error("no kernel of the call does that");
}

class GuardedLoads : public testing::TestWithParam<Case> {};

TEST_P(GuardedLoads, NeverReadFromTheNullPointerOfANumber) {
  const std::string tool = disassembler();
  if (tool.empty()) GTEST_SKIP() << "neither nvdisasm nor cuobjdump was found; FA_NVDISASM may name one";
  const auto& [name, arch_name, family, config, op] = GetParam();
  const plan::Arch arch = plan::parse_arch(arch_name);
  const api::Functions functions = api::read_functions(config, false);
  AttentionShape shape{.b = 16, .h_q = 8, .h_kv = 2, .s_q = 111, .s_kv = 111};
  if (config.varlen) shape.total_q = shape.total_kv = shape.b * shape.s_q;
  const plan::Problem problem = api::make_problem(config, shape, arch, &functions.variants);
  const plan::KernelSpec spec = kernel_of(problem, family, op);
  if (op == plan::Op::forward || op == plan::Op::backward) {
    ASSERT_EQ(spec.family(), family);
  }
  const std::vector<std::string> instructions = instructions_of(compile::compile(render::render(spec), arch), tool);
  ASSERT_GT(instructions.size(), 1000U) << tool;
  std::size_t capture = 0;
  while (functions.program.captures[capture].name != "gain") ++capture;
  // Where launch parameters start in the constant bank; tensor maps among them are at multiples of 64.
  std::size_t place = spec.kernel().tensor_maps ? 0x240 : arch.major >= 9 ? 0x210 : 0x160;
  place += place_of_captures(spec) + capture * sizeof(kernel::CaptureParams) + offsetof(kernel::CaptureParams, data);
  char constant[32];
  std::snprintf(constant, sizeof constant, "c[0x0][0x%zx]", place);
  const PointerUse use = use_of_pointer(instructions, constant);
  EXPECT_GT(use.mentioned, 0) << constant << ": the kernel does not read its capture";
  for (const std::string& load : use.unguarded) ADD_FAILURE() << load;
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, GuardedLoads,
    testing::Values(
        Case{"packed_sm80", "sm_80", plan::Family::sm80, packed(guarded_score())},
        Case{"packed_sm90", "sm_90a", plan::Family::sm90, packed(guarded_score())},
        Case{"twice_sm80", "sm_80", plan::Family::sm80, guarded_twice()},
        Case{"twice_sm80_on_sm90", "sm_90a", plan::Family::sm80, guarded_twice()},
        Case{"twice_sm90", "sm_90a", plan::Family::sm90, guarded_twice()},
        Case{"number_sm80", "sm_80", plan::Family::sm80, unguarded_number(DType::f32)},
        Case{"number_sm90", "sm_90a", plan::Family::sm90, unguarded_number(DType::f32)},
        Case{"f16_number_sm90", "sm_90a", plan::Family::sm90, unguarded_number(DType::f16)},
        Case{"backward_sm80", "sm_80", plan::Family::sm80, guarded_rows(), plan::Op::backward},
        Case{"backward_sm90", "sm_90a", plan::Family::sm90, guarded_rows(), plan::Op::backward},
        Case{"packed_backward_sm80", "sm_80", plan::Family::sm80, packed(guarded_score()), plan::Op::backward},
        Case{"packed_backward_sm90", "sm_90a", plan::Family::sm90, packed(guarded_score()), plan::Op::backward},
        Case{"backward_of_statistics", "sm_80", plan::Family::sm80, with_gradients_of_statistics(guarded_rows()),
             plan::Op::backward},
        Case{"column_sums_on_sm80", "sm_80", plan::Family::sm80, with_column_sums(guarded_rows()),
             plan::Op::column_sums},
        Case{"packed_column_sums_on_sm90", "sm_90a", plan::Family::sm80, with_column_sums(packed(guarded_score())),
             plan::Op::column_sums},
        Case{"statistic_rows_on_sm80", "sm_80", plan::Family::sm80, with_gradients_of_statistics(guarded_rows()),
             plan::Op::statistic_rows},
        Case{"packed_statistic_rows_on_sm90", "sm_90a", plan::Family::sm80,
             with_gradients_of_statistics(packed(guarded_score())), plan::Op::statistic_rows}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace fa
