#include "parallel/config.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "parallel/errors.hpp"
#include "parallel/layout.hpp"

namespace fa {

const char* to_string(ShardLayout layout) noexcept {
  switch (layout) {
    case ShardLayout::contiguous:
      return "contiguous";
    case ShardLayout::zigzag:
      return "zigzag";
    case ShardLayout::striped:
      return "striped";
  }
  return "unknown";
}

const char* to_string(Scheme scheme) noexcept {
  switch (scheme) {
    case Scheme::automatic:
      return "automatic";
    case Scheme::ring:
      return "ring";
    case Scheme::all_gather:
      return "all_gather";
    case Scheme::ulysses:
      return "ulysses";
  }
  return "unknown";
}

const char* to_string(NcclTransfers transfers) noexcept {
  switch (transfers) {
    case NcclTransfers::automatic:
      return "automatic";
    case NcclTransfers::messages:
      return "messages";
    case NcclTransfers::puts:
      return "puts";
  }
  return "unknown";
}

namespace parallel {
namespace {

/// Windows from 2^31 on are unbounded, as for Attention.
std::int64_t window_of(std::int64_t given) {
  return given < 0 || given > std::numeric_limits<std::int32_t>::max() ? -1 : given;
}

void check_served(const AttentionConfig& config) {
  const std::string kNone = "with context parallelism";
  if (config.page_size != 0) throw_unsupported("page_size", std::to_string(config.page_size), "0 " + kNone);
  if (config.accumulate) throw_unsupported("accumulate", "true", "false " + kNone);
  if (config.statistics.any()) throw_unsupported("statistics", "given", "none " + kNone);
  if (config.value_in_key > 0) throw_unsupported("value_in_key", std::to_string(config.value_in_key), "0 " + kNone);
  if (config.k_dtype || config.v_dtype) {
    throw_unsupported(config.k_dtype ? "k_dtype" : "v_dtype", "given", "none " + kNone);
  }
  if (config.invariance != Invariance::none) {
    throw_unsupported("invariance", to_string(config.invariance), "none " + kNone);
  }
  if (config.zero_padding) throw_unsupported("zero_padding", "true", "false " + kNone + ": shards have no padding");
  const DType dtype = config.dtype;
  if (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32 && dtype != DType::f64) {
    throw_unsupported("dtype", to_string(dtype), "f16, bf16, f32, and f64 on the host, " + kNone);
  }
  for (const std::vector<Capture>* captures : {&config.score.captures, &config.mask.captures}) {
    for (const Capture& capture : *captures) {
      if (!capture.requires_grad) continue;
      throw_unsupported("requires_grad of capture " + capture.name, "true", "false " + kNone);
    }
  }
}

bool has_functions(const AttentionConfig& config) {
  return !config.score.expression.empty() || !config.mask.expression.empty() || config.dropout > 0;
}

}  // namespace

void check_config(const ContextParallelConfig& config, ShardLayout layout, int ranks) {
  check_served(config.attention);
  if (config.ulysses < 0 || (config.ulysses > 0 && ranks % config.ulysses != 0)) {
    throw_invalid("ulysses", config.ulysses, "0, or a divisor of the " + std::to_string(ranks) + " ranks");
  }
  if (config.scheme == Scheme::ulysses && config.ulysses != 0 && config.ulysses != ranks) {
    throw_invalid("ulysses", config.ulysses,
                  "0 or all " + std::to_string(ranks) + " ranks with Scheme::ulysses; ring and all_gather take fewer");
  }
  if (config.head_groups < 0) throw_invalid("head_groups", config.head_groups, "0 or more");
  if (config.reserved_multiprocessors < 0) {
    throw_invalid("reserved_multiprocessors", config.reserved_multiprocessors, "0 or more");
  }
  if (config.attention.dropout > 0 && layout == ShardLayout::striped && ranks > 1) {
    throw_unsupported("layout", to_string(layout), "contiguous or zigzag with dropout");
  }
  const auto known = [](auto value, auto last) { return static_cast<int>(value) <= static_cast<int>(last); };
  if (!known(layout, ShardLayout::striped)) throw_invalid("layout", static_cast<int>(layout), "a ShardLayout");
  if (!known(config.scheme, Scheme::ulysses)) throw_invalid("scheme", static_cast<int>(config.scheme), "a Scheme");
}

/// all_gather holds keys of all ranks thrice for each piece: so many that these are two shards, and at least four.
int pieces_of_keys(std::int64_t heads, int ranks) {
  constexpr std::int64_t kMost = 4096;  // that are looked for; no attention has as many KV heads
  const std::int64_t least = std::max((3 * std::int64_t{ranks} + 1) / 2, std::int64_t{4});
  for (std::int64_t pieces = least; pieces < std::min(heads, kMost); ++pieces) {
    if (heads % pieces == 0) return static_cast<int>(pieces);
  }
  return static_cast<int>(heads);
}

Problem problem_of(const ContextParallelConfig& config, ShardLayout layout, int ranks, const ContextShape& shape,
                   std::span<const std::int64_t> lengths, const SchemeTime& scheme) {
  const AttentionConfig& attention = config.attention;
  Problem problem;
  problem.ranks = ranks;
  problem.layout = layout;
  problem.scheme = scheme.scheme == Scheme::ulysses ? Scheme::ring : scheme.scheme;
  problem.ulysses = scheme.ulysses;
  problem.wide_gradients = config.gradients == GradientTransfer::f32;
  problem.b = shape.b;
  problem.h_q = shape.h_q;
  problem.h_kv = shape.h_kv;
  problem.d_qk = attention.head_dim;
  problem.d_v = attention.head_dim_v > 0 ? attention.head_dim_v : attention.head_dim;
  problem.packed = attention.varlen;
  if (attention.varlen) {
    problem.lengths_q.assign(lengths.begin(), lengths.end());
    problem.lengths_kv = problem.lengths_q;
  } else {
    problem.lengths_q = {shape.s_q};
    problem.lengths_kv = {shape.s_kv};
  }
  problem.causal = attention.causal;
  problem.bottom_right = attention.causal_align == CausalAlign::bottom_right;
  problem.window_left = window_of(attention.window_left);
  problem.window_right = window_of(attention.window_right);
  problem.chunk = attention.chunk;
  problem.functions = has_functions(attention);
  problem.sink = attention.sink;
  if (problem.ulysses >= 1 && problem.h_kv > 0 && problem.h_kv % problem.ulysses == 0 &&
      problem.scheme == Scheme::all_gather) {
    const std::int64_t heads = problem.h_kv / problem.ulysses;
    problem.head_groups = config.head_groups > 0 ? config.head_groups : pieces_of_keys(heads, ranks / problem.ulysses);
  }
  check(problem);
  const std::int64_t chunk_rows = problem.lengths_q.empty() ? 0 : divisor(layout, ranks);
  if (attention.dropout > 0 && ranks > 1) {
    for (const auto* all : {&problem.lengths_q, &problem.lengths_kv}) {
      for (const std::int64_t length : *all) {
        if (length / chunk_rows % 32 == 0) continue;
        throw_unsupported(problem.packed ? "lengths" : "s_q", std::to_string(length),
                          "with dropout multiples of " + std::to_string(32 * chunk_rows));
      }
    }
  }
  if (layout == ShardLayout::striped && ranks > 1 && attention.chunk % ranks != 0) {
    throw_unsupported("chunk", std::to_string(attention.chunk),
                      "with striped shards a multiple of the " + std::to_string(ranks) + " ranks");
  }
  return problem;
}

std::uint64_t hash_of(const ContextParallelConfig& config, ShardLayout layout, const ClusterSpeeds& speeds) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto add_bytes = [&hash](const void* data, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
      hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
    }
  };
  const auto add = [&](std::int64_t value) { add_bytes(&value, sizeof value); };
  const auto add_text = [&](const std::string& text) {
    add(static_cast<std::int64_t>(text.size()));
    add_bytes(text.data(), text.size());
  };
  const AttentionConfig& attention = config.attention;
  for (const std::int64_t value :
       {std::int64_t{FA_VERSION_NUMBER}, static_cast<std::int64_t>(layout), static_cast<std::int64_t>(config.scheme),
        std::int64_t{config.ulysses}, std::int64_t{config.head_groups}, static_cast<std::int64_t>(config.gradients),
        std::int64_t{attention.head_dim}, std::int64_t{attention.head_dim_v},
        static_cast<std::int64_t>(attention.dtype), std::int64_t{attention.causal},
        static_cast<std::int64_t>(attention.causal_align), window_of(attention.window_left),
        window_of(attention.window_right), attention.chunk, std::int64_t{attention.sink},
        std::int64_t{attention.varlen}, std::int64_t{attention.deterministic}}) {
    add(value);
  }
  // They choose the scheme, and which heads of a ring's own keys come last.
  for (const double speed : {speeds.flops, speeds.backward_flops, speeds.link, speeds.network, speeds.latency,
                             speeds.launch, speeds.memory, double(speeds.ranks_of_node)}) {
    add(std::bit_cast<std::int64_t>(speed));
  }
  add(std::bit_cast<std::int32_t>(attention.dropout));
  add(attention.scale.has_value() ? std::int64_t{std::bit_cast<std::int32_t>(*attention.scale)}
                                  : std::int64_t{1} << 40);
  add_text(attention.score.expression);
  add_text(attention.mask.expression);
  for (const std::vector<Capture>* captures : {&attention.score.captures, &attention.mask.captures}) {
    for (const Capture& capture : *captures) {
      add_text(capture.name);
      add(static_cast<std::int64_t>(capture.dtype));
    }
  }
  return hash;
}

}  // namespace parallel
}  // namespace fa
