// What debug calls say of a call, and P of one of its heads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "differential/calls.hpp"
#include "differential/inputs.hpp"
#include "differential/random.hpp"

namespace fa::differential {

void Calls::look_inside(const ForwardInputs& in) {
  Random random(call_.values + 31);
  const std::vector<Segment> segments = segments_of(c_, call_);
  if (segments.empty() || call_.h_q == 0) return;
  const auto which = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(segments.size())));
  const Segment& segment = segments[which];
  const std::int64_t h = random.below(call_.h_q);
  const bool ragged = c_.config.varlen || c_.config.page_size != 0;
  const bool bytes = has_bytes(c_.config);  // without a dump
  Tensor p =
      Tensor::dense(statistics(c_), {ragged ? segment.s_q + 1 : call_.s_q, ragged ? segment.s_kv + 1 : call_.s_kv});
  p.poison();
  p.upload(where_);
  Tensor o = output({call_.b, call_.h_q, call_.s_q, c_.config.head_dim_v}, call_.o, output_dtype(c_.config));
  Tensor lse = output({call_.b, call_.h_q, call_.s_q}, call_.lse_layout, statistics(c_));
  AttentionConfig config = c_.config;
  config.debug = true;
  config.statistics = {};
  std::string said;
  try {
    ForwardOutputs outputs{o.view(), lse.view()};
    if (!bytes) outputs.dump = {p.view(), static_cast<std::int64_t>(which), h};
    Attention::create(config, Device::host()).forward(in, outputs);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_finite) throw;
    said = error.what();
  }
  o.download(), lse.download();
  const bool broken = std::ranges::any_of(segments, [&](const Segment& of) { return is_broken(of, o, lse); });
  if (broken == said.empty()) wrong_inside_ = broken ? "nothing is said of a broken number" : "it is said: " + said;
  if (broken || bytes || segment.s_kv == 0) return;
  p.download();
  for (std::int64_t i = 0; i < segment.s_q; ++i) compare_p(segment, h, i, p, o, lse);
  if (!pages_ && !in_.stored_v.codes.defined() && call_.v.expanded == 0) name_a_nan(in, segment, h, p, o, lse);
}

void Calls::name_a_nan(ForwardInputs in, const Segment& of, std::int64_t h, const Tensor& p, const Tensor& o,
                       const Tensor& lse) {
  const std::int64_t pairs = of.s_q * of.s_kv,
                     first = Random(call_.values + 37).below(std::max<std::int64_t>(pairs, 1));
  std::int64_t pair = first;
  while (pair < pairs && p.at(pair / of.s_kv, pair % of.s_kv) == 0) ++pair;
  if (pair >= pairs) return;
  const std::int64_t j = pair % of.s_kv, h_kv = h / (call_.h_q / call_.h_kv), d = pair % c_.config.head_dim_v;
  Tensor v = in_.v;
  v.set(std::nan(""), of.tensor_b, h_kv, of.first_kv + j, d);
  v.upload(where_);
  in.v = v.const_view();
  AttentionConfig config = c_.config;
  config.debug = true;
  config.statistics = {};
  try {
    Attention::create(config, Device::host()).forward(in, {o.view(), lse.view()});
    wrong_inside_ = "nothing is said of a NaN in V";
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_finite) throw;
    const ErrorLocation& at = *error.location();
    const bool right = at.tensor == "v" && at.b == of.b && at.h == h_kv && at.kv == j && at.d == d && at.q == -1;
    if (!right) wrong_inside_ = std::string("another NaN is said: ") + error.what();
  }
}

bool Calls::is_broken(const Segment& of, const Tensor& o, const Tensor& lse) const {
  for (std::int64_t row = 0; row < call_.h_q * of.s_q; ++row) {
    const std::int64_t h = row / of.s_q, s = of.first_q + row % of.s_q;
    const double sum = lse.at(of.tensor_b, h, s);
    if (std::isnan(sum) || sum == HUGE_VAL) return true;
    for (std::int64_t d = 0; d < c_.config.head_dim_v; ++d) {
      if (!std::isfinite(o.at(of.tensor_b, h, s, d))) return true;
    }
  }
  return false;
}

void Calls::compare_p(const Segment& of, std::int64_t h, std::int64_t i, const Tensor& p, const Tensor& o,
                      const Tensor& lse) {
  const std::int64_t h_kv = h / (call_.h_q / call_.h_kv);
  // P is made by the log-sum-exp, which is rounded to float: the greater that is, the more.
  const double total = lse.at(of.tensor_b, h, of.first_q + i);
  const double of_p = 1e-4 + (std::isfinite(total) ? 0x1p-23 * std::abs(total) : 0);
  for (std::int64_t d = 0; d < c_.config.head_dim_v; ++d) {
    double sum = 0, size = 0;
    for (std::int64_t j = 0; j < of.s_kv; ++j) {
      const double weight = p.at(i, j);
      if (weight == 0) continue;
      const double term = weight * in_.v.at(of.tensor_b, h_kv, of.first_kv + j, d);
      sum += term, size += std::abs(term);
    }
    const double got = o.at(of.tensor_b, h, of.first_q + i, d);
    const double allowed = std::abs(got) / 128 + of_p * size + 1e-7;
    if (std::abs(sum - got) <= allowed) continue;
    std::ostringstream text;
    text << "P of head " << h << ", row " << i << " makes " << sum << " of column " << d << ", where o has " << got;
    wrong_inside_ = text.str();
    return;
  }
}

}  // namespace fa::differential
