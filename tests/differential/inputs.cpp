#include "differential/inputs.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "differential/bytes.hpp"
#include "differential/random.hpp"

namespace fa::differential {

DType statistics(const Configuration& c) {
  return c.config.dtype == DType::f64 ? DType::f64 : DType::f32;
}

std::vector<bool> used_captures(const Configuration& c) {
  std::vector<bool> used(c.captures.size(), false);
  for (const ExprPtr& function : {c.score, c.mask}) {
    visit(function, [&](const Expr& e) {
      if (e.op == Op::load) used[static_cast<std::size_t>(e.capture)] = true;
    });
  }
  return used;
}

namespace {

/// How inputs are multiplied, for scores and values of unusual sizes that every dtype holds.
struct Factors {
  double q = 1, k = 1, v = 1, dout = 1;
};
Factors factors_of(const Call& call, Random& random) {
  if (call.hostile == Hostile::large) {
    return {random.pick({4.0, 30.0, 100.0}), random.pick({1.0, 5.0}), random.pick({1.0, 200.0}),
            random.pick({1.0, 8.0})};
  }
  if (call.hostile == Hostile::tiny) {
    return {random.pick({1e-4, 1e-3}), random.pick({1.0, 1e-3}), random.pick({1.0, 1e-3}), random.pick({1.0, 1e-3})};
  }
  return {};
}

void fill(Tensor& t, Random& random, double factor) {
  const auto length = [&](std::size_t axis) { return axis < t.shape().size() ? t.shape()[axis] : 1; };
  for (std::int64_t a = 0; a < length(0); ++a) {
    for (std::int64_t b = 0; b < length(1); ++b) {
      for (std::int64_t c = 0; c < length(2); ++c) {
        for (std::int64_t d = 0; d < length(3); ++d) t.set(factor * random.normal(), a, b, c, d);
      }
    }
  }
}

void fill_row(Tensor& t, std::int64_t b, std::int64_t h, std::int64_t s, double value) {
  const std::int64_t count = t.shape().size() == 4 ? t.shape()[3] : 1;
  for (std::int64_t d = 0; d < count; ++d) t.set(value, b, h, s, d);
}

double captured_value(const CaptureChoice& choice, const Call& call, Random& random, double* document) {
  using Values = CaptureChoice::Values;
  switch (choice.values) {
    case Values::centred:
      return 2 * random.uniform() - 1;
    case Values::positive:
      return 0.05 + 0.4 * random.uniform();
    case Values::documents:
      return *document += random.percent(10) ? 1 : 0;
    case Values::prefix:
      return static_cast<double>(random.between(0, call.place ? call.place->whole_s_kv : call.s_kv));
    case Values::small_integers:
      return static_cast<double>(random.between(-5, 70));
    case Values::bits:
      return static_cast<double>(random.between(-(std::int64_t{1} << 31), (std::int64_t{1} << 31) - 1));
    case Values::keep:
      return random.percent(60) ? 1 : 0;
  }
  return 0;
}

std::vector<std::int64_t> shape_of(const CaptureChoice& choice, const Configuration& c, const Call& call) {
  std::vector<std::int64_t> shape;
  const bool packed = c.config.varlen;
  const std::int64_t q = call.longest_q(packed), kv = call.longest_kv(c.config);
  for (const Axis axis : choice.axes) {
    switch (axis) {
      case Axis::b:
        shape.push_back(call.entries_of_captures(packed));
        break;
      case Axis::h:
        shape.push_back(call.heads_of_captures());
        break;
      case Axis::q:
        shape.push_back(q);
        break;
      case Axis::kv:
        shape.push_back(kv);
        break;
      case Axis::both:
        shape.push_back(std::max(q, kv));
        break;
      case Axis::fixed:
        shape.push_back(choice.fixed);
        break;
      case Axis::broadcast:
        shape.push_back(1);
        break;
    }
  }
  return shape;
}

class Maker {
 public:
  Maker(const Configuration& c, const Call& call) : c_(c), call_(call), random_(call.values) {}

  Inputs make() {
    const AttentionConfig& config = c_.config;
    const Factors factors = factors_of(call_, random_);
    const std::int64_t d_qk = config.head_dim, d_v = config.head_dim_v;
    const DType dtype = has_bytes(config) ? DType::f64 : config.dtype;
    in_.q = Tensor(dtype, {call_.b, call_.h_q, call_.s_q, d_qk}, call_.q);
    in_.k = Tensor(dtype, {call_.b, call_.h_kv, call_.s_kv, d_qk}, call_.k);
    in_.v = Tensor(dtype, {call_.b, call_.h_kv, call_.s_kv, d_v}, call_.v);
    in_.dout = Tensor(dtype, {call_.b, call_.h_q, call_.s_q, d_v}, call_.dout);
    fill(in_.q, random_, factors.q);
    fill(in_.k, random_, factors.k);
    fill(in_.v, random_, factors.v);
    fill(in_.dout, random_, factors.dout);
    if (call_.hostile == Hostile::equal_keys) repeat_keys();
    if (call_.dlse) {
      in_.dlse = Tensor(statistics(c_), {call_.b, call_.h_q, call_.s_q}, call_.dlse_layout);
      fill(in_.dlse, random_, 1);
    }
    if (config.sink) {
      in_.sink = Tensor::dense(statistics(c_), {call_.h_q});
      fill(in_.sink, random_, 1.5);
    }
    make_captures();
    spoil();
    Random random(call_.values + 131);
    if (has_bytes(config)) {
      store_bytes(c_, call_, random, in_);
      return std::move(in_);
    }
    in_.stored_k = store(in_.k, config.k_dtype, config.group_size, call_.k, random);
    in_.stored_v = store(in_.v, config.v_dtype, config.group_size, call_.v, random);
    return std::move(in_);
  }

 private:
  void repeat_keys() {
    for (std::int64_t b = 0; b < call_.b; ++b) {
      for (std::int64_t h = 0; h < call_.h_kv; ++h) {
        for (std::int64_t s = 1; s < call_.s_kv; ++s) {
          for (std::int64_t d = 0; d < c_.config.head_dim; ++d) in_.k.set(in_.k.at(b, h, 0, d), b, h, s, d);
          for (std::int64_t d = 0; d < c_.config.head_dim_v; ++d) in_.v.set(in_.v.at(b, h, 0, d), b, h, s, d);
        }
      }
    }
  }

  void make_captures() {
    const std::vector<bool> used = used_captures(c_);
    in_.captures.resize(c_.captures.size());
    in_.numbers.resize(c_.captures.size());
    for (std::size_t i = 0; i < c_.captures.size(); ++i) {
      Random random(call_.values + 31 * i + 5);
      const CaptureChoice& choice = c_.captures[i];
      double document = 0;
      if (choice.axes.empty() && choice.as_number) {
        in_.numbers[i] = Tensor::dense(choice.dtype, {1}).rounded(captured_value(choice, call_, random, &document));
      }
      if (!used[i] || (choice.axes.empty() && choice.as_number && !choice.requires_grad)) continue;
      std::vector<std::int64_t> shape = shape_of(choice, c_, call_);
      if (shape.empty()) shape = {1};
      Tensor& t = in_.captures[i] = Tensor::capture(choice.dtype, shape, call_.capture);
      const auto length = [&](std::size_t axis) { return axis < shape.size() ? shape[axis] : 1; };
      for (std::int64_t a = 0; a < length(0); ++a) {
        for (std::int64_t b = 0; b < length(1); ++b) {
          for (std::int64_t c = 0; c < length(2); ++c) {
            for (std::int64_t d = 0; d < length(3); ++d)
              t.set(captured_value(choice, call_, random, &document), a, b, c, d);
          }
        }
      }
      if (choice.axes.empty() && choice.as_number) t.set(in_.numbers[i], 0);
    }
  }

  /// NaN in rows of no sequence, and where the call says so in keys that no row sees and in rows that see no key.
  void spoil() {
    const double nan = std::nan("");
    const auto spoil_outside = [&](Tensor& t, bool keys, const Layout& layout) {
      if (!c_.config.varlen || !t.defined() || layout.expanded != 0) return;
      std::vector<bool> inside(static_cast<std::size_t>(t.shape()[2]), false);
      for (const Segment& s : segments_of(c_, call_)) {
        const std::int64_t first = keys ? s.first_kv : s.first_q, count = keys ? s.s_kv : s.s_q;
        for (std::int64_t n = 0; n < count; ++n) inside[static_cast<std::size_t>(first + n)] = true;
      }
      for (std::int64_t h = 0; h < t.shape()[1]; ++h) {
        for (std::int64_t s = 0; s < t.shape()[2]; ++s) {
          if (!inside[static_cast<std::size_t>(s)]) fill_row(t, 0, h, s, nan);
        }
      }
    };
    spoil_outside(in_.q, false, call_.q);
    spoil_outside(in_.k, true, call_.k);
    spoil_outside(in_.v, true, call_.v);
    spoil_outside(in_.dout, false, call_.dout);
    spoil_outside(in_.dlse, false, call_.dlse_layout);
    if (call_.hostile != Hostile::unseen_keys && call_.hostile != Hostile::empty_rows) return;
    Function mask = mask_function(c_, in_);
    for (const Segment& segment : segments_of(c_, call_)) spoil(segment, mask);
  }

  void spoil(const Segment& s, Function& mask) {
    const std::int64_t group = call_.h_kv == 0 ? 1 : call_.h_q / call_.h_kv;
    std::vector<bool> seen(static_cast<std::size_t>(call_.h_kv * s.s_kv), false);
    const bool rows = call_.hostile == Hostile::empty_rows && !c_.config.sink;
    for (std::int64_t h = 0; h < call_.h_q; ++h) {
      for (std::int64_t i = 0; i < s.s_q; ++i) {
        bool empty = true;
        for (std::int64_t j = s.begin; j < s.s_kv; ++j) {
          const Place at = in_whole(call_, {s.b, h, i, j, s.s_q, s.s_kv});
          if (!in_closed_form(c_.config, at.s_q, at.s_kv, at.q, at.kv)) continue;
          if (mask.defined() && !mask.boolean_at(at)) continue;
          seen[static_cast<std::size_t>(h / group * s.s_kv + j)] = true;
          empty = false;
        }
        if (!rows || !empty) continue;
        if (call_.q.expanded == 0) fill_row(in_.q, s.tensor_b, h, s.first_q + i, std::nan(""));
        if (call_.dout.expanded == 0) fill_row(in_.dout, s.tensor_b, h, s.first_q + i, std::nan(""));
        if (call_.dlse && call_.dlse_layout.expanded == 0)
          fill_row(in_.dlse, s.tensor_b, h, s.first_q + i, std::nan(""));
      }
    }
    if (call_.hostile != Hostile::unseen_keys || call_.k.expanded != 0) return;
    for (std::int64_t h = 0; h < call_.h_kv; ++h) {
      for (std::int64_t j = 0; j < s.s_kv; ++j) {
        if (!seen[static_cast<std::size_t>(h * s.s_kv + j)])
          fill_row(in_.k, s.tensor_b, h, s.first_kv + j, std::nan(""));
      }
    }
  }

  const Configuration& c_;
  const Call& call_;
  Random random_;
  Inputs in_;
};

}  // namespace

Inputs make_inputs(const Configuration& configuration, const Call& call) {
  return Maker(configuration, call).make();
}

}  // namespace fa::differential
