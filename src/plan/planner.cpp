#include "plan/planner.hpp"

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

#include "plan/catalogue.hpp"
#include "plan/column_sums.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/row_arithmetic.hpp"
#include "plan/schedule.hpp"
#include "plan/sm90_fp8_forward.hpp"
#include "support/text.hpp"

#include <common/forward_params.cuh>
#include <sm90/sm90_forward_layout.cuh>

namespace fa::plan {
namespace {

constexpr std::int64_t kShortQueryRows = 64;
constexpr std::int64_t kMaxPackedRows = std::int64_t{1} << 30;  // rows are 32-bit in the kernels
constexpr std::int64_t kMaxSplits = 64;
// Where K and V of the heads that static rounds need to be balanced do not fit the L2 cache, and a counter costs
// little.
constexpr std::int64_t kDynamicHeadBytes = std::int64_t{2} << 20;
constexpr std::int64_t kDynamicRows = 1024;
// Or where rounds leave more than a twentieth of the multiprocessors without a tile. Of few rounds the last has the
// shortest tiles, and clearing the counter takes longer than what is gained.
constexpr std::int64_t kUnevenRows = 512;
constexpr std::int64_t kUnevenRounds = 6;
// Of ragged batches: more rounds than these, and head dims whose tiles have two Q buffers. With one the V thread hears
// of a query tile when the one before is done.
constexpr std::int64_t kCountedRounds = 2;
constexpr int kCountedHeadDim = 128;
// A pass over q and k to look for norms is a smaller part of a call the longer rows are.
constexpr std::int64_t kReachRows = 1024;
constexpr std::int64_t kReachKeys = 2048;
constexpr std::int64_t kUsualLength = 4096;
constexpr std::int64_t kMostPartialFloats = std::int64_t{1} << 27;  // of fixed splits that blocks share
constexpr int kNormWarps = 8;
constexpr std::int64_t kNormLoads = 8;  // of a thread (templates/common/row_norms.cuh)
constexpr int kCombineWarps = 4;
constexpr int kClearWarps = 4;
constexpr int kPageRows = 8;  // that the copy engine brings at once, at least

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

bool Problem::splits_by_length() const noexcept {
  if (invariance != Invariance::batch || varlen || !paged() || portable || stored() || accumulate) return false;
  return (contiguous() || page_size % kPageRows == 0) && has_wgmma_rows(*this, *this);
}

std::int64_t visible_keys(const Problem& problem) noexcept {
  const bool top_left = !problem.placed && problem.causal && problem.causal_align == CausalAlign::top_left;
  std::int64_t keys = top_left ? std::min(problem.s_q, problem.s_kv) : problem.s_kv;
  if (problem.variants != nullptr && problem.variants->left_window) {
    // Distances beyond all keys are cut to these, and no sum leaves 64 bits.
    const std::int64_t before = std::min(problem.window_left, problem.s_kv);
    const std::int64_t behind = std::min(problem.causal ? problem.window_right : problem.s_kv, problem.s_kv);
    keys = std::min(keys, problem.s_q + before + behind);
  }
  return keys;
}

namespace {

int choose_splits(const Problem& problem, const Choice& choice, std::int64_t tile_m) {
  const std::int64_t enough = forward_family(choice.family).enough_blocks;
  const std::int64_t group = problem.h_q / problem.h_kv;
  if (problem.ragged() && !choice.splits_request) return 1;  // how much work a sequence is, the host does not know
  const std::int64_t rows = choice.pack_gqa ? problem.s_q * group : problem.s_q;
  const std::int64_t heads = choice.pack_gqa ? problem.h_kv : problem.h_q;
  const std::int64_t blocks = ceil_div(rows, tile_m) * heads * problem.b;
  if (blocks == 0 || blocks * 2 > enough) return 1;
  const std::int64_t keys = visible_keys(problem);
  if (problem.invariance == Invariance::batch && choice.short_query) {
    const auto most = static_cast<int>(std::min<std::int64_t>(enough / blocks, kMaxSplits));  // with the GPU alone
    const int splits = kernel::splits_of_length(keys, most, kLengthKeys);
    // Which kernel it is must not follow from the bound of lengths.
    return problem.splits_by_length() ? std::max(splits, 2) : splits;
  }
  if (keys < kFewestSplitKeys) return 1;
  const std::int64_t least_keys = choice.short_query ? kFewKeysPerSplit : kKeysPerSplit;
  const std::int64_t splits = std::min({enough / blocks, keys / least_keys, kMaxSplits});
  return static_cast<int>(std::max<std::int64_t>(splits, 1));
}

bool is_uneven(std::int64_t tiles) {
  const std::int64_t places = ceil_div(tiles, kHopperMultiprocessors) * kHopperMultiprocessors;
  return tiles > kUnevenRounds * kHopperMultiprocessors && 20 * places > 21 * tiles;
}

/// Whether a family is left to a problem, and by its override.
bool serves(const ForwardFamily& family, const Problem& problem, const Fixed& fixed) noexcept {
  if (family.misfit == nullptr) return true;
  if (family.misfit(problem) != nullptr || family.obstacle(problem) != nullptr) return false;
  return fixed.family == Family::automatic ? fixed.fits(*family.kernel) : fixed.family == family.family;
}

/// Of those that serve a problem the preferred one.
Family choose_family(const Problem& problem, const Fixed& fixed) noexcept {
  for (const ForwardFamily* const family : forward_families()) {
    if (serves(*family, problem, fixed)) return family->family;
  }
  return forward_families().back()->family;
}

/// Takes the family, and what of its kernels the shapes want; the rows of a query tile.
int take_family(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept {
  int tile_m = 0;
  for (const ForwardFamily* const family : forward_families()) {
    if (!serves(*family, problem, fixed)) continue;
    choice.family = family->family;
    if (choice.pack_gqa && family->packs != nullptr && !family->packs(problem, fixed, choice)) {
      const bool alone = problem.fp8() || problem.fixed_rows();  // no other has 8-bit floats, or the same bits
      if (fixed.family == Family::automatic && !alone) continue;
      choice.pack_gqa = false;
      choice.short_query = problem.s_q <= kShortQueryRows;
    }
    tile_m = family->decide(problem, fixed, choice);
    break;
  }
  return tile_m;
}

/// Whether blocks share the splits of a query tile: where there are few tiles, and by wgmma of few rows, whose partial
/// results are small. It changes no bit.
bool shares_splits(const Problem& problem, const Choice& choice, std::int64_t tile_m, std::int64_t tiles) noexcept {
  const RowFacts facts = RowFacts::of(problem, choice.family == Family::sm90);
  const int split_keys = row_arithmetic(facts).split_keys;
  const bool few_tiles = tiles < forward_family(choice.family).enough_blocks && problem.s_kv > split_keys;
  if (tiles == 0 || !(few_tiles || (facts.wgmma && choice.short_query))) return false;
  if (needs_tile_lists(problem)) return false;
  const std::int64_t rows = choice.pack_gqa ? problem.s_q * (problem.h_q / problem.h_kv) : problem.s_q;
  const std::int64_t partial_rows = tiles * std::min(rows, tile_m) * ceil_div(problem.s_kv, split_keys);
  return partial_rows * problem.d_v <= kMostPartialFloats;
}

/// Why no call of a configuration takes query tiles from a counter; nullptr where some may.
const char* counter_misfit(const Problem& problem, const ForwardFamily& family) noexcept {
  if (!family.has_counter) return "0: no kernel that serves this problem has a counter";
  if (problem.dropout) return "0 with dropout";
  if (problem.ragged()) return nullptr;  // lengths differ
  const Variants* const variants = problem.variants;
  if (variants != nullptr && variants->hides_keys()) return "0 with windows, chunks or masks of dense batches";
  const bool reaches = family.may_have_reach != nullptr && family.may_have_reach(problem);
  return problem.causal || reaches ? nullptr : "0 for dense batches without a causal mask";
}

void check_counter(const Problem& problem, const Fixed& fixed, Family family) {
  if (!fixed.flag("dynamic", false) || family != choose_family(usual_call(problem), fixed)) return;
  const char* const misfit = counter_misfit(problem, forward_family(family));
  if (misfit != nullptr) support::throw_invalid("kernel.dynamic", 1, misfit);
}

/// Of ragged batches, which come in waves else: where a counter is the faster, if there are many query tiles.
bool may_count_ragged(const Problem& problem, const Choice& choice) noexcept {
  const bool plain = problem.variants == nullptr || !problem.variants->hides_keys();
  return problem.ragged() && problem.causal && plain && !choice.short_query &&
         std::max(problem.d_qk, problem.d_v) <= kCountedHeadDim;
}

/// `b`: requests of the call, which may be more than the problem's: of whose tiles a counter may be worth it.
Choice choose_by(const Problem& problem, const Fixed& fixed, std::int64_t b) noexcept {
  Choice choice;
  choice.aligned = problem.aligned;
  if (problem.h_kv == 0) return choice;
  const std::int64_t group = problem.h_q / problem.h_kv;
  // Packing fills a tile that one head's few rows would leave mostly empty.
  const std::int64_t s_q = problem.typical_s_q();
  const std::int64_t most_rows = problem.varlen ? problem.total_q : problem.s_q;
  const bool packable = group > 1 && most_rows <= kMaxPackedRows / group;
  choice.pack_gqa = packable && fixed.flag("pack_gqa", problem.mean_s_q() <= kShortQueryRows);
  choice.short_query = (choice.pack_gqa ? s_q * group : s_q) <= kShortQueryRows;
  const std::int64_t tile_m = take_family(problem, fixed, choice);
  choice.splits = fixed.has("splits") && (!problem.ragged() || choice.splits_request)
                      ? fixed.number("splits")
                      : choose_splits(problem, choice, std::max<std::int64_t>(tile_m, 1));
  const std::int64_t head_bytes =
      problem.typical_s_kv() * (problem.d_qk + problem.d_v) * static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t tiles = ceil_div(choice.pack_gqa ? s_q * group : s_q, std::max<std::int64_t>(tile_m, 1)) *
                             (choice.pack_gqa ? problem.h_kv : problem.h_q) * b;
  choice.scheduled = shares_by_schedule(problem, fixed, choice);
  if (choice.own_parts) choice.splits = 1;
  if (choice.own_parts || choice.splits_request) choice.scheduled = false;
  choice.affine_reach = may_have_reach(problem, choice) &&
                        fixed.flag("affine_reach", problem.s_q >= kReachRows && problem.s_kv >= kReachKeys);
  const bool beyond_l2 = s_q >= kDynamicRows && head_bytes / std::max<std::int64_t>(group, 1) >= kDynamicHeadBytes;
  const bool usual = choice.affine_reach || beyond_l2 || (s_q >= kUnevenRows && is_uneven(tiles));
  const bool many = may_count_ragged(problem, choice) && tiles > kCountedRounds * kHopperMultiprocessors;
  choice.dynamic = may_be_dynamic(problem, choice) && fixed.flag("dynamic", problem.ragged() ? many : usual);
  if (problem.row_statistics()) {  // a block has its rows alone
    choice.splits = 1;
    choice.scheduled = false;
  }
  if (problem.fixed_rows()) {
    choice.splits = 1;
    choice.scheduled = false;
    choice.shares_splits = shares_splits(problem, choice, tile_m, tiles);
    choice.dynamic = choice.dynamic && !choice.shares_splits;
  }
  const auto form_clusters = forward_family(choice.family).form_clusters;
  if (form_clusters != nullptr) form_clusters(problem, fixed, choice);
  return choice;
}

}  // namespace

bool shares_by_schedule(const Problem& problem, const Fixed& fixed, const Choice& choice) noexcept {
  if (!problem.paged() || problem.accumulate) return false;  // pieces are not added to a state
  const auto scheduled_keys = forward_family(choice.family).scheduled_keys;
  const std::optional<std::int64_t> keys = scheduled_keys != nullptr ? scheduled_keys(problem, choice) : std::nullopt;
  return keys && fixed.flag("scheduled", visible_keys(problem) >= *keys);
}

Choice choose(const Problem& problem, const Fixed& fixed) noexcept {
  if (problem.bits_of() != Facts::request) return choose_by(problem, fixed, problem.b);
  Choice choice = choose_by(alone(problem, problem), fixed, problem.splits_by_length() ? problem.b : 1);
  const auto takes_whole = forward_family(choice.family).takes_whole;
  choice.whole_tiles = takes_whole != nullptr && takes_whole(problem, choice);
  choice.all_whole = choice.whole_tiles && !problem.paged();
  return choice;
}

Problem alone(const RequestFacts& request, const DeviceFacts& device) noexcept {
  return {request, BatchFacts{}, device};
}

Problem visible_facts(const Problem& problem) noexcept {
  return problem.bits_of() == Facts::request ? alone(problem, problem) : problem;
}

Problem usual_call(const Problem& problem) noexcept {
  Problem usual = problem;
  usual.aligned = usual.tensor_maps = true;
  usual.b = usual.h_q = usual.h_kv = usual.s_q = usual.s_kv = usual.total_q = usual.total_kv = 1;
  return usual;
}

Fixed followed_forward(const Problem& problem, const Fixed& fixed) {
  const Choice choice = choose(problem, fixed);
  if (choice.family == choose_family(usual_call(problem), fixed)) return fixed;
  const ForwardFamily& family = forward_family(choice.family);
  return family.fits == nullptr || family.fits(problem, fixed, choice) ? fixed : fixed.without_tile(family.family);
}

void check_forward_override(const Problem& problem, const Fixed& fixed) {
  Fixed whole = fixed;
  if (!whole.has("splits")) whole.set("splits", 1);
  Problem usual = usual_call(problem);
  usual.s_kv = usual.total_kv = kUsualLength;
  for (const std::int64_t s_q : {std::int64_t{1}, kUsualLength}) {
    usual.s_q = usual.total_q = s_q;
    plan_forward(usual, whole);
  }
}

void check_invariant(const Problem& problem, const Fixed& fixed) {
  const bool wgmma = has_wgmma_rows(problem, problem) && fixed.family != Family::sm80;
  const bool rows = problem.bits_of() == Facts::row && wgmma;
  if (!rows && problem.bits_of() != Facts::request) return;
  if (rows && problem.paged() && !problem.contiguous() && problem.page_size % kPageRows != 0) {
    support::throw_invalid("page_size", problem.page_size, "multiples of 8 with invariance on Hopper, or kernel sm80");
  }
  if ((rows || problem.paged()) && (problem.s_kv == 0 || problem.b == 0)) return;  // no row has a key
  if (!problem.aligned) {
    support::throw_invalid("q, k, v or o", "rows that do not start at multiples of 16 bytes",
                           "multiples of 16 bytes with invariance, which unaligned rows would change bits of");
  }
  if (!rows && choose_family(usual_call(problem), {}) == forward_families().back()->family) return;
  if (!problem.tensor_maps) {
    support::throw_invalid("q, k, v or o", "a stride that is zero, negative or 2^40 bytes or more, or a first key",
                           "strides that the copy engine can describe, and no seq_begin, with invariance");
  }
  if (problem.bounded_rows() > Problem::kMostBoundedRows) {
    support::throw_invalid("total_q, total_kv, s_kv or page_size", problem.bounded_rows(), "at most 2^30 rows");
  }
}

KernelSpec combine_spec(const RequestFacts& request, const DeviceFacts& device) noexcept {
  KernelSpec spec;
  spec.own = ForwardCombine{};
  spec.arch = device.arch;
  spec.dtype = size_of(request.dtype) == 1 ? request.o_dtype : request.dtype;
  spec.d_v = request.d_v;
  spec.warps = kCombineWarps;
  spec.accumulate = request.accumulate;
  if (request.variants != nullptr) spec.variants.sink = request.variants->sink;
  return spec;
}

ForwardPlan plan_forward(const Problem& of_call, const Fixed& fixed) {
  const Problem problem = visible_facts(of_call);
  check_dtype(problem.arch, problem.dtype);
  if (problem.arch.major < 8 && problem.stored()) {
    support::throw_unsupported("k_dtype", to_string(problem.k_dtype), "none on compute capability 7.5");
  }
  if (fixed.family != Family::automatic) {
    const ForwardFamily& wanted = forward_family(fixed.family);
    const char* const misfit = wanted.misfit == nullptr ? nullptr : wanted.misfit(problem);
    if (misfit != nullptr) support::throw_invalid("kernel.kernel", to_string(wanted.family), misfit);
  }
  const Choice choice = choose(of_call, fixed);
  if (problem.fp8()) check_fp8(problem, fixed, choice);
  check_counter(problem, fixed, choice.family);
  ForwardPlan plan;
  std::vector<KernelSpec> specs =
      forward_family(choice.family).specs(problem, followed_forward(problem, fixed), choice);
  check_kernel(fixed, specs.front(), "kernel");
  plan.kernel = specs.front();
  plan.alternatives.assign(specs.begin() + 1, specs.end());
  plan.combine = combine_spec(problem, problem);
  plan.combine.as<ForwardCombine>().folds = plan.kernel.length_keys() > 0;
  plan.norms = row_norms_spec(plan.kernel);
  if (problem.statistics.summed_heads() != ColumnSums::none) plan.sums = column_sums_spec(problem);
  if (problem.statistics.top_keys != 0) plan.top_keys = top_keys_spec(problem);
  return plan;
}

std::vector<Alternatives> kernels_of(const ForwardPlan& plan) {
  Alternatives attention{plan.kernel};
  attention.insert(attention.end(), plan.alternatives.begin(), plan.alternatives.end());
  const bool reaches = std::ranges::any_of(attention, &KernelSpec::affine_reach);
  std::vector<Alternatives> schedules;  // one for each tile
  for (const KernelSpec& spec : attention) {
    if (!spec.scheduled()) continue;
    Alternatives schedule{schedule_spec(spec)};
    if (std::ranges::find(schedules, schedule) == schedules.end()) schedules.push_back(std::move(schedule));
  }
  std::vector<Alternatives> kernels{std::move(attention)};
  if (plan.kernel.leaves_splits()) kernels.push_back({plan.combine});
  if (reaches) kernels.push_back({plan.norms});
  if (plan.sums.warps != 0) kernels.push_back({plan.sums});
  if (plan.top_keys.warps != 0) kernels.push_back({plan.top_keys});
  kernels.insert(kernels.end(), schedules.begin(), schedules.end());
  return kernels;
}

KernelSpec clear_padding_spec(Arch arch, DType dtype) noexcept {
  KernelSpec spec;
  spec.own = ClearPadding{};
  spec.arch = arch;
  spec.dtype = dtype;
  spec.warps = kClearWarps;
  return spec;
}

int shared_bytes(const KernelSpec& spec) {
  const Kernel& kernel = spec.kernel();
  return kernel.shared_bytes == nullptr ? 0 : kernel.shared_bytes(spec);
}

int most_shared_bytes(const KernelSpec& spec) {
  const int own = shared_bytes(spec);
  const bool may_be_alone = spec.is<Sm90Forward>() && (spec.split || spec.own_parts()) && spec.min_blocks == 2;
  return may_be_alone ? std::max(own, sm90::kMoreThanHalf) : own;
}

KernelSpec retargeted(KernelSpec spec, Arch target) {
  spec.arch = target;
  const Kernel& kernel = spec.kernel();
  if (kernel.resident_blocks != nullptr) spec.min_blocks = kernel.resident_blocks(spec);
  return spec;
}

bool may_be_dynamic(const Problem& problem, const Choice& choice) noexcept {
  const bool shares_keys = choice.splits > 1 || choice.scheduled || choice.own_parts;
  const bool differ = problem.ragged() || problem.causal || choice.affine_reach;
  return differ && !shares_keys && counter_misfit(problem, forward_family(choice.family)) == nullptr;
}

bool may_count(const Problem& problem, const Choice& choice) noexcept {
  return may_be_dynamic(problem, choice) && (!problem.ragged() || may_count_ragged(problem, choice));
}

bool may_have_counter(const Problem& problem, const Choice& choice) noexcept {
  return choice.dynamic || may_count(problem, choice) || may_have_reach(problem, choice);
}

bool may_have_reach(const Problem& problem, const Choice& choice) noexcept {
  const ForwardFamily& family = forward_family(choice.family);
  return family.may_have_reach != nullptr && choice.splits <= 1 && !choice.pack_gqa && family.may_have_reach(problem);
}

void set_statistics(const Problem& problem, KernelSpec& spec) noexcept {
  const Statistics& wanted = problem.statistics;
  if (wanted.max_logit != MaxLogit::none) {
    // Without a function the softmax takes the scaled scores.
    const bool tracks = wanted.max_logit == MaxLogit::scaled && !spec.variants.score.empty();
    spec.max_logit = tracks ? 2 : 1;
    spec.max_logit_by_head = wanted.max_logit_by_head;
  }
  spec.entropy = wanted.entropy;
}

KernelSpec row_norms_spec(const KernelSpec& attention) noexcept {
  KernelSpec spec;
  spec.own = RowNorms{};
  spec.arch = attention.arch;
  spec.dtype = attention.dtype;
  spec.d_qk = attention.d_qk;
  spec.warps = kNormWarps;
  return spec;
}

std::int64_t row_norms_blocks(const Problem& problem, const KernelSpec& norms) noexcept {
  const auto lanes = static_cast<std::int64_t>(std::bit_ceil(static_cast<unsigned>(norms.d_qk / 8)));  // 16 bytes each
  const std::int64_t rows = norms.threads() / lanes * kNormLoads;
  return problem.b * (ceil_div(problem.s_q, rows) * problem.h_q + ceil_div(problem.s_kv, rows) * problem.h_kv);
}

}  // namespace fa::plan
