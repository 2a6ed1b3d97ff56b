// Prints the table of docs/scale.md: for each number of GPUs and of tokens the fastest choice, and its efficiency, as
// the model of time has them. parallel_model [causal 0|1] [h_q] [h_kv] [link GB/s] [network GB/s]
// With --json behind it: lines of JSON, for tools/scale.py.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include <fa/parallel.hpp>

#include "json.hpp"

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

constexpr int kRanks[] = {2, 4, 8, 16, 64, 256, 1024};
constexpr std::int64_t kFirstTokens = 1 << 14, kLastTokens = 1 << 24;

struct Question {
  fa::ContextParallelConfig config;
  std::int64_t h_q = 16, h_kv = 16;
  fa::ClusterSpeeds speeds;
  fa::SchemeTime best(std::int64_t tokens, int ranks) const {
    const fa::ContextShape shape{1, h_q, h_kv, tokens, tokens};
    return compare_schemes(config, fa::ShardLayout::zigzag, shape, ranks, speeds).front();
  }
};

void print_table(const Question& question) {
  std::printf("| Tokens |");
  for (const int ranks : kRanks) std::printf(" %d |", ranks);
  std::printf("\n|---|");
  for (std::size_t i = 0; i < std::size(kRanks); ++i) std::printf("---|");
  std::printf("\n");
  for (std::int64_t tokens = kFirstTokens; tokens <= kLastTokens; tokens *= 4) {
    std::printf("| %s |", tokens_of(tokens).c_str());
    for (const int ranks : kRanks) {
      const fa::SchemeTime best = question.best(tokens, ranks);
      std::printf(" %.2f %s |", best.efficiency(ranks), name_of(best).c_str());
    }
    std::printf("\n");
  }
}

void print_json(const Question& question) {
  for (std::int64_t tokens = kFirstTokens; tokens <= kLastTokens; tokens *= 4) {
    for (const int ranks : kRanks) {
      const fa::SchemeTime best = question.best(tokens, ranks);
      bench::Json line;
      line.set("tokens", tokens).set("ranks", ranks).set("h_q", question.h_q).set("h_kv", question.h_kv);
      line.set("scheme", to_string(best.scheme)).set("ulysses", best.ulysses);
      std::printf("%s\n", line.set("efficiency", best.efficiency(ranks)).text().c_str());
    }
  }
}

}  // namespace

int main(int count, char** values) {
  const bool json = count > 1 && std::string_view(values[count - 1]) == "--json";
  if (json) --count;
  Question question;
  question.config.attention.head_dim = 128;
  question.config.attention.causal = argument(count, values, 1, 1) != 0;
  question.h_q = static_cast<std::int64_t>(argument(count, values, 2, 16));
  question.h_kv = static_cast<std::int64_t>(argument(count, values, 3, 16));
  question.speeds.link = 1e9 * argument(count, values, 4, question.speeds.link / 1e9);
  question.speeds.network = 1e9 * argument(count, values, 5, question.speeds.network / 1e9);
  try {
    json ? print_json(question) : print_table(question);
  } catch (const fa::Error& error) {
    std::fprintf(stderr, "parallel_model: %s\n", error.what());
    return 1;
  }
  return 0;
}
