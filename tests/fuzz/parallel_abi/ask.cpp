#include "fuzz/parallel_abi/ask.hpp"

#include <cstring>
#include <limits>
#include <thread>

namespace fa::fuzz {
namespace {

constexpr std::uint8_t kGuard = 0xa5;

/// Bytes that a call may write the first of, and must not write the rest of.
template <class Item>
struct Guarded {
  std::vector<Item> items;
  std::size_t capacity;

  Guarded(Random& random, std::size_t most) : items(most + 1), capacity(random.index(most + 1)) {
    std::memset(static_cast<void*>(items.data()), kGuard, items.size() * sizeof(Item));
  }
  std::string problem() const {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(items.data());
    for (std::size_t i = capacity * sizeof(Item); i < items.size() * sizeof(Item); ++i) {
      if (bytes[i] != kGuard) return "wrote behind its capacity";
    }
    return "";
  }
};

fa_cluster_speeds speeds_of(Random& random) {
  fa_cluster_speeds speeds{};
  speeds.struct_size = sizeof speeds;
  for (double* const speed : {&speeds.flops, &speeds.backward_flops, &speeds.link, &speeds.network, &speeds.latency,
                              &speeds.launch, &speeds.memory}) {
    constexpr double kSpeeds[] = {
        0, 0, 1, 1e-300, 1e300, -1, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()};
    if (random.one_in(20)) *speed = random.pick(kSpeeds);
  }
  if (random.one_in(20)) speeds.ranks_of_node = random.wild32();
  return speeds;
}

int pass(void*, const fa_transfer*, std::uint64_t, void*, std::uint64_t* group) {
  *group = 0;
  return FA_OK;
}
int pass_wait(void*, std::uint64_t, void*) {
  return FA_OK;
}
int pass_stream(void*, void*) {
  return FA_OK;
}
int pass_check(void*) {
  return FA_OK;
}
void pass_abort(void*, const char*) {}
void count_end(void* user) {
  ++*static_cast<int*>(user);
}

Asked make_communicator(Random& random) {
  int ends = 0;
  fa_communicator_functions functions{};
  functions.struct_size = sizeof functions;
  functions.rank = random.one_in(4) ? random.wild32() : 0;
  functions.size = random.one_in(4) ? random.wild32() : 2;
  functions.device = {random.one_in(4) ? random.wild32() : FA_DEVICE_HOST, 0};
  if (functions.device.kind != FA_DEVICE_HOST && functions.device.kind >= 0 && functions.device.kind < 3) {
    functions.device.kind = FA_DEVICE_HOST;  // no GPU is asked for
  }
  functions.user = &ends;
  functions.exchange = random.one_in(8) ? nullptr : pass;
  functions.wait = random.one_in(8) ? nullptr : pass_wait;
  functions.synchronize = random.one_in(8) ? nullptr : pass_stream;
  functions.check = random.one_in(8) ? nullptr : pass_check;
  functions.abort = random.one_in(8) ? nullptr : pass_abort;
  functions.destroy = random.one_in(2) ? nullptr : count_end;
  fa_communicator* made = reinterpret_cast<fa_communicator*>(std::uintptr_t{1});
  Asked asked{"fa_communicator_create", fa_communicator_create(&functions, &made), ""};
  if ((asked.status == FA_OK) != (made != nullptr)) asked.problem = "object and status do not agree";
  fa_communicator_destroy(made);
  if (ends != (asked.status == FA_OK && functions.destroy != nullptr ? 1 : 0))
    asked.problem = "ends more or less often";
  return asked;
}

/// Two ranks with options, of which each sends the other some numbers.
void exchange(Random& random, const Report& report) {
  fa_local_group_options options{};
  options.struct_size = sizeof options;
  options.timeout_ms = 20000;
  options.seed = random.next();
  options.max_delay_us = random.between(0, 50);
  fa_communicator* ranks[2] = {};
  const int status = fa_communicator_local_group_of(2, &options, ranks);
  report({"fa_communicator_local_group_of", status, status == FA_OK ? "" : "refused"});
  const auto count = random.between(0, 9);
  double numbers[2][2][9] = {};
  int statuses[2][2] = {};
  fa_device device{};
  on_ranks(2, [&](int rank) {
    for (double& number : numbers[rank][0]) number = rank + 1;
    const fa_transfer transfers[] = {{1, 1 - rank, FA_F64, 0, numbers[rank][0], count},
                                     {0, 1 - rank, FA_F64, 0, numbers[rank][1], count}};
    std::uint64_t group = 7;
    statuses[rank][0] = fa_communicator_exchange(ranks[rank], transfers, 2, nullptr, &group);
    statuses[rank][1] = fa_communicator_wait(ranks[rank], group, nullptr);
  });
  report({"fa_communicator_device", fa_communicator_device(ranks[0], &device), ""});
  for (int rank = 0; rank < 2; ++rank) {
    const bool right = statuses[rank][0] == FA_OK && statuses[rank][1] == FA_OK;
    std::string problem = right ? "" : "ranks that do the same fail";
    for (int i = 0; right && i < 9; ++i) {
      if (numbers[rank][1][i] != (i < count ? 2 - rank : 0)) problem = "other numbers than were sent";
    }
    report({"fa_communicator_exchange", FA_OK, problem});
    fa_communicator_destroy(ranks[rank]);
  }
}

}  // namespace

void ask(Random& random, const Setup& setup, RankCall& call, fa_parallel* parallel, const Report& report) {
  const fa_parallel_shape* const shape = call.shape(setup);
  std::uint64_t count = 0, hash = 0, length = 0;
  const std::int64_t* const lengths = call.lengths(setup, &count);
  const int backward = random.one_in(2) ? 1 : 0;
  std::int32_t layout = -1;
  report({"fa_parallel_hash", fa_parallel_hash(parallel, &hash), ""});
  report({"fa_parallel_layout", fa_parallel_layout(parallel, &layout), ""});
  fa_scheme_time time{};
  time.struct_size = sizeof time;
  report({"fa_parallel_scheme_time", fa_parallel_scheme_time(parallel, shape, lengths, count, &time), ""});
  fa_context_memory memory{};
  memory.struct_size = sizeof memory;
  report({"fa_parallel_memory", fa_parallel_memory(parallel, shape, backward, lengths, count, &memory), ""});
  Guarded<char> text(random, 400);
  const int status =
      fa_parallel_describe(parallel, shape, backward, lengths, count, text.items.data(), text.capacity, &length);
  report({"fa_parallel_describe", status, text.problem()});
  const fa_cluster_speeds speeds = speeds_of(random);
  Guarded<fa_scheme_time> times(random, 6);
  std::uint64_t choices = 0;
  const auto ranks = static_cast<std::int32_t>(random.between(-2, 32));
  const int compared = fa_compare_schemes(call.config(setup), shape, ranks, random.one_in(3) ? nullptr : &speeds,
                                          times.items.data(), times.capacity, &choices);
  report({"fa_compare_schemes", compared, times.problem()});
}

void ask_without_attention(Random& random, const Setup& setup, RankCall& call, const Report& report) {
  exchange(random, report);
  report(make_communicator(random));
  const fa_cluster_speeds speeds = speeds_of(random);
  const int set = fa_parallel_set_speeds(nullptr, &speeds);
  report({"fa_parallel_set_speeds", set, set == FA_OK ? "accepted NULL" : ""});
  std::uint64_t count = 0, rows = 0;
  const std::int64_t* const lengths = call.lengths(setup, &count);
  bool is_small = true;
  for (std::uint64_t i = 0; lengths != nullptr && i < count; ++i) is_small = is_small && lengths[i] < 100000;
  const std::int32_t layout = random.one_in(4) ? random.wild32() : static_cast<std::int32_t>(random.below(3));
  if (is_small) {
    Guarded<std::int64_t> guarded(random, 300);
    const int status = fa_shard_rows(layout, static_cast<std::int32_t>(random.between(-2, 9)),
                                     static_cast<std::int32_t>(random.between(-2, 9)), lengths, count,
                                     guarded.items.data(), guarded.capacity, &rows);
    report({"fa_shard_rows", status, guarded.problem()});
  }
  const std::int32_t scheme = random.wild32();
  const bool is_layout = layout >= 0 && layout < 3, is_scheme = scheme >= 0 && scheme < 4;
  const bool right = (std::string(fa_layout_name(layout)) != "unknown") == is_layout &&
                     (std::string(fa_scheme_name(scheme)) != "unknown") == is_scheme;
  report({"fa_layout_name", FA_OK, right ? "" : "another name"});
}

}  // namespace fa::fuzz
