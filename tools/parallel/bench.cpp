// Times context parallelism of the GPUs that a launcher has started this program on, beside one GPU with the whole
// sequence, which every rank computes at the same time, so that clocks and power are those of the load.
//
//   examples/context_parallel/launch.py 2 parallel_bench [--tokens 16384,65536,262144] [--heads 16/16,32/8]
//       [--schemes ring,all_gather,ulysses,automatic,ring:2 | all] [--layout zigzag] [--full] [--packed]
//       [--json FILE] [--repeats 10] [--least 3] [--seconds 4] [--limit SECONDS] [--limit-mb MB] [--no-single]
//       [--copied]
//       [--reserved 0] [--transfers automatic|messages|puts] [--timeout SECONDS]
//
// A row: sizes, milliseconds of one GPU and of all, efficiency T1 / (n Tn), and what docs/scale.md's model says. Each
// row is a median of --repeats rounds; behind --seconds of a row no more begin, once there are --least. ring:2 is two
// dimensions, of which two ranks share heads; `all` is every choice that the ranks allow. --packed shares a packed
// batch of lengths from 256 to 32k, log-uniform. --json FILE has a line of JSON for the machine and for each row.
// K and V of a rank lie in memory that ranks share where these have some; with --copied they are copied there by each
// call. What one GPU's memory, --limit-mb or --limit is too small for says so and is left out.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fa/parallel.hpp>

#include "gpu.hpp"
#include "json.hpp"
#include "ranks.hpp"
#include "rows.hpp"

namespace {

using bench::Choice;
using bench::Options;

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

template <class Enum>
Enum named(const std::string& text, Enum last) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    if (text == to_string(static_cast<Enum>(i))) return static_cast<Enum>(i);
  }
  throw std::runtime_error(text + " is no layout, scheme or way of transfers");
}

Choice choice_of(const std::string& text) {
  const std::size_t colon = text.find(':');
  return {named(text.substr(0, colon), fa::Scheme::ulysses),
          colon == std::string::npos ? 0 : std::max(std::stoi(text.substr(colon + 1)), 1)};
}

bool take_flag(Options& options, const std::string& name) {
  if (name == "--full") {
    options.causal = false;
  } else if (name == "--packed") {
    options.packed = true;
  } else if (name == "--copied") {
    options.copied = true;
  } else if (name == "--no-single") {
    options.single = false;
  } else {
    return false;
  }
  return true;
}

void take_sizes(Options& options, const std::string& name, const std::vector<std::string>& parts) {
  if (name == "--tokens") {
    options.tokens.clear();
    for (const std::string& part : parts) options.tokens.push_back(std::stoll(part));
  } else {
    options.heads.clear();
    for (const std::string& part : parts) {
      options.heads.emplace_back(std::stoll(part), std::stoll(part.substr(part.find('/') + 1)));
    }
  }
}

void take(Options& options, const std::string& name, const std::string& value) {
  const std::vector<std::string> parts = split(value);
  if (name == "--tokens" || name == "--heads") {
    take_sizes(options, name, parts);
  } else if (name == "--schemes") {
    options.all_choices = value == "all";
    options.choices.clear();
    if (options.all_choices) return;
    for (const std::string& part : parts) options.choices.push_back(choice_of(part));
  } else if (name == "--layout") {
    options.layout = named(value, fa::ShardLayout::striped);
  } else if (name == "--json") {
    options.json = value;
  } else if (name == "--repeats") {
    options.rounds.most = std::max(std::stoi(value), 1);
    options.rounds.least = std::min(options.rounds.least, options.rounds.most);
  } else if (name == "--least") {
    options.rounds.least = std::max(std::stoi(value), 1);
    options.rounds.most = std::max(options.rounds.least, options.rounds.most);
  } else if (name == "--seconds") {
    options.rounds.seconds = std::stod(value);
  } else if (name == "--limit") {
    options.limit_s = std::stod(value);
  } else if (name == "--limit-mb") {
    options.limit_mb = std::stod(value);
  } else if (name == "--reserved") {
    options.reserved = std::stoi(value);
  } else if (name == "--transfers") {
    options.transfers = named(value, fa::NcclTransfers::puts);
  } else if (name == "--timeout") {
    options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * std::stod(value)));
  } else {
    throw std::runtime_error(name +
                             ": accepted are --tokens, --heads, --schemes, --layout, --json, --repeats, --least, "
                             "--seconds, --limit, --limit-mb, --reserved, --transfers, --timeout, --full, --packed, "
                             "--copied, --no-single");
  }
}

Options options_of(int count, char** values) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string name = values[i];
    if (take_flag(options, name)) continue;
    if (i + 1 == count) throw std::runtime_error(name + " is no option, or takes a value");
    try {
      take(options, name, values[++i]);
    } catch (const std::logic_error&) {  // of std::stoi and its like
      throw std::runtime_error(name + ": " + values[i] + " is no number, or none that it takes");
    }
  }
  return options;
}

/// What the machine is, and what NCCL was told.
bench::Json facts_of(int device, const ranks::NcclGroup& group) {
  cudaDeviceProp properties{};
  bench::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  bench::Json facts, environment;
  facts.set("kind", "machine").set("gpu", static_cast<const char*>(properties.name));
  facts.set("memory_mb", static_cast<double>(properties.totalGlobalMem) / (1 << 20));
  facts.set("multiprocessors", properties.multiProcessorCount).set("nccl", group.version());
  for (const char* const name :
       {"NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_PROTO",
        "NCCL_ALGO", "NCCL_MAX_P2P_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS", "CUDA_DEVICE_MAX_CONNECTIONS"}) {
    if (const char* const value = std::getenv(name)) environment.set(name, value);
  }
  return facts.set("environment", environment);
}

}  // namespace

int main(int count, char** values) {
  try {
    const Options options = options_of(count, values);
    const ranks::Rank rank;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices <= rank.local) {
      std::printf("rank %d has no GPU %d\n", rank.rank, rank.local);
      return 77;
    }
    bench::check(cudaSetDevice(rank.local), "cudaSetDevice");
    const ranks::NcclGroup group(rank);
    const auto communicator = fa::use_nccl(group.comm(), {.timeout = options.timeout, .transfers = options.transfers});
    bench::Json facts = facts_of(rank.local, group);
    const bool copies = communicator->shares_memory() && options.copied;
    facts.set("transfers", copies ? "puts of copies" : communicator->shares_memory() ? "puts" : "messages");
    bench::Bench(options, communicator).run(facts);
    return 0;
  } catch (const std::exception& problem) {
    std::printf("parallel_bench: %s\n", problem.what());
    return 1;
  }
}
