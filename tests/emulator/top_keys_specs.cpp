#include "emulator/top_keys_specs.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "plan/column_sums.hpp"

namespace emulator {
namespace {

using fa::plan::KernelSpec;

std::uint32_t mixed(std::size_t i) {
  return (static_cast<std::uint32_t>(i) + 1) * 2654435761U;
}

/// Sums as P has them: a few rows' worth, and most of them small.
float usual(std::size_t i) {
  const auto x = static_cast<float>(mixed(i) >> 8) * 0x1p-24F;
  return 4 * x * x * x * x;
}

/// All within a digit of each other.
float close(std::size_t i) {
  return std::bit_cast<float>(0x3f800000U + (mixed(i) >> 14));
}

float tied(std::size_t i) {
  return static_cast<float>(mixed(i) >> 30) / 4;
}

float constant(std::size_t) {
  return 0.5F;
}

float constant_negative(std::size_t) {
  return -0.5F;
}

float negative(std::size_t i) {
  return -1 - usual(i);
}

/// NaNs of both signs, infinities, zeros of both signs and denormal numbers among others.
float special(std::size_t i) {
  switch (mixed(i) >> 27) {
    case 0:
      return std::bit_cast<float>(0xffc00001U);
    case 1:
      return std::numeric_limits<float>::quiet_NaN();
    case 2:
      return std::numeric_limits<float>::infinity();
    case 3:
      return -std::numeric_limits<float>::infinity();
    case 4:
      return 1e-42F;
    case 5:
      return -1e-42F;
    case 6:
      return -0.F;
    case 7:
      return 3;
    default:
      return 0;
  }
}

}  // namespace

const std::vector<TopKeysCase>& top_keys_cases() {
  static const std::vector<TopKeysCase> cases{
      {.name = "usual", .sum = usual},
      {.name = "one", .sum = usual, .count = 1, .s_kv = 3001},
      {.name = "most", .sum = usual, .count = 1024, .b = 1, .s_kv = 5003},
      {.name = "fits_just", .sum = usual, .count = 700, .b = 1, .s_kv = 2048},
      {.name = "fits_just_not", .sum = usual, .count = 700, .b = 1, .s_kv = 2049},
      {.name = "fewer_keys", .sum = usual, .count = 70, .s_kv = 37},
      {.name = "no_keys", .sum = usual, .count = 3, .s_kv = 0},
      {.name = "close", .sum = close, .count = 300, .b = 1, .s_kv = 4100},
      {.name = "ties", .sum = tied, .count = 40, .s_kv = 130},
      {.name = "many_ties", .sum = tied, .count = 900, .b = 1, .s_kv = 9001},
      {.name = "constant", .sum = constant, .count = 1000, .b = 1, .h = 1, .s_kv = 7000},
      {.name = "special", .sum = special, .count = 300, .s_kv = 301},
      {.name = "many_special", .sum = special, .count = 1000, .b = 1, .s_kv = 2500},
      {.name = "negative", .sum = negative, .count = 9, .s_kv = 61, .first = 3},
      {.name = "many_negative", .sum = negative, .count = 1000, .b = 1, .h = 3, .s_kv = 2303, .first = 1},
      {.name = "constant_negative", .sum = constant_negative, .count = 1001, .b = 1, .h = 1, .s_kv = 7001, .first = 1},
      {.name = "packed",
       .sum = usual,
       .count = 20,
       .b = 1,
       .s_kv = 5000,
       .cu_q = {0, 9, 9, 30, 30, 41},
       .cu_kv = {2, 50, 90, 90, 97, 4990}},
      {.name = "packed_used",
       .sum = tied,
       .count = 12,
       .b = 1,
       .h = 3,
       .s_kv = 77,
       .cu_q = {0, 9, 12, 41},
       .cu_kv = {0, 33, 50, 77},
       .used_kv = {30, 0, 8}},
      {.name = "requests", .sum = usual, .count = 9, .b = 3, .s_kv = 90, .used_kv = {90, 0, 41}, .begin = {3, 0, 38}},
      {.name = "requests_without_begin", .sum = tied, .count = 9, .s_kv = 83, .used_kv = {5, 83}},
      {.name = "requests_of_packed_rows",
       .sum = usual,
       .count = 700,
       .b = 3,
       .h = 1,
       .s_kv = 3003,
       .cu_q = {0, 9, 9, 30},
       .used_kv = {3003, 2000, 2900},
       .begin = {501, 3, 0}},
  };
  return cases;
}

const TopKeysCase& top_keys_case_named(const std::string& name) {
  const auto found = std::ranges::find(top_keys_cases(), name, &TopKeysCase::name);
  if (found == top_keys_cases().end()) throw std::invalid_argument("no case is named " + name);
  return *found;
}

fa::plan::Problem problem_of(const TopKeysCase& c) {
  fa::plan::Problem problem;
  problem.arch = {8, 0, '\0'};
  problem.b = c.sequences();
  problem.h_q = problem.h_kv = c.h;
  problem.s_q = 64;
  problem.s_kv = c.s_kv;
  problem.varlen = !c.cu_q.empty();
  problem.page_size = c.of_requests() ? 16 : 0;
  problem.total_q = problem.varlen ? c.cu_q.back() : 0;
  problem.total_kv = c.packed() ? c.s_kv : 0;
  problem.statistics.top_keys = c.count;
  return problem;
}

std::vector<KernelSpec> all_top_keys_specs() {
  std::vector<KernelSpec> specs;
  for (const bool varlen : {false, true}) {
    for (const int page_size : {0, 16}) {
      fa::plan::Problem problem;
      problem.arch = {8, 0, '\0'};
      problem.varlen = varlen;
      problem.page_size = page_size;
      specs.push_back(top_keys_spec(problem));
    }
  }
  return specs;
}

const std::vector<StatisticsMutation>& top_keys_mutations() {
  constexpr const char* kTopKeys = "common/top_keys.cuh";
  static const std::vector<StatisticsMutation> list{
      {"top_keys_in_front_of_the_first", kTopKeys, "p.s_kv + first_key;", "p.s_kv;", "requests"},
      {"top_keys_behind_the_last", kTopKeys, "count -= first_key;", "", "requests"},
      {"top_keys_from_the_first_on", kTopKeys, "key >= 0 ? key + first_key : key", "key >= 0 ? key : key", "requests"},
      {"top_keys_of_absent_keys", kTopKeys, "kRequests && key >= 0 ? key + first_key : key",
       "kRequests ? key + first_key : key", "requests"},
      {"top_keys_of_all_positions", kTopKeys, "count = clamp(ptx::ld_global(from.used_kv + batch), 0, p.s_kv);", "",
       "requests"},
      {"top_keys_of_requests_without_rows", kTopKeys,
       "if constexpr (kVarlen) rows = span_of(from.cu_q, from.used_q, batch, from.total_q, p.s_q).count; count =",
       "count =", "requests_of_packed_rows"},
      {"top_keys_nans_by_their_bits", kTopKeys, "if ((bits & ~kSign) > kInfinite) return ~0u;",
       "if ((bits & ~kSign) == kInfinite + kSign) return ~0u;", "special"},
      {"top_keys_two_zeros", kTopKeys, "bits <= kSign ?", "bits < kSign ?", "special"},
      {"top_keys_negative_upside_down", kTopKeys, "bits | kSign : ~bits;", "bits | kSign : bits & ~kSign;", "negative"},
      {"top_keys_ties_to_the_greater_index", kTopKeys, "? index_a < index_b :", "? index_a > index_b :", "ties"},
      {"top_keys_count_in_old_counts",
       kTopKeys,
       "ptx::sync_threads();  // the counts are 0",
       "",
       "close",
       {FaultKind::shared_race, FaultKind::shared_uninitialised}},
      {"top_keys_decide_early",
       kTopKeys,
       "ptx::sync_threads();  // all have counted",
       "",
       "close",
       {FaultKind::shared_race}},
      {"top_keys_read_sums_of_warps_early",
       kTopKeys,
       "ptx::sync_threads();  // the sums of warps are there",
       "",
       "close",
       {FaultKind::shared_race, FaultKind::shared_uninitialised}},
      {"top_keys_read_a_decision_early",
       kTopKeys,
       "ptx::sync_threads();  // it is decided",
       "",
       "close",
       {FaultKind::shared_race, FaultKind::shared_uninitialised}},
      {"top_keys_forget_a_decision_early",
       kTopKeys,
       "ptx::sync_threads();  // all have read what is decided",
       "",
       "close",
       {FaultKind::shared_race}},
      {"top_keys_take_before_there_is_a_place",
       kTopKeys,
       "ptx::sync_threads();  // nothing is taken yet",
       "",
       "usual",
       {FaultKind::shared_race, FaultKind::shared_uninitialised}},
      {"top_keys_sort_early",
       kTopKeys,
       "ptx::sync_threads();  // all is taken",
       "",
       "usual",
       {FaultKind::shared_race, FaultKind::shared_uninitialised}},
      {"top_keys_warps_do_not_wait_for_each_other",
       kTopKeys,
       "ptx::sync_threads();  // other warps have what is next",
       "ptx::sync_warp();",
       "most",
       {FaultKind::shared_race}},
      {"top_keys_lanes_do_not_wait_for_each_other",
       kTopKeys,
       "ptx::sync_warp();  // other lanes have it",
       "",
       "usual",
       {FaultKind::shared_race}},
      {"top_keys_ties_without_the_highest_bits", kTopKeys, "prefix.index = prefix.index_mask = ~0u << shift;", "",
       "constant"},
      {"top_keys_ties_by_sums_alone", kTopKeys, "digit = ~(first + e);", "digit = orders[e] + 0 * first;", "constant"},
      {"top_keys_forget_those_above", kTopKeys, "above += greater;", "above += 0 * greater;", "most"},
      {"top_keys_of_one_copy", kTopKeys, "copies.word[0] + copies.word[1] + copies.word[2] + copies.word[3];",
       "copies.word[0];", "close"},
      {"top_keys_lose_the_last_run",
       kTopKeys,
       "if (run != 0) ptx::red_add_shared(bin_at(last) + copy, run); ptx::sync_threads();",
       "ptx::sync_threads();",
       "close",
       {FaultKind::shared_uninitialised}},
      {"top_keys_lose_runs", kTopKeys, "last = bin; run = 0;", "last = bin;", "close"},
      {"top_keys_of_the_threads_before_but_one", kTopKeys, "if (lane >= distance) upto += before;",
       "if (lane > distance) upto += before;", "many_special"},
      {"top_keys_of_one_warp",
       kTopKeys,
       "for (int other = 0; other < warp; ++other) before +=",
       "for (int other = warp; other < warp; ++other) before +=",
       "close",
       {FaultKind::shared_race}},
      {"top_keys_count_what_agrees_not", kTopKeys, "if ((orders[e] & prefix.sum_mask) != prefix.sum) continue;",
       "if ((orders[e] & prefix.sum_mask) > ~0u) continue;", "many_ties"},
      {"top_keys_count_what_is_not_there", kTopKeys, "orders[e] = first + e < keys ? orders[e] : 0;",
       "orders[e] = first + e < keys + 4 ? orders[e] : 0;", "constant_negative"},
      {"top_keys_take_what_is_not_there", kTopKeys, "if (orders[e] != 0 && reaches)", "if (reaches)", "fewer_keys"},
      {"top_keys_take_ties_of_any_index", kTopKeys, "(~(first + e) & prefix.index_mask) >= prefix.index",
       "(~(first + e) | prefix.index_mask) >= prefix.index", "constant"},
      {"top_keys_sort_the_half", kTopKeys, "ceil_power_of_two(entries);", "ceil_power_of_two(entries / 2);", "usual"},
      {"top_keys_read_behind_the_row",
       kTopKeys,
       "return first < keys && keys - first >= 4; }",
       "return first < keys; }",
       "negative",
       {FaultKind::global_out_of_bounds, FaultKind::global_uninitialised}},
      {"top_keys_of_rows_that_begin_anywhere",
       kTopKeys,
       "/ sizeof(float)) % 4;",
       "/ sizeof(float)) % 1;",
       "negative",
       {FaultKind::misaligned}},
      {"top_keys_of_the_first_row", kTopKeys, "first = static_cast<int64_t>(ptx::block_index()) * p.s_kv;",
       "first = 0 * p.s_kv;", "usual"},
      {"top_keys_of_the_first_sequence", kTopKeys, "* from.total_kv + span.first;", "* from.total_kv;", "packed"},
      {"top_keys_of_the_first_head", kTopKeys, "first = static_cast<int64_t>(head) * from.total_kv",
       "first = int64_t{0} * from.total_kv", "packed"},
      {"top_keys_of_sequences_without_rows", kTopKeys, "if (rows > 0) keys", "if (rows >= 0) keys", "packed"},
      {"top_keys_that_are_not_there", kTopKeys, "uint32_t index = 0;", "uint32_t index = 1;", "fewer_keys"},
      {"top_keys_in_one_place", kTopKeys, "static_cast<int64_t>(ptx::block_index()) * params.count;",
       "static_cast<int64_t>(batch) * params.count;", "usual"},
  };
  return list;
}

KernelSpec top_keys_subject_of(const StatisticsMutation& mutation) {
  return top_keys_spec(problem_of(top_keys_case_named(mutation.subject)));
}

}  // namespace emulator
