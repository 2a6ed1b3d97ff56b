#include "emulator/paged_sums_specs.hpp"

#include <algorithm>
#include <stdexcept>

#include "emulator/paged_specs.hpp"

namespace emulator {
namespace {

using fa::ColumnSums;
using fa::DType;
using fa::plan::KernelSpec;
using fa::test::PagedCase;

/// Prefills, chunks of them, decodes; requests without rows or keys, and of more rows than keys. Of more keys than a
/// thread block has.
PagedCase requests(DType dtype, int d_qk, ColumnSums sums, bool packed) {
  PagedCase c;
  c.attention.dtype = dtype;
  c.attention.d_qk = d_qk;
  c.attention.d_v = d_qk;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.causal = true;
  c.packed = packed;
  c.bounded = true;
  c.keys = {37, 150, 5, 0, 64, 141};
  c.rows = packed ? std::vector<std::int32_t>{37, 40, 9, 1, 0, 1} : std::vector<std::int32_t>(6, 35);
  c.variant.config.statistics.column_sums = sums;
  return c;
}

/// With first positions that count, among them that of the last key.
PagedCase begun(PagedCase c) {
  c.begin = {0, 70, 4, 0, 9, 131};
  c.attention.layout = fa::test::Layout::bshd;
  c.indexed = true;
  return c;
}

PagedCase of_choice(const char* name, int page_size, PagedCase c) {
  const std::vector<fa::test::VariantChoice> choices = fa::test::variant_choices(false);
  const auto found = std::ranges::find(choices, name, &fa::test::VariantChoice::name);
  if (found == choices.end()) throw std::invalid_argument(std::string("no choice is named ") + name);
  const fa::Statistics statistics = c.variant.config.statistics;
  c.variant = *found;
  c.variant.config.statistics = statistics;
  c.page_size = page_size;
  return c;
}

PagedCase stored(std::optional<DType> k, std::optional<DType> v, int page_size, PagedCase c, int group = 0) {
  c.k_dtype = k;
  c.v_dtype = v;
  c.group_size = group;
  c.page_size = page_size;
  return c;
}

PagedCase in_key(std::optional<DType> k, int page_size, PagedCase c) {
  c.value_in_key = true;
  c.k_dtype = k;
  c.page_size = page_size;
  c.attention.d_v = c.attention.d_qk == 576 ? 512 : 16;
  c.attention.h_kv = 1;
  c.attention.h_q = 2;
  return c;
}

std::vector<PagedSumsCase> make_cases() {
  constexpr auto kOfQuery = ColumnSums::query_heads, kOfKv = ColumnSums::kv_heads;
  std::vector<PagedSumsCase> cases;
  const auto add = [&](const char* name, PagedCase c) -> PagedCase& {
    return cases.emplace_back(PagedSumsCase{name, std::move(c)}).of;
  };
  add("pages", requests(DType::bf16, 16, kOfQuery, true));
  add("pages_dense", begun(requests(DType::f16, 24, kOfKv, false))).page_size = 3;
  add("pages_not_causal", begun(requests(DType::bf16, 16, kOfKv, true))).attention.causal = false;
  add("pages_f32", begun(requests(DType::f32, 8, kOfQuery, true))).page_size = 64;
  add("pages_of_one_key", requests(DType::f16, 112, kOfQuery, true)).page_size = 1;
  add("pages_to_their_end", requests(DType::f16, 16, kOfQuery, true)).bounded = false;
  add("contiguous", begun(requests(DType::bf16, 16, kOfQuery, true))).page_size = fa::kContiguous;
  add("contiguous_dense", requests(DType::f16, 16, kOfKv, false)).page_size = fa::kContiguous;
  add("window_sink", of_choice("window_sink", 8, begun(requests(DType::bf16, 16, kOfQuery, true))));
  add("chunked", of_choice("chunked", 12, requests(DType::f16, 16, kOfQuery, false)));
  add("functions", of_choice("everything", 16, begun(requests(DType::bf16, 16, kOfKv, true))));
  add("documents", of_choice("documents", 40, requests(DType::f16, 16, kOfQuery, false)));
  add("one_buffer", requests(DType::bf16, 16, kOfKv, true)).variant.config.kernel =
      fa::KernelOverride{"column_sums", "row_buffers=1"};
  add("e4m3", stored(DType::e4m3, DType::i8, 16, begun(requests(DType::bf16, 48, kOfQuery, true))));
  add("i8", stored(DType::i8, std::nullopt, fa::kContiguous, requests(DType::f16, 32, kOfKv, false)));
  add("values_of_8_bits", stored(std::nullopt, DType::e4m3, 8, requests(DType::f16, 32, kOfKv, true)));
  add("u4", stored(DType::u4x2, DType::u4x2, 16, begun(requests(DType::f16, 64, kOfQuery, true)), 32));
  add("u4_wide_groups", stored(DType::u4x2, DType::u4x2, 3, requests(DType::bf16, 128, kOfKv, false), 64));
  add("value_in_key", in_key(std::nullopt, 8, begun(requests(DType::bf16, 24, kOfQuery, true))));
  add("latent", in_key(DType::e4m3, 16, begun(requests(DType::bf16, 576, kOfKv, true))));
  PagedCase top = begun(requests(DType::bf16, 16, kOfQuery, true));
  top.variant.config.statistics.top_keys = 7;
  add("top_keys", top);
  top.page_size = fa::kContiguous;
  top.packed = false;
  top.rows.assign(6, 35);
  top.variant.config.statistics.column_sums = ColumnSums::none;
  add("top_keys_alone", top);
  cases.back().without_sums = true;
  return cases;
}

}  // namespace

const std::vector<PagedSumsCase>& paged_sums_cases() {
  static const std::vector<PagedSumsCase> cases = make_cases();
  return cases;
}

const PagedSumsCase& paged_sums_case_named(const std::string& name) {
  const auto found = std::ranges::find(paged_sums_cases(), name, &PagedSumsCase::name);
  if (found == paged_sums_cases().end()) throw std::invalid_argument("no case is named " + name);
  return *found;
}

fa::plan::ForwardPlan plan_of(const PagedSumsCase& c, const fa::test::PagedData& data) {
  const fa::test::VariantCase variant = variant_of(c.of);
  KernelSpec of_arch;
  of_arch.arch = {8, 0, '\0'};
  const bool wide = c.of.attention.d_qk > 256;
  const fa::KernelOverride small{"sm80", wide ? "" : "tile_m=32 tile_n=32 warps=2 stages=1"};
  return plan_forward(problem_of(of_arch, c.of, data, variant),
                      fa::plan::read_override(small, fa::plan::Op::forward, "kernel"));
}

std::vector<KernelSpec> all_paged_sums_specs() {
  std::vector<KernelSpec> unique;
  for (const PagedSumsCase& c : paged_sums_cases()) {
    const fa::plan::ForwardPlan plan = plan_of(c, make_data(c.of));
    for (const KernelSpec& spec : {plan.kernel, plan.sums}) {
      if (std::ranges::find(unique, spec) == unique.end()) unique.push_back(spec);
    }
  }
  return unique;
}

const std::vector<StatisticsMutation>& paged_sums_mutations() {
  constexpr const char* kSums = "sm80/sm80_column_sums.cuh";
  using enum FaultKind;
  static const std::vector<StatisticsMutation> list{
      {"paged_sums_to_the_last_key", kSums, "return kPaged ? params.s_kv : lengths.s_kv;", "return lengths.s_kv;",
       "pages"},
      {"paged_sums_of_keys_in_front", kSums, "if (first_key_of(lengths) > block * kPartKeys) return true;", "",
       "pages_not_causal"},
      {"paged_sums_read_keys_in_front",
       kSums,
       "rows.first_read = keys_begin<Variant>(params, lengths, 0);",
       "rows.first_read = 0;",
       "window_sink",
       {global_out_of_bounds, global_uninitialised}},
      {"paged_sums_of_the_requests_number",
       kSums,
       "table_row_of(params.paged, tile.batch);",
       "tile.batch;",
       "pages_dense",
       {global_out_of_bounds, global_uninitialised}},
      {"paged_sums_at_places_of_the_request", kSums, "tile.head) * params.s_kv + first_key;",
       "tile.head) * lengths.s_kv + first_key;", "pages"},
      {"paged_sums_of_the_first_part_of_keys", kSums, "rows.load_k(tile.block * kParts + part, part);",
       "rows.load_k(tile.block * kParts, part);", "one_buffer"},
      {"stored_sums_of_codes", kSums, "StoredScales<Scores>{rows}.multiply_k(s, part);", "", "e4m3"},
      {"u4_sums_by_scales_of_the_next_key",
       kSums,
       "scales.own_k(part)",
       "scales.own_k(part) + 4",
       "u4",
       {shared_uninitialised}},
      {"latent_sums_of_codes",
       kSums,
       "if constexpr (Scores::kLatentRows) widen_keys();",
       "",
       "latent",
       {shared_uninitialised}},
      {"latent_sums_before_keys_are_wide",
       kSums,
       "ptx::sync_threads();  // K is of the queries' type",
       "",
       "latent",
       {shared_race}},
  };
  return list;
}

KernelSpec paged_sums_subject_of(const StatisticsMutation& mutation) {
  const PagedSumsCase& c = paged_sums_case_named(mutation.subject);
  return plan_of(c, make_data(c.of)).sums;
}

}  // namespace emulator
