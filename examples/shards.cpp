// Causal ALiBi attention of a long sequence by "ranks" that have a part of the rows and of the keys each, in zigzag
// order, and whose keys go around in a ring: the whole, rank by rank. On the host device; a GPU takes the same calls.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr std::int64_t kRanks = 4, kHeads = 2, kHeadDim = 16, kChunk = 24;
constexpr std::int64_t kLength = 2 * kRanks * kChunk;  // two chunks a rank

std::vector<float> random_values(std::int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

/// Rows [first, first + count) of [1, h, s, d], or of statistics [1, h, s] where d is 0.
fa::TensorView rows(std::vector<float>& memory, std::int64_t first, std::int64_t count, std::int64_t d) {
  const std::int64_t step = std::max<std::int64_t>(d, 1);
  fa::TensorView view = d == 0 ? fa::TensorView(memory.data() + first, fa::DType::f32, {1, kHeads, count})
                               : fa::TensorView(memory.data() + first * d, fa::DType::f32, {1, kHeads, count, d});
  view.strides[1] = kLength * step;
  return view;
}

struct Sequence {
  std::vector<float> q = random_values(kHeads * kLength * kHeadDim, 1),
                     k = random_values(kHeads * kLength * kHeadDim, 2),
                     v = random_values(kHeads * kLength * kHeadDim, 3);
  std::vector<float> o = std::vector<float>(q.size()), lse = std::vector<float>(kHeads * kLength);
};

/// The rows of one chunk with the keys of another: their place in the sequence is all that the call is told.
void add_keys(const fa::Attention& attention, Sequence& s, std::int64_t chunk, std::int64_t keys,
              const fa::Captures& slopes) {
  fa::ForwardInputs in{rows(s.q, chunk * kChunk, kChunk, kHeadDim), rows(s.k, keys * kChunk, kChunk, kHeadDim),
                       rows(s.v, keys * kChunk, kChunk, kHeadDim), slopes};
  in.place = fa::ShardPlace{.q = chunk * kChunk, .kv = keys * kChunk, .whole_s_q = kLength, .whole_s_kv = kLength};
  attention.forward(in, {rows(s.o, chunk * kChunk, kChunk, kHeadDim), rows(s.lse, chunk * kChunk, kChunk, 0)});
}

int run() {
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  config.score = fa::functions::alibi();
  std::vector<float> slope{0.25f, 0.0625f};
  const fa::Captures slopes{{"slope", fa::TensorView(slope.data(), fa::DType::f32, {kHeads})}};
  const auto whole = fa::Attention::create(config, fa::Device::host());
  config.accumulate = true;  // each step of the ring adds its keys to what o and lse hold
  const auto adding = fa::Attention::create(config, fa::Device::host());

  Sequence expected, parts;
  whole.forward({rows(expected.q, 0, kLength, kHeadDim), rows(expected.k, 0, kLength, kHeadDim),
                 rows(expected.v, 0, kLength, kHeadDim), slopes},
                {rows(expected.o, 0, kLength, kHeadDim), rows(expected.lse, 0, kLength, 0)});

  std::fill(parts.lse.begin(), parts.lse.end(), -INFINITY);  // no keys yet
  int calls = 0;
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    for (std::int64_t step = 0; step < kRanks; ++step) {  // the keys of rank - step are there
      const std::int64_t from = (rank - step + kRanks) % kRanks;
      for (const std::int64_t chunk : {rank, 2 * kRanks - 1 - rank}) {
        for (const std::int64_t keys : {from, 2 * kRanks - 1 - from}) {
          if (keys > chunk) continue;  // behind all of the rows
          add_keys(adding, parts, chunk, keys, slopes);
          ++calls;
        }
      }
    }
  }

  float worst = 0;
  for (std::size_t i = 0; i < expected.o.size(); ++i) worst = std::max(worst, std::abs(expected.o[i] - parts.o[i]));
  std::printf("%d calls of %d ranks; o differs by %.1e at most\n", calls, static_cast<int>(kRanks),
              static_cast<double>(worst));
  return worst < 1e-5f ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
