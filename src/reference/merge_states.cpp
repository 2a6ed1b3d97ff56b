#include "reference/merge_states.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "reference/geometry.hpp"
#include "reference/parallel.hpp"

namespace fa::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Merge {
 public:
  explicit Merge(const MergeArgs& args)
      : args_(args), count_(args.stacked > 0 ? args.stacked : static_cast<std::int64_t>(args.states.size())) {}

  struct Row {
    std::vector<double> lse, state, sum;
  };

  void run(Row& row, std::int64_t number) const {
    const TensorView& merged = args_.merged.o;
    const std::int64_t s = number % merged.shape[2];
    const std::int64_t h = number / merged.shape[2] % merged.shape[1];
    const std::int64_t b = number / merged.shape[2] / merged.shape[1];
    const std::int64_t d_v = merged.shape[3];
    row.lse.resize(static_cast<std::size_t>(count_));
    row.state.resize(static_cast<std::size_t>(d_v));
    row.sum.assign(static_cast<std::size_t>(d_v), 0.0);
    double sink = -kInfinity;
    if (args_.sink.defined()) load(args_.sink, h * args_.sink.strides[0], 1, 1, &sink);
    double base = sink;
    for (std::int64_t i = 0; i < count_; ++i) {
      double& lse = row.lse[static_cast<std::size_t>(i)];
      if (args_.sum) {
        lse = 0;
        continue;
      }
      const TensorView& view = state(i).lse;
      load(view, i * stride_lse() + row_offset(view, b, h, s), 1, 1, &lse);
      if (lse == kInfinity) lse = -kInfinity;
      if (lse > base) base = lse;
    }
    if (base == -kInfinity || std::isnan(base)) base = 0;
    double weights = args_.sum ? 0.0 : std::exp(sink - base);
    for (std::int64_t i = 0; i < count_; ++i) {
      const double lse = row.lse[static_cast<std::size_t>(i)];
      if (lse == -kInfinity) continue;
      const double weight = args_.sum ? 1.0 : std::exp(lse - base);
      weights += weight;
      const TensorView& view = state(i).o;
      load(view, i * stride_o() + row_offset(view, b, h, s), 1, d_v, row.state.data());
      for (std::size_t c = 0; c < row.sum.size(); ++c) row.sum[c] += weight * row.state[c];
    }
    if (args_.sum) weights = 1;
    const std::int64_t at = row_offset(merged, b, h, s);
    for (std::int64_t c = 0; c < d_v; ++c) {
      store_element(merged, at + c, weights == 0 ? 0.0 : row.sum[static_cast<std::size_t>(c)] / weights);
    }
    const TensorView& lse = args_.merged.lse;
    if (!lse.defined()) return;
    store_element(lse, row_offset(lse, b, h, s), weights == 0 ? -kInfinity : base + std::log(weights));
  }

 private:
  const AttentionState& state(std::int64_t i) const {
    return args_.states[args_.stacked > 0 ? 0 : static_cast<std::size_t>(i)];
  }
  std::int64_t stride_o() const { return args_.stacked > 0 ? args_.stride_o : 0; }
  std::int64_t stride_lse() const { return args_.stacked > 0 ? args_.stride_lse : 0; }

  const MergeArgs& args_;
  std::int64_t count_;
};

}  // namespace

void merge_states(const MergeArgs& args) {
  const TensorView& merged = args.merged.o;
  const std::int64_t rows = merged.shape[0] * merged.shape[1] * merged.shape[2];
  const std::int64_t states = std::max<std::int64_t>(args.stacked, static_cast<std::int64_t>(args.states.size()));
  std::vector<Merge::Row> scratch(static_cast<std::size_t>(
      thread_count(rows, 4.0 * static_cast<double>(states) * static_cast<double>(merged.shape[3]))));
  const Merge merge(args);
  parallel_for(rows, scratch, [&](Merge::Row& own, std::int64_t row) { merge.run(own, row); });
}

}  // namespace fa::reference
