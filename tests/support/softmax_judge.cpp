#include "support/softmax_judge.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <future>
#include <limits>
#include <utility>

#include "reference/dropout.hpp"
#include "reference/geometry.hpp"

namespace fa::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kF32 = 0x1p-24;
constexpr double kNegligible = 104;  // exp(-104) < 2^-149
constexpr double kAnywhere = 0.3;    // (exp(2 h) - 1) is near 1: from here on the hull is the bound

double unit_roundoff(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : kF32;
}

std::string text_of(std::int64_t b, std::int64_t h, std::int64_t s, double actual, double expected, double bound) {
  return "batch " + std::to_string(b) + " head " + std::to_string(h) + " row " + std::to_string(s) + ": " +
         std::to_string(actual) + ", expected " + std::to_string(expected) + " within " + std::to_string(bound);
}

double ratio(double error, double bound) {
  if (std::isnan(error)) return kInfinity;
  return error == 0 ? 0 : error / bound;
}

}  // namespace

void make_whole(HostTensor& tensor, double limit) {
  const TensorView view = tensor.view();
  for (std::int64_t b = 0; b < view.shape[0]; ++b) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t s = 0; s < view.shape[2]; ++s) {
        for (std::int64_t d = 0; d < view.shape[3]; ++d) {
          tensor.set(b, h, s, d, std::clamp(std::round(tensor.at(b, h, s, d)), -limit, limit));
        }
      }
    }
  }
}

SoftmaxJudge::SoftmaxJudge(JudgedCase c, const AttentionInputs& inputs) : case_(std::move(c)) {
  const AttentionCase& a = case_.attention;
  const auto each_row = [](const HostTensor& tensor, const auto& visit) {
    const TensorView view = tensor.view();
    std::vector<double> row(static_cast<std::size_t>(view.shape[3]));
    for (std::int64_t b = 0; b < view.shape[0]; ++b) {
      for (std::int64_t h = 0; h < view.shape[1]; ++h) {
        for (std::int64_t s = 0; s < view.shape[2]; ++s) {
          reference::load(view, reference::row_offset(view, b, h, s), view.strides[3], view.shape[3], row.data());
          visit((b * view.shape[1] + h) * view.shape[2] + s, row);
        }
      }
    }
  };
  each_row(inputs.q,
           [&](std::int64_t, const std::vector<double>& row) { q_.insert(q_.end(), row.begin(), row.end()); });
  each_row(inputs.v, [&](std::int64_t, const std::vector<double>& row) {
    v_.insert(v_.end(), row.begin(), row.end());
    for (const double x : row) largest_v_ = std::max(largest_v_, std::abs(x));
  });
  k_.resize(static_cast<std::size_t>(a.b * a.h_kv * a.s_kv * a.d_qk));
  each_row(inputs.k, [&](std::int64_t at, const std::vector<double>& row) {
    const std::int64_t head = at / a.s_kv, key = at % a.s_kv;
    for (std::int64_t d = 0; d < a.d_qk; ++d) {
      k_[static_cast<std::size_t>((head * a.d_qk + d) * a.s_kv + key)] = row[static_cast<std::size_t>(d)];
    }
  });
}

std::vector<SoftmaxJudge::Part> SoftmaxJudge::parts() const {
  const AttentionCase& a = case_.attention;
  std::vector<Part> parts;
  if (case_.cu_q.empty()) {
    for (std::int64_t b = 0; b < a.b; ++b) parts.push_back({b, b, 0, 0, a.s_q, a.s_kv});
    return parts;
  }
  for (std::size_t i = 0; i + 1 < case_.cu_q.size(); ++i) {
    parts.push_back({static_cast<std::int64_t>(i), 0, case_.cu_q[i], case_.cu_kv[i], case_.cu_q[i + 1] - case_.cu_q[i],
                     case_.cu_kv[i + 1] - case_.cu_kv[i]});
  }
  return parts;
}

const double* SoftmaxJudge::key_column(std::int64_t b, std::int64_t h, std::int64_t d) const {
  const AttentionCase& a = case_.attention;
  return k_.data() + ((b * a.h_kv + h) * a.d_qk + d) * a.s_kv;
}

SoftmaxJudge::Row SoftmaxJudge::row(const Part& part, std::int64_t h, std::int64_t i, double scale,
                                    double& lse_units) const {
  const AttentionCase& a = case_.attention;
  const reference::Geometry g{1,     a.h_q,    a.h_kv,         part.s_q,          part.s_kv,          a.d_qk,
                              a.d_v, a.causal, a.causal_align, case_.window_left, case_.window_right, 0};
  const std::int64_t first = g.first_key(i), count = std::max<std::int64_t>(g.visible_keys(i) - first, 0);
  std::vector<double> products(static_cast<std::size_t>(count));
  const double* q = q_.data() + ((part.b * a.h_q + h) * a.s_q + part.q0 + i) * a.d_qk;
  for (std::int64_t d = 0; d < a.d_qk; ++d) {
    const double* column = key_column(part.b, g.kv_head(h), d) + part.kv0 + first;
    const double factor = q[d];
    for (std::size_t j = 0; j < products.size(); ++j) products[j] += factor * column[j];
  }
  std::vector<std::uint8_t> drawn(static_cast<std::size_t>(first + count), 1);
  const reference::DropoutMask mask =
      case_.dropout > 0 ? reference::DropoutMask(double{case_.dropout}, case_.state.seed, case_.state.offset)
                        : reference::DropoutMask();
  if (mask.active()) mask.row(part.index * a.h_q + h, i, 0, first + count, drawn.data());

  std::vector<double> scores, kept;
  std::vector<const double*> values;
  for (std::int64_t j = 0; j < count; ++j) {
    const ScorePlace place{part.index, h, i, first + j, part.s_q, part.s_kv};
    if (case_.keep && !case_.keep(place)) continue;
    const double scaled = products[static_cast<std::size_t>(j)] * scale;
    scores.push_back(case_.score ? case_.score(place, scaled) : scaled);
    kept.push_back(drawn[static_cast<std::size_t>(first + j)] != 0 ? mask.scale() : 0);
    values.push_back(v_.data() + ((part.b * a.h_kv + g.kv_head(h)) * a.s_kv + part.kv0 + first + j) * a.d_v);
  }
  Row result;
  result.judged = true;
  weigh(result, scores, values, kept, case_.sink.empty() ? -kInfinity : case_.sink[static_cast<std::size_t>(h)],
        lse_units);
  return result;
}

void SoftmaxJudge::weigh(Row& row, const std::vector<double>& scores, const std::vector<const double*>& values,
                         const std::vector<double>& kept, double sink, double& lse_units) const {
  const auto d_v = static_cast<std::size_t>(case_.attention.d_v);
  row.o.assign(d_v, 0);
  row.o_f32.assign(d_v, 0);
  row.top = sink;
  for (const double score : scores) row.top = std::max(row.top, score);
  row.keys = static_cast<std::int64_t>(scores.size());
  row.empty = row.top == -kInfinity;
  if (row.empty) {
    row.lse = -kInfinity;
    return;
  }
  const auto weight_f32 = [&](double score) {
    return std::exp2(static_cast<float>(score - row.top) * 1.44269504088896341f);
  };
  double sum = sink == -kInfinity ? 0 : std::exp(sink - row.top);
  float sum_f32 = sink == -kInfinity ? 0.f : weight_f32(sink);
  std::vector<float> o_f32(d_v);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    if (row.top - scores[j] > kNegligible) continue;
    const double p = std::exp(scores[j] - row.top);
    const float p_f32 = weight_f32(scores[j]);
    sum += p;
    sum_f32 += p_f32;
    if (kept[j] == 0) continue;
    for (std::size_t d = 0; d < d_v; ++d) {
      row.o[d] += p * kept[j] * values[j][d];
      o_f32[d] += p_f32 * static_cast<float>(kept[j] * values[j][d]);
    }
  }
  for (std::size_t d = 0; d < d_v; ++d) {
    row.o[d] /= sum;
    row.o_f32[d] = static_cast<double>(o_f32[d] / sum_f32);
  }
  row.lse = row.top + std::log(sum);
  const float lse_f32 = static_cast<float>(row.top) + std::log(sum_f32);
  lse_units = std::max(lse_units, std::abs(static_cast<double>(lse_f32) - row.lse) / (kF32 * (std::abs(row.top) + 16)));
  if (!case_.rounded_scores) return;
  row.slack = kF32 * (std::abs(row.top) + kNegligible);
  find_hull(row, scores, values, sink);
}

void SoftmaxJudge::find_hull(Row& row, const std::vector<double>& scores, const std::vector<const double*>& values,
                             double sink) const {
  const auto d_v = static_cast<std::size_t>(case_.attention.d_v);
  row.low.assign(d_v, kInfinity);
  row.high.assign(d_v, -kInfinity);
  const double factor = dropout_factor();
  const auto add = [&](double score, const double* value) {
    if (row.top - score > kNegligible + 2 * row.slack) return;
    for (std::size_t d = 0; d < d_v; ++d) {
      const double x = value == nullptr ? 0 : factor * value[d];
      row.low[d] = std::min(row.low[d], x);
      row.high[d] = std::max(row.high[d], x);
    }
  };
  for (std::size_t j = 0; j < scores.size(); ++j) add(scores[j], values[j]);
  add(case_.dropout > 0 ? row.top : sink, nullptr);
}

double SoftmaxJudge::dropout_factor() const {
  return case_.dropout > 0 ? reference::DropoutMask(double{case_.dropout}, 0, 0).scale() : 1;
}

double SoftmaxJudge::allowed_o(const Row& row, double worst_f32, std::int64_t d) const {
  const DType dtype = case_.attention.dtype;
  const auto keys = static_cast<double>(row.keys);
  const double subnormal = dtype == DType::f16 ? keys * 0x1p-25 : 0;
  double allowed = 2 * worst_f32 + dropout_factor() * largest_v_ *
                                       (2 * unit_roundoff(dtype) + subnormal + (keys / 8 + 32) * 0x1p-22 + 0x1p-20);
  if (row.slack > 0 && row.slack < kAnywhere) {
    const auto i = static_cast<std::size_t>(d);
    allowed += std::expm1(2 * row.slack) * std::max(row.high[i] - row.low[i], 0.0);
  }
  return allowed;
}

/// Distance from the expected number, or from the hull of what is possible.
double SoftmaxJudge::error_o(const Row& row, double actual, std::int64_t d) const {
  const auto i = static_cast<std::size_t>(d);
  if (std::isnan(actual)) return kInfinity;
  if (row.slack < kAnywhere) return std::abs(actual - row.o[i]);
  return std::max({row.low[i] - actual, actual - row.high[i], 0.0});
}

std::pair<double, double> SoftmaxJudge::judge_head(const Part& part, std::int64_t h, double scale,
                                                   std::vector<Row>& rows) const {
  double lse_units = 1, worst_f32 = 0;
  for (std::int64_t i = 0; i < part.s_q; ++i) {
    if (case_.judged_row && !case_.judged_row(part.q0 + i)) continue;
    const std::int64_t at = (part.b * case_.attention.h_q + h) * case_.attention.s_q + part.q0 + i;
    const Row& row = rows[static_cast<std::size_t>(at)] = this->row(part, h, i, scale, lse_units);
    if (case_.rounded_scores) continue;
    for (std::size_t d = 0; d < row.o.size(); ++d) worst_f32 = std::max(worst_f32, std::abs(row.o_f32[d] - row.o[d]));
  }
  return {lse_units, worst_f32};
}

Verdict SoftmaxJudge::judge(double scale, const AttentionOutputs& actual) const {
  const AttentionCase& a = case_.attention;
  std::vector<Row> rows(static_cast<std::size_t>(a.b * a.h_q * a.s_q));
  double lse_units = 1, worst_f32 = 0;
  std::vector<std::future<std::pair<double, double>>> heads;
  for (const Part& part : parts()) {
    for (std::int64_t h = 0; h < a.h_q; ++h) {
      heads.push_back(std::async([this, part, h, scale, &rows] { return judge_head(part, h, scale, rows); }));
    }
  }
  for (std::future<std::pair<double, double>>& head : heads) {
    const auto [units, error] = head.get();
    lse_units = std::max(lse_units, units);
    worst_f32 = std::max(worst_f32, error);
  }
  if (case_.rounded_scores) lse_units = 1;
  Verdict verdict;
  for (std::size_t at = 0; at < rows.size(); ++at) {
    const Row& row = rows[at];
    if (!row.judged) continue;
    const auto place = static_cast<std::int64_t>(at);
    const std::int64_t b = place / a.s_q / a.h_q, h = place / a.s_q % a.h_q, s = place % a.s_q;
    const double lse = actual.lse.at(b, h, s);
    // With a sink the log-sum-exp of the keys is rounded once more.
    const double allowed_lse = kF32 * (2 * lse_units + (case_.sink.empty() ? 1 : 2)) * (std::abs(row.top) + 16) +
                               kF32 * (128 + static_cast<double>(row.keys) / 16) + 0x1p-20 + row.slack;
    const double wrong_lse = lse == row.lse ? 0 : row.empty ? kInfinity : ratio(std::abs(lse - row.lse), allowed_lse);
    if (wrong_lse > verdict.lse) {
      verdict.lse = wrong_lse;
      verdict.where_lse = text_of(b, h, s, lse, row.lse, allowed_lse);
    }
    for (std::int64_t d = 0; d < a.d_v; ++d) {
      const double o = actual.o.at(b, h, s, d);
      const double allowed = row.empty ? 0 : allowed_o(row, worst_f32, d);
      const double wrong = ratio(error_o(row, o, d), allowed);
      if (wrong <= verdict.o) continue;
      verdict.o = wrong;
      verdict.where_o = text_of(b, h, s, o, row.o[static_cast<std::size_t>(d)], allowed);
    }
  }
  return verdict;
}

}  // namespace fa::test
