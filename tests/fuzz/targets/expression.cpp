#include <fa/error.hpp>

#include <array>
#include <span>
#include <string_view>

#include "expression/emit.hpp"
#include "expression/parse.hpp"
#include "expression/program.hpp"
#include "expression/ranges.hpp"
#include "fuzz/targets/target.hpp"
#include "reference/evaluator.hpp"

// A score function, and behind a '@' perhaps a mask function, is read, differentiated, printed and interpreted.
namespace fa::fuzz {
namespace {

using expression::CapturedView;
using expression::Lengths;
using expression::NodeId;
using expression::Program;

constexpr Lengths kLengths{2, 2, 3, 4};
constexpr std::size_t kMostGradients = 64;  // beyond that an input takes seconds, and shows no more

std::vector<expression::Capture> captures() {
  return {{"slope", DType::f32, -1, true}, {"bias", DType::bf16, -1, true}, {"half", DType::f16, -1, false},
          {"wide", DType::f64, -1, true},  {"doc", DType::i32, -1, false},  {"table", DType::i32, -1, false}};
}

std::string everything(const Program& program) {
  std::string text;
  for (const auto part : {expression::Part::values, expression::Part::slopes, expression::Part::gradients}) {
    text += emit(program, part, part == expression::Part::values);
  }
  return text + (loads_ahead(program) ? "1" : "0") + (is_affine(program) ? "1" : "0");
}

/// Tensors no larger than the indices need, so that a sanitizer sees what an index reaches beyond.
class Tensors {
 public:
  explicit Tensors(const Program& program) {
    const auto shapes = smallest_shapes(program, kLengths);
    for (std::size_t i = 0; i < shapes.size(); ++i) add(program.captures[i], shapes[i]);
  }

  bool small() const { return small_; }
  std::span<const CapturedView> views() const { return views_; }

 private:
  void add(const expression::Capture& capture, const std::vector<std::int64_t>& shape) {
    CapturedView captured;
    TensorView& view = captured.view;
    view.dtype = capture.dtype;
    view.rank = static_cast<int>(shape.size());
    std::int64_t stride = 1;
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      view.shape[axis] = std::max<std::int64_t>(shape[axis], 1);  // one that nothing bounds is broadcast
      view.strides[axis] = stride;
      if (view.shape[axis] > kMost) small_ = false;
      stride = small_ ? stride * view.shape[axis] : 1;
      if (stride > kMost) small_ = false;
    }
    if (small_) {
      memory_.emplace_back(static_cast<std::size_t>(stride) * size_of(view.dtype));
      for (std::size_t i = 0; i < memory_.back().size(); ++i) memory_.back()[i] = static_cast<std::byte>(i * 37);
      memory_.back().shrink_to_fit();
      view.data = memory_.back().data();
      if (capture.requires_grad) captured.gradient = view;
    }
    views_.push_back(captured);
  }

  static constexpr std::int64_t kMost = 1 << 16;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<CapturedView> views_;
  bool small_ = true;
};

void interpret(const Program& program) {
  const Tensors tensors(program);
  if (!tensors.small()) return;
  try {
    check_indices(program, tensors.views(), kLengths);
  } catch (const Error&) {
    return;  // an index that nothing bounds
  }
  std::vector<NodeId> roots;
  if (program.score) roots = {*program.score, program.score_derivative};
  if (program.mask) roots.push_back(*program.mask);
  for (const expression::CapturedGradient& gradient : program.gradients) {
    roots.push_back(gradient.load);
    roots.push_back(gradient.derivative);
  }
  reference::VariantArgs args;
  args.program = &program;
  args.captures = tensors.views();
  reference::Evaluator evaluator(program, roots, args, kLengths);
  for (std::int64_t at = 0; at < kLengths.b * kLengths.h_q * kLengths.s_q * kLengths.s_kv; ++at) {
    const std::int64_t row = at / kLengths.s_kv;
    const std::int64_t head = row / kLengths.s_q;
    evaluator.run(
        {head / kLengths.h_q, head % kLengths.h_q, row % kLengths.s_q, at % kLengths.s_kv, at % 2 == 0 ? 0.5 : -1e30});
    for (const expression::CapturedGradient& gradient : program.gradients) {
      const auto capture = static_cast<std::size_t>(program.graph[gradient.load].index);
      const std::int64_t offset = evaluator.gradient_offset(gradient.load);
      require(offset >= 0 && offset < tensors.views()[capture].gradient.elements(), "a gradient inside of its tensor");
    }
  }
}

void run(const std::string& score, const std::string& mask) {
  std::string text;
  Program program;
  try {
    program = Program::parse(score, mask, captures());
    if (program.gradients.size() > kMostGradients) return;
    text = everything(program);
  } catch (const Error& error) {
    require(error.code() == ErrorCode::invalid_argument, "a function that is refused is an invalid argument");
    return;
  }
  interpret(program);
  const std::string short_score = expression::without_spaces("score", score);
  const std::string short_mask = expression::without_spaces("mask", mask);
  require(everything(Program::parse(short_score, short_mask, captures())) == text, "spaces mean nothing");
  static_cast<void>(expression::with_score("score", score, "score"));
}

}  // namespace

std::vector<std::string> seeds() {
  return {"score",
          "4.0 * tanh(score / 4.0)",
          "score - slope[h] * abs(float(q + s_kv - s_q - kv))",
          "score + bias[b, h, q, kv]@q >= kv",
          "score + half[h][q][kv] * wide",
          "score + slope[h, clamp(kv - (q + s_kv - s_q), -3, 3) + 3]@doc[b, q] == doc[b, kv]",
          "kv % 3 == q % 3 ? score : -infinity",
          "@kv < table[b] || kv <= q + s_kv - s_q",
          "min(score, 1.5e3f) + max(exp(score), log2(abs(bias) + 1e-3)) / sigmoid(wide)",
          "score * sqrt(slope) + rsqrt(slope) - sin(cos(floor(score)))",
          "~q << 3 | kv & 7 ^ h ? float(int(score)) : ceil(exp2(bias))",
          "floor_div(q - kv, 2) + floor_mod(kv - q, 3) + q / 0 + q % 0",
          "@kv < s_kv - s_q || bit(table[clamp(kv - (s_kv - s_q), 0, s_q - 1) >> 5], kv - (s_kv - s_q))",
          "@!(q == kv) && bool(h) || true"};
}

}  // namespace fa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(text.find('@'), size);
  fa::fuzz::run(std::string(text.substr(0, end)), std::string(text.substr(std::min(end + 1, size))));
  return 0;
}
