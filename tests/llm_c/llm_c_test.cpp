// The functions of examples/llm_c/cudnn_att.cpp on the host device, beside attention and its gradients as formulas in
// double. Inputs are of 16 bits, so that what differs is the rounding of results and of sums in float.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "cudnn_att.h"

namespace {

#if defined(ENABLE_FP16)
constexpr double kUnit = 0x1p-11, kSmallest = 0x1p-25;  // half of what two numbers near 1, and near 0, are apart
#else
constexpr double kUnit = 0x1p-8, kSmallest = 0;
#endif

struct Sizes {
  int B, T, NH, HS;
  [[nodiscard]] int channels() const { return NH * HS; }
  [[nodiscard]] std::size_t elements(int parts) const { return std::size_t(B) * T * parts * NH * HS; }
  /// Element (b, t, part, h, i) of memory (B, T, parts, NH, HS).
  [[nodiscard]] std::size_t at(int b, int t, int parts, int part, int h, int i) const {
    return (((std::size_t(b) * T + t) * parts + part) * NH + h) * HS + i;
  }
};

using Memory = std::vector<floatX>;
int failures = 0;

/// `bound`: the sum of the absolute values that were added up, which float rounds.
void expect_near(const char* what, std::size_t at, double result, double wanted, double bound, int terms) {
  const double tolerance = kUnit * std::abs(wanted) * 1.01 + kSmallest + terms * 0x1p-23 * bound;
  if (std::abs(result - wanted) <= tolerance) return;  // false for NaN
  if (++failures <= 10) std::printf("%s[%zu] is %.9g, and not %.9g +- %.3g\n", what, at, result, wanted, tolerance);
}

Memory random_memory(std::size_t elements, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  Memory memory(elements);
  for (floatX& element : memory) element = floatX(distribution(generator));
  return memory;
}

/// Attention of one head: what is known of it in double.
class Head {
 public:
  Head(const Sizes& sizes, const Memory& qkv, int b, int h)
      : sizes_(sizes), qkv_(qkv), b_(b), h_(h), p_(square()), s_(square()) {
    for (int t = 0; t < sizes.T; ++t) {
      double largest = -std::numeric_limits<double>::infinity(), sum = 0;
      for (int j = 0; j <= t; ++j) largest = std::max(largest, score(t, j));
      for (int j = 0; j <= t; ++j) sum += std::exp(score(t, j) - largest);
      lse_.push_back(largest + std::log(sum));
      for (int j = 0; j <= t; ++j) p_[cell(t, j)] = std::exp(score(t, j) - lse_.back());
    }
  }

  [[nodiscard]] double in(int part, int t, int i) const { return float(qkv_[sizes_.at(b_, t, 3, part, h_, i)]); }

  void check_forward(const Memory& out, const std::vector<float>& stats) const {
    for (int t = 0; t < sizes_.T; ++t) {
      const std::size_t row = (std::size_t(b_) * sizes_.NH + h_) * sizes_.T + t;
      expect_near("stats", row, stats[row], lse_[t], 1 + std::abs(lse_[t]), 16);
      for (int i = 0; i < sizes_.HS; ++i) {
        double wanted = 0, bound = 0;
        for (int j = 0; j <= t; ++j) add(p_[cell(t, j)] * in(2, j, i), wanted, bound);
        const std::size_t at = sizes_.at(b_, t, 1, 0, h_, i);
        expect_near("out", at, float(out[at]), wanted, bound, terms());
      }
    }
  }

  /// dS = P (dout v^T - sum of dout o), with the o of 16 bits that backward was given.
  void check_backward(const Memory& out, const Memory& dout, const Memory& dqkv) {
    Head bounds = *this;
    for (int t = 0; t < sizes_.T; ++t) {
      double delta = 0, delta_bound = 0;
      for (int i = 0; i < sizes_.HS; ++i) add(one(dout, t, i) * one(out, t, i), delta, delta_bound);
      for (int j = 0; j <= t; ++j) {
        double dp = 0, bound = 0;
        for (int i = 0; i < sizes_.HS; ++i) add(one(dout, t, i) * in(2, j, i), dp, bound);
        s_[cell(t, j)] = p_[cell(t, j)] * (dp - delta) * scale();
        bounds.s_[cell(t, j)] = p_[cell(t, j)] * (bound + delta_bound) * scale();
      }
    }
    for (int t = 0; t < sizes_.T; ++t) {
      for (int i = 0; i < sizes_.HS; ++i) check_gradients(bounds, dout, dqkv, t, i);
    }
  }

 private:
  [[nodiscard]] std::vector<double> square() const { return std::vector<double>(std::size_t(sizes_.T) * sizes_.T); }
  [[nodiscard]] std::size_t cell(int t, int j) const { return std::size_t(t) * sizes_.T + j; }
  [[nodiscard]] double scale() const { return 1 / std::sqrt(double(sizes_.HS)); }
  [[nodiscard]] int terms() const { return sizes_.T + 2 * sizes_.HS + 16; }
  [[nodiscard]] double one(const Memory& memory, int t, int i) const {
    return float(memory[sizes_.at(b_, t, 1, 0, h_, i)]);
  }

  static void add(double term, double& sum, double& bound) {
    sum += term;
    bound += std::abs(term);
  }

  [[nodiscard]] double score(int t, int j) const {
    double sum = 0;
    for (int i = 0; i < sizes_.HS; ++i) sum += in(0, t, i) * in(1, j, i);
    return sum * scale();
  }

  void check_gradients(const Head& bounds, const Memory& dout, const Memory& dqkv, int t, int i) const {
    double dq = 0, dk = 0, dv = 0, dq_bound = 0, dk_bound = 0, dv_bound = 0;
    for (int j = 0; j <= t; ++j) {
      dq += s_[cell(t, j)] * in(1, j, i);
      dq_bound += bounds.s_[cell(t, j)] * std::abs(in(1, j, i));
    }
    for (int row = t; row < sizes_.T; ++row) {
      dk += s_[cell(row, t)] * in(0, row, i);
      dk_bound += bounds.s_[cell(row, t)] * std::abs(in(0, row, i));
      add(p_[cell(row, t)] * one(dout, row, i), dv, dv_bound);
    }
    const double wanted[3] = {dq, dk, dv}, bound[3] = {dq_bound, dk_bound, dv_bound};
    const char* names[3] = {"dq", "dk", "dv"};
    for (int part = 0; part < 3; ++part) {
      const std::size_t at = sizes_.at(b_, t, 3, part, h_, i);
      expect_near(names[part], at, float(dqkv[at]), wanted[part], bound[part], terms());
    }
  }

  const Sizes& sizes_;
  const Memory& qkv_;
  int b_, h_;
  std::vector<double> p_, s_, lse_;  // P and dS [T, T], the log-sum-exp [T]
};

void run(const Sizes& sizes) {
  const int C = sizes.channels();
  Memory qkv = random_memory(sizes.elements(3), 1), dout = random_memory(sizes.elements(1), 2);
  const floatX nan(std::numeric_limits<float>::quiet_NaN());
  Memory out(sizes.elements(1), nan), inference(sizes.elements(1), nan), dqkv(sizes.elements(3), nan);
  std::vector<float> stats(std::size_t(sizes.B) * sizes.NH * sizes.T, std::numeric_limits<float>::quiet_NaN());
  attention_forward_cudnn(out.data(), stats.data(), qkv.data(), sizes.B, sizes.T, sizes.NH, C, nullptr);
  attention_forward_cudnn(inference.data(), nullptr, qkv.data(), sizes.B, sizes.T, sizes.NH, C, nullptr);
  attention_backward_cudnn(dqkv.data(), dout.data(), qkv.data(), out.data(), stats.data(), sizes.B, sizes.T, sizes.NH,
                           C, nullptr);
  for (std::size_t at = 0; at < out.size(); ++at) {
    expect_near("out without stats", at, float(inference[at]), float(out[at]), 0, 0);
  }
  for (int b = 0; b < sizes.B; ++b) {
    for (int h = 0; h < sizes.NH; ++h) {
      Head head(sizes, qkv, b, h);
      head.check_forward(out, stats);
      head.check_backward(out, dout, dqkv);
    }
  }
}

}  // namespace

int main() {
  create_cudnn();
  run({.B = 2, .T = 70, .NH = 3, .HS = 64});
  run({.B = 1, .T = 33, .NH = 2, .HS = 128});  // another head dim in the same process
  run({.B = 3, .T = 1, .NH = 1, .HS = 64});
  destroy_cudnn();
  create_cudnn();
  run({.B = 1, .T = 17, .NH = 12, .HS = 64});  // attentions are made anew
  destroy_cudnn();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
