// Context parallelism without a GPU: four ranks, threads of this process, share a sequence. Each has its rows alone,
// and all come to what one device comes to. Over GPUs the ranks are processes, and communicators are fa::use_nccl's.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include <fa/parallel.hpp>

namespace {

constexpr int kRanks = 4;
constexpr std::int64_t kHeads = 4, kKeyHeads = 2, kRows = 256, kColumns = 32;

using Floats = std::vector<float>;

fa::TensorView view(Floats& data, std::int64_t heads, std::int64_t rows) {
  return {data.data(), fa::DType::f32, {1, heads, rows, kColumns}};
}

Floats numbers(std::int64_t heads, unsigned seed) {
  Floats data(static_cast<std::size_t>(heads * kRows * kColumns));
  for (float& number : data) {
    seed = seed * 1664525 + 1013904223;
    number = static_cast<float>(seed >> 8) / (1 << 23) - 1.0F;
  }
  return data;
}

fa::AttentionConfig attention() {
  fa::AttentionConfig config;
  config.head_dim = kColumns;
  config.dtype = fa::DType::f32;
  config.causal = true;
  return config;
}

/// The whole of a tensor that ranks have parts of, and its part of each.
struct Shared {
  Floats whole;
  std::vector<Floats> parts;
  std::int64_t heads;

  Shared(Floats numbers, std::int64_t head_count) : whole(std::move(numbers)), heads(head_count) {
    for (int rank = 0; rank < kRanks; ++rank) {
      parts.emplace_back(whole.size() / kRanks);
      fa::shard(of(rank), view(whole, heads, kRows), part(rank));
    }
  }
  fa::TensorView part(int rank) { return view(parts[static_cast<std::size_t>(rank)], heads, kRows / kRanks); }
  fa::ShardCopy of(int rank) const {
    return {.layout = fa::ShardLayout::zigzag, .ranks = kRanks, .rank = rank, .device = fa::Device::host()};
  }
  Floats together() {
    Floats all(whole.size());
    for (int rank = 0; rank < kRanks; ++rank) fa::unshard(of(rank), part(rank), view(all, heads, kRows));
    return all;
  }
};

float difference(const Floats& a, const Floats& b) {
  float greatest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) greatest = std::max(greatest, std::abs(a[i] - b[i]));
  return greatest;
}

float differs(fa::Scheme scheme) {
  Shared q(numbers(kHeads, 1), kHeads), k(numbers(kKeyHeads, 2), kKeyHeads), v(numbers(kKeyHeads, 3), kKeyHeads);
  Shared o(Floats(q.whole.size()), kHeads);
  const auto group = fa::make_local_group(kRanks);
  std::vector<std::thread> ranks;
  std::vector<std::string> problems(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto i = static_cast<std::size_t>(rank);
      try {
        fa::ContextParallelConfig config;
        config.attention = attention();
        config.scheme = scheme;
        auto parallel = fa::ContextParallel::create(config, group[i], fa::ShardLayout::zigzag);
        parallel.check_agreement();
        parallel.forward({q.part(rank), k.part(rank), v.part(rank)}, {o.part(rank)});
      } catch (const fa::Error& error) {
        problems[i] = error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& problem : problems) {
    if (!problem.empty()) throw fa::Error(fa::ErrorCode::internal, problem);
  }
  const auto one = fa::Attention::create(attention(), fa::Device::host());
  one.forward({view(q.whole, kHeads, kRows), view(k.whole, kKeyHeads, kRows), view(v.whole, kKeyHeads, kRows)},
              {view(o.whole, kHeads, kRows)});
  return difference(o.together(), o.whole);
}

}  // namespace

int main() {
  try {
    bool right = true;
    for (const fa::Scheme scheme : {fa::Scheme::ring, fa::Scheme::all_gather}) {
      const float off = differs(scheme);
      std::printf("%s of %d ranks: o differs from one device's by %g at most\n", to_string(scheme), kRanks,
                  static_cast<double>(off));
      right = right && off < 1e-5F;
    }
    return right ? 0 : 1;
  } catch (const fa::Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
