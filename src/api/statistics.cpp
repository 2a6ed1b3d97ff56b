#include "api/statistics.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "api/validate.hpp"
#include "api/variants.hpp"
#include "api/views.hpp"
#include "plan/fixed.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

/// Whether elements lie one behind the other, in the order of the axes.
bool is_row_major(const TensorView& view) {
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<std::size_t>(axis);
    if (view.shape[i] > 1 && view.strides[i] != stride) return false;
    stride *= view.shape[i];
  }
  return true;
}

void check_read_row_major(const char* name, const TensorView& view) {
  if (view.elements() == 0 || is_row_major(view)) return;
  throw_invalid(name, fmt::format("strides [{}]", fmt::join(view.strides, ", ")), "row-major elements without gaps");
}

void check_row_major(const char* name, const TensorView& view) {
  check_writable(name, view);
  check_read_row_major(name, view);
}

/// Throws for what is given and not asked for, or asked for and not given; whether it is.
bool is_wanted(const char* name, const TensorView& given, bool wanted) {
  if (given.defined() && !wanted) {
    throw_invalid(name, "given", fmt::format("nothing, unless AttentionConfig::statistics asks for {}", name));
  }
  if (!given.defined() && wanted) throw_invalid(name, "nothing", "a tensor, as AttentionConfig::statistics says");
  return wanted;
}

/// The axes of column sums, in the place of those of rows; over a KV cache those of `b` requests.
AttentionShape of_keys(const AttentionConfig& config, AttentionShape shape, std::int64_t b) {
  if (config.statistics.column_sums == ColumnSums::kv_heads) shape.h_q = shape.h_kv;
  if (config.page_size != 0) shape.b = b;
  shape.s_q = shape.s_kv;
  return shape;
}

/// Of packed keys [h, total_kv].
TensorView checked_sums(const AttentionConfig& config, const TensorView& sums, const AttentionShape& keys, bool rank3) {
  constexpr const char* kName = "column_sums";
  const bool packed = config.varlen && config.page_size == 0;
  TensorView checked = packed ? checked_statistic(kName, config, sums, keys, rank3, "[b, h, s_kv]")
                              : checked_rows(kName, config.dtype, sums, keys, rank3 && !config.varlen, "[b, h, s_kv]");
  check_row_major(kName, sums);
  return checked;
}

/// [b, h, k]; of q without an axis of heads [b, k] too.
TensorView checked_top_keys(const AttentionConfig& config, const TensorView& given, std::int64_t b, std::int64_t h,
                            bool rank3) {
  constexpr const char* kName = "top_keys";
  check_memory(kName, given);
  if (given.dtype != DType::i32) throw_invalid(kName, to_string(given.dtype), "dtype i32");
  const bool without_heads = rank3 && !config.varlen && given.rank == 2;
  TensorView full = given;
  if (without_heads) {
    full.rank = 3;
    full.shape = {given.shape[0], 1, given.shape[1], 0};
    full.strides = {given.strides[0], given.shape[1], given.strides[1], 0};
  }
  const std::array<std::int64_t, 4> shape{b, h, config.statistics.top_keys, 0};
  if (full.rank != 3 || full.shape != shape) {
    throw_invalid(kName, fmt::format("shape {}", shape_text(given)),
                  fmt::format("[b, h, top_keys] = [{}, {}, {}]", shape[0], shape[1], shape[2]));
  }
  check_row_major(kName, given);
  return full;
}

/// Overrides that would share a row among thread blocks or warps, each with keys of its own.
void check_statistics_override(const AttentionConfig& config) {
  const plan::Fixed fixed = plan::read_override(config.kernel, plan::Op::forward, "kernel");
  for (const std::string_view field : {"splits", "scheduled", "own_parts", "split_warps"}) {
    const int value = fixed.number(field);
    const int most = field == "splits" ? 1 : 0;
    if (value > most) {
      throw_invalid(fmt::format("kernel.{}", field), value, fmt::format("at most {} with statistics of rows", most));
    }
  }
}

}  // namespace

void validate_statistics(const AttentionConfig& config) {
  const Statistics& wanted = config.statistics;
  if (wanted.max_logit > MaxLogit::scaled) {
    throw_invalid("statistics.max_logit", static_cast<int>(wanted.max_logit), "none, softmax or scaled");
  }
  if (wanted.column_sums > ColumnSums::kv_heads) {
    throw_invalid("statistics.column_sums", static_cast<int>(wanted.column_sums), "none, query_heads or kv_heads");
  }
  if (wanted.max_logit_by_head && wanted.max_logit == MaxLogit::none) {
    throw_invalid("statistics.max_logit_by_head", "true", "false without max_logit");
  }
  if (wanted.entropy_gradient && !wanted.entropy) {
    throw_invalid("statistics.entropy_gradient", "true", "false without entropy");
  }
  if (wanted.column_sums_gradient && wanted.column_sums == ColumnSums::none) {
    throw_invalid("statistics.column_sums_gradient", "true", "false without column_sums");
  }
  if (wanted.max_logit_gradient && wanted.max_logit == MaxLogit::none) {
    throw_invalid("statistics.max_logit_gradient", "true", "false without max_logit");
  }
  if (wanted.top_keys < 0 || wanted.top_keys > kMaxTopKeys) {
    throw_invalid("statistics.top_keys", wanted.top_keys, fmt::format("0 to {}", kMaxTopKeys));
  }
  if (plan::sum_buffers(config.kernel) != 0 && wanted.summed_heads() == ColumnSums::none) {
    throw_invalid("kernel.kernel", config.kernel->kernel, "a kernel of the forward without column_sums or top_keys");
  }
  if (!wanted.any()) return;
  const auto refuse = [](const char* name, bool given) {
    if (given) throw_invalid(name, "given", "none with statistics");
  };
  refuse("accumulate", config.accumulate);
  refuse("invariance", config.invariance != Invariance::none);
  if (is_fp8(config.dtype)) throw_invalid("dtype", to_string(config.dtype), "f16, bf16, f32 or f64 with statistics");
  if (wanted.max_logit != MaxLogit::none || wanted.entropy) check_statistics_override(config);
}

CheckedStatistics check_statistics(const AttentionConfig& config, const ForwardOutputs& outputs,
                                   const AttentionShape& shape, std::int64_t b, bool rank3) {
  const Statistics& wanted = config.statistics;
  CheckedStatistics checked;
  checked.outputs = outputs.statistics;
  const TensorView& max_logit = outputs.statistics.max_logit;
  if (is_wanted("max_logit", max_logit, wanted.max_logit != MaxLogit::none)) {
    if (wanted.max_logit_by_head) {
      checked_of_heads("max_logit", config, max_logit, shape.h_q);
      checked.heads = shape.h_q;
    } else {
      checked.max_logit_rows = checked_statistic("max_logit", config, max_logit, shape, rank3);
    }
    check_row_major("max_logit", max_logit);
  }
  if (is_wanted("entropy", outputs.statistics.entropy, wanted.entropy)) {
    checked.entropy_rows = checked_statistic("entropy", config, outputs.statistics.entropy, shape, rank3);
    check_row_major("entropy", outputs.statistics.entropy);
  }
  const TensorView& sums = outputs.statistics.column_sums;
  const AttentionShape keys = of_keys(config, shape, b);
  const bool may_be_left_out = wanted.top_keys != 0 && !sums.defined();
  if (!may_be_left_out && is_wanted("column_sums", sums, wanted.column_sums != ColumnSums::none)) {
    checked.column_sums = checked_sums(config, sums, keys, rank3);
  }
  if (is_wanted("top_keys", outputs.statistics.top_keys, wanted.top_keys != 0)) {
    checked.top_keys = checked_top_keys(config, outputs.statistics.top_keys, b, keys.h_q, rank3);
  }
  if (wanted.summed_heads() != ColumnSums::none && !outputs.lse.defined()) {
    throw_invalid("lse", "nothing", "a tensor with column_sums or top_keys, which are made by it");
  }
  return checked;
}

StatisticsGradients check_statistics_gradients(const AttentionConfig& config, const BackwardInputs& inputs,
                                               const AttentionShape& shape, bool rank3) {
  const StatisticsGradients& given = inputs.statistics;
  StatisticsGradients checked;
  const auto check = [&](const char* name, const TensorView& view, bool wanted, const AttentionShape& of,
                         TensorView& to, const char* accepted) {
    if (!is_wanted(name, view, wanted)) return;
    to = checked_statistic(name, config, view, of, rank3, accepted);
    check_read_row_major(name, view);
  };
  const Statistics& wanted = config.statistics;
  constexpr const char* kRows = "[b, h_q, s_q]";
  check("entropy", given.entropy, wanted.entropy_gradient, shape, checked.entropy, kRows);
  check("dentropy", given.dentropy, wanted.entropy_gradient, shape, checked.dentropy, kRows);
  if (!wanted.gradient_of_heads()) {
    check("dmax_logit", given.dmax_logit, wanted.max_logit_gradient, shape, checked.dmax_logit, kRows);
  } else if (is_wanted("dmax_logit", given.dmax_logit, true)) {
    checked_of_heads("dmax_logit", config, given.dmax_logit, shape.h_q);
    check_read_row_major("dmax_logit", given.dmax_logit);
    checked.dmax_logit = given.dmax_logit;
  }
  check("dcolumn_sums", given.dcolumn_sums, wanted.column_sums_gradient, of_keys(config, shape, shape.b),
        checked.dcolumn_sums, "[b, h, s_kv]");
  if (inputs.place && wanted.any_gradient()) {
    throw_invalid("place", "given", "none with gradients of statistics, which are of a call's own keys");
  }
  return checked;
}

void check_without_statistics(const StatisticsOutputs& outputs, const char* accepted) {
  for (const auto& [name, view] :
       {std::pair{"max_logit", &outputs.max_logit}, std::pair{"entropy", &outputs.entropy},
        std::pair{"column_sums", &outputs.column_sums}, std::pair{"top_keys", &outputs.top_keys}}) {
    if (view->defined()) throw_invalid(name, "given", accepted);
  }
}

}  // namespace fa::api
