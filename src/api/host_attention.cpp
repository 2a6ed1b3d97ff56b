#include "api/host_attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "api/paged.hpp"
#include "plan/variant_launch.hpp"
#include "reference/backward.hpp"
#include "reference/elements.hpp"
#include "reference/forward.hpp"
#include "reference/packed.hpp"
#include "reference/paged.hpp"

namespace fa::api {
namespace {

/// Numbers in memory of a call's device.
template <std::size_t kCount, class T>
std::array<T, kCount> read_numbers(const T* from, const reference::Fetch* fetch) {
  std::array<T, kCount> numbers;
  if (fetch != nullptr) {
    (*fetch)(numbers.data(), from, sizeof numbers);
  } else {
    std::copy_n(from, kCount, numbers.begin());
  }
  return numbers;
}

reference::DropoutMask dropout_mask(const AttentionConfig& config, const DropoutState& state,
                                    const reference::Fetch* fetch) {
  if (config.dropout == 0) return {};
  if (state.device == nullptr) return {double{config.dropout}, state.seed, state.offset};
  const auto [seed, offset] = read_numbers<2>(state.device, fetch);
  return {double{config.dropout}, seed, offset};
}

/// A place that memory holds, as kernels read it.
ShardPlace read_place(const AttentionConfig& config, const AttentionShape& shape, ShardPlace place,
                      const reference::Fetch* fetch) {
  if (place.begin == nullptr) return place;
  plan::Problem problem;
  problem.b = shape.b;
  problem.h_q = shape.h_q;
  problem.h_kv = shape.h_kv;
  problem.s_q = shape.s_q;
  problem.s_kv = shape.s_kv;
  problem.dropout = config.dropout > 0;
  const std::array<std::int64_t, 4> given = read_numbers<4>(place.begin, fetch);
  const kernel::PlaceBegin begin =
      kernel::place_inside(plan::place_params(problem, place), {given[0], given[1], given[2], given[3]});
  place.b = begin.b;
  place.h_q = begin.h_q;
  place.q = begin.q;
  place.kv = begin.kv;
  return place;
}

reference::VariantArgs variant_args(const AttentionConfig& config, const Functions& functions,
                                    const VariantCall& variant) {
  reference::VariantArgs args;
  if (functions.any()) args.program = &functions.program;
  args.captures = variant.views();
  args.sink = variant.sink;
  args.dsink = variant.dsink;
  args.window_left = config.window_left;
  args.window_right = config.window_right;
  args.chunk = config.chunk;
  return args;
}

/// Where the rows' greatest logits are until those of heads are made of them.
class HostStatistics {
 public:
  HostStatistics(const AttentionConfig& config, const ForwardCall& call, reference::ForwardArgs& args)
      : heads_(call.statistics.max_logit_heads()) {
    const CheckedStatistics& wanted = call.statistics;
    args.statistics = {
        wanted.max_logit_rows, config.statistics.max_logit == MaxLogit::scaled,          wanted.entropy_rows,
        wanted.column_sums,    config.statistics.summed_heads() == ColumnSums::kv_heads, wanted.top_keys};
    if (wanted.top_keys.defined() && !wanted.column_sums.defined()) make_sums(config, call, args);
    if (!heads_.defined()) return;
    const std::int64_t b = call.q.shape[0], h = call.q.shape[1], s = call.q.shape[2];
    rows_.assign(static_cast<std::size_t>(b * h * s), -std::numeric_limits<double>::infinity());
    args.statistics.max_logit = TensorView(rows_.data(), DType::f64, {b, h, s});
    b_ = b;
    s_ = s;
  }

  void reduce() const {
    if (!heads_.defined()) return;
    const std::int64_t h_q = heads_.shape[0];
    for (std::int64_t h = 0; h < h_q; ++h) {
      double greatest = -std::numeric_limits<double>::infinity();
      for (std::int64_t b = 0; b < b_; ++b) {
        const auto first = rows_.begin() + (b * h_q + h) * s_;
        greatest = std::accumulate(first, first + s_, greatest, [](double x, double y) { return std::fmax(x, y); });
      }
      reference::store_element(heads_, h * heads_.strides[0], greatest);
    }
  }

 private:
  /// Rounded as a tensor of the caller would be.
  void make_sums(const AttentionConfig& config, const ForwardCall& call, reference::ForwardArgs& args) {
    const TensorView& top_keys = call.statistics.top_keys;
    const bool paged = config.page_size != 0;
    const std::int64_t b = paged ? top_keys.shape[0] : call.k.shape[0], h = top_keys.shape[1];
    const std::int64_t s_kv = paged ? call.shape.s_kv : call.k.shape[2];
    sums_.resize(static_cast<std::size_t>(b * h * s_kv));
    const DType dtype = config.dtype == DType::f64 ? DType::f64 : DType::f32;
    args.statistics.column_sums = TensorView(sums_.data(), dtype, {b, h, s_kv});
  }

  TensorView heads_;
  std::vector<double> rows_;  // [b, h_q, s_q]
  std::vector<double> sums_;  // f32 or f64, [b, h, s_kv]
  std::int64_t b_ = 0;
  std::int64_t s_ = 0;
};

/// The gradient of a head's greatest logit as one of rows: that of the first row that has it, and 0 elsewhere.
class GradientOfHeads {
 public:
  explicit GradientOfHeads(const reference::BackwardArgs& of)
      : b_(of.q.shape[0]),
        h_q_(of.q.shape[1]),
        s_q_(of.q.shape[2]),
        greatest_(static_cast<std::size_t>(b_ * h_q_ * s_q_), -std::numeric_limits<double>::infinity()),
        gradient_(greatest_.size()),
        o_(greatest_.size()) {
    forward_.q = of.q;
    forward_.k = of.k;
    forward_.v = of.v;
    forward_.v.shape[3] = 1;  // o is of no interest
    forward_.o = TensorView(o_.data(), DType::f32, {b_, h_q_, s_q_, std::int64_t{1}});
    forward_.scale = of.scale;
    forward_.causal = of.causal;
    forward_.causal_align = of.causal_align;
    forward_.variant = of.variant;
    forward_.f64 = of.f64;
    forward_.statistics.max_logit = TensorView(greatest_.data(), DType::f64, {b_, h_q_, s_q_});
    forward_.statistics.scaled = of.of_scaled;
  }

  /// Its pass leaves the greatest logits of rows.
  const reference::ForwardArgs& forward() const noexcept { return forward_; }

  TensorView of_rows(const TensorView& of_heads) {
    for (std::int64_t h = 0; h < h_q_; ++h) {
      double greatest = -std::numeric_limits<double>::infinity();
      std::size_t row = gradient_.size();
      for (std::int64_t i = 0; i < b_ * s_q_; ++i) {
        const auto at = static_cast<std::size_t>((i / s_q_ * h_q_ + h) * s_q_ + i % s_q_);
        if (!(greatest_[at] > greatest)) continue;
        greatest = greatest_[at];
        row = at;
      }
      if (row < gradient_.size()) reference::load(of_heads, h * of_heads.strides[0], 1, 1, &gradient_[row]);
    }
    return TensorView(gradient_.data(), DType::f64, {b_, h_q_, s_q_});
  }

 private:
  std::int64_t b_, h_q_, s_q_;
  std::vector<double> greatest_, gradient_;  // [b, h_q, s_q]
  std::vector<float> o_;
  reference::ForwardArgs forward_;
};

}  // namespace

template <class Call, class Args>
void HostAttention::set_common(const Call& call, const VariantCall& variant, const reference::Fetch* fetch,
                               Args* args) const {
  args->q = call.q;
  args->k = call.k;
  args->v = call.v;
  args->o = call.o;
  args->lse = call.lse;
  args->scale = scale_;
  args->causal = config_.causal;
  args->causal_align = config_.causal_align;
  args->dropout = dropout_mask(config_, call.dropout, fetch);
  args->variant = variant_args(config_, functions_, variant);
  if (call.place) {
    const ShardPlace place = read_place(config_, call.shape, *call.place, fetch);
    args->variant.place = place;
    args->dropout = args->dropout.part(place.b * place.whole_h_q + place.h_q, place.q, place.kv);
  }
  args->f64 = config_.host_f64 || config_.dtype == DType::f64;
}

reference::ForwardArgs HostAttention::forward_args(const ForwardCall& call, const VariantCall& variant,
                                                   const reference::Fetch* fetch) const {
  reference::ForwardArgs args;
  set_common(call, variant, fetch, &args);
  args.accumulate = config_.accumulate;
  args.k_scale = call.k_scale;
  args.v_scale = call.v_scale;
  args.q_scale = call.q_scale;
  args.row_bias = call.row_bias;
  args.k_scale_of_requests = is_fp8(config_.dtype) && !config_.key_scales;
  args.v_scale_of_requests = is_fp8(config_.dtype) && !config_.value_scales;
  return args;
}

reference::BackwardArgs HostAttention::backward_args(const BackwardCall& call, const VariantCall& variant,
                                                     const reference::Fetch* fetch) const {
  reference::BackwardArgs args;
  set_common(call, variant, fetch, &args);
  args.dout = call.dout;
  args.dlse = call.dlse;
  args.entropy = call.statistics.entropy;
  args.dentropy = call.statistics.dentropy;
  args.dmax_logit = call.statistics.dmax_logit;
  args.dcolumn_sums = call.statistics.dcolumn_sums;
  args.of_scaled = config_.statistics.max_logit == MaxLogit::scaled;
  args.dq = call.dq;
  args.dk = call.dk;
  args.dv = call.dv;
  return args;
}

void HostAttention::forward(const ForwardCall& call, const VariantCall& variant) const {
  reference::ForwardArgs args = forward_args(call, variant);
  HostStatistics statistics(config_, call, args);
  run(call, args);
  statistics.reduce();
}

void HostAttention::run(const ForwardCall& call, const reference::ForwardArgs& args) const {
  if (config_.page_size != 0) {
    check_requests(config_, call.sequences, call.cache, call.shape, call.k.shape[0]);
    return reference::forward(args, call.sequences, call.cache, config_.zero_padding);
  }
  if (config_.varlen) check_lengths(call.sequences, call.shape);
  if (!config_.varlen) return reference::forward(args);
  reference::forward(args, call.sequences, config_.zero_padding);
}

void HostAttention::backward(const BackwardCall& call, const VariantCall& variant) const {
  reference::BackwardArgs args = backward_args(call, variant);
  if (config_.varlen) check_lengths(call.sequences, call.shape);
  std::optional<GradientOfHeads> of_heads;
  if (args.dmax_logit.defined() && config_.statistics.gradient_of_heads()) {
    of_heads.emplace(args);
    if (config_.varlen) {
      reference::forward(of_heads->forward(), call.sequences, false);
    } else {
      reference::forward(of_heads->forward());
    }
    args.dmax_logit = of_heads->of_rows(args.dmax_logit);
  }
  if (!config_.varlen) return reference::backward(args);
  reference::backward(args, call.sequences, config_.zero_padding);
}

KernelInfo HostAttention::info(Operation operation) const {
  const char* const name = operation == Operation::backward ? "backward" : "forward";
  KernelInfo info;
  info.name = fmt::format("fa_reference_{}", name);
  info.spec = fmt::format("reference_{} dtype={} f64={:d}", name, to_string(config_.dtype), config_.host_f64);
  info.origin = "host";
  return info;
}

}  // namespace fa::api
