#include "differential/functions.hpp"

#include <string>
#include <utility>

namespace fa::differential {
namespace {

using Values = CaptureChoice::Values;

class Writer {
 public:
  Writer(Random& random, Configuration& configuration, Where where, bool gradients)
      : random_(random), c_(configuration), where_(where), gradients_(gradients) {}

  ExprPtr score() {
    switch (random_.below(9)) {
      case 0:
        return softcap(leaf(Op::score));
      case 1:
        return alibi(leaf(Op::score));
      case 2:
        return bias(leaf(Op::score));
      case 3:
        return table(leaf(Op::score));
      case 4:
        return learned(leaf(Op::score));
      case 5:
        return bias(softcap(leaf(Op::score)));
      case 6:
        return softcap(alibi(leaf(Op::score)));
      default:
        return wild();
    }
  }

  ExprPtr mask() {
    switch (random_.below(9)) {
      case 8:
        return tree();
      case 0:
        return documents();
      case 1:
        return prefix();
      case 2:
        return blocks();
      case 3:
        return make(Op::logical_or,
                    {make(Op::equal, {make(Op::modulo, {make(Op::subtract, {q(), kv()}), integer(4)}), integer(0)}),
                     make(Op::less, {kv(), integer(3)})});
      case 4:
        return make(Op::logical_and, {documents(), boolean(1)});
      default:
        return boolean(3);
    }
  }

 private:
  static ExprPtr q() { return leaf(Op::q); }
  static ExprPtr kv() { return leaf(Op::kv); }
  /// kv's distance from the diagonal of the last key.
  static ExprPtr distance() {
    return make(Op::subtract, {make(Op::subtract, {make(Op::add, {q(), leaf(Op::s_kv)}), leaf(Op::s_q)}), kv()});
  }

  DType real_dtype() {
    if (where_ == Where::host && random_.percent(15)) return DType::f64;
    return random_.pick({DType::f32, DType::f32, DType::bf16, DType::f16});
  }

  /// A new capture, or -1 where there are as many as a call takes.
  int add(const char* stem, DType dtype, std::vector<Axis> axes, Values values, bool gradient) {
    if (c_.captures.size() >= Captures::kMax) return -1;
    CaptureChoice capture;
    capture.name = stem + std::to_string(c_.captures.size());
    capture.dtype = dtype;
    capture.axes = std::move(axes);
    capture.values = values;
    capture.requires_grad = gradient && gradients_ && !in_mask_ && dtype != DType::i32;
    capture.as_number = capture.axes.empty() && random_.percent(60);
    c_.captures.push_back(capture);
    return static_cast<int>(c_.captures.size()) - 1;
  }

  ExprPtr indexed(int capture) {
    std::vector<ExprPtr> indices;
    for (const Axis axis : c_.captures[static_cast<std::size_t>(capture)].axes) {
      indices.push_back(axis == Axis::b ? leaf(Op::b) : axis == Axis::h ? leaf(Op::h) : axis == Axis::q ? q() : kv());
    }
    return load(capture, indices, c_.captures[static_cast<std::size_t>(capture)].dtype == DType::i32);
  }

  ExprPtr softcap(const ExprPtr& x) {
    if (random_.percent(50)) {
      const double cap = random_.pick({2.0, 3.0, 4.0, 30.0, 50.0});
      return make(Op::multiply, {real(cap), make(Op::tanh, {make(Op::divide, {x, real(cap)})})});
    }
    const int cap = add("cap", DType::f32, {}, Values::positive, true);
    if (cap < 0) return x;
    const ExprPtr c = make(Op::add, {real(2), load(cap, {})});
    return make(Op::multiply, {c, make(Op::tanh, {make(Op::divide, {x, c})})});
  }

  ExprPtr alibi(const ExprPtr& x) {
    const int slope = add("slope", DType::f32, {Axis::h}, Values::positive, true);
    if (slope < 0) return x;
    const ExprPtr away = make(Op::to_real, {make(Op::absolute, {distance()})});
    return make(Op::subtract, {x, make(Op::multiply, {indexed(slope), away})});
  }

  ExprPtr bias(const ExprPtr& x) {
    static const std::vector<std::vector<Axis>> kAxes{{Axis::b, Axis::h, Axis::q, Axis::kv},
                                                      {Axis::h, Axis::q, Axis::kv},
                                                      {Axis::q, Axis::kv},
                                                      {Axis::kv},
                                                      {Axis::b, Axis::kv},
                                                      {Axis::h, Axis::kv},
                                                      {Axis::b, Axis::h},
                                                      {Axis::q}};
    std::vector<Axis> axes = kAxes[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(kAxes.size())))];
    const int capture = add("bias", real_dtype(), axes, Values::centred, true);
    if (capture < 0) return x;
    const ExprPtr loaded = indexed(capture);
    if (random_.percent(20)) c_.captures[static_cast<std::size_t>(capture)].axes[0] = Axis::broadcast;
    return make(Op::add, {x, loaded});
  }

  ExprPtr table(const ExprPtr& x) {
    const std::int64_t most = random_.pick<std::int64_t>({0, 3, 5, 40});
    const int capture = add("table", real_dtype(), {Axis::h, Axis::fixed}, Values::centred, true);
    if (capture < 0) return x;
    c_.captures[static_cast<std::size_t>(capture)].fixed = 2 * most + 1;
    const ExprPtr index = make(
        Op::add, {make(Op::clamp, {make(Op::negate, {distance()}), integer(-most), integer(most)}), integer(most)});
    return make(Op::add, {x, load(capture, {leaf(Op::h), index})});
  }

  ExprPtr learned(const ExprPtr& x) {
    const int gain = add("gain", DType::f32, {}, Values::positive, true);
    const int offset = add("offset", real_dtype(), {Axis::h, Axis::q}, Values::centred, true);
    if (gain < 0 || offset < 0) return x;
    const ExprPtr step = make(Op::to_real, {make(Op::modulo, {kv(), integer(3)})});
    return make(Op::add, {make(Op::multiply, {x, load(gain, {})}), make(Op::multiply, {indexed(offset), step})});
  }

  /// A random tree, kept within what leaves a softmax something to do.
  ExprPtr wild() {
    ExprPtr tree = number(3);
    if (random_.percent(60)) tree = make(Op::add, {leaf(Op::score), tree});
    tree = random_.percent(70) ? make(Op::clamp, {tree, real(-8), real(8)})
                               : make(Op::multiply, {real(4), make(Op::tanh, {make(Op::divide, {tree, real(4)})})});
    if (random_.percent(30)) tree = make(Op::select, {boolean(2), tree, make(Op::negate, {real(HUGE_VAL)})});
    return tree;
  }

  ExprPtr documents() {
    const bool batched = random_.percent(30);
    const int doc = add("doc", DType::i32, batched ? std::vector{Axis::b, Axis::both} : std::vector{Axis::both},
                        Values::documents, false);
    if (doc < 0) return boolean(1);
    const auto at = [&](const ExprPtr& place) {
      return batched ? load(doc, {leaf(Op::b), place}, true) : load(doc, {place}, true);
    };
    return make(Op::equal, {at(q()), at(kv())});
  }

  ExprPtr prefix() {
    const int capture = add("prefix", DType::i32, {Axis::b}, Values::prefix, false);
    if (capture < 0) return boolean(1);
    return make(Op::logical_or,
                {make(Op::less, {kv(), indexed(capture)}), make(Op::greater_equal, {distance(), integer(0)})});
  }

  /// Of drafts at the end; rows beyond the words' share the last one.
  ExprPtr tree() {
    const int capture = add("tree", DType::i32, {Axis::b, Axis::q, Axis::fixed}, Values::bits, false);
    if (capture < 0) return boolean(1);
    const std::int64_t words = random_.pick<std::int64_t>({1, 2, 9});
    c_.captures[static_cast<std::size_t>(capture)].fixed = words;
    const ExprPtr context = make(Op::subtract, {leaf(Op::s_kv), leaf(Op::s_q)});
    const ExprPtr draft = make(Op::subtract, {kv(), context});
    const ExprPtr word = make(Op::clamp, {make(Op::shift_right, {draft, integer(5)}), integer(0), integer(words - 1)});
    const ExprPtr seen = make(Op::bit, {load(capture, {leaf(Op::b), q(), word}, true), draft});
    const ExprPtr before = random_.percent(50) ? make(Op::less, {kv(), context})
                                               : make(Op::logical_not, {make(Op::less_equal, {context, kv()})});
    return random_.percent(70) ? make(Op::logical_or, {before, seen})
                               : make(Op::select, {before, make(Op::less, {kv(), integer(40)}), seen});
  }

  ExprPtr blocks() {
    const int capture = add("keep", DType::i32, {Axis::fixed, Axis::fixed}, Values::keep, false);
    if (capture < 0) return boolean(1);
    CaptureChoice& choice = c_.captures[static_cast<std::size_t>(capture)];
    choice.fixed = 6;
    const std::int64_t rows = random_.pick<std::int64_t>({16, 32, 64}),
                       keys = random_.pick<std::int64_t>({16, 64, 128});
    const auto block = [](const ExprPtr& place, std::int64_t size) {
      return make(Op::minimum, {make(Op::divide, {place, integer(size)}), integer(5)});
    };
    return make(Op::not_equal, {load(capture, {block(q(), rows), block(kv(), keys)}, true), integer(0)});
  }

  ExprPtr number(int depth) {
    if (depth == 0 || random_.percent(15)) return real_leaf();
    const auto one = [&] { return number(depth - 1); };
    const auto least_one = [&] { return make(Op::add, {make(Op::absolute, {one()}), real(1)}); };
    switch (random_.below(22)) {
      case 0:
      case 1:
        return make(Op::add, {one(), one()});
      case 2:
        return make(Op::subtract, {one(), one()});
      case 3:
      case 4:
        return make(Op::multiply, {one(), one()});
      case 5:
        return make(Op::divide, {one(), least_one()});
      case 6:
        return make(Op::tanh, {one()});
      case 7:
        return make(Op::sin, {one()});
      case 8:
        return make(Op::cos, {one()});
      case 9:
        return make(Op::log, {least_one()});
      case 10:
        return make(Op::log2, {least_one()});
      case 11:
        return make(Op::exp, {make(Op::minimum, {one(), real(3)})});
      case 12:
        return make(Op::exp2, {make(Op::minimum, {one(), real(4)})});
      case 13:
        return make(Op::sqrt, {least_one()});
      case 14:
        return make(Op::rsqrt, {least_one()});
      case 15:
        return make(Op::sigmoid, {one()});
      case 16:
        return make(Op::minimum, {one(), one()});
      case 17:
        return make(Op::maximum, {one(), one()});
      case 18:
        return make(Op::select, {boolean(depth - 1), one(), one()});
      case 19:
        return make(Op::clamp, {one(), real(-2.5), real(3.5)});
      case 20:
        return make(random_.percent(50) ? Op::floor : Op::ceil, {one()});
      default:
        return make(Op::negate, {make(Op::absolute, {one()})});
    }
  }

  ExprPtr real_leaf() {
    switch (random_.below(7)) {
      case 0:
      case 1:
        return leaf(Op::score);
      case 2:
        return real(random_.pick({0.5, 2.0, -1.25, 0.1, 3.0}));
      case 3:
        return make(Op::to_real, {whole(1)});
      case 4:
        return make(Op::multiply, {real(0.0625), make(Op::to_real, {make(Op::subtract, {kv(), q()})})});
      case 5: {
        const int gain = add("gain", real_dtype(), {}, random_.percent(50) ? Values::centred : Values::positive, true);
        return gain < 0 ? leaf(Op::score) : load(gain, {});
      }
      default: {
        static const std::vector<std::vector<Axis>> kAxes{
            {Axis::h}, {Axis::b, Axis::q}, {Axis::kv}, {Axis::h, Axis::q}, {Axis::b, Axis::h, Axis::kv}};
        const int row =
            add("row", real_dtype(), kAxes[static_cast<std::size_t>(random_.below(5))], Values::centred, true);
        return row < 0 ? leaf(Op::score) : indexed(row);
      }
    }
  }

  ExprPtr whole(int depth) {
    if (depth == 0 || random_.percent(20)) {
      switch (random_.below(9)) {
        case 0:
        case 1:
          return q();
        case 2:
        case 3:
          return kv();
        case 4:
          return leaf(Op::b);
        case 5:
          return leaf(Op::h);
        case 6:
          return leaf(random_.percent(50) ? Op::s_q : Op::s_kv);
        case 7: {
          if (!random_.percent(50)) return integer(random_.between(-3, 70));
          const int label =
              add("label", DType::i32, {random_.percent(50) ? Axis::q : Axis::kv}, Values::small_integers, false);
          return label < 0 ? integer(7) : indexed(label);
        }
        default:
          return integer(random_.between(-3, 70));
      }
    }
    const auto one = [&] { return whole(depth - 1); };
    const auto divisor = [&] {
      return random_.percent(80) ? integer(random_.pick<std::int64_t>({2, 3, 5, 16, 64})) : one();
    };
    switch (random_.below(13)) {
      case 0:
      case 1:
        return make(Op::add, {one(), one()});
      case 2:
      case 3:
        return make(Op::subtract, {one(), one()});
      case 4:
        return make(Op::multiply, {integer(random_.between(-3, 4)), one()});
      case 5:
        return make(Op::divide, {one(), divisor()});
      case 6:
        return make(Op::modulo, {one(), divisor()});
      case 7:
        return make(Op::floor_div, {one(), divisor()});
      case 8:
        return make(Op::floor_mod, {one(), divisor()});
      case 9:
        return make(random_.percent(50) ? Op::minimum : Op::maximum, {one(), one()});
      case 10:
        return make(random_.pick({Op::bit_and, Op::bit_or, Op::bit_xor}), {one(), one()});
      case 11:
        return make(random_.percent(50) ? Op::shift_left : Op::shift_right, {one(), integer(random_.between(0, 4))});
      default:
        return make(Op::absolute, {one()});
    }
  }

  ExprPtr boolean(int depth) {
    if (depth > 1 && random_.percent(50)) {
      const int kind = static_cast<int>(random_.below(5));
      if (kind == 0) return make(Op::logical_not, {boolean(depth - 1)});
      return make(kind < 3 ? Op::logical_and : Op::logical_or, {boolean(depth - 1), boolean(depth - 1)});
    }
    if (random_.percent(10)) return make(Op::bit, {whole(1), whole(1)});
    const Op op = random_.pick(
        {Op::less, Op::less_equal, Op::greater, Op::greater_equal, Op::not_equal, Op::not_equal, Op::equal});
    if (random_.percent(15)) {
      const int row = add("row", real_dtype(), {random_.percent(50) ? Axis::q : Axis::kv}, Values::centred, false);
      if (row >= 0) return make(op == Op::equal ? Op::less : op, {indexed(row), real(0.25)});
    }
    return make(op, {whole(2), whole(2)});
  }

  Random& random_;
  Configuration& c_;
  Where where_;
  bool gradients_;
  bool in_mask_ = false;

 public:
  void set_in_mask() { in_mask_ = true; }
};

}  // namespace

void choose_functions(Random& random, Configuration& c, Where where, bool gradients) {
  Writer writer(random, c, where, gradients);
  if (random.percent(50)) c.score = writer.score();
  writer.set_in_mask();
  if (random.percent(25)) c.mask = writer.mask();
}

}  // namespace fa::differential
