#ifndef FA_FUNCTIONS_HPP_
#define FA_FUNCTIONS_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fa/export.hpp>
#include <fa/tensor.hpp>

/// Score and mask functions: expressions in a subset of C that the library parses, differentiates, and compiles into
/// its kernels (docs/variants.md has the whole language).
///
///   config.score = fa::ScoreFunction{"score + slope[h] * float(kv - q)", {{"slope", fa::DType::f32}}};
///   config.mask = fa::MaskFunction{"doc[q] == doc[kv] && q >= kv", {{"doc", fa::DType::i32}}};
///   ...
///   attention.forward({q, k, v, {{"slope", slope}, {"doc", doc}}}, {o});
///
/// They see the logical indices b (batch), h (query head), q (query row) and kv (key), the lengths s_q and s_kv, and,
/// a score function, the scaled score.
namespace fa {

/// A tensor or number that functions name, as a configuration declares it. How many indices it takes follows from the
/// expressions; without any it is a scalar.
struct Capture {
  std::string name;
  DType dtype = DType::f32;    ///< f16, bf16, f32, i32; f64 on the host
  bool requires_grad = false;  ///< of a score function: backward computes its gradient, in fp32
};

/// What becomes of a scaled score; empty: nothing.
struct ScoreFunction {
  std::string expression;
  std::vector<Capture> captures = {};
};

/// Which scores are kept, those where it is true; empty: all.
struct MaskFunction {
  std::string expression;
  std::vector<Capture> captures = {};
};

/// What a call gives for a declared capture: a tensor on the Attention's device, of the declared dtype, whose axes of
/// length 1 are broadcast. For a scalar it is a number, or a tensor of one element. `name` is read during the call
/// only.
struct Captured {
  std::string_view name = {};
  TensorView tensor = {};
  double number = 0;  ///< counts when `tensor` is not defined

  Captured() = default;
  Captured(std::string_view which, const TensorView& view) : name(which), tensor(view) {}
  Captured(std::string_view which, double value) : name(which), number(value) {}
};

/// The captures of a call, in any order: {{"slope", slope}, {"cap", 30.0}}.
class FA_API Captures {
 public:
  static constexpr std::size_t kMax = 8;  ///< of both functions together

  Captures() = default;
  /// Throws fa::Error(invalid_argument) beyond kMax.
  Captures(std::initializer_list<Captured> given);

  void add(const Captured& captured);

  const Captured* begin() const noexcept { return items_.data(); }
  const Captured* end() const noexcept { return items_.data() + count_; }
  std::size_t size() const noexcept { return count_; }

 private:
  std::array<Captured, kMax> items_{};
  std::size_t count_ = 0;
};

/// Functions in wide use, ready for a configuration, and two ways to combine functions.
namespace functions {

/// cap * tanh(score / cap): scores stay within +-cap.
FA_API ScoreFunction softcap(double cap);

/// score - slope[h] * |q + s_kv - s_q - kv|, of the diagonal of the last key (Press et al., "Train Short, Test Long",
/// 2022). Captures slope [h_q], f32.
FA_API ScoreFunction alibi(bool requires_grad = false);

/// score + bias[...]. `axes` names the axes of bias in their order: "bhqk" for [b, h_q, s_q, s_kv], "hqk" for [h_q,
/// s_q, s_kv], "k" for [s_kv], and so on. Axes of length 1 are broadcast. Captures bias, of `dtype`. Throws
/// fa::Error(invalid_argument) for other letters.
FA_API ScoreFunction bias(std::string_view axes = "bhqk", DType dtype = DType::f32, bool requires_grad = false);

/// score + table[h, clamp(kv - (q + s_kv - s_q), -distance, distance) + distance]: captures table
/// [h_q, 2 * distance + 1].
FA_API ScoreFunction relative_table(int distance, DType dtype = DType::f32, bool requires_grad = false);

/// Keys of a prefix are seen by all rows, later ones causally: kv < prefix[b] || kv <= q + s_kv - s_q. Captures prefix
/// [b], i32.
FA_API MaskFunction prefix_lm();

/// doc[q] == doc[kv]: captures doc [s_q], i32, of queries and keys alike; with `batched` doc [b, s_q]. Causal inside of
/// documents with AttentionConfig::causal.
FA_API MaskFunction documents(bool batched = false);

/// blocks[q / rows, kv / keys] != 0: captures blocks [ceil(s_q / rows), ceil(s_kv / keys)], i32, a map of what is kept;
/// with `by_head` [h_q, ...]. Blocks that are a multiple of a kernel's tiles cost no mask code.
FA_API MaskFunction block_sparse(int rows, int keys, bool by_head = false);

/// A tree of drafts behind a context: rows are the last s_q keys, and each sees the whole context, kv < s_kv - s_q, and
/// of the draft what its bits say. Bit n % 32 of tree[b, q, n / 32] is set where row q sees draft n, itself included.
/// Captures tree [b, s_q, ceil(s_q / 32)], i32; without `batched` tree [s_q, ceil(s_q / 32)]. Full, whatever the order
/// of the drafts: without AttentionConfig::causal. tree_words and tree_view make the words.
FA_API MaskFunction tree(bool batched = true);

/// Words of a tree in which draft i hangs on draft parents[i], or on the context where that is -1. Each sees itself and
/// what it hangs on, directly or not. Rows are of ceil(parents.size() / 32) words, or of `words` where that is more.
/// Throws fa::Error(invalid_argument) for a parent that is no draft, a circle, and too few words.
FA_API std::vector<std::int32_t> tree_words(std::span<const std::int32_t> parents, int words = 0);

/// Words of 64 bits, dense [..., words], as tree() reads them: bit n % 64 of word n / 64. On the Attention's device.
FA_API TensorView tree_view(const std::int64_t* words, std::span<const std::int64_t> shape);

/// `second` of what `first` makes of the score. Captures of one name are one capture.
FA_API ScoreFunction compose(const ScoreFunction& first, const ScoreFunction& second);

/// Keeps what both keep.
FA_API MaskFunction both(const MaskFunction& first, const MaskFunction& second);

}  // namespace functions
}  // namespace fa

#endif  // FA_FUNCTIONS_HPP_
