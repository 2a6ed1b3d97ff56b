#include "emulator/merge_specs.hpp"

#include <array>
#include <set>
#include <string>

#include "emulator/mutations.hpp"
#include "emulator/pairwise.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::test::MergeCase;

constexpr std::array kDTypes{DType::bf16, DType::f16, DType::f32};
constexpr std::array<std::int64_t, 8> kHeadDims{64, 8, 24, 80, 128, 136, 256, 200};
constexpr std::array kKinds{MergeCase::Kinds::own, MergeCase::Kinds::floats, MergeCase::Kinds::mixed};

enum Factor : std::size_t { dtype, head_dim, kinds, float_result, aligned, sum, factor_count };

MergeCase to_case(const Row& row) {
  MergeCase c;
  c.dtype = kDTypes[row[dtype]];
  c.d_v = kHeadDims[row[head_dim]];
  c.kinds = kKinds[row[kinds]];
  c.float_result = row[float_result] != 0;
  c.aligned = row[aligned] == 0;
  c.sum = row[sum] != 0;
  return c;
}

bool is_kind(const Row& row) {
  const MergeCase c = to_case(row);
  return c.dtype != DType::f32 || (c.kinds == MergeCase::Kinds::own && !c.float_result);
}

}  // namespace

const std::vector<MergeCase>& merge_kinds() {
  static const std::vector<MergeCase> kinds_of_all = [] {
    const std::vector<std::size_t> levels{kDTypes.size(), kHeadDims.size(), kKinds.size(), 2, 2, 2};
    std::vector<MergeCase> all;
    for (const Row& row : pairwise_cover(levels, is_kind)) all.push_back(to_case(row));
    return all;
  }();
  return kinds_of_all;
}

fa::plan::KernelSpec merge_spec(const MergeCase& c, fa::plan::Arch arch) {
  fa::plan::MergeProblem problem;
  problem.arch = arch;
  problem.dtype = c.dtype;
  problem.d_v = static_cast<int>(c.d_v);
  problem.states = c.dtype == DType::f32 ? 0 : static_cast<int>(c.kinds);
  problem.float_result = c.float_result;
  problem.aligned = c.aligned;
  problem.sum = c.sum;
  return fa::plan::merge_specs(problem).front();
}

std::vector<fa::plan::KernelSpec> all_merge_specs() {
  std::set<std::string> seen;
  std::vector<fa::plan::KernelSpec> unique;
  const auto add = [&](const fa::plan::KernelSpec& spec) {
    if (seen.insert(canonical(spec)).second) unique.push_back(spec);
  };
  for (const MergeCase& kind : merge_kinds()) add(merge_spec(kind));
  for (const fa::plan::Arch arch : {fa::plan::Arch{8, 0, '\0'}, fa::plan::Arch{9, 0, 'a'}}) add(merge_spec({}, arch));
  for (const Mutation& mutation : mutations()) {
    if (mutation.subject.merge) add(mutation.subject.spec);
  }
  return unique;
}

}  // namespace emulator
