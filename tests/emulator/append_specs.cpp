#include "emulator/append_specs.hpp"

#include <array>
#include <set>
#include <string>

#include "emulator/mutations.hpp"
#include "emulator/pairwise.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::test::AppendCase;

constexpr std::array kDTypes{DType::bf16, DType::f16, DType::f32};
constexpr std::array<std::int64_t, 8> kPageSizes{16, 0, 1, 3, 8, 12, 64, 5};
constexpr std::array<std::array<std::int64_t, 2>, 4> kHeadDims{{{64, 64}, {40, 8}, {128, 72}, {8, 24}}};
constexpr std::array kRotaryDims{0, 64, 8, 24, 20, 6, 40, 128};

enum Factor : std::size_t { dtype, page_size, head_dims, rotary_dims, interleaved, table, aligned, factor_count };

AppendCase to_case(const Row& row) {
  AppendCase c;
  c.dtype = kDTypes[row[dtype]];
  c.page_size = kPageSizes[row[page_size]];
  c.d_qk = kHeadDims[row[head_dims]][0];
  c.d_v = kHeadDims[row[head_dims]][1];
  c.rotary_dims = kRotaryDims[row[rotary_dims]];
  c.interleaved = row[interleaved] != 0;
  if (row[table] == 1) c.table = DType::f32;
  if (row[table] == 2) c.table = c.dtype;
  c.aligned = row[aligned] == 0;
  return c;
}

bool is_kind(const Row& row) {
  const AppendCase c = to_case(row);
  if (c.rotary_dims == 0 && (c.interleaved || c.table)) return false;
  return c.rotary_dims <= c.d_qk && !(row[table] == 2 && c.dtype == DType::f32);
}

/// Into caches of 8 and 4 bits.
std::vector<AppendCase> stored_kinds() {
  const auto kind = [](DType dtype, std::int64_t page, std::array<std::int64_t, 2> d, int dims, bool neighbours) {
    AppendCase c;
    c.dtype = dtype;
    c.page_size = page;
    c.d_qk = d[0];
    c.d_v = d[1];
    c.rotary_dims = dims;
    c.interleaved = neighbours;
    return c;
  };
  std::vector<AppendCase> kinds{kind(DType::bf16, 16, {64, 64}, 64, false), kind(DType::f16, 0, {48, 16}, 20, true),
                                kind(DType::bf16, 3, {256, 80}, 0, false),  kind(DType::f16, 8, {16, 32}, 6, false),
                                kind(DType::bf16, 5, {32, 32}, 24, false),  kind(DType::bf16, 16, {64, 96}, 64, false),
                                kind(DType::f16, 0, {256, 128}, 20, true),  kind(DType::f16, 3, {192, 32}, 0, false),
                                kind(DType::f16, 8, {32, 64}, 0, false),    kind(DType::bf16, 8, {64, 32}, 0, false)};
  kinds[0].k_dtype = kinds[0].v_dtype = kinds[1].v_dtype = kinds[3].k_dtype = kinds[4].k_dtype = DType::e4m3;
  kinds[1].k_dtype = kinds[2].k_dtype = kinds[2].v_dtype = kinds[4].v_dtype = DType::i8;
  kinds[1].table = DType::f32;
  kinds[2].scales_given = kinds[3].scales_given = true;
  kinds[3].aligned = false;
  kinds[4].table = DType::bf16;
  kinds[5].k_dtype = kinds[5].v_dtype = kinds[6].k_dtype = kinds[6].v_dtype = kinds[7].k_dtype = DType::u4x2;
  kinds[7].v_dtype = DType::i8;
  for (const std::size_t extreme : {8U, 9U}) {
    kinds[extreme].k_dtype = kinds[extreme].v_dtype = DType::u4x2;
    kinds[extreme].group_size = 32;
    kinds[extreme].extreme = true;
  }
  kinds[5].group_size = 32;
  kinds[6].group_size = 128;
  kinds[7].group_size = 64;
  kinds[6].aligned = false;
  kinds[7].scales_given = true;
  for (const AppendCase& latent :
       {kind(DType::bf16, 64, {576, 512}, 64, true), kind(DType::f16, 0, {576, 512}, 64, false),
        kind(DType::bf16, 5, {576, 512}, 24, false), kind(DType::f16, 16, {576, 512}, 0, false)}) {
    kinds.push_back(latent);
    kinds.back().latent = true;
    kinds.back().k_dtype = DType::e4m3;
  }
  kinds[11].aligned = false;
  kinds[12].table = DType::f32;
  kinds[12].scales_given = true;
  return kinds;
}

}  // namespace

const std::vector<AppendCase>& append_kinds() {
  static const std::vector<AppendCase> kinds = [] {
    const std::vector<std::size_t> levels{
        kDTypes.size(), kPageSizes.size(), kHeadDims.size(), kRotaryDims.size(), 2, 3, 2};
    std::vector<AppendCase> all;
    for (const Row& row : pairwise_cover(levels, is_kind)) all.push_back(to_case(row));
    for (const AppendCase& stored : stored_kinds()) all.push_back(stored);
    return all;
  }();
  return kinds;
}

fa::plan::KernelSpec append_spec(const AppendCase& c, fa::plan::Arch arch) {
  fa::plan::AppendProblem problem;
  problem.arch = arch;
  problem.dtype = c.dtype;
  problem.d_qk = static_cast<int>(c.d_qk);
  problem.d_v = static_cast<int>(c.d_v);
  problem.page_size = static_cast<int>(c.page_size);
  problem.rotary_dims = c.rotary_dims;
  problem.interleaved = c.interleaved;
  problem.table = !c.table ? 0 : *c.table == DType::f32 ? 1 : 2;
  problem.aligned = c.aligned;
  problem.k_storage = c.latent ? fa::plan::kLatentRows : c.k_dtype ? fa::plan::storage_of(*c.k_dtype, c.group_size) : 0;
  problem.v_storage = c.v_dtype ? fa::plan::storage_of(*c.v_dtype, c.group_size) : 0;
  problem.scales_given = c.scales_given;
  return fa::plan::append_specs(problem).front();
}

std::vector<fa::plan::KernelSpec> all_append_specs() {
  std::set<std::string> seen;
  std::vector<fa::plan::KernelSpec> unique;
  const auto add = [&](const fa::plan::KernelSpec& spec) {
    if (seen.insert(canonical(spec)).second) unique.push_back(spec);
  };
  for (const AppendCase& kind : append_kinds()) add(append_spec(kind));
  AppendCase usual;
  usual.rotary_dims = 64;
  for (const fa::plan::Arch arch : {fa::plan::Arch{8, 0, '\0'}, fa::plan::Arch{9, 0, 'a'}})
    add(append_spec(usual, arch));
  for (const Mutation& mutation : mutations()) {
    if (mutation.subject.append) add(mutation.subject.spec);
  }
  return unique;
}

}  // namespace emulator
