#include "fuzz/c_abi/expressions.hpp"

#include <algorithm>

#include <fa/fa.h>

namespace fa::fuzz {
namespace {

struct Usual {
  const char* text;
  const char* name;
  std::int32_t dtype;
  const char* axes;
};

constexpr Usual kScores[] = {
    {"score", nullptr, 0, ""},
    {"4.0 * tanh(score / 4.0)", nullptr, 0, ""},
    {"score + 1e30 * 1e30", nullptr, 0, ""},
    {"score - slope[h] * abs(float(q + s_kv - s_q - kv))", "slope", FA_F32, "h"},
    {"score + bias[b, h, q, kv]", "bias", FA_BF16, "bhqk"},
    {"score + bias[h][q][kv]", "bias", FA_F16, "hqk"},
    {"score + bias[b, kv]", "bias", FA_F32, "bk"},
    {"score * gain", "gain", FA_F32, ""},
    {"score + float(step)", "step", FA_I32, ""},
    {"score + table[h, clamp(kv - (q + s_kv - s_q), -3, 3) + 3]", "table", FA_F32, "h7"},
    {"score + log(abs(row[q]) + 1.0)", "row", FA_F64, "q"},
    {"kv % 3 == q % 3 ? score : -infinity", nullptr, 0, ""},
};

constexpr Usual kMasks[] = {
    {"q >= kv", nullptr, 0, ""},
    {"(q - kv) % 4 == 0 || kv < 3", nullptr, 0, ""},
    {"kv < prefix[b] || kv <= q + s_kv - s_q", "prefix", FA_I32, "b"},
    {"doc[b, q] == doc[b, kv]", "doc", FA_I32, "bm"},
    {"doc[q] == doc[kv] && q >= kv", "doc", FA_I32, "m"},
    {"blocks[h, q / 8, kv / 8] != 0", "blocks", FA_I32, "h99"},
    {"kv < s_kv - s_q || bit(tree[b, q, clamp(kv - (s_kv - s_q), 0, s_q - 1) >> 5], kv - (s_kv - s_q))", "tree", FA_I32,
     "bq9"},
    {"false", nullptr, 0, ""},
    {"kv << h != floor_mod(q, b + 1)", nullptr, 0, ""},
};

/// Expressions of the whole language, each of a type that its place can take.
class Writer {
 public:
  explicit Writer(Random& random, bool mask) : random_(random), mask_(mask) {}

  std::string real(int depth) {
    if (depth <= 0) {
      const char* const leaves[] = {"0.5", "1e-30", "3.25f", "infinity", "1e38", "0.0"};
      if (!mask_ && random_.one_in(2)) return "score";
      return random_.one_in(3) ? load(depth, false) : random_.pick(leaves);
    }
    const char* const infix[] = {" + ", " - ", " * ", " / "};
    const char* const functions[] = {"floor", "ceil", "exp", "exp2", "log", "log2", "sqrt",
                                     "rsqrt", "tanh", "sin", "cos",  "abs", "-",    "sigmoid"};
    switch (random_.below(7)) {
      case 0:
        return "(" + boolean(depth - 1) + " ? " + real(depth - 1) + " : " + real(depth - 1) + ")";
      case 1:
        return "float(" + integer(depth - 1) + ")";
      case 2:
        return random_.pick(functions) + ("(" + real(depth - 1)) + ")";
      case 3:
        return std::string(random_.one_in(2) ? "min(" : "max(") + real(depth - 1) + ", " + real(depth - 1) + ")";
      case 4:
        return load(depth, false);
      default:
        return "(" + real(depth - 1) + random_.pick(infix) + real(depth - 1) + ")";
    }
  }

  std::string integer(int depth) {
    const char* const leaves[] = {"q", "kv", "h", "b", "s_q",        "s_kv",
                                  "0", "1",  "2", "7", "2147483647", "(-2147483647 - 1)"};
    if (depth <= 0) return random_.pick(leaves);
    const char* const infix[] = {" + ", " - ", " * ", " / ", " % ", " << ", " >> ", " & ", " | ", " ^ "};
    switch (random_.below(8)) {
      case 0:
        return std::string(random_.one_in(2) ? "floor_div(" : "floor_mod(") + integer(depth - 1) + ", " +
               integer(depth - 1) + ")";
      case 1:
        return "clamp(" + integer(depth - 1) + ", 0, " + std::to_string(random_.below(9)) + ")";
      case 2:
        return std::string(random_.one_in(2) ? "-" : "~") + integer(depth - 1);
      case 3:
        return load(depth, true);
      case 4:
        return "int(" + real(depth - 1) + ")";
      default:
        return "(" + integer(depth - 1) + random_.pick(infix) + integer(depth - 1) + ")";
    }
  }

  std::string boolean(int depth) {
    const char* const compare[] = {" < ", " <= ", " == ", " != ", " > ", " >= "};
    if (depth <= 0) return random_.one_in(2) ? "q >= kv" : "true";
    switch (random_.below(5)) {
      case 4:
        return "bit(" + integer(depth - 1) + ", " + integer(depth - 1) + ")";
      case 0:
        return "(" + boolean(depth - 1) + (random_.one_in(2) ? " && " : " || ") + boolean(depth - 1) + ")";
      case 1:
        return "!(" + boolean(depth - 1) + ")";
      case 2:
        return "(" + real(depth - 1) + random_.pick(compare) + real(depth - 1) + ")";
      default:
        return "(" + integer(depth - 1) + random_.pick(compare) + integer(depth - 1) + ")";
    }
  }

  std::vector<NamedCapture> captures;

 private:
  /// One of a few captures, mostly at an index that its axes hold.
  std::string load(int depth, bool integral) {
    const char* const axes[] = {"", "h", "q", "k", "bh", "hq", "qk", "bhqk", "9"};
    const std::size_t which = random_.index(std::size(axes));
    const std::string name = (integral ? "i" : "r") + std::to_string(which);
    if (std::none_of(captures.begin(), captures.end(), [&](const NamedCapture& c) { return c.name == name; })) {
      if (captures.size() == 4) return integral ? "1" : "1.0";
      const std::int32_t reals[] = {FA_F16, FA_BF16, FA_F32};
      captures.push_back({name, integral ? std::int32_t{FA_I32} : random_.pick(reals), axes[which],
                          !integral && !mask_ && random_.one_in(3)});
    }
    std::string indices;
    for (const char axis : std::string(axes[which])) {
      std::string index = axis == 'k'   ? "kv"
                          : axis == '9' ? "clamp(" + integer(depth - 1) + ", 0, 8)"
                                        : std::string(1, axis);
      if (random_.one_in(20)) index = integer(depth - 1);
      indices += (indices.empty() ? "" : ", ") + index;
    }
    return indices.empty() ? name : name + "[" + indices + "]";
  }

  Random& random_;
  const bool mask_;
};

Expression usual(Random& random, bool mask) {
  const Usual& usual = mask ? kMasks[random.index(std::size(kMasks))] : kScores[random.index(std::size(kScores))];
  Expression result{usual.text, {}};
  if (usual.name != nullptr) {
    const bool differentiable = !mask && usual.dtype != FA_I32;
    result.captures.push_back({usual.name, usual.dtype, usual.axes, differentiable && random.one_in(2)});
  }
  return result;
}

}  // namespace

std::string hostile_text(Random& random) {
  const char* const pieces[] = {"score",       "q",    "kv",     "(",        ")",      "[",  "]",    ",",    "?",
                                ":",           "-",    "!",      "~",        "<<",     "1",  "0.5",  "1e",   "1e999",
                                "99999999999", "exp(", "x",      "\xff",     "\"",     "'",  "\\",   "\n",   "min(",
                                "==",          "&&",   "score*", "((((((((", "-!-!-!", "{}", "%s%n", "int(", "clamp("};
  std::string text;
  const std::uint64_t count = 1 + random.below(random.one_in(20) ? 3000 : 12);
  const bool same = random.one_in(4);
  const char* piece = random.pick(pieces);
  for (std::uint64_t i = 0; i < count; ++i) {
    if (!same) piece = random.pick(pieces);
    text += piece;
    if (random.one_in(2)) text += ' ';
  }
  return text;
}

Expression random_expression(Random& random, bool mask) {
  if (random.one_in(2)) return usual(random, mask);
  Writer writer(random, mask);
  const auto depth = static_cast<int>(random.below(5));
  Expression result;
  result.text = mask ? writer.boolean(depth) : "score + " + writer.real(depth);
  result.captures = writer.captures;
  return result;
}

}  // namespace fa::fuzz
