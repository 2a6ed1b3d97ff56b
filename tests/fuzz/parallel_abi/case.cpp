#include "fuzz/parallel_abi/case.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "fuzz/c_abi/arguments.hpp"
#include "fuzz/parallel_abi/ask.hpp"
#include "fuzz/parallel_abi/rank.hpp"

namespace fa::fuzz {
namespace {

enum class Call : std::uint8_t { forward, backward, agreement, prepare, scheme, synchronize, none };

/// Ranks, and what they have made.
struct Group {
  std::vector<fa_communicator*> communicators;
  std::vector<fa_parallel*> parallels;

  explicit Group(int ranks)
      : communicators(static_cast<std::size_t>(ranks)), parallels(static_cast<std::size_t>(ranks)) {}
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    for (fa_parallel* const parallel : parallels) fa_parallel_destroy(parallel);
    for (fa_communicator* const communicator : communicators) fa_communicator_destroy(communicator);
  }
};

class ParallelCase {
 public:
  ParallelCase(std::uint64_t seed, std::uint64_t index, Tally* tally) : random_(seed, index), tally_(*tally) {}

  void run() {
    const std::uint64_t kind = random_.below(100);
    if (kind < 10) return without_group();
    if (kind < 25) return copies();
    if (kind < 28) return disagree();
    if (kind < 35) return abort();
    if (kind < 42) return ask_alone();
    agree();
  }

 private:
  std::uint64_t mischief() {
    constexpr std::uint64_t kMischief[] = {0, 0, 400, 100, 40, 10};
    return random_.pick(kMischief);
  }

  [[noreturn]] static void fail(const std::string& function, const std::string& what) {
    throw std::runtime_error(function + ": " + what);
  }

  void count(const char* function, int status) {
    ++tally_.calls;
    ++tally_.outcomes[function][status];
  }

  /// A call that no other rank takes part in.
  int check(const char* function, int status, const std::vector<int>& expected) {
    const Outcome outcome = observed(status);
    count(function, status);
    if (!outcome.message.empty()) fail(function, outcome.message + "; last error: " + outcome.error);
    if (std::ranges::find(expected, status) == expected.end()) {
      fail(function, std::string("status ") + fa_status_name(status) + "; last error: " + outcome.error);
    }
    return status;
  }
  int check_refusable(const char* function, int status) {
    return check(function, status, {FA_OK, FA_INVALID_ARGUMENT, FA_UNSUPPORTED});
  }

  /// Speeds may be wild at any time, and so may numbers of ranks: what an attention is asked for is right or spoilt.
  void take(const Asked& asked, bool may_refuse) {
    check_refusable(asked.function, asked.status);
    if (!asked.problem.empty()) fail(asked.function, asked.problem);
    const bool of_attention = std::string(asked.function).starts_with("fa_parallel_");
    if (asked.status != FA_OK && of_attention && !may_refuse) fail(asked.function, "refused");
  }

  void ask_alone() {
    const Setup setup = random_setup(random_, static_cast<int>(random_.between(1, 4)));
    RankCall call(Random(random_.next()), random_.next(), 0, mischief());
    ask_without_attention(random_, setup, call, [this](const Asked& asked) { take(asked, true); });
  }

  void make_group(Group* group, std::int64_t timeout_ms) {
    const auto ranks = static_cast<std::int32_t>(group->communicators.size());
    fa_local_group_options options{};
    options.struct_size = sizeof options;
    options.timeout_ms = timeout_ms;
    options.shares_memory = random_.one_in(2) ? 1 : 0;
    check("fa_communicator_local_group_of",
          fa_communicator_local_group_of(ranks, &options, group->communicators.data()), {FA_OK});
  }

  /// Returns whether all ranks have one. They are all given the same.
  bool create(Group* group, const Setup& setup, std::uint64_t mischief, bool* spoilt) {
    const Random shared(random_.next());
    std::optional<int> first;
    for (int rank = 0; rank < setup.ranks; ++rank) {
      RankCall call(shared, 0, rank, mischief);
      fa_parallel*& made = group->parallels[static_cast<std::size_t>(rank)];
      made = reinterpret_cast<fa_parallel*>(std::uintptr_t{1});
      const int status =
          fa_parallel_create(call.config(setup), group->communicators[static_cast<std::size_t>(rank)], &made);
      if ((status == FA_OK) != (made != nullptr)) fail("fa_parallel_create", "object and status do not agree");
      check("fa_parallel_create", status, {FA_OK, FA_INVALID_ARGUMENT, FA_UNSUPPORTED});
      *spoilt = call.spoilt();
      if (status != FA_OK && !*spoilt) fail("fa_parallel_create", std::string("refused: ") + fa_last_error_message());
      if (first.value_or(status) != status) fail("fa_parallel_create", "ranks differ");
      first = status;
    }
    return first == FA_OK;
  }

  /// In any order, before or after what uses them.
  void destroy(Group* group) {
    std::vector<std::pair<bool, std::size_t>> objects;
    for (std::size_t rank = 0; rank < group->communicators.size(); ++rank) {
      objects.emplace_back(true, rank);
      objects.emplace_back(false, rank);
    }
    for (std::size_t i = objects.size(); i > 1; --i) std::swap(objects[i - 1], objects[random_.index(i)]);
    for (const auto& [is_communicator, rank] : objects) {
      if (is_communicator) {
        fa_communicator_destroy(std::exchange(group->communicators[rank], nullptr));
      } else {
        fa_parallel_destroy(std::exchange(group->parallels[rank], nullptr));
      }
    }
    tally_.calls += objects.size();
  }

  /// A prepare that would take gigabytes may not start.
  static bool is_large(const fa_parallel_shape* shape, const std::int64_t* lengths, std::uint64_t count) {
    constexpr double kLarge = 1e6, kRefused = 4e13;
    if (shape == nullptr) return false;
    fa_parallel_shape seen{};
    std::memcpy(&seen, shape, std::clamp<std::size_t>(shape->struct_size, 4, sizeof seen));
    const auto number = [](std::int64_t value) { return static_cast<double>(std::max<std::int64_t>(value, 0)); };
    double rows = 0;
    for (std::uint64_t i = 0; lengths != nullptr && i < count; ++i) rows += number(lengths[i]);
    const double heads = std::max(number(seen.h_q), number(seen.h_kv));
    const double dense = number(seen.b) * heads * std::max(number(seen.s_q), number(seen.s_kv));
    const auto between = [](double size) { return size > kLarge && size < kRefused; };
    return heads > 1000 || between(dense) || between(heads * rows) || between(number(seen.b) * heads * rows);
  }

  struct Made {
    std::unique_ptr<RankCall> call;
    const void* inputs = nullptr;
    const void* outputs = nullptr;
    const fa_parallel_shape* shape = nullptr;
    const std::int64_t* lengths = nullptr;
    std::uint64_t length_count = 0;
    bool with_backward = false;
  };

  Made make(Call kind, const Setup& setup, Whole& whole, int rank, const Random& shared, std::uint64_t seed,
            std::uint64_t mischief) {
    Made made;
    made.call = std::make_unique<RankCall>(shared, seed, rank, mischief);
    RankCall& call = *made.call;
    if (kind == Call::forward) {
      made.outputs = call.forward_outputs(setup, whole);
      made.inputs = call.forward_inputs(setup, whole);
    } else if (kind == Call::backward) {
      made.outputs = call.backward_outputs(setup, whole);
      made.inputs = call.backward_inputs(setup, whole);
    }
    if (kind == Call::prepare || kind == Call::scheme) made.shape = call.shape(setup);
    made.lengths = call.lengths(setup, &made.length_count);
    made.with_backward = setup.has_dlse;
    return made;
  }

  static const char* name_of(Call kind) {
    switch (kind) {
      case Call::forward:
        return "fa_parallel_forward";
      case Call::backward:
        return "fa_parallel_backward";
      case Call::agreement:
        return "fa_parallel_check_agreement";
      case Call::prepare:
        return "fa_parallel_prepare";
      case Call::scheme:
        return "fa_parallel_scheme";
      default:
        return "fa_communicator_synchronize";
    }
  }

  static int call(Call kind, const Made& made, fa_parallel* parallel, fa_communicator* communicator) {
    switch (kind) {
      case Call::forward:
        return fa_parallel_forward(parallel, static_cast<const fa_forward_inputs*>(made.inputs),
                                   static_cast<const fa_forward_outputs*>(made.outputs), nullptr, made.lengths,
                                   made.length_count);
      case Call::backward:
        return fa_parallel_backward(parallel, static_cast<const fa_backward_inputs*>(made.inputs),
                                    static_cast<const fa_backward_outputs*>(made.outputs), nullptr, made.lengths,
                                    made.length_count);
      case Call::agreement:
        return fa_parallel_check_agreement(parallel, nullptr);
      case Call::prepare:
        if (!is_large(made.shape, made.lengths, made.length_count)) {
          return fa_parallel_prepare(parallel, made.shape, made.with_backward, made.lengths, made.length_count);
        }
        [[fallthrough]];
      case Call::scheme: {
        std::int32_t scheme = -1, ulysses = -1;
        return fa_parallel_scheme(parallel, made.shape, made.lengths, made.length_count, &scheme, &ulysses);
      }
      default:
        return communicator == nullptr ? FA_OK : fa_communicator_synchronize(communicator, nullptr);
    }
  }

  /// The same call by all ranks. Each frees its memory as soon as it may.
  std::vector<Outcome> together(Call kind, const Group& group, const Setup& setup, std::vector<Made>* made,
                                Whole* results) {
    std::vector<Outcome> outcomes(made->size());
    on_ranks(setup.ranks, [&](int rank) {
      const auto i = static_cast<std::size_t>(rank);
      RankCall& arguments = *(*made)[i].call;
      outcomes[i] = observed(call(kind, (*made)[i], group.parallels[i], group.communicators[i]));
      const std::string damage = outcomes[i].message.empty() && outcomes[i].status != FA_CUDA
                                     ? arguments.damage(outcomes[i].status)
                                     : std::string();
      if (outcomes[i].message.empty()) outcomes[i].message = damage;
      if (outcomes[i].status == FA_OK && results != nullptr && !arguments.spoilt()) arguments.take(setup, results);
      arguments.release();
    });
    for (const Outcome& outcome : outcomes) {
      count(name_of(kind), outcome.status);
      if (!outcome.message.empty()) fail(name_of(kind), outcome.message + "; last error: " + outcome.error);
    }
    return outcomes;
  }

  void agree() {
    const int ranks = static_cast<int>(random_.between(1, 4));
    const Setup setup = random_setup(random_, ranks);
    const std::uint64_t mischief = this->mischief();
    Group group(ranks);
    constexpr std::int64_t kTimeouts[] = {0, 0, 20000, std::numeric_limits<std::int64_t>::max(), std::int64_t{1} << 45};
    make_group(&group, random_.pick(kTimeouts));
    bool spoilt = false;
    if (!create(&group, setup, random_.one_in(3) ? mischief : 0, &spoilt)) return destroy(&group);
    if (random_.one_in(2)) {  // of a ring the own keys of some heads come last
      fa_cluster_speeds slow{};
      slow.struct_size = sizeof slow;
      slow.flops = slow.backward_flops = 1;
      for (fa_parallel* const one : group.parallels) {
        check("fa_parallel_set_speeds", fa_parallel_set_speeds(one, &slow), {FA_OK});
      }
    }
    Whole whole(setup, random_);
    if (!whole.compute(setup, true)) fail("fa_forward", std::string("refused: ") + fa_last_error_message());
    if (random_.one_in(4)) {  // those that attentions use live on
      fa_communicator*& one = group.communicators[random_.index(group.communicators.size())];
      fa_communicator_destroy(std::exchange(one, nullptr));
    }
    {
      RankCall call(Random(random_.next()), random_.next(), 0, random_.one_in(2) ? mischief : 0);
      ask(random_, setup, call, group.parallels.back(),
          [&](const Asked& asked) { take(asked, spoilt || call.spoilt()); });
    }
    for (std::uint64_t calls = 1 + random_.below(5); calls > 0; --calls) {
      constexpr Call kCalls[] = {Call::forward, Call::forward, Call::forward,   Call::backward,   Call::backward,
                                 Call::prepare, Call::scheme,  Call::agreement, Call::synchronize};
      agreed(random_.pick(kCalls), group, setup, &whole, random_.one_in(2) ? mischief : 0, spoilt);
    }
    for (fa_communicator* const communicator : group.communicators) {
      if (communicator != nullptr) check("fa_communicator_check", fa_communicator_check(communicator), {FA_OK});
    }
    destroy(&group);
  }

  void agreed(Call kind, const Group& group, const Setup& setup, Whole* whole, std::uint64_t mischief, bool spoilt) {
    const Random shared(random_.next());
    const std::uint64_t seed = random_.next();
    std::vector<Made> made;
    for (int rank = 0; rank < setup.ranks; ++rank) {
      made.push_back(make(kind, setup, *whole, rank, shared, seed, mischief));
    }
    const RankCall& first = *made.front().call;
    const bool is_call = kind == Call::forward || kind == Call::backward;
    const bool wild = first.spoilt() && kind != Call::agreement && kind != Call::synchronize;
    const bool must_fail = is_call && first.must_fail();
    Whole results = *whole;
    const std::vector<Outcome> outcomes = together(kind, group, setup, &made, is_call ? &results : nullptr);
    for (const Outcome& outcome : outcomes) {
      const int status = outcome.status;
      if (status != outcomes.front().status) fail(name_of(kind), "ranks differ; last error: " + outcome.error);
      const bool refused = status == FA_INVALID_ARGUMENT || status == FA_UNSUPPORTED;
      if (status != FA_OK && !refused) fail(name_of(kind), "status " + std::to_string(status) + ": " + outcome.error);
      if (refused && !spoilt && !wild) fail(name_of(kind), "refused: " + outcome.error);
      if (status == FA_OK && must_fail) fail(name_of(kind), "accepted what it must refuse");
    }
    if (!is_call || spoilt || wild || outcomes.front().status != FA_OK) return;
    constexpr std::pair<int, const char*> kResults[] = {{kO, "o"},   {kLse, "lse"}, {kDq, "dq"},
                                                        {kDk, "dk"}, {kDv, "dv"},   {kDsink, "dsink"}};
    for (const auto& [name, text] : kResults) {
      const std::string problem = difference(text, results[name], (*whole)[name]);
      if (!problem.empty()) fail(name_of(kind), problem);
    }
  }

  /// Ranks that make other calls, or none, or are configured otherwise: nobody waits for longer than the bound.
  void disagree() {
    const int ranks = static_cast<int>(random_.between(2, 4));
    const Setup usual = random_setup(random_, ranks);
    const Setup other = random_.one_in(2) ? random_setup(random_, ranks) : usual;
    const int odd = static_cast<int>(random_.below(static_cast<std::uint64_t>(ranks)));
    Group group(ranks);
    make_group(&group, random_.between(20, 60));
    Whole wholes[] = {Whole(usual, random_), Whole(other, random_)};
    constexpr Call kCalls[] = {Call::forward, Call::backward, Call::agreement};
    const Call kind = random_.pick(kCalls);
    const Call odd_kind = random_.one_in(3) ? Call::none : random_.pick(kCalls);
    const bool leaves = random_.one_in(3);
    std::vector<Made> made;
    for (int rank = 0; rank < ranks; ++rank) {
      const Setup& setup = rank == odd ? other : usual;
      RankCall arguments(Random(1), 1, rank, 0);
      const auto i = static_cast<std::size_t>(rank);
      check("fa_parallel_create",
            fa_parallel_create(arguments.config(setup), group.communicators[i], &group.parallels[i]), {FA_OK});
      made.push_back(make(rank == odd ? odd_kind : kind, setup, wholes[rank == odd ? 1 : 0], rank,
                          Random(random_.next()), random_.next(), rank == odd && random_.one_in(3) ? 10 : 0));
    }
    std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks));
    const auto begin = std::chrono::steady_clock::now();
    on_ranks(ranks, [&](int rank) {
      const auto i = static_cast<std::size_t>(rank);
      if (rank == odd && odd_kind == Call::none) {
        if (!leaves) return;
        fa_parallel_destroy(std::exchange(group.parallels[i], nullptr));
        fa_communicator_destroy(std::exchange(group.communicators[i], nullptr));
        return;
      }
      outcomes[i] = observed(call(rank == odd ? odd_kind : kind, made[i], group.parallels[i], nullptr));
      made[i].call->release();
    });
    if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(20)) fail(name_of(kind), "did not end");
    for (const Outcome& outcome : outcomes) {
      count(name_of(kind), outcome.status);
      const bool known = outcome.status == FA_OK || outcome.status == FA_INVALID_ARGUMENT ||
                         outcome.status == FA_UNSUPPORTED || outcome.status == FA_CUDA;
      if (!known || !outcome.message.empty()) {
        fail(name_of(kind), "status " + std::to_string(outcome.status) + ": " + outcome.message + outcome.error);
      }
    }
    for (fa_communicator* const communicator : group.communicators) {
      if (communicator != nullptr)
        check("fa_communicator_check", fa_communicator_check(communicator), {FA_OK, FA_CUDA});
    }
    destroy(&group);
  }

  /// An end from outside, at any moment.
  void abort() {
    const int ranks = static_cast<int>(random_.between(1, 4));
    const Setup setup = random_setup(random_, ranks);
    Group group(ranks);
    make_group(&group, 20000);
    bool spoilt = false;
    if (!create(&group, setup, 0, &spoilt)) fail("fa_parallel_create", "refused");
    Whole whole(setup, random_);
    constexpr Call kCalls[] = {Call::forward, Call::backward, Call::agreement};
    const Call kind = random_.pick(kCalls);
    std::vector<Made> made;
    for (int rank = 0; rank < ranks; ++rank) {
      made.push_back(make(kind, setup, whole, rank, Random(1), 1, 0));
    }
    fa_communicator* const by = group.communicators[random_.index(group.communicators.size())];
    const auto delay = std::chrono::microseconds(random_.below(300));
    const char* const problem = random_.one_in(3) ? nullptr : random_.one_in(2) ? "" : "the user has had enough";
    int aborted = -1;
    std::thread aborter([&] {
      std::this_thread::sleep_for(delay);
      aborted = fa_communicator_abort(by, problem);
    });
    std::vector<Outcome> outcomes;
    try {
      outcomes = together(kind, group, setup, &made, nullptr);
    } catch (...) {
      aborter.join();
      throw;
    }
    aborter.join();
    check("fa_communicator_abort", aborted, {FA_OK});
    for (const Outcome& outcome : outcomes) {
      if (outcome.status != FA_OK && outcome.status != FA_CUDA) fail(name_of(kind), outcome.error);
    }
    check("fa_communicator_abort", fa_communicator_abort(by, problem), {FA_OK});
    for (std::size_t i = 0; i < group.communicators.size(); ++i) {
      fa_communicator* const communicator = group.communicators[i];
      check("fa_communicator_check", fa_communicator_check(communicator), {FA_CUDA});
      check("fa_communicator_synchronize", fa_communicator_synchronize(communicator, nullptr), {FA_CUDA});
      RankCall arguments(Random(2), 1, static_cast<int>(i), 0);
      fa_parallel* late = nullptr;
      check("fa_parallel_create", fa_parallel_create(arguments.config(setup), communicator, &late), {FA_CUDA});
      check("fa_parallel_check_agreement", fa_parallel_check_agreement(group.parallels[i], nullptr), {FA_CUDA});
    }
    destroy(&group);
  }

  /// fa_shard and fa_unshard of one rank.
  void copies() {
    const int ranks = static_cast<int>(random_.between(1, 4));
    const Setup setup = random_setup(random_, ranks);
    Whole whole(setup, random_);
    const std::uint64_t mischief = this->mischief();
    for (int rank = 0; rank < ranks; ++rank) {
      constexpr int kCopied[] = {kQ, kK, kV, kO};
      const int name = random_.pick(kCopied);
      const bool to_part = random_.one_in(2);
      RankCall call(Random(random_.next()), random_.next(), rank, mischief);
      const fa_tensor* const all = call.whole_tensor(whole, name, !to_part);
      const fa_tensor* const part = call.part_tensor(setup, whole, name, to_part);
      const fa_shard_copy* const how = call.shard_copy(setup);
      const char* const function = to_part ? "fa_shard" : "fa_unshard";
      const int status = to_part ? fa_shard(how, all, part, nullptr) : fa_unshard(how, part, all, nullptr);
      std::vector<int> expected{FA_OK};
      if (call.spoilt()) expected = {FA_OK, FA_INVALID_ARGUMENT, FA_UNSUPPORTED, FA_NO_DRIVER, FA_CUDA};
      check(function, status, expected);
      if (status == FA_OK && call.must_fail()) fail(function, "accepted what it must refuse");
      const std::string problem = status == FA_NO_DRIVER || status == FA_CUDA ? std::string() : call.damage(status);
      if (!problem.empty()) fail(function, problem);
      if (status == FA_OK && !call.spoilt() && !call.is_copied(setup, whole, name, to_part))
        fail(function, "other rows");
    }
  }

  /// What is refused before there is a group, and a group with wild arguments.
  void without_group() {
    const Setup setup = random_setup(random_, 1);
    Whole whole(setup, random_);
    RankCall call(Random(random_.next()), random_.next(), 0, 4);
    std::uint64_t count = 0;
    const std::int64_t* const lengths = call.lengths(setup, &count);
    const std::vector<int> kInvalid{FA_INVALID_ARGUMENT};
    fa_parallel* made = nullptr;
    fa_communicator* communicator = nullptr;
    switch (random_.below(6)) {
      case 0: {
        std::int32_t size = random_.wild32();
        if (size > 4 && size <= 65536) size = 65537;
        const std::int64_t timeout = random_.wild();
        std::vector<fa_communicator*> group(4);
        const int status = fa_communicator_local_group(size, timeout, random_.one_in(8) ? nullptr : group.data());
        check_refusable("fa_communicator_local_group", status);
        if (status == FA_OK && (size < 1 || timeout < 0)) fail("fa_communicator_local_group", "accepted");
        for (fa_communicator* const rank : group) fa_communicator_destroy(rank);
        return;
      }
      case 1: {
        auto* const comm = reinterpret_cast<void*>(random_.one_in(2) ? std::uintptr_t{0} : std::uintptr_t{4096});
        const fa_nccl_options* const options = random_.one_in(4) ? nullptr : call.nccl_options();
        fa_communicator** const out = random_.one_in(8) ? nullptr : &communicator;
        check("fa_communicator_of_nccl", fa_communicator_of_nccl(comm, options, out),
              {FA_INVALID_ARGUMENT, FA_UNSUPPORTED, FA_NO_DRIVER});
        if (communicator != nullptr) fail("fa_communicator_of_nccl", "made one without NCCL");
        return;
      }
      case 2:
        check("fa_parallel_create", fa_parallel_create(call.config(setup), nullptr, &made), kInvalid);
        check("fa_parallel_create", fa_parallel_create(call.config(setup), nullptr, nullptr), kInvalid);
        check("fa_parallel_prepare", fa_parallel_prepare(nullptr, call.shape(setup), 1, lengths, count), kInvalid);
        check("fa_parallel_scheme", fa_parallel_scheme(nullptr, call.shape(setup), lengths, count, nullptr, nullptr),
              kInvalid);
        return;
      case 3: {
        const fa_forward_outputs* const outputs = call.forward_outputs(setup, whole);
        const fa_forward_inputs* const inputs = call.forward_inputs(setup, whole);
        check("fa_parallel_forward", fa_parallel_forward(nullptr, inputs, outputs, nullptr, lengths, count), kInvalid);
        check("fa_parallel_backward", fa_parallel_backward(nullptr, nullptr, nullptr, nullptr, lengths, count),
              kInvalid);
        return;
      }
      case 4:
        fa_parallel_destroy(nullptr);
        fa_communicator_destroy(nullptr);
        check("fa_parallel_check_agreement", fa_parallel_check_agreement(nullptr, nullptr), kInvalid);
        check("fa_communicator_synchronize", fa_communicator_synchronize(nullptr, nullptr), kInvalid);
        check("fa_communicator_check", fa_communicator_check(nullptr), kInvalid);
        check("fa_communicator_abort", fa_communicator_abort(nullptr, "reason"), kInvalid);
        check("fa_communicator_rank", fa_communicator_rank(nullptr, nullptr, nullptr), kInvalid);
        return;
      default:
        return hostile_attention();
    }
  }

  /// All that an fa_config may say.
  void hostile_attention() {
    const int ranks = static_cast<int>(random_.between(1, 4));
    Group group(ranks);
    make_group(&group, 0);
    for (int rank = 0; rank < ranks; ++rank) {
      std::int32_t number = -1, size = -1;
      fa_communicator* const communicator = group.communicators[static_cast<std::size_t>(rank)];
      check("fa_communicator_rank", fa_communicator_rank(communicator, &number, &size), {FA_OK});
      if (number != rank || size != ranks) fail("fa_communicator_rank", "another rank or size");
      check("fa_communicator_rank", fa_communicator_rank(communicator, nullptr, nullptr), {FA_OK});
    }
    Memory memory(random_);
    Arguments arguments(random_, memory, mischief());
    fa_parallel_config config{};
    config.struct_size = sizeof config;
    config.attention = arguments.config(true).config;
    config.layout = static_cast<std::int32_t>(random_.below(3));
    config.scheme = static_cast<std::int32_t>(random_.below(4));
    fa_parallel*& made = group.parallels.front();
    const int status = fa_parallel_create(&config, group.communicators.front(), &made);
    check_refusable("fa_parallel_create", status);
    if ((status == FA_OK) != (made != nullptr)) fail("fa_parallel_create", "object and status do not agree");
    memory.clear();
    const fa_parallel_shape shape{sizeof shape, 0, 2, 8, 4, 16 * ranks, 16 * ranks};
    const std::vector<std::int64_t> lengths(3, 8 * ranks);
    const bool packed = random_.one_in(2);
    std::int32_t scheme = -1, ulysses = -1;
    if (made == nullptr) return destroy(&group);
    check_refusable("fa_parallel_scheme", fa_parallel_scheme(made, &shape, packed ? lengths.data() : nullptr,
                                                             packed ? lengths.size() : 0, &scheme, &ulysses));
    check_refusable("fa_parallel_prepare",
                    fa_parallel_prepare(made, &shape, random_.one_in(2), packed ? lengths.data() : nullptr,
                                        packed ? lengths.size() : 0));
    destroy(&group);
  }

  Random random_;
  Tally& tally_;
};

}  // namespace

void run_parallel_case(std::uint64_t seed, std::uint64_t index, Tally* tally) {
  ParallelCase(seed, index, tally).run();
}

}  // namespace fa::fuzz
