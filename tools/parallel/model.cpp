// Prints the table of docs/scale.md: for each number of GPUs and of tokens the fastest choice, and its efficiency, as
// the model of time has them. parallel_model [causal 0|1] [h_q] [h_kv] [link GB/s] [network GB/s]

#include <cstdio>
#include <cstdlib>
#include <string>

#include <fa/parallel.hpp>

namespace {

std::string name_of(const fa::SchemeTime& time) {
  if (time.scheme == fa::Scheme::ulysses) return "ulysses";
  const std::string scheme = fa::to_string(time.scheme);
  return time.ulysses == 1 ? scheme : "ulysses " + std::to_string(time.ulysses) + " × " + scheme;
}

std::string tokens_of(std::int64_t tokens) {
  return tokens >= 1 << 20 ? std::to_string(tokens >> 20) + "M" : std::to_string(tokens >> 10) + "k";
}

double argument(int count, char** values, int index, double otherwise) {
  return count > index ? std::atof(values[index]) : otherwise;
}

}  // namespace

int main(int count, char** values) {
  fa::ContextParallelConfig config;
  config.attention.head_dim = 128;
  config.attention.causal = argument(count, values, 1, 1) != 0;
  const auto h_q = static_cast<std::int64_t>(argument(count, values, 2, 16));
  const auto h_kv = static_cast<std::int64_t>(argument(count, values, 3, 16));
  fa::ClusterSpeeds speeds;
  speeds.link = 1e9 * argument(count, values, 4, speeds.link / 1e9);
  speeds.network = 1e9 * argument(count, values, 5, speeds.network / 1e9);
  constexpr int kRanks[] = {2, 4, 8, 16, 64, 256, 1024};
  std::printf("| Tokens |");
  for (const int ranks : kRanks) std::printf(" %d |", ranks);
  std::printf("\n|---|");
  for (std::size_t i = 0; i < std::size(kRanks); ++i) std::printf("---|");
  std::printf("\n");
  try {
    for (std::int64_t tokens = 1 << 14; tokens <= 1 << 24; tokens *= 4) {
      std::printf("| %s |", tokens_of(tokens).c_str());
      for (const int ranks : kRanks) {
        const fa::ContextShape shape{1, h_q, h_kv, tokens, tokens};
        const fa::SchemeTime best = compare_schemes(config, fa::ShardLayout::zigzag, shape, ranks, speeds).front();
        std::printf(" %.2f %s |", best.efficiency(ranks), name_of(best).c_str());
      }
      std::printf("\n");
    }
  } catch (const fa::Error& error) {
    std::fprintf(stderr, "parallel_model: %s\n", error.what());
    return 1;
  }
  return 0;
}
