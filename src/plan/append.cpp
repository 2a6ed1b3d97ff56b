#include "plan/append.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "plan/early_start.hpp"
#include "plan/rounding.hpp"
#include "support/text.hpp"

namespace fa::plan {
namespace {

constexpr int kAppendWarps = 8;
constexpr int kMostBlocks = 3;  // of a multiprocessor
constexpr int kFewerBlocks = 2;
constexpr int kHeadsOfThread = 4;
constexpr std::int64_t kMaxItems = std::int64_t{1} << 30;  // of a token

/// Pieces of 16 bytes of a row of q or k, of which two that make pairs count once.
std::int64_t pieces_of_row(const AppendProblem& problem) {
  const auto piece = static_cast<std::int64_t>(16 / size_of(problem.dtype));
  if (problem.rotary_dims == 0 || problem.interleaved) return problem.d_qk / piece;
  return ceil_div(problem.rotary_dims / 2, piece) + ceil_div(problem.d_qk - problem.rotary_dims, piece);
}

/// What threads do of a token.
std::int64_t items_of_token(const AppendProblem& problem, const AppendInputs& inputs) {
  const auto piece = static_cast<std::int64_t>(16 / size_of(problem.dtype));
  const std::int64_t groups_q = inputs.q.defined() ? ceil_div(inputs.q.shape[1], kHeadsOfThread) : 0;
  const std::int64_t groups_kv = ceil_div(inputs.k.shape[1], kHeadsOfThread);
  return groups_kv * (pieces_of_row(problem) + problem.d_v / piece) + groups_q * pieces_of_row(problem);
}

void set_strides(const TensorView& view, std::int64_t& b, std::int64_t& h, std::int64_t& s) noexcept {
  b = view.strides[0];
  h = view.strides[1];
  s = view.strides[2];
}

void set_tensors(const AppendInputs& inputs, kernel::AppendParams& params) noexcept {
  params.k = inputs.k.data;
  params.v = inputs.v.data;
  params.k_cache = inputs.k_cache.data;
  params.v_cache = inputs.v_cache.data;
  set_strides(inputs.k, params.stride_k_b, params.stride_k_h, params.stride_k_s);
  set_strides(inputs.v, params.stride_v_b, params.stride_v_h, params.stride_v_s);
  set_strides(inputs.k_cache, params.stride_k_cache_page, params.stride_k_cache_h, params.stride_k_cache_s);
  set_strides(inputs.v_cache, params.stride_v_cache_page, params.stride_v_cache_h, params.stride_v_cache_s);
  if (inputs.q.defined()) {
    params.q = inputs.q.data;
    params.q_out = inputs.q_out.data;
    set_strides(inputs.q, params.stride_q_b, params.stride_q_h, params.stride_q_s);
    set_strides(inputs.q_out, params.stride_q_out_b, params.stride_q_out_h, params.stride_q_out_s);
  }
  const RotaryEmbedding& rotary = inputs.rotary;
  if (rotary.cos.defined()) {
    params.cos = rotary.cos.data;
    params.sin = rotary.sin.data;
    params.stride_cos = rotary.cos.strides[0];
    params.stride_sin = rotary.sin.strides[0];
    params.table_positions = static_cast<int>(rotary.cos.shape[0]);
  }
}

void set_places(const AppendInputs& inputs, kernel::AppendParams& params) noexcept {
  const PagedCache& cache = inputs.cache;
  const TensorView& table = cache.block_table;
  params.cu = inputs.cu_seqlens_k_new;
  params.used_kv = inputs.seqused_kv;
  params.batch_index = cache.batch_index;
  params.slots = inputs.slots;
  params.slots_64 = inputs.slots_64;
  params.positions = inputs.rotary.positions;
  params.positions_64 = inputs.rotary.positions_64;
  params.pages = static_cast<int>(inputs.k_cache.shape[0]);
  params.page_rows = static_cast<int>(inputs.k_cache.shape[2]);
  params.table_rows = params.pages;
  params.max_pages = 1;
  if (!table.defined()) return;
  params.block_table = static_cast<const std::int32_t*>(table.data);
  params.stride_table_row = table.strides[0];
  params.stride_table_page = table.strides[1];
  params.table_rows = static_cast<int>(table.shape[0]);
  params.max_pages = static_cast<int>(table.shape[1]);
}

}  // namespace

namespace {

/// What kernels of both kinds have.
KernelSpec spec_for(const AppendProblem& problem) {
  KernelSpec spec;
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.aligned = problem.aligned;
  spec.page_size = problem.page_size;
  spec.warps = kAppendWarps;
  return spec;
}

KernelSpec stored_spec(const AppendProblem& problem) {
  KernelSpec spec = spec_for(problem);
  spec.own = AppendStored{problem.rotary_dims, problem.interleaved, problem.table,
                          problem.k_storage,   problem.v_storage,   problem.scales_given};
  return spec;
}

/// In words of 4 bytes: scales of u4x2 are pairs of 16 bits.
void set_scale_strides(const TensorView& scales, std::int64_t& page, std::int64_t& h, std::int64_t& s) noexcept {
  set_strides(scales, page, h, s);
  if (!scales.defined() || size_of(scales.dtype) != 2) return;
  page /= 2;
  h /= 2;
  s /= 2;
}

void set_scales(const AppendInputs& inputs, kernel::AppendStoredParams& params) noexcept {
  params.k_scale = static_cast<float*>(inputs.k_scale.data);
  params.v_scale = static_cast<float*>(inputs.v_scale.data);
  set_scale_strides(inputs.k_scale, params.stride_k_scale_page, params.stride_k_scale_h, params.stride_k_scale_s);
  set_scale_strides(inputs.v_scale, params.stride_v_scale_page, params.stride_v_scale_h, params.stride_v_scale_s);
}

}  // namespace

Alternatives append_specs(const AppendProblem& problem) {
  check_dtype(problem.arch, problem.dtype);
  if (problem.stored()) return {stored_spec(problem)};
  KernelSpec spec = spec_for(problem);
  spec.own = Append{problem.rotary_dims, problem.interleaved, problem.table};
  spec.min_blocks = kMostBlocks;
  Alternatives specs{spec};
  spec.min_blocks = kFewerBlocks;
  specs.push_back(spec);
  // Cosines and sines of a table come in pieces too, which take registers.
  if (problem.table != 0 && !problem.interleaved) specs.erase(specs.begin());
  return specs;
}

RotaryTurns rotary_turns(int dims, double base) noexcept {
  constexpr long double kTwoPi = 6.283185307179586476925286766559005768L;
  RotaryTurns turns{};
  for (int i = 0; i < dims / 2; ++i) {
    const long double turn = std::pow(static_cast<long double>(base), -2.0L * i / dims) / kTwoPi;
    const long double part = turn - std::floor(turn);
    const long double high = std::floor(std::ldexp(part, 32));
    const long double low = std::nearbyint(std::ldexp(std::ldexp(part, 32) - high, 32));
    // Below 2^32; a `low` of 2^32 carries, perhaps into a whole revolution.
    turns[static_cast<std::size_t>(i)] = (static_cast<std::uint64_t>(high) << 32) + static_cast<std::uint64_t>(low);
  }
  return turns;
}

void plan_call(const AppendProblem& problem, const KernelSpec& kernel, const AppendInputs& inputs,
               const RotaryTurns* turns, CallPlan& call) {
  kernel::AppendStoredParams& params = call.append_params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);
  set_tensors(inputs, params);
  set_places(inputs, params);
  const std::int64_t tokens = inputs.k.shape[0] * inputs.k.shape[2];
  const std::int64_t items = items_of_token(problem, inputs);
  const std::int64_t threads = kernel.threads();
  if (items > kMaxItems) {
    const TensorView& most = inputs.q.defined() ? inputs.q : inputs.k;
    support::throw_invalid(inputs.q.defined() ? "h_q" : "h_kv", most.shape[1],
                           fmt::format("heads with at most {} pieces of 16 bytes together", 4 * kMaxItems));
  }
  const std::int64_t block_tokens = std::clamp<std::int64_t>(threads / items, 1, tokens);
  params.b = static_cast<int>(inputs.b);
  params.h_kv = static_cast<int>(inputs.k.shape[1]);
  params.h_q = inputs.q.defined() ? static_cast<int>(inputs.q.shape[1]) : 0;
  params.tokens = static_cast<int>(tokens);
  params.s_new = static_cast<int>(inputs.k.shape[2]);
  params.even_rows = inputs.b != 0 && tokens % inputs.b == 0 ? static_cast<int>(tokens / inputs.b) : 0;
  params.items = static_cast<int>(items);
  params.block_tokens = static_cast<int>(block_tokens);
  params.token_blocks = static_cast<int>(ceil_div(block_tokens * items, threads));
  if (turns != nullptr) std::ranges::copy(*turns, params.turns);
  if (problem.stored()) {
    set_scales(inputs, params);
    const int tensors = problem.latent() ? 1 : 2;
    const std::int64_t rows = tokens * (tensors * params.h_kv + params.h_q);  // of a warp each
    call.add(Role::append, ceil_div(rows, kernel.warps), &params, may_start_early(kernel));
    return;
  }
  call.add(Role::append, ceil_div(tokens, block_tokens) * params.token_blocks, &params, may_start_early(kernel));
}

}  // namespace fa::plan
