#include "rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>

namespace bench {
namespace {

constexpr double kMb = 1 << 20;
constexpr double kSpareMb = 1024;  // of kernels, NCCL and the allocator
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

/// Lengths from 256 to 32k, log-uniform, that ranks can divide, of so many tokens in all.
std::vector<std::int64_t> lengths_of(std::int64_t tokens, int ranks) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> logarithm(std::log(256.0), std::log(32768.0));
  std::vector<std::int64_t> lengths;
  const std::int64_t unit = 2 * ranks;
  for (std::int64_t left = tokens; left > 0; left -= lengths.back()) {
    const auto drawn = static_cast<std::int64_t>(std::exp(logarithm(random))) / unit * unit;
    lengths.push_back(std::min(std::max(drawn, unit), left));
  }
  return lengths;
}

/// "ring", or "ring:2" with the ranks that share heads.
std::string name_of(const Choice& choice) {
  const std::string name = fa::to_string(choice.scheme);
  return choice.ulysses == 0 ? name : name + ":" + std::to_string(choice.ulysses);
}

Json milliseconds(double forward, double both) {
  return Json().set("forward", forward).set("forward_backward", both);
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double free_mb() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<double>(free) / kMb;
}

}  // namespace

Bench::Bench(const Options& options, std::shared_ptr<fa::Communicator> communicator)
    : options_(options), ranks_(std::move(communicator)) {
  if (options_.json.empty() || !ranks_.first()) return;
  json_.open(options_.json);
  if (!json_) throw std::runtime_error(options_.json + " cannot be written");
}

void Bench::write(const Json& line) {
  if (json_.is_open()) json_ << line.text() << std::endl;
}

void Bench::run(const Json& facts) {
  links_ = ranks_.link_speeds();
  Json link, machine = facts;
  link.set("one_way", links_.one_way).set("both_ways", links_.both_ways).set("all_to_all", links_.all_to_all);
  machine.set("ranks", ranks_.size()).set("link_gb_s", link).set("group_us", links_.latency_us);
  write(machine);
  if (ranks_.first()) {
    std::printf("%s\n\n", machine.text().c_str());
    std::printf("| tokens | heads | scheme | 1 GPU fwd, fwd + bwd (ms) | %d GPUs | efficiency | model |\n",
                ranks_.size());
    std::printf("|---|---|---|---|---|---|---|\n");
  }
  for (const std::int64_t tokens : options_.tokens) {
    for (const auto& [h_q, h_kv] : options_.heads) {
      Size size{tokens, h_q, h_kv, {}};
      if (options_.packed) size.lengths = lengths_of(tokens, ranks_.size());
      row(size);
    }
  }
}

fa::AttentionConfig Bench::attention() const {
  fa::AttentionConfig config;
  config.head_dim = kColumns;
  config.causal = options_.causal;
  config.varlen = options_.packed;
  return config;
}

fa::ContextParallelConfig Bench::config(const Choice& choice) const {
  fa::ContextParallelConfig config;
  config.attention = attention();
  config.scheme = choice.scheme;
  config.ulysses = choice.ulysses;
  config.reserved_multiprocessors = options_.reserved;
  return config;
}

fa::AttentionShape Bench::call_shape(const Size& size, std::int64_t tokens) const {
  fa::AttentionShape shape;
  shape.h_q = size.h_q;
  shape.h_kv = size.h_kv;
  shape.s_q = shape.s_kv = tokens;
  if (!options_.packed) return shape;
  shape.b = static_cast<std::int64_t>(size.lengths.size());
  shape.total_q = shape.total_kv = tokens;
  shape.s_q = shape.s_kv = *std::ranges::max_element(size.lengths);
  return shape;
}

/// Those that were asked for; or one dimension, every number of ranks that can share heads, and what is automatic.
std::vector<Choice> Bench::choices(const Size& size) const {
  if (!options_.all_choices) return options_.choices;
  std::vector<Choice> all{{fa::Scheme::ring}, {fa::Scheme::all_gather}, {fa::Scheme::ulysses}};
  for (int ulysses = 2; ulysses < ranks_.size(); ++ulysses) {
    if (ranks_.size() % ulysses != 0 || size.h_kv % ulysses != 0) continue;
    all.push_back({fa::Scheme::ring, ulysses});
    all.push_back({fa::Scheme::all_gather, ulysses});
  }
  all.push_back({});
  return all;
}

std::string Bench::refusal(std::size_t bytes, double seconds) {
  const double spent = ranks_.greatest(seconds_since(begun_));
  if (options_.limit_s > 0 && spent + seconds > options_.limit_s) {
    return "the time limit: about " + std::to_string(static_cast<int>(seconds)) + " s more than " +
           std::to_string(static_cast<int>(spent)) + " s";
  }
  const double free = ranks_.least(free_mb()) - kSpareMb;
  const double limit = options_.limit_mb > 0 ? std::min(options_.limit_mb, free) : free;
  const double needed = static_cast<double>(bytes) / kMb;
  if (needed <= limit) return "";
  return "memory: " + std::to_string(static_cast<std::int64_t>(needed)) + " MB of " +
         std::to_string(static_cast<std::int64_t>(limit)) + " MB a GPU";
}

/// One GPU with all tokens, all GPUs at the same time.
Times Bench::single(const Size& size, std::string& reason) {
  if (!options_.single) {
    reason = "not asked for";
    return {kNone, kNone};
  }
  const auto one = fa::Attention::create(attention(), ranks_.communicator().device());
  const fa::AttentionShape shape = call_shape(size, size.tokens);
  const std::size_t scratch = std::max(one.workspace_size(shape), one.backward_workspace_size(shape));
  double seconds = 0;
  if (!options_.packed) {
    seconds = compare_schemes(config({}), options_.layout, size.shape(), ranks_.size()).front().single;
    seconds *= seconds > options_.rounds.seconds ? options_.rounds.least : options_.rounds.least + 1;
  }
  reason = refusal(Tensors::bytes(size.h_q, size.h_kv, size.tokens) + scratch, seconds);
  if (!reason.empty()) return {kNone, kNone};
  one.prepare(shape);
  one.prepare_backward(shape);
  const Tensors whole(size.h_q, size.h_kv, size.tokens, options_.packed);
  const Memory memory(std::max<std::size_t>(scratch, 256));
  const fa::Workspace workspace{memory.get(), scratch};
  std::vector<std::int32_t> ends{0};
  for (const std::int64_t length : size.lengths) ends.push_back(ends.back() + static_cast<std::int32_t>(length));
  const Memory cu(ends.size() * 4);
  check(cudaMemcpy(cu.get(), ends.data(), ends.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  fa::ForwardInputs forward = whole.forward_inputs();
  fa::BackwardInputs backward = whole.backward_inputs();
  if (options_.packed) {
    const auto* const at = static_cast<const std::int32_t*>(cu.get());
    forward.sequences = {shape.b, at, at, nullptr, nullptr, shape.s_q, shape.s_kv};
    backward.sequences = forward.sequences;
  }
  return ranks_.time(
      options_.rounds, [&] { one.forward(forward, whole.forward_outputs(), ranks_.stream(), workspace); },
      [&] { one.backward(backward, whole.backward_outputs(), ranks_.stream(), workspace); });
}

/// What a choice needs beside the shards, and how long it takes if it is as efficient as the model says.
std::string Bench::refusal_of(const Size& size, const Choice& choice, const Times& one) {
  const int n = ranks_.size();
  const auto parallel = fa::ContextParallel::create(config(choice), ranks_.shared(), options_.layout);
  const std::size_t scratch = parallel.memory(size.shape(), true, size.lengths).scratch;
  const auto alone = fa::Attention::create(attention(), ranks_.communicator().device());
  // A call has the rows of a rank at most, and with Ulysses some heads of more rows: as many.
  const fa::AttentionShape call = call_shape(size, size.tokens / n);
  const std::size_t workspace = std::max(alone.workspace_size(call), alone.backward_workspace_size(call));
  const fa::SchemeTime model = parallel.scheme(size.shape(), size.lengths);
  double seconds = std::isfinite(one.both) ? one.both / 1e3 / n : model.forward + model.backward;
  seconds *= seconds > options_.rounds.seconds ? options_.rounds.least : options_.rounds.least + 1;
  return refusal(scratch + workspace, seconds);
}

std::optional<Bench::Measured> Bench::measure(const Size& size, const Choice& choice, const Tensors& own,
                                              std::string& reason) {
  auto parallel = fa::ContextParallel::create(config(choice), ranks_.shared(), options_.layout);
  parallel.check_agreement(ranks_.stream());
  try {
    parallel.prepare(size.shape(), true, size.lengths);
  } catch (const fa::Error& error) {
    reason = error.what();
  }
  if (ranks_.greatest(reason.empty() ? 0 : 1) > 0) {
    if (reason.empty()) reason = "another rank could not prepare it";
    return std::nullopt;
  }
  Measured measured;
  measured.chosen = parallel.scheme(size.shape(), size.lengths);
  const auto forward = [&] {
    parallel.forward(own.forward_inputs(), own.forward_outputs(), ranks_.stream(), size.lengths);
  };
  const auto backward = [&] {
    parallel.backward(own.backward_inputs(), own.backward_outputs(), ranks_.stream(), size.lengths);
  };
  measured.times = ranks_.time(options_.rounds, forward, backward);
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  const fa::ContextMemory memory = parallel.memory(size.shape(), true, size.lengths);
  const std::size_t shards = Tensors::bytes(size.h_q, size.h_kv, size.tokens / ranks_.size());
  measured.memory.set("shards", static_cast<double>(shards) / kMb)
      .set("shard_kv", static_cast<double>(memory.shard_kv) / kMb)
      .set("kv_in_flight", static_cast<double>(memory.kv_in_flight) / kMb)
      .set("scratch", static_cast<double>(memory.scratch) / kMb)
      .set("gpu_used", ranks_.greatest(static_cast<double>(total - free) / kMb));
  return measured;
}

void Bench::row(const Size& size) {
  std::string reason;
  const Times one = single(size, reason);
  if (!reason.empty() && ranks_.first()) {
    std::printf("%lld tokens, %lld/%lld heads on one GPU: %s\n", static_cast<long long>(size.tokens),
                static_cast<long long>(size.h_q), static_cast<long long>(size.h_kv), reason.c_str());
  }
  reason = refusal(Tensors::bytes(size.h_q, size.h_kv, size.tokens / ranks_.size()), 0);
  if (!reason.empty()) return print_refused(size, {}, reason);
  fa::Communicator& communicator = ranks_.communicator();
  const bool shares = communicator.shares_memory() && !options_.copied;
  const Tensors own(size.h_q, size.h_kv, size.tokens / ranks_.size(), options_.packed,
                    shares ? &communicator : nullptr);
  std::vector<Measured> all;
  for (const Choice& choice : choices(size)) {
    // What a choice is refused for, it is refused for on every rank, before anything is sent.
    try {
      const auto parallel = fa::ContextParallel::create(config(choice), ranks_.shared(), options_.layout);
      const fa::SchemeTime chosen = parallel.scheme(size.shape(), size.lengths);
      const auto same = std::ranges::find_if(all, [&](const Measured& measured) {
        return measured.chosen.scheme == chosen.scheme && measured.chosen.ulysses == chosen.ulysses;
      });
      if (same != all.end()) {
        print(size, choice, one, *same);
        continue;
      }
      reason = refusal_of(size, choice, one);
    } catch (const fa::Error& error) {
      reason = error.what();
    }
    const std::optional<Measured> measured = reason.empty() ? measure(size, choice, own, reason) : std::nullopt;
    if (!measured) {
      print_refused(size, choice, reason);
      continue;
    }
    all.push_back(*measured);
    print(size, choice, one, *measured);
  }
}

/// The model's speeds, as this machine has them: of one GPU with these sizes, and of its links.
fa::ClusterSpeeds Bench::measured_speeds(const Size& size, const Times& one) const {
  fa::ClusterSpeeds speeds;
  const auto tokens = static_cast<double>(size.tokens);
  const double scores = tokens * tokens * static_cast<double>(size.h_q) * (options_.causal ? 0.5 : 1);
  speeds.flops = 4 * kColumns * scores / (one.forward / 1e3);
  speeds.backward_flops = 10 * kColumns * scores / ((one.both - one.forward) / 1e3);
  speeds.link = 1e9 * links_.both_ways;
  speeds.latency = 1e-6 * links_.latency_us;
  return speeds;
}

Json Bench::line(const Size& size, const Choice& choice) const {
  Json line;
  line.set("kind", "row").set("tokens", size.tokens).set("h_q", size.h_q).set("h_kv", size.h_kv).set("d", kColumns);
  line.set("causal", options_.causal).set("packed", options_.packed).set("layout", to_string(options_.layout));
  line.set("ranks", ranks_.size()).set("scheme", name_of(choice)).set("reserved_multiprocessors", options_.reserved);
  return line;
}

void Bench::print_refused(const Size& size, const Choice& choice, const std::string& reason) {
  if (!ranks_.first()) return;
  std::printf("| %lld | %lld/%lld | %s | | | | not measured: %s |\n", static_cast<long long>(size.tokens),
              static_cast<long long>(size.h_q), static_cast<long long>(size.h_kv), name_of(choice).c_str(),
              reason.c_str());
  std::fflush(stdout);
  write(line(size, choice).set("reason", reason));
}

void Bench::print(const Size& size, const Choice& choice, const Times& one, const Measured& measured) {
  if (!ranks_.first()) return;
  const int n = ranks_.size();
  const Times& all = measured.times;
  const fa::SchemeTime& model = measured.chosen;
  Json line = this->line(size, choice);
  line.set("chosen", to_string(model.scheme)).set("ulysses", model.ulysses);
  line.set("one_ms", milliseconds(one.forward, one.both)).set("ms", milliseconds(all.forward, all.both));
  line.set("efficiency", milliseconds(one.forward / n / all.forward, one.both / n / all.both));
  line.set("model", model.efficiency(n));
  line.set("rounds", all.rounds).set("calls", all.calls).set("one_rounds", one.rounds);
  if (!options_.packed && std::isfinite(one.both)) {
    fa::ContextParallelConfig fixed = config({model.scheme, model.ulysses});
    const fa::SchemeTime again =
        compare_schemes(fixed, options_.layout, size.shape(), n, measured_speeds(size, one)).front();
    line.set("model_ms", milliseconds(1e3 * again.forward, 1e3 * (again.forward + again.backward)));
  }
  line.set("memory_mb", measured.memory);
  write(line);
  std::printf("| %lld | %lld/%lld | %s (%s, ulysses %d) | %.3f, %.3f | %.3f, %.3f | %.3f, %.3f | %.3f |\n",
              static_cast<long long>(size.tokens), static_cast<long long>(size.h_q), static_cast<long long>(size.h_kv),
              name_of(choice).c_str(), to_string(model.scheme), model.ulysses, one.forward, one.both, all.forward,
              all.both, one.forward / n / all.forward, one.both / n / all.both, model.efficiency(n));
  std::fflush(stdout);
}

}  // namespace bench
