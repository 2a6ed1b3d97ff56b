#include "differential/run.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include "differential/pages.hpp"
#include "differential/random.hpp"
#include "driver/driver.hpp"

namespace fa::differential {
namespace {

DType statistics(const Configuration& c) {
  return c.config.dtype == DType::f64 ? DType::f64 : DType::f32;
}

/// Which captures the functions read.
std::vector<bool> used_captures(const Configuration& c) {
  std::vector<bool> used(c.captures.size(), false);
  for (const ExprPtr& function : {c.score, c.mask}) {
    visit(function, [&](const Expr& e) {
      if (e.op == Op::load) used[static_cast<std::size_t>(e.capture)] = true;
    });
  }
  return used;
}

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
  const std::int64_t q = call.longest_q(packed), kv = call.longest_kv(packed);
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

/// The values of a call, and what hostile ones stand where nothing may see them.
class Maker {
 public:
  Maker(const Configuration& c, const Call& call) : c_(c), call_(call), random_(call.values) {}

  Inputs make() {
    const AttentionConfig& config = c_.config;
    const Factors factors = factors_of(call_, random_);
    const std::int64_t d_qk = config.head_dim, d_v = config.head_dim_v;
    in_.q = Tensor(config.dtype, {call_.b, call_.h_q, call_.s_q, d_qk}, call_.q);
    in_.k = Tensor(config.dtype, {call_.b, call_.h_kv, call_.s_kv, d_qk}, call_.k);
    in_.v = Tensor(config.dtype, {call_.b, call_.h_kv, call_.s_kv, d_v}, call_.v);
    in_.dout = Tensor(config.dtype, {call_.b, call_.h_q, call_.s_q, d_v}, call_.dout);
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

/// Arrays that a call names besides tensors.
Tensor integers(const std::vector<std::int32_t>& values, Where where) {
  Tensor t;
  if (values.empty()) return t;
  t = Tensor::dense(DType::i32, {static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) t.set(values[i], static_cast<std::int64_t>(i));
  t.upload(where);
  return t;
}

const std::int32_t* pointer(const Tensor& t) {
  return t.defined() ? static_cast<const std::int32_t*>(t.view().data) : nullptr;
}

/// A result beside what is expected.
class Judge {
 public:
  Judge(Verdict* verdict, double perturb, std::uint64_t seed) : verdict_(verdict), perturb_(perturb), random_(seed) {}

  /// `untouched(s)`: rows of axis 2 that must hold what they held; `exact(s)`: rows of a given value instead.
  template <class Untouched>
  void hold(const char* name, const Tensor& actual, const Expected& expected, const Untouched& untouched) {
    if (!actual.defined()) return;
    if (actual.touched_outside()) complain(name, "written outside of its elements");
    const auto& shape = actual.shape();
    const auto length = [&](std::size_t axis) { return axis < shape.size() ? shape[axis] : 1; };
    double largest = 0;
    for (const double x : expected.value) {
      if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    }
    const auto moved = random_.below(static_cast<std::int64_t>(expected.value.size()));
    std::size_t n = 0;
    for (std::int64_t a = 0; a < length(0); ++a) {
      for (std::int64_t b = 0; b < length(1); ++b) {
        for (std::int64_t c = 0; c < length(2); ++c) {
          const bool alone = untouched(c);
          for (std::int64_t d = 0; d < length(3); ++d, ++n) {
            double got = actual.at(a, b, c, d);
            const double wanted = expected.value[n], bound = expected.bound[n];
            if (perturb_ != 0 && !alone && static_cast<std::int64_t>(n) == moved && std::isfinite(wanted + bound)) {
              got += perturb_ * (bound + 1e-30);
              ++verdict_->moved;
            }
            if (alone ? !std::isnan(got) : !near(got, wanted, bound, largest)) {
              std::ostringstream text;
              text << "[" << a << ", " << b << ", " << c << ", " << d << "] is " << got << ", ";
              if (alone)
                text << "and was not to be written";
              else
                text << "wanted " << wanted << " within " << bound;
              complain(name, text.str());
              return;
            }
            if (!alone && bound > 0) note(name, std::abs(got - wanted) / bound);
          }
        }
      }
    }
  }

 private:
  bool near(double got, double wanted, double bound, double largest) {
    ++verdict_->checked;
    if (std::isinf(bound) || bound > 0.1 * largest) ++verdict_->loose;
    return got == wanted || std::isinf(bound) || std::abs(got - wanted) <= bound;
  }
  void note(const char* name, double ratio) {
    if (!(ratio > verdict_->worst)) return;
    verdict_->worst = ratio;
    verdict_->worst_of = name;
  }
  void complain(const char* name, const std::string& what) {
    verdict_->kind = Verdict::Kind::failed;
    if (verdict_->message.size() < 400)
      verdict_->message += std::string(verdict_->message.empty() ? "" : "; ") + name + " " + what;
  }

  Verdict* verdict_;
  double perturb_;
  Random random_;
};

/// As include/fa/attention.hpp says it.
bool has_aligned_rows(const TensorView& view) {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] * element % 16 != 0) return false;
  }
  return true;
}

/// Everything of one call: tensors on the device, and results.
class Calls {
 public:
  Calls(const Configuration& c, const Call& call, Where where, const Attention& attention)
      : c_(c), call_(call), where_(where), attention_(attention), in_(Maker(c, call).make()) {
    if (c.config.page_size != 0) make_pages();
    for (Tensor* t : {&in_.q, &in_.k, &in_.v, &in_.dout, &in_.dlse, &in_.sink, &in_.stored_k.codes,
                      &in_.stored_k.scales, &in_.stored_v.codes, &in_.stored_v.scales}) {
      if (t->defined()) t->upload(where);
    }
    for (std::size_t i = 0; i < in_.captures.size(); ++i) {
      if (!in_.captures[i].defined()) continue;
      in_.captures[i].upload(where);
    }
    cu_q_ = integers(call.cu_q, where);
    cu_kv_ = integers(call.cu_kv, where);
    used_q_ = integers(call.used_q, where);
    used_kv_ = integers(pages_ ? pages_->lengths : call.used_kv, where);
    if (c.config.dropout > 0 && call.dropout_on_device && where == Where::cuda) {
      state_ = Tensor::dense(DType::f64, {2});  // two words of 64 bits
      double words[2];
      std::memcpy(&words[0], &call.dropout.seed, 8);
      std::memcpy(&words[1], &call.dropout.offset, 8);
      state_.set(words[0], 0), state_.set(words[1], 1);
      state_.upload(where);
    }
  }

  const Inputs& inputs() const { return in_; }

  void forward() {
    const AttentionConfig& config = c_.config;
    o_ = output({call_.b, call_.h_q, call_.s_q, config.head_dim_v}, call_.o, config.dtype);
    if (call_.lse || call_.backward || config.accumulate)
      lse_ = output({call_.b, call_.h_q, call_.s_q}, call_.lse_layout, statistics(c_));
    if (config.accumulate) make_state();
    ForwardInputs in{in_.q.const_view(), keys().const_view(), values().const_view()};
    in.k_scale = (pages_ ? pages_->k_scale : in_.stored_k.scales).const_view();
    in.v_scale = (pages_ ? pages_->v_scale : in_.stored_v.scales).const_view();
    in.cache = cache();
    in.captures = captures();
    if (config.sink) in.sink = in_.sink.const_view();
    in.sequences = sequences();
    in.dropout = dropout();
    in.place = call_.place;
    const AttentionShape shape = shape_of({&in_.q, &keys(), &values(), &o_});
    const Tensor tiles =
        scratch(call_.tiles && where_ == Where::cuda && c_.mask != nullptr ? attention_.mask_tiles_size(shape) : 0);
    in.tiles = {tiles.defined() ? tiles.view().data : nullptr,
                tiles.defined() ? static_cast<std::size_t>(tiles.elements()) * 4 : 0, false};
    const Tensor workspace = scratch(call_.workspace ? attention_.workspace_size(shape) : 0);
    const Tensor lists = schedule(shape, in);
    attention_.forward(in, {o_.view(), lse_.view()}, nullptr, given(workspace));
    if (tiles.defined()) {  // again, with what is known now
      in.tiles.filled = true;
      synchronize();
      o_.refresh();
      if (config.accumulate) lse_.refresh();
      attention_.forward(in, {o_.view(), lse_.view()}, nullptr, given(workspace));
    }
    synchronize();
    check(tiles), check(workspace), check(lists);
    o_.download();
    if (lse_.defined()) lse_.download();
    if (where_ == Where::host && !config.accumulate) look_inside(in);
  }

  /// What a debug call says of itself that is not so; empty if nothing is.
  const std::string& wrong_inside() const { return wrong_inside_; }

  const State& state() const { return other_keys_; }

  void backward(const Results& expected) {
    const AttentionConfig& config = c_.config;
    if (call_.positive_empty_lse) raise_empty_rows(expected);
    BackwardOutputs out;
    const auto [wants_dq, wants_dk, wants_dv] = call_.gradients;
    if (wants_dq) out.dq = (dq_ = output(in_.q.shape(), call_.dq, config.dtype)).view();
    if (wants_dk) out.dk = (dk_ = output(in_.k.shape(), call_.dk, config.dtype)).view();
    if (wants_dv) out.dv = (dv_ = output(in_.v.shape(), call_.dv, config.dtype)).view();
    gradients_.resize(c_.captures.size());
    for (std::size_t i = 0; i < c_.captures.size(); ++i) {
      if (!c_.captures[i].requires_grad || !in_.captures[i].defined() || !declared(i)) continue;
      gradients_[i] = Tensor::dense(statistics(c_), in_.captures[i].shape());
      gradients_[i].upload(where_);
      out.captures.add({c_.captures[i].name, gradients_[i].view()});
    }
    if (config.sink && call_.dsink) {
      dsink_ = Tensor::dense(statistics(c_), {call_.h_q});
      dsink_.upload(where_);
      out.dsink = dsink_.view();
    }
    BackwardInputs in;
    in.q = in_.q.const_view(), in.k = in_.k.const_view(), in.v = in_.v.const_view();
    in.o = o_.const_view(), in.lse = lse_.const_view(), in.dout = in_.dout.const_view(),
    in.dlse = in_.dlse.const_view();
    in.captures = captures();
    if (config.sink) in.sink = in_.sink.const_view();
    in.sequences = sequences();
    in.dropout = dropout();
    in.place = call_.place;
    AttentionShape shape = shape_of({&in_.q, &in_.k, &in_.v, &o_, &in_.dout, &dq_, &dk_, &dv_});
    shape.gradients = call_.gradients;
    const Tensor workspace = scratch(call_.workspace ? attention_.backward_workspace_size(shape) : 0);
    attention_.backward(in, out, nullptr, given(workspace));
    synchronize();
    check(workspace);
    for (Tensor* gradient : {&dq_, &dk_, &dv_}) {
      if (gradient->defined()) gradient->download();
    }
    for (Tensor& gradient : gradients_) {
      if (gradient.defined()) gradient.download();
    }
    if (dsink_.defined()) dsink_.download();
  }

  void judge_forward(const Results& e, Judge* judge) const {
    judge->hold("o", o_, e.o, untouched(e.q_rows));
    judge->hold("lse", lse_, e.lse, untouched(e.q_rows));
  }

  void judge_backward(const Results& e, Judge* judge) const {
    judge->hold("dq", dq_, e.dq, untouched(e.q_rows));
    judge->hold("dk", dk_, e.dk, untouched(e.kv_rows));
    judge->hold("dv", dv_, e.dv, untouched(e.kv_rows));
    const auto never = [](std::int64_t) { return false; };
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      judge->hold(("gradient of " + c_.captures[i].name).c_str(), gradients_[i],
                  gradients_[i].defined() ? e.captures[i] : Expected{}, never);
    }
    judge->hold("dsink", dsink_, e.dsink, never);
  }

  bool scratch_touched() const { return scratch_touched_; }

 private:
  /// The same as a debug call: it names a broken number where a result has one, and there alone. P of a head makes O.
  void look_inside(const ForwardInputs& in) {
    Random random(call_.values + 31);
    const std::vector<Segment> segments = segments_of(c_, call_);
    if (segments.empty() || call_.h_q == 0) return;
    const auto which = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(segments.size())));
    const Segment& segment = segments[which];
    const std::int64_t h = random.below(call_.h_q);
    const bool ragged = c_.config.varlen || c_.config.page_size != 0;
    Tensor p =
        Tensor::dense(statistics(c_), {ragged ? segment.s_q + 1 : call_.s_q, ragged ? segment.s_kv + 1 : call_.s_kv});
    p.poison();
    p.upload(where_);
    Tensor o = output({call_.b, call_.h_q, call_.s_q, c_.config.head_dim_v}, call_.o, c_.config.dtype);
    Tensor lse = output({call_.b, call_.h_q, call_.s_q}, call_.lse_layout, statistics(c_));
    AttentionConfig config = c_.config;
    config.debug = true;
    std::string said;
    try {
      ForwardOutputs outputs{o.view(), lse.view()};
      outputs.dump = {p.view(), static_cast<std::int64_t>(which), h};
      Attention::create(config, Device::host()).forward(in, outputs);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::not_finite) throw;
      said = error.what();
    }
    o.download(), lse.download();
    const bool broken = std::ranges::any_of(segments, [&](const Segment& of) { return is_broken(of, o, lse); });
    if (broken == said.empty()) wrong_inside_ = broken ? "nothing is said of a broken number" : "it is said: " + said;
    if (broken || segment.s_kv == 0) return;
    p.download();
    for (std::int64_t i = 0; i < segment.s_q; ++i) compare_p(segment, h, i, p, o);
    if (!pages_ && !in_.stored_v.codes.defined() && call_.v.expanded == 0) name_a_nan(in, segment, h, p, o, lse);
  }

  /// One NaN in a row of V that has a weight is what is named.
  void name_a_nan(ForwardInputs in, const Segment& of, std::int64_t h, const Tensor& p, const Tensor& o,
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

  bool is_broken(const Segment& of, const Tensor& o, const Tensor& lse) const {
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

  /// A row of P by V, of which what has no weight may be anything.
  void compare_p(const Segment& of, std::int64_t h, std::int64_t i, const Tensor& p, const Tensor& o) {
    const std::int64_t h_kv = h / (call_.h_q / call_.h_kv);
    for (std::int64_t d = 0; d < c_.config.head_dim_v; ++d) {
      double sum = 0, size = 0;
      for (std::int64_t j = 0; j < of.s_kv; ++j) {
        const double weight = p.at(i, j);
        if (weight == 0) continue;
        const double term = weight * in_.v.at(of.tensor_b, h_kv, of.first_kv + j, d);
        sum += term, size += std::abs(term);
      }
      const double got = o.at(of.tensor_b, h, of.first_q + i, d);
      const double allowed = std::abs(got) / 128 + 1e-4 * size + 1e-7;
      if (std::abs(sum - got) <= allowed) continue;
      std::ostringstream text;
      text << "P of head " << h << ", row " << i << " makes " << sum << " of column " << d << ", where o has " << got;
      wrong_inside_ = text.str();
      return;
    }
  }

  /// Rows of sequences get what other keys may have come to, some of them nothing, and then anything in o.
  void make_state() {
    Random random(call_.values + 977);
    const std::int64_t d_v = c_.config.head_dim_v;
    other_keys_.o.assign(static_cast<std::size_t>(call_.b * call_.h_q * call_.s_q * d_v), std::nan(""));
    other_keys_.lse.assign(static_cast<std::size_t>(call_.b * call_.h_q * call_.s_q), std::nan(""));
    for (const Segment& segment : segments_of(c_, call_)) {
      for (std::int64_t h = 0; h < call_.h_q; ++h) {
        for (std::int64_t i = 0; i < segment.s_q; ++i) {
          const std::int64_t s = segment.first_q + i;
          const auto row = static_cast<std::size_t>((segment.tensor_b * call_.h_q + h) * call_.s_q + s);
          const bool none = random.percent(25);
          const double infinity = random.percent(50) ? HUGE_VAL : -HUGE_VAL;
          const double lse = none ? infinity : random.pick({0.0, 3.0, 6.0, 60.0, -60.0}) + random.normal();
          lse_.set(lse, segment.tensor_b, h, s);
          other_keys_.lse[row] = lse_.rounded(lse);
          for (std::int64_t d = 0; d < d_v; ++d) {
            const double value = none ? std::nan("") : random.normal();
            o_.set(value, segment.tensor_b, h, s, d);
            other_keys_.o[row * static_cast<std::size_t>(d_v) + static_cast<std::size_t>(d)] = o_.rounded(value);
          }
        }
      }
    }
    o_.upload(where_), lse_.upload(where_);
  }

  void make_pages() {
    pages_.emplace(c_, call_, in_);
    for (Tensor* t : {&pages_->k, &pages_->v, &pages_->k_scale, &pages_->v_scale}) {
      if (t->defined()) t->upload(where_);
    }
    table_ = integers(pages_->table, where_);
    index_ = integers(pages_->index, where_);
    begin_ = integers(call_.begin, where_);
  }
  const Tensor& keys() const { return pages_ ? pages_->k : in_.stored_k.codes.defined() ? in_.stored_k.codes : in_.k; }
  const Tensor& values() const {
    return pages_ ? pages_->v : in_.stored_v.codes.defined() ? in_.stored_v.codes : in_.v;
  }

  /// Memory of a schedule, which `in` has then.
  Tensor schedule(const AttentionShape& shape, ForwardInputs& in) {
    if (!pages_ || !call_.scheduled) return {};
    AttentionShape limits = shape;
    limits.s_kv = pages_->longest;
    Tensor lists = scratch(attention_.schedule_size(limits));
    if (lists.defined()) in.schedule = {lists.view().data, static_cast<std::size_t>(lists.elements()) * 4};
    attention_.schedule({limits, in.sequences, in.cache.seq_begin}, in.schedule);
    return lists;
  }

  PagedCache cache() const {
    PagedCache cache;
    if (!pages_) return cache;
    if (c_.config.page_size > 0) {
      cache.block_table =
          TensorView(static_cast<const void*>(pointer(table_)), DType::i32, {pages_->rows, pages_->max_pages});
    }
    cache.batch_index = pointer(index_);
    cache.seq_begin = pointer(begin_);
    return cache;
  }

  bool declared(std::size_t i) const {
    return std::ranges::any_of(c_.config.score.captures, [&](const Capture& capture) {
      return capture.name == c_.captures[i].name && capture.requires_grad;
    });
  }

  Tensor output(const std::vector<std::int64_t>& shape, const Layout& layout, DType dtype) const {
    Tensor t(dtype, shape, layout);
    t.poison();
    t.upload(where_);
    return t;
  }

  /// Memory of exactly as many bytes, with guards. Its contents are arbitrary.
  Tensor scratch(std::size_t bytes) const {
    if (bytes == 0) return {};
    Tensor t = Tensor::dense(DType::i32, {static_cast<std::int64_t>((bytes + 3) / 4)});
    t.upload(where_);
    return t;
  }
  void check(Tensor t) {
    if (!t.defined()) return;
    t.download();
    if (t.touched_outside()) scratch_touched_ = true;
  }
  static Workspace given(const Tensor& t) {
    return t.defined() ? Workspace{t.view().data, static_cast<std::size_t>(t.elements()) * 4} : Workspace{};
  }

  /// Of a call with these tensors: a strange layout may well be aligned, and of a mixed one every tensor.
  AttentionShape shape_of(std::initializer_list<const Tensor*> tensors) const {
    AttentionShape shape{.b = call_.b, .h_q = call_.h_q, .h_kv = call_.h_kv, .s_q = call_.s_q, .s_kv = call_.s_kv};
    shape.aligned =
        std::ranges::all_of(tensors, [](const Tensor* t) { return !t->defined() || has_aligned_rows(t->view()); });
    shape.placed = call_.place.has_value();
    shape.strided = call_.place && (call_.place->q_step != 1 || call_.place->kv_step != 1);
    if (!c_.config.varlen) return shape;
    shape.b = call_.sequences(true);
    shape.s_q = call_.max_s_q, shape.s_kv = pages_ ? pages_->longest : call_.max_s_kv;
    shape.total_q = call_.s_q, shape.total_kv = call_.s_kv;
    return shape;
  }

  PackedSequences sequences() const {
    if (pages_) {
      return {.b = call_.sequences(c_.config.varlen),
              .cu_seqlens_q = pointer(cu_q_),
              .seqused_q = pointer(used_q_),
              .seqused_kv = pointer(used_kv_),
              .max_s_q = call_.max_s_q,
              .max_s_kv = pages_->longest};
    }
    if (!c_.config.varlen) return {};
    return {.b = call_.sequences(true),
            .cu_seqlens_q = pointer(cu_q_),
            .cu_seqlens_kv = pointer(cu_kv_),
            .seqused_q = pointer(used_q_),
            .seqused_kv = pointer(used_kv_),
            .max_s_q = call_.max_s_q,
            .max_s_kv = call_.max_s_kv};
  }

  DropoutState dropout() const {
    if (c_.config.dropout == 0) return {};
    if (!state_.defined()) return call_.dropout;
    return {.device = static_cast<const std::uint64_t*>(state_.view().data)};
  }

  Captures captures() const {
    Captures given;
    const std::vector<bool> used = used_captures(c_);
    for (std::size_t i = 0; i < c_.captures.size(); ++i) {
      if (!used[i]) continue;
      const CaptureChoice& choice = c_.captures[i];
      if (choice.axes.empty() && choice.as_number) {
        given.add({choice.name, in_.numbers[i]});
      } else {
        given.add({choice.name, in_.captures[i].const_view()});
      }
    }
    return given;
  }

  /// Of rows without keys either infinity is accepted.
  void raise_empty_rows(const Results& expected) {
    std::size_t n = 0;
    for (std::int64_t b = 0; b < call_.b; ++b) {
      for (std::int64_t h = 0; h < call_.h_q; ++h) {
        for (std::int64_t s = 0; s < call_.s_q; ++s, ++n) {
          if (expected.empty_rows[n] && !c_.config.sink) lse_.set(std::numeric_limits<double>::infinity(), b, h, s);
        }
      }
    }
    lse_.refresh();
  }

  std::function<bool(std::int64_t)> untouched(const std::vector<bool>& rows) const {
    const bool alone = c_.config.varlen && !c_.config.zero_padding;
    return [alone, &rows](std::int64_t s) { return alone && !rows[static_cast<std::size_t>(s)]; };
  }

  void synchronize() const {
    if (where_ == Where::cuda) driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  }

  const Configuration& c_;
  const Call& call_;
  Where where_;
  const Attention& attention_;
  Inputs in_;
  Tensor cu_q_, cu_kv_, used_q_, used_kv_, state_;
  std::optional<Pages> pages_;
  Tensor table_, index_, begin_;
  Tensor o_, lse_, dq_, dk_, dv_, dsink_;
  std::vector<Tensor> gradients_;
  State other_keys_;
  bool scratch_touched_ = false;
  std::string wrong_inside_;
};

/// What `judge(verdict)` finds, or why the library refused.
template <class Function>
Verdict verdict_of(const Function& judge) {
  Verdict verdict;
  try {
    judge(verdict);
  } catch (const Error& error) {
    verdict.kind = error.code() == ErrorCode::unsupported ? Verdict::Kind::skipped : Verdict::Kind::failed;
    verdict.message = std::string(fa::to_string(error.code())) + ": " + error.what();
    verdict.context_lost = error.code() == ErrorCode::cuda;
  }
  return verdict;
}

Arithmetic arithmetic_of(const Configuration& c, Where where) {
  return {c.config.dtype == DType::f64 || (where == Where::host && c.config.host_f64), where == Where::cuda};
}

/// The device's, for as long as the process lives: what a runner leaves behind must stay usable.
void make_context_current() {
  static const driver::ContextRef context = driver::ContextRef::acquire(Device::cuda(0));
  driver::check(driver::api().cuCtxSetCurrent(context.context()), "cuCtxSetCurrent");
}

}  // namespace

Runner::Runner(Configuration configuration, Where where, const std::string& cache_directory)
    : c_(std::move(configuration)), where_(where) {
  if (where == Where::cuda) make_context_current();
  AttentionConfig config = c_.config;
  if (!cache_directory.empty()) config.cache.directory = cache_directory;
  config.on_compile = [counter = compilations_](const CompileEvent& event) {
    if (event.phase == CompileEvent::Phase::finished) ++*counter;
  };
  attention_ =
      std::make_unique<Attention>(Attention::create(config, where == Where::host ? Device::host() : Device::cuda(0)));
}

Verdict evaluate_only(const Configuration& c, const Call& call, Where where) {
  Verdict verdict;
  const Inputs inputs = Maker(c, call).make();
  const Results results = evaluate(c, call, inputs, arithmetic_of(c, where));
  std::vector<const Expected*> all{&results.o, &results.lse, &results.dq, &results.dk, &results.dv, &results.dsink};
  for (const Expected& capture : results.captures) all.push_back(&capture);
  for (const Expected* e : all) {
    double largest = 0;
    for (const double x : e->value) largest = std::isfinite(x) ? std::max(largest, std::abs(x)) : largest;
    for (const double bound : e->bound) verdict.loose += bound > 0.1 * largest ? 1 : 0;
    verdict.checked += e->value.size();
  }
  return verdict;
}

Verdict Runner::run(const Call& call, Mistake mistake, double perturb) {
  return verdict_of([&](Verdict& verdict) {
    Calls calls(c_, call, where_, *attention_);
    Results expected = evaluate(c_, call, calls.inputs(), arithmetic_of(c_, where_), mistake);
    Judge judge(&verdict, perturb, call.values);
    calls.forward();
    if (c_.config.accumulate) join_state(c_, calls.state(), expected, mistake);
    calls.judge_forward(expected, &judge);
    // What keys that no row sees hold may reach gradients through the tiles that they lie in.
    const bool forward_only = where_ == Where::cuda && call.hostile == Hostile::unseen_keys;
    if (call.backward && !forward_only) {
      calls.backward(expected);
      calls.judge_backward(expected, &judge);
    }
    if (calls.scratch_touched()) {
      verdict.kind = Verdict::Kind::failed;
      verdict.message += " workspace or tiles: written outside";
    }
    if (!calls.wrong_inside().empty()) {
      verdict.kind = Verdict::Kind::failed;
      verdict.message += " debug call: " + calls.wrong_inside();
    }
  });
}

Verdict Runner::call_only(const Call& call) {
  return verdict_of([&](Verdict&) {
    Calls calls(c_, call, where_, *attention_);
    calls.forward();
    Results none;
    none.empty_rows.assign(static_cast<std::size_t>(call.b * call.h_q * call.s_q), false);
    if (call.backward) calls.backward(none);
  });
}

}  // namespace fa::differential
