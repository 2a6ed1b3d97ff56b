#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "files.hpp"
#include "plan/append.hpp"
#include "plan/catalogue.hpp"
#include "plan/merge_states.hpp"
#include "plan/planner.hpp"
#include "plan/schedule.hpp"
#include "render/source.hpp"
#include "render/templates.hpp"
#include "support/thorough.hpp"

namespace fa::render {
namespace {

plan::KernelSpec forward_spec() {
  plan::KernelSpec spec;
  spec.arch = plan::parse_arch("sm_90a");
  spec.dtype = DType::bf16;
  spec.d_qk = 192;
  spec.d_v = 128;
  spec.causal = true;
  spec.tile_m = 128;
  spec.tile_n = 64;
  spec.warps = 8;
  spec.stages = 2;
  spec.min_blocks = 1;
  return spec;
}

plan::KernelSpec sm90_forward_spec() {
  plan::KernelSpec spec;
  spec.own = plan::Sm90Forward{};
  spec.arch = plan::parse_arch("sm_90a");
  spec.dtype = DType::f16;
  spec.d_qk = 192;
  spec.d_v = 128;
  spec.causal = true;
  spec.tile_m = 128;
  spec.tile_n = 112;
  spec.warps = 12;
  spec.stages = 2;
  spec.as<plan::Sm90Forward>().q_buffers = 1;
  spec.as<plan::Sm90Forward>().softmax_chunks = 2;
  spec.as<plan::Sm90Forward>().take_turns = true;
  return spec;
}

plan::KernelSpec combine_spec() {
  plan::KernelSpec spec;
  spec.own = plan::ForwardCombine{};
  spec.arch = plan::parse_arch("sm_80");
  spec.dtype = DType::f16;
  spec.d_v = 72;
  spec.warps = 4;
  return spec;
}

plan::KernelSpec backward_spec() {
  plan::KernelSpec spec;
  spec.own = plan::Sm80Backward{};
  spec.arch = plan::parse_arch("sm_90a");
  spec.dtype = DType::bf16;
  spec.d_qk = 192;
  spec.d_v = 128;
  spec.causal = true;
  spec.tile_m = 64;
  spec.tile_n = 64;
  spec.warps = 8;
  spec.warps_n = 4;
  spec.as<plan::Sm80Backward>().dq_warps_m = 2;
  spec.stages = 2;
  return spec;
}

plan::KernelSpec sm90_backward_spec() {
  plan::KernelSpec spec;
  spec.own = plan::Sm90Backward{};
  spec.arch = plan::parse_arch("sm_90a");
  spec.dtype = DType::f16;
  spec.d_qk = 128;
  spec.d_v = 72;
  spec.causal = true;
  spec.tile_m = 64;
  spec.tile_n = 128;
  spec.warps = 12;
  spec.stages = 2;
  return spec;
}

plan::KernelSpec sm90_backward_pair_spec() {
  plan::KernelSpec spec = sm90_backward_spec();
  spec.d_qk = 256;
  spec.d_v = 192;
  spec.warps = 16;
  spec.own = plan::Sm90BackwardPair{};
  return spec;
}

plan::KernelSpec sm90_backward_wide_spec() {
  plan::KernelSpec spec = sm90_backward_pair_spec();
  spec.d_qk = 512;
  spec.d_v = 320;
  spec.stages = 4;
  return spec;
}

plan::KernelSpec backward_spec(plan::Op op) {
  plan::KernelSpec spec = backward_spec();
  spec.own = plan::own_of(op);
  if (op == plan::Op::backward_dq) spec.warps = 4;
  return spec;
}

plan::KernelSpec append_spec() {
  plan::AppendProblem problem;
  problem.arch = {9, 0, 'a'};
  problem.d_qk = problem.d_v = 128;
  problem.page_size = 16;
  problem.rotary_dims = 64;
  return plan::append_specs(problem).front();
}

plan::KernelSpec scheduled_spec() {
  plan::Problem problem;
  problem.arch = plan::parse_arch("sm_90a");
  problem.d_qk = problem.d_v = 128;
  problem.page_size = 16;
  problem.s_kv = 8192;
  return plan::plan_forward(problem, {}).kernel;
}

plan::KernelSpec merge_states_spec() {
  plan::MergeProblem problem;
  problem.arch = {9, 0, 'a'};
  problem.d_v = 128;
  problem.states = 2;
  problem.float_result = true;
  return plan::merge_specs(problem).front();
}

plan::KernelSpec clear_spec() {
  plan::KernelSpec spec;
  spec.own = plan::ClearPadding{};
  spec.arch = plan::parse_arch("sm_80");
  spec.dtype = DType::f16;
  spec.warps = 4;
  return spec;
}

/// One of each operation.
std::vector<plan::KernelSpec> all_specs() {
  return {forward_spec(),
          sm90_forward_spec(),
          combine_spec(),
          backward_spec(),
          sm90_backward_spec(),
          sm90_backward_pair_spec(),
          backward_spec(plan::Op::backward_dq),
          backward_spec(plan::Op::backward_preprocess),
          backward_spec(plan::Op::backward_convert),
          backward_spec(plan::Op::backward_reduce),
          clear_spec(),
          append_spec(),
          scheduled_spec(),
          plan::schedule_spec(scheduled_spec()),
          merge_states_spec()};
}

/// Run with FA_UPDATE_GOLDEN=1 to accept what is rendered now, and read the difference before committing it.
void expect_golden(const std::string& name, const std::string& text) {
  const std::filesystem::path path = std::filesystem::path(FA_TEST_GOLDEN_DIR) / name;
  if (std::getenv("FA_UPDATE_GOLDEN") != nullptr) write_file(path, text);
  EXPECT_EQ(text, read_file(path)) << path;
}

TEST(Render, ForwardUnitIsGolden) {
  expect_golden("sm80_forward.cu", render(forward_spec()).unit);
}

TEST(Render, Sm90BackwardPairUnitIsGolden) {
  expect_golden("sm90_backward_pair.cu", render(sm90_backward_pair_spec()).unit);
}

TEST(Render, Sm90BackwardWideUnitIsGolden) {
  expect_golden("sm90_backward_wide.cu", render(sm90_backward_wide_spec()).unit);
}

TEST(Render, Sm90ForwardUnitIsGolden) {
  expect_golden("sm90_forward.cu", render(sm90_forward_spec()).unit);
}

TEST(Render, CombineUnitIsGolden) {
  expect_golden("forward_combine.cu", render(combine_spec()).unit);
}

TEST(Render, BackwardUnitsAreGolden) {
  for (const plan::KernelSpec& spec : all_specs()) {
    if (spec.op() == plan::Op::forward || spec.op() == plan::Op::combine) continue;
    expect_golden(kernel_name(spec).substr(3) + ".cu", render(spec).unit);
  }
}

TEST(Render, Sm90BackwardUnitWithVariantsIsGolden) {
  plan::KernelSpec spec = sm90_backward_spec();
  spec.varlen = spec.dropout = true;
  spec.variants.left_window = true;
  spec.variants.sink = true;
  spec.variants.score = "score*gain";
  spec.variants.captures = {{"gain", DType::f32, 0, true}};
  expect_golden("sm90_backward_variants.cu", render(spec).unit);
}

TEST(Render, EqualSpecsGiveEqualBytes) {
  for (const plan::KernelSpec& spec : all_specs()) {
    const plan::KernelSpec copy = spec;
    const Source first = render(spec);
    const Source second = render(copy);
    EXPECT_EQ(first.unit, second.unit);
    EXPECT_EQ(first.kernel_name, second.kernel_name);
    EXPECT_EQ(flatten(first), flatten(second));
  }
}

using Mutation = void (*)(plan::KernelSpec&);

/// Every mutation of `spec` changes the code. The first line is a comment with the whole spec: it does not count.
void expect_reach_the_kernel(const plan::KernelSpec& original, const std::vector<Mutation>& mutations) {
  const auto code_of = [](const plan::KernelSpec& spec) {
    const std::string unit = render(spec).unit;
    return unit.substr(unit.find('\n'));
  };
  std::set<std::string> units{code_of(original)};
  for (std::size_t i = 0; i < mutations.size(); ++i) {
    plan::KernelSpec spec = original;
    mutations[i](spec);
    EXPECT_TRUE(units.insert(code_of(spec)).second) << "mutation " << i << ": " << canonical(spec);
  }
}

TEST(Render, WhatTheKernelDependsOnReachesIt) {
  using Spec = plan::KernelSpec;
  expect_reach_the_kernel(sm90_forward_spec(),
                          {
                              [](Spec& spec) { spec.dtype = DType::bf16; },
                              [](Spec& spec) { spec.d_qk = 128; },
                              [](Spec& spec) { spec.d_v = 64; },
                              [](Spec& spec) { spec.causal = false; },
                              [](Spec& spec) { spec.positive_scale = false; },
                              [](Spec& spec) { spec.tile_m = 192; },
                              [](Spec& spec) { spec.tile_n = 96; },
                              [](Spec& spec) { spec.stages = 3; },
                              [](Spec& spec) { spec.as<plan::Sm90Forward>().q_buffers = 2; },
                              [](Spec& spec) { spec.as<plan::Sm90Forward>().softmax_chunks = 1; },
                              [](Spec& spec) { spec.as<plan::Sm90Forward>().take_turns = false; },
                              [](Spec& spec) { spec.as<plan::Sm90Forward>().skips_hidden = true; },
                              [](Spec& spec) { spec.as<plan::Sm90Forward>().own_ends = true; },
                              [](Spec& spec) { spec.as<plan::Sm90Forward>().dynamic = true; },
                              [](Spec& spec) { spec.as<plan::Sm90Forward>().affine_product = true; },
                              [](Spec& spec) { spec.as<plan::Sm90Forward>().affine_reach = true; },
                              [](Spec& spec) { spec.as<plan::Sm90Forward>().exact_max = true; },
                              [](Spec& spec) { spec.pack_gqa = true; },
                              [](Spec& spec) { spec.split = true; },
                          });
  expect_reach_the_kernel(forward_spec(), {
                                              [](Spec& spec) { spec.dtype = DType::f16; },
                                              [](Spec& spec) { spec.dtype = DType::f32; },
                                              [](Spec& spec) { spec.d_qk = 8; },
                                              [](Spec& spec) { spec.d_v = 8; },
                                              [](Spec& spec) { spec.causal = false; },
                                              [](Spec& spec) { spec.positive_scale = false; },
                                              [](Spec& spec) { spec.aligned = false; },
                                              [](Spec& spec) { spec.tile_m = 256; },
                                              [](Spec& spec) { spec.tile_n = 16; },
                                              [](Spec& spec) { spec.warps = 4; },
                                              [](Spec& spec) { spec.stages = 1; },
                                              [](Spec& spec) { spec.as<plan::Sm80Forward>().q_in_registers = true; },
                                              [](Spec& spec) { spec.as<plan::Sm80Forward>().loop_bodies = 2; },
                                              [](Spec& spec) { spec.pack_gqa = true; },
                                              [](Spec& spec) { spec.split = true; },
                                              [](Spec& spec) { spec.varlen = true; },
                                              [](Spec& spec) { spec.dropout = true; },
                                              [](Spec& spec) { spec.warps_n = 2; },
                                              [](Spec& spec) { spec.min_blocks = 2; },
                                          });
}

/// A variant is a line of the unit; without it the unit has no trace of it.
TEST(Render, PlainKernelsKnowNothingOfVariants) {
  for (const plan::KernelSpec& plain : all_specs()) {
    const std::string unit = render(plain).unit;
    EXPECT_EQ(unit.find("kVarlen"), std::string::npos) << unit;
    EXPECT_EQ(unit.find("kDropout"), std::string::npos) << unit;
    plan::KernelSpec both = plain;
    both.varlen = both.dropout = true;
    std::string variant = render(both).unit;
    for (const char* line :
         {"  static constexpr bool kVarlen = true;\n", "  static constexpr bool kDropout = true;\n"}) {
      const std::size_t at = variant.find(line);
      if (at != std::string::npos) variant.erase(at, std::string(line).size());
    }
    // A packed batch may take more shared memory.
    const std::string bytes = fmt::format("kSharedBytes == {})", plan::shared_bytes(both));
    if (const std::size_t at = variant.find(bytes); at != std::string::npos) {
      variant.replace(at, bytes.size(), fmt::format("kSharedBytes == {})", plan::shared_bytes(plain)));
    }
    EXPECT_EQ(variant.substr(variant.find('\n')), unit.substr(unit.find('\n')));
  }
}

TEST(Render, DebugKernelsDifferByALine) {
  plan::KernelSpec spec = sm90_backward_spec();
  const std::string unit = render(spec).unit;
  EXPECT_EQ(unit.find("FA_DEBUG_KERNELS"), std::string::npos);
  spec.debug = true;
  const std::string debug = render(spec).unit;
  EXPECT_NE(canonical(spec).find(" debug=1"), std::string::npos);
  const std::string line = "#define FA_DEBUG_KERNELS 1\n";
  const std::size_t at = debug.find(line);
  ASSERT_NE(at, std::string::npos);
  EXPECT_EQ(debug.substr(at + line.size()), unit.substr(unit.find('\n') + 1));
}

TEST(Render, WhatTheBackwardDependsOnReachesIt) {
  using Spec = plan::KernelSpec;
  expect_reach_the_kernel(sm90_backward_spec(), {
                                                    [](Spec& spec) { spec.dtype = DType::bf16; },
                                                    [](Spec& spec) { spec.d_qk = 64; },
                                                    [](Spec& spec) { spec.d_v = 64; },
                                                    [](Spec& spec) { spec.causal = false; },
                                                    [](Spec& spec) { spec.tile_m = 128; },
                                                    [](Spec& spec) { spec.tile_n = 64, spec.warps = 8; },
                                                    [](Spec& spec) { spec.stages = 1; },
                                                    [](Spec& spec) { spec.write_dq = false; },
                                                    [](Spec& spec) { spec.split = true; },
                                                    [](Spec& spec) { spec.varlen = true; },
                                                    [](Spec& spec) { spec.dropout = true; },
                                                    [](Spec& spec) { spec.variants.chunked = true; },
                                                    [](Spec& spec) { spec.variants.score = "score*2.0"; },
                                                });
  expect_reach_the_kernel(sm90_backward_pair_spec(), {
                                                         [](Spec& spec) { spec.dtype = DType::bf16; },
                                                         [](Spec& spec) { spec.d_qk = 192; },
                                                         [](Spec& spec) { spec.d_v = 128; },
                                                         [](Spec& spec) { spec.causal = false; },
                                                         [](Spec& spec) { spec.stages = 3; },
                                                         [](Spec& spec) { spec.write_dq = false; },
                                                         [](Spec& spec) { spec.split = true; },
                                                     });
  expect_reach_the_kernel(sm90_backward_wide_spec(), {
                                                         [](Spec& spec) { spec.dtype = DType::bf16; },
                                                         [](Spec& spec) { spec.d_qk = 264; },
                                                         [](Spec& spec) { spec.d_v = 264; },
                                                         [](Spec& spec) { spec.causal = false; },
                                                         [](Spec& spec) { spec.stages = 3; },
                                                         [](Spec& spec) { spec.write_dq = false; },
                                                         [](Spec& spec) { spec.split = true; },
                                                     });
  expect_reach_the_kernel(backward_spec(),
                          {
                              [](Spec& spec) { spec.arch = plan::parse_arch("sm_80"); },
                              [](Spec& spec) { spec.dtype = DType::f16; },
                              [](Spec& spec) { spec.d_qk = 8; },
                              [](Spec& spec) { spec.d_v = 8; },
                              [](Spec& spec) { spec.causal = false; },
                              [](Spec& spec) { spec.aligned = false; },
                              [](Spec& spec) { spec.tile_m = 32; },
                              [](Spec& spec) { spec.tile_n = 128; },
                              [](Spec& spec) { spec.warps = 4; },
                              [](Spec& spec) { spec.warps_n = 2; },
                              [](Spec& spec) { spec.as<plan::Sm80Backward>().dq_warps_m = 4; },
                              [](Spec& spec) { spec.varlen = true; },
                              [](Spec& spec) { spec.dropout = true; },
                              [](Spec& spec) { spec.stages = 1; },
                              [](Spec& spec) { spec.as<plan::Sm80Backward>().operands_in_registers = 1; },
                              [](Spec& spec) { spec.write_dq = false; },
                              [](Spec& spec) { spec.split = true; },
                              [](Spec& spec) { spec.min_blocks = 2; },
                          });
  expect_reach_the_kernel(backward_spec(plan::Op::backward_dq), {
                                                                    [](Spec& spec) { spec.dtype = DType::f16; },
                                                                    [](Spec& spec) { spec.d_qk = 8; },
                                                                    [](Spec& spec) { spec.d_v = 8; },
                                                                    [](Spec& spec) { spec.causal = false; },
                                                                    [](Spec& spec) { spec.aligned = false; },
                                                                    [](Spec& spec) { spec.tile_m = 128; },
                                                                    [](Spec& spec) { spec.tile_n = 128; },
                                                                    [](Spec& spec) { spec.warps = 2; },
                                                                    [](Spec& spec) { spec.stages = 1; },
                                                                    [](Spec& spec) { spec.min_blocks = 2; },
                                                                });
}

/// griddepcontrol is an instruction of compute capability 9.0.
TEST(Render, OverlapsWhereTheGpuCan) {
  for (const plan::Op op : {plan::Op::backward_preprocess, plan::Op::backward_convert, plan::Op::backward_reduce}) {
    plan::KernelSpec spec = backward_spec(op);
    for (const auto& [arch, expected] : {std::pair{"sm_80", false}, {"sm_89", false}, {"sm_90a", true}}) {
      spec.arch = plan::parse_arch(arch);
      EXPECT_EQ(render(spec).unit.find("kOverlaps = true") != std::string::npos, expected) << canonical(spec);
    }
  }
}

TEST(Render, UnitNamesTheSpecAndTheEntryPoint) {
  for (const plan::KernelSpec& spec : all_specs()) {
    const Source source = render(spec);
    EXPECT_EQ(lines_of(source.unit).front(), "// " + canonical(spec));
    EXPECT_EQ(source.kernel_name, kernel_name(spec));
    EXPECT_EQ(count_of(source.unit, "KERNEL(" + source.kernel_name + ","), 1);
    EXPECT_EQ(source.unit.back(), '\n');
  }
}

/// The macro that guards a template header, which flattening must define once.
std::string guard_of(const std::string& name) {
  std::string guard = "FA_TEMPLATES_" + name + "_";
  for (char& c : guard) {
    c = c == '/' || c == '.' ? '_' : c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  }
  return guard;
}

/// Whether the compiler comes to the header, which flattening pastes in.
bool pastes(const std::string& flat, const Header& header) {
  return count_of(flat, "#define " + guard_of(header.name) + "\n") != 0;
}

TEST(Render, BringsTheHeadersThatItsUnitIncludesAndNoOthers) {
  for (const plan::KernelSpec& spec : all_specs()) {
    Source everything = render(spec);
    std::vector<std::string> names;
    for (const Header& header : everything.headers) names.push_back(header.name);
    EXPECT_TRUE(std::ranges::is_sorted(names));
    everything.headers = templates().headers();
    const std::string flat = flatten(everything);
    EXPECT_EQ(flat, flatten(render(spec))) << "nothing is missing";
    for (const Header& header : templates().headers()) {
      const bool brought = std::ranges::find(names, header.name) != names.end();
      EXPECT_EQ(brought, pastes(flat, header)) << header.name << " of " << canonical(spec);
    }
  }
}

TEST(Render, TheDigestOfAKernelCoversTheHeadersThatItIncludes) {
  const std::vector<plan::KernelSpec> specs = all_specs();
  std::set<std::string> digests;
  for (std::size_t i = 0; i < templates().headers().size(); ++i) {
    if (!test::tries_watched(i)) continue;
    std::vector<Header> headers = templates().headers();
    headers[i].text += "\n";
    const TemplateSet changed(headers);
    EXPECT_NE(changed.digest(), templates().digest());
    for (const plan::KernelSpec& spec : specs) {
      const std::string unit = unit_of(spec);
      const std::string& digest = templates_digest(unit);
      const bool counts = pastes(flatten(render(spec)), headers[i]);
      EXPECT_EQ(changed.included_by(unit).digest != digest, counts) << headers[i].name << " of " << canonical(spec);
      digests.insert(digest);
    }
  }
  EXPECT_EQ(digests.size(), 14U) << "one for each of the kernels";
}

TEST(Render, ANewHeaderIsNobodysUntilItIsIncluded) {
  std::vector<Header> headers = templates().headers();
  headers.push_back({"common/newcomer.cuh", "constexpr int kNewcomer = 1;\n"});
  headers.push_back({"aaa.cuh", "#include <common/newcomer.cuh>\n"});
  const TemplateSet grown(headers);
  for (const plan::KernelSpec& spec : all_specs()) {
    EXPECT_EQ(grown.included_by(unit_of(spec)).digest, templates_digest(unit_of(spec))) << canonical(spec);
    EXPECT_EQ(flatten(render(spec, grown)), flatten(render(spec))) << canonical(spec);
  }
  for (Header& header : headers) {
    if (header.name == "sm90/sm90_forward.cuh") header.text.insert(0, "#include <common/newcomer.cuh>\n");
  }
  const TemplateSet included(headers);
  for (const plan::KernelSpec& spec : all_specs()) {
    const bool its_own = spec.family() == plan::Family::sm90 && spec.op() == plan::Op::forward;
    EXPECT_EQ(included.included_by(unit_of(spec)).digest != templates_digest(unit_of(spec)), its_own)
        << canonical(spec);
  }
}

TEST(Flatten, PastesEachIncludedHeaderOnce) {
  for (const plan::KernelSpec& spec : all_specs()) {
    const Source source = render(spec);
    const std::string flat = flatten(source);
    int pasted = 0;
    for (const Header& header : source.headers) {
      const int count = count_of(flat, "#define " + guard_of(header.name) + "\n");
      EXPECT_LE(count, 1) << header.name;
      pasted += count;
      EXPECT_EQ(count_of(flat, "#include <" + header.name + ">"), 0) << header.name;
    }
    EXPECT_GE(pasted, 5);
    EXPECT_EQ(count_of(flat, "struct Config {"), 1);
    for (const plan::Family family : {plan::Family::sm80, plan::Family::sm90}) {
      const char* header = family == plan::Family::sm80 ? "sm80/sm80_forward.cuh" : "sm90/sm90_forward.cuh";
      const bool its_own = spec.op() == plan::Op::forward && spec.family() == family;
      EXPECT_EQ(count_of(flat, "#define " + guard_of(header) + "\n"), its_own ? 1 : 0) << canonical(spec);
    }
  }
}

TEST(Flatten, LeavesNoIncludeButTheHostsOwn) {
  for (const plan::KernelSpec& spec : all_specs()) {
    std::set<std::string> left;
    for (const std::string& line : lines_of(flatten(render(spec)))) {
      if (line.find("#include") != std::string::npos) left.insert(line);
    }
    EXPECT_EQ(left, (std::set<std::string>{"#include <cstddef>", "#include <cstdint>"}));
  }
}

/// What comes before the unit says how to compile it.
std::string without_head(const std::string& flat) {
  constexpr std::string_view kEnd = "#endif\n";
  return flat.substr(flat.find(kEnd) + kEnd.size());
}

TEST(Flatten, PastesNestedHeadersWhereTheyAreNeeded) {
  Source source;
  source.unit = "#include <a.cuh>\nunit\n#include <b.cuh>\n#include <unknown.h>\nlast";
  source.headers = {{"a.cuh", "a1\n#include <b.cuh>\na2\n"}, {"b.cuh", "b\n"}, {"unused.cuh", "unused\n"}};
  EXPECT_EQ(without_head(flatten(source)), "a1\nb\na2\nunit\n#include <unknown.h>\nlast\n");
}

TEST(Flatten, EndsWithCyclicIncludes) {
  Source source;
  source.unit = "#include <a.cuh>\n";
  source.headers = {{"a.cuh", "#include <b.cuh>\na\n"}, {"b.cuh", "#include <a.cuh>\nb\n"}};
  EXPECT_EQ(without_head(flatten(source)), "b\na\n");
}

TEST(Flatten, SaysHowToCompileIt) {
  for (const plan::KernelSpec& spec : all_specs()) {
    const Source source = render(spec);
    const std::string line = lines_of(flatten(source)).front();
    EXPECT_NE(line.find(source.kernel_name), std::string::npos) << line;
    EXPECT_NE(line.find("nvcc -std=c++20 -arch=" + to_string(spec.arch) + " "), std::string::npos) << line;
    EXPECT_EQ(source.unit.find("nvcc"), std::string::npos) << "it is no part of the key";
  }
}

}  // namespace
}  // namespace fa::render
