#include "api/known_calls.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <common/stored_params.cuh>
#include <cstddef>
#include <cstdint>
#include <fa/error.hpp>
#include <functional>
#include <map>
#include <optional>
#include <sm90/sm90_fp8_params.cuh>
#include <string>
#include <tuple>
#include <vector>

#include "fake_driver/launches_test.hpp"
#include "fake_driver/random_calls.hpp"

// A call like one that came before runs as if none had: the same launches with the same parameters, or the same
// refusal.
namespace fa {
namespace {

auto fields(const fake_driver::Launch& launch) {
  return std::tie(launch.kernel, launch.early, launch.address, launch.bytes, launch.grid, launch.threads,
                  launch.shared_bytes, launch.params);
}

void* at(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

constexpr std::uintptr_t kWorkspace = std::uintptr_t{1} << 60;
constexpr std::uintptr_t kLists = std::uintptr_t{3} << 59;

struct Forward {
  ForwardInputs inputs;
  ForwardOutputs outputs;
  Workspace workspace;

  void run(const Attention& attention) const { attention.forward(inputs, outputs, nullptr, workspace); }
};

struct Backward {
  BackwardInputs inputs;
  BackwardOutputs outputs;
  Workspace workspace;

  void run(const Attention& attention) const { attention.backward(inputs, outputs, nullptr, workspace); }
};

std::vector<TensorView*> views_of(Forward& call) {
  ForwardInputs& in = call.inputs;
  return {&in.q,       &in.k,       &in.v,        &in.sink,        &in.cache.block_table, &in.k_scale,
          &in.v_scale, &in.q_scale, &in.row_bias, &call.outputs.o, &call.outputs.lse};
}

std::vector<TensorView*> views_of(Backward& call) {
  BackwardInputs& in = call.inputs;
  BackwardOutputs& out = call.outputs;
  return {&in.q, &in.k, &in.v, &in.o, &in.lse, &in.dout, &in.dlse, &in.sink, &out.dq, &out.dk, &out.dv, &out.dsink};
}

std::vector<const std::int32_t**> arrays_of(PackedSequences& sequences) {
  return {&sequences.cu_seqlens_q, &sequences.cu_seqlens_kv, &sequences.seqused_q, &sequences.seqused_kv};
}

std::vector<const std::int32_t**> arrays_of(Forward& call) {
  std::vector<const std::int32_t**> arrays = arrays_of(call.inputs.sequences);
  arrays.push_back(&call.inputs.cache.batch_index);
  arrays.push_back(&call.inputs.cache.seq_begin);
  return arrays;
}

std::vector<const std::int32_t**> arrays_of(Backward& call) {
  return arrays_of(call.inputs.sequences);
}

/// The `n`-th time somewhere else, everything by another distance.
template <class Call>
Call moved(Call call, std::uintptr_t n) {
  std::uintptr_t which = 0;
  const auto distance = [&] { return (n << 52) + (n * ++which << 46); };
  for (TensorView* const view : views_of(call)) {
    if (view->defined()) view->data = static_cast<std::byte*>(view->data) + distance();
  }
  for (const std::int32_t** const array : arrays_of(call)) {
    if (*array != nullptr)
      *array = reinterpret_cast<const std::int32_t*>(reinterpret_cast<std::uintptr_t>(*array) + distance());
  }
  const auto moved_captures = [&](const Captures& given) {
    Captures result;
    for (Captured captured : given) {
      if (captured.tensor.defined()) captured.tensor.data = static_cast<std::byte*>(captured.tensor.data) + distance();
      result.add(captured);
    }
    return result;
  };
  call.inputs.captures = moved_captures(call.inputs.captures);
  if constexpr (requires { call.outputs.captures; }) call.outputs.captures = moved_captures(call.outputs.captures);
  call.inputs.dropout.seed += n;
  call.inputs.dropout.offset += 3 * n;
  if (call.workspace.data != nullptr) call.workspace.data = at(kWorkspace + (n << 52));
  return call;
}

/// What a call has led to.
struct Outcome {
  std::string refusal;
  std::vector<fake_driver::Launch> launches;

  bool served() const { return refusal.empty(); }
};

class KnownCalls : public LaunchesTest {
 protected:
  void SetUp() override {
    LaunchesTest::SetUp();
    if (IsSkipped()) return;
    const auto driver = support::DynamicLibrary::open("libcuda.so.1", nullptr);
    scales_ = driver.function<fake_driver::GetScales>(fake_driver::kScales);
  }
  void TearDown() override {
    if (scales_ != nullptr) scales_().bytes = 0;
  }

  static std::optional<Attention> create(const AttentionConfig& config) {
    try {
      return Attention::create(config);
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  void tell_scales(const AttentionConfig& config) const {
    const auto tell = [this](const auto& params, const auto& first, const auto& last) {
      const auto place = [](const auto& of) { return reinterpret_cast<std::uintptr_t>(&of); };
      scales_().offset = place(first) - place(params);
      scales_().bytes = place(last) + sizeof last - place(first);
    };
    scales_().bytes = 0;
    const kernel::Sm90Int8Params of_8_bits{};
    const kernel::ForwardStoredParams of_a_cache{};
    if (config.dtype == DType::i8) {
      tell(of_8_bits, of_8_bits.scales, of_8_bits.row_bias);
    } else if (size_of(config.dtype) == 1) {
      tell(of_8_bits, of_8_bits.scales, of_8_bits.scales);
    } else if (config.k_dtype || config.v_dtype) {
      tell(of_a_cache, of_a_cache.scales, of_a_cache.scales);
    }
  }

  template <class Call>
  Outcome outcome(const Attention& attention, const Call& call) const {
    launches_().clear();
    Outcome result;
    try {
      call.run(attention);
    } catch (const Error& error) {
      result.refusal = error.what();
    }
    result.launches = launches_();
    return result;
  }

  /// On an Attention that has seen such a call, and on one that has seen none.
  template <class Call>
  Outcome expect_equal(const Attention& attention, const AttentionConfig& config, const Call& call) const {
    const Outcome known = outcome(attention, call);
    const Outcome fresh = outcome(*create(config), call);
    EXPECT_EQ(known.refusal, fresh.refusal);
    EXPECT_EQ(known.launches.size(), fresh.launches.size());
    for (std::size_t i = 0; i < std::min(known.launches.size(), fresh.launches.size()); ++i) {
      EXPECT_EQ(fields(known.launches[i]), fields(fresh.launches[i])) << "launch " << i;
    }
    return known;
  }

  /// Calls until one like it is known, and then elsewhere; whether it became known.
  template <class Call>
  bool expect_repeats(const Attention& attention, const AttentionConfig& config, const Call& call) const {
    for (std::uintptr_t n = 1; n <= 2; ++n) {
      if (!outcome(attention, moved(call, n)).served()) return false;
    }
    const Call again = moved(call, 3);
    const bool knows = api::KnownCallsAccess::knows(attention, again.inputs, again.outputs);
    expect_equal(attention, config, again);
    return knows;
  }

  fake_driver::GetScales scales_ = nullptr;
};

/// Whatever call comes next, with one thing that is different, right or wrong.
template <class Call>
void change(Call& call, RandomCalls& random) {
  const std::vector<TensorView*> views = views_of(call);
  const std::vector<const std::int32_t**> arrays = arrays_of(call);
  TensorView& view = *views[static_cast<std::size_t>(random.up_to(static_cast<std::int64_t>(views.size())) - 1)];
  TensorView& other = *views[static_cast<std::size_t>(random.up_to(static_cast<std::int64_t>(views.size())) - 1)];
  const std::int32_t*& array =
      *arrays[static_cast<std::size_t>(random.up_to(static_cast<std::int64_t>(arrays.size())) - 1)];
  const auto axis = static_cast<std::size_t>(random.up_to(4) - 1);
  const std::vector<std::function<void()>> changes = {
      [&] {
        view.data = static_cast<std::byte*>(view.data) + random.one_of({1, 2, 4, 8, 16, 64});
      },
      [&] { view.data = nullptr; },
      [&] {
        view.data = static_cast<std::byte*>(other.data) + random.one_of({0, 0, 16, 4096});
      },
      [&] {
        view.data = static_cast<std::byte*>(other.data) + random.one_of({0, 0, 16, 4096});
      },
      [&] {
        view.data = static_cast<std::byte*>(other.data) - random.one_of({16, 4096});
      },
      [&] {
        view.strides[axis] = random.one_of<std::int64_t>({0, 1, 3, view.strides[axis] * 2, -view.strides[axis]});
      },
      [&] {
        view.shape[axis] += random.one_of({-1, 1});
      },
      [&] {
        view.rank += random.one_of({-1, 1});
      },
      [&] {
        view.dtype = random.one_of({DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::i32});
      },
      [&] { view.read_only = !view.read_only; },
      [&] { view = TensorView(); },
      [&] { view = other; },
      [&] { array = random.one_in(2) ? nullptr : reinterpret_cast<const std::int32_t*>(std::uintptr_t{1} << 62); },
      [&] { array = reinterpret_cast<const std::int32_t*>((std::uintptr_t{1} << 62) + 2); },
      [&] { array = static_cast<const std::int32_t*>(view.data); },
      [&] {
        call.inputs.sequences.b += random.one_of({-1, 1});
      },
      [&] {
        call.inputs.sequences.max_s_q += random.one_of({-1, 1, -100000});
      },
      [&] {
        call.inputs.sequences.max_s_kv += random.one_of({-1, 1, -100000});
      },
      [&] { call.inputs.dropout.device = reinterpret_cast<const std::uint64_t*>((std::uintptr_t{1} << 62) + 4); },
      [&] { call.inputs.dropout.device = reinterpret_cast<const std::uint64_t*>(std::uintptr_t{1} << 62); },
      [&] {
        call.inputs.max_multiprocessors = random.one_of({-1, 0, 7, 1000});
      },
      [&] { call.inputs.captures = {}; },
      [&] {
        call.inputs.captures = {{"slope", 1.5}};
      },
      [&] { call.inputs.place = ShardPlace{.q = 64, .kv = 32}; },
      [&] { call.inputs.place = ShardPlace{.q = -1}; },
      [&] {
        call.inputs.tiles = {at(kLists + 128), 1 << 20, random.one_in(2)};
      },
      [&] {
        call.inputs.tiles = {nullptr, 0, true};
      },
      [&] { call.workspace.data = static_cast<std::byte*>(call.workspace.data) + 128; },
      [&] { call.workspace.size = call.workspace.size / 2; },
      [&] { call.workspace = {}; },
  };
  changes[static_cast<std::size_t>(random.up_to(static_cast<std::int64_t>(changes.size())) - 1)]();
}

void change_more(Forward& call, RandomCalls& random) {
  const TensorView row(at(std::uintptr_t{1} << 62), DType::f32, {1, 1, 1});
  if (!random.one_in(4)) return change(call, random);
  const std::vector<std::function<void()>> changes = {
      [&] { call.inputs.schedule.data = static_cast<std::byte*>(call.inputs.schedule.data) + 128; },
      [&] { call.inputs.schedule.size /= 2; },
      [&] {
        call.inputs.schedule = {at(kLists + (std::uintptr_t{1} << 57)), std::size_t{1} << 30};
      },
      [&] { call.inputs.schedule = {}; },
      [&] { call.outputs.dump.p = row; },
      [&] { call.outputs.statistics.entropy = row; },
      [&] { call.inputs.q_scale = row; },
      [&] { call.inputs.row_bias = row; },
  };
  changes[static_cast<std::size_t>(random.up_to(static_cast<std::int64_t>(changes.size())) - 1)]();
}

void change_more(Backward& call, RandomCalls& random) {
  change(call, random);
}

AttentionConfig random_config(RandomCalls& random, RandomCalls& more, const AttentionConfig& like) {
  AttentionConfig config = more.one_in(3) ? random.paged_config() : random.config();
  config.tune = like.tune;
  config.cache = like.cache;
  add_to(config, more);
  if (!more.one_in(8)) config.zero_padding = false;
  return config;
}

TEST_F(KnownCalls, RunAsTheFirstOne) {
  std::map<std::string, int> known;
  for (unsigned seed = 5000; seed < 5800; ++seed) {
    RandomCalls random(seed, seed % 2 == 0), more(seed + 1000000);
    const AttentionConfig config = random_config(random, more, config_);
    const auto attention = create(config);
    if (!attention) continue;
    tell_scales(config);
    for (int i = 0; i < 3; ++i) {
      RandomCalls::Call drawn = random.call(config, random.shape(config));
      if (config.k_dtype) store_in_few_bits(drawn.inputs, drawn.forward_shape, config);
      if (size_of(config.dtype) == 1) drawn.outputs.o.dtype = DType::bf16;
      place(drawn.inputs, drawn.forward_shape, config, more);
      place(drawn.backward_inputs, drawn.backward_shape, config, more);
      if (more.one_in(4)) drawn.outputs.lse = {};
      SCOPED_TRACE("seed " + std::to_string(seed) + ": " + text_of(config, drawn.forward_shape));
      const std::size_t room = std::size_t{1} << 50;
      Forward forward{drawn.inputs, drawn.outputs, more.one_in(4) ? Workspace{} : Workspace{at(kWorkspace), room}};
      const bool scheduled = config.page_size > 0 && more.one_in(2);
      if (scheduled) {
        forward.inputs.schedule = {at(kLists), std::size_t{1} << 40};
        attention->schedule({drawn.forward_shape, forward.inputs.sequences, forward.inputs.cache.seq_begin},
                            forward.inputs.schedule);
      }
      const bool knows = expect_repeats(*attention, config, forward);
      known["forward"] += knows;
      known["over pages"] += knows && config.page_size > 0;
      known["with a schedule"] += knows && scheduled;
      known["packed"] += knows && config.varlen;
      known["with captures"] += knows && forward.inputs.captures.size() != 0;
      known["with dropout"] += knows && config.dropout > 0;
      known["with sinks"] += knows && config.sink;
      known["placed"] += knows && forward.inputs.place.has_value();
      known["bounded"] += knows && forward.inputs.max_multiprocessors > 0;
      known["stored in 8 bits"] += knows && config.k_dtype.has_value();
      known["of 8 bits"] += knows && size_of(config.dtype) == 1;
      const Backward backward{drawn.backward_inputs, drawn.backward_outputs, {at(kWorkspace), room}};
      known["backward"] += expect_repeats(*attention, config, backward);
    }
    if (HasFailure()) return;
  }
  for (const auto& [kind, count] : known) EXPECT_GT(count, 12) << kind;
}

TEST_F(KnownCalls, RefuseWhatTheFirstOneWould) {
  int refused = 0;
  int refused_though_alike = 0;
  int served = 0;
  const auto try_changes = [&](const Attention& attention, const AttentionConfig& config, const auto& call,
                               RandomCalls& random) {
    if (!expect_repeats(attention, config, call)) return;
    for (int i = 0; i < 10; ++i) {
      auto changed = moved(call, 3);
      change_more(changed, random);
      const bool alike = api::KnownCallsAccess::knows(attention, changed.inputs, changed.outputs);
      const Outcome outcome = expect_equal(attention, config, changed);
      refused += !outcome.served();
      refused_though_alike += alike && !outcome.served();
      served += outcome.served();
    }
  };
  for (unsigned seed = 6000; seed < 6250; ++seed) {
    RandomCalls random(seed, true), more(seed + 1000000);
    const AttentionConfig config = random_config(random, more, config_);
    const auto attention = create(config);
    if (!attention) continue;
    tell_scales(config);
    RandomCalls::Call drawn = random.call(config, random.shape(config));
    if (config.k_dtype) store_in_few_bits(drawn.inputs, drawn.forward_shape, config);
    if (size_of(config.dtype) == 1) drawn.outputs.o.dtype = DType::bf16;
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + text_of(config, drawn.forward_shape));
    Forward forward{drawn.inputs, drawn.outputs, {at(kWorkspace), attention->workspace_size(drawn.forward_shape)}};
    if (config.page_size > 0) {
      forward.inputs.schedule = {at(kLists), attention->schedule_size(drawn.forward_shape)};
      attention->schedule({drawn.forward_shape, forward.inputs.sequences, forward.inputs.cache.seq_begin},
                          forward.inputs.schedule);
    }
    try_changes(*attention, config, forward, more);
    if (config.page_size == 0 && size_of(config.dtype) != 1) {
      const std::size_t bytes = attention->backward_workspace_size(drawn.backward_shape);
      try_changes(*attention, config, Backward{drawn.backward_inputs, drawn.backward_outputs, {at(kWorkspace), bytes}},
                  more);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(refused, 200);
  EXPECT_GT(refused_though_alike, 30);
  EXPECT_GT(served, 100);
}

/// Where numbers lie, so far from a multiple of 16 bytes.
template <class Number>
const Number* array_at(std::uintptr_t offset) {
  return reinterpret_cast<const Number*>((std::uintptr_t{1} << 62) + offset);
}

/// Changes of a view that make another call of it.
std::vector<std::function<void()>> changes_of(TensorView& view) {
  std::vector<std::function<void()>> changes = {
      [&] { view.data = nullptr; },   [&] { view.data = static_cast<std::byte*>(view.data) + 8; },
      [&] { view.read_only = true; }, [&] { view.dtype = DType::f64; },
      [&] { view.rank = 3; },         [&] { view = TensorView(); }};
  for (std::size_t axis = 0; axis < TensorView::kMaxRank; ++axis) {
    changes.emplace_back([&view, axis] { ++view.shape[axis]; });
    changes.emplace_back([&view, axis] { --view.strides[axis]; });
  }
  return changes;
}

/// Changes of whatever both operations have.
template <class Call>
std::vector<std::function<void()>> changes_of(Call& call) {
  auto& in = call.inputs;
  std::vector<std::function<void()>> changes = {
      [&] { ++in.sequences.b; },
      [&] { ++in.sequences.max_s_q; },
      [&] { ++in.sequences.max_s_kv; },
      [&] { in.dropout.device = nullptr; },
      [&] { in.dropout.device = array_at<std::uint64_t>(8); },
      [&] { in.tiles.data = nullptr; },
      [&] { in.tiles.filled = true; },
      [&] { in.place->whole_s_kv = 9; },
      [&] { in.place.reset(); },
      [&] { in.max_multiprocessors = 3; },
      [&] { in.captures = {}; },
      [&] {
        in.captures = {{"slope", 2.0}, {"cup", 1.0}};
      },
      [&] {
        in.captures = {{"slope", 2.0}, {"cap", 1.5}};
      },
      [&] {
        in.captures = {{"slope", in.q}, {"cap", 1.0}};
      },
  };
  for (TensorView* const view : views_of(call)) {
    for (auto& change : changes_of(*view)) changes.push_back(change);
  }
  for (const std::int32_t** const array : arrays_of(call)) {
    changes.emplace_back([array] { *array = nullptr; });
    changes.emplace_back([array] { *array = array_at<std::int32_t>(4); });
  }
  return changes;
}

/// With all that a call may name.
template <class Call>
Call full_call() {
  Call call;
  const TensorView view(at(std::uintptr_t{1} << 40), DType::f32, {2, 3, 4, 5});
  for (TensorView* const each : views_of(call)) *each = view;
  for (const std::int32_t** const array : arrays_of(call)) *array = array_at<std::int32_t>(0);
  call.inputs.dropout.device = array_at<std::uint64_t>(0);
  call.inputs.tiles.data = at(kLists);
  call.inputs.place = ShardPlace{.q = 1};
  call.inputs.captures = {{"slope", 2.0}, {"cap", 1.0}};
  return call;
}

/// Each change, made to a copy, is seen by who compares calls: the number that finds one may not tell.
template <class Call, class More>
void expect_told_apart(const Call& call, const More& more) {
  const auto are_alike = [&](const Call& other) {
    return api::are_alike(call.inputs, call.outputs, other.inputs, other.outputs);
  };
  EXPECT_TRUE(are_alike(call));
  EXPECT_TRUE(are_alike(moved(call, 3)));
  EXPECT_EQ(api::code_of(call.inputs, call.outputs), api::code_of(moved(call, 3).inputs, moved(call, 3).outputs));
  Call changed = call;
  std::vector<std::function<void()>> changes = changes_of(changed);
  more(changed, changes);
  for (std::size_t i = 0; i < changes.size(); ++i) {
    changed = call;
    changes[i]();
    EXPECT_FALSE(are_alike(changed)) << i;
  }
}

TEST_F(KnownCalls, AreAlikeInEveryMember) {
  Forward forward = full_call<Forward>();
  forward.inputs.schedule.data = at(kLists);
  expect_told_apart(forward, [](Forward& call, std::vector<std::function<void()>>& changes) {
    static constexpr SharedPrefix kPrefix;
    const TensorView view(at(std::uintptr_t{1} << 40), DType::f32, {2});
    StatisticsOutputs& statistics = call.outputs.statistics;
    for (TensorView* const other : {&statistics.max_logit, &statistics.entropy, &statistics.column_sums,
                                    &statistics.top_keys, &call.outputs.dump.p}) {
      changes.emplace_back([other, view] { *other = view; });
    }
    changes.emplace_back([&call] { call.inputs.schedule.data = nullptr; });
    changes.emplace_back([&call] { call.inputs.prefixes = {&kPrefix, 1}; });
  });
  expect_told_apart(full_call<Backward>(), [](Backward& call, std::vector<std::function<void()>>& changes) {
    changes.emplace_back([&call] { call.outputs.captures = {{"slope", call.inputs.q}}; });
    const TensorView view(at(std::uintptr_t{1} << 40), DType::f32, {2});
    StatisticsGradients& statistics = call.inputs.statistics;
    for (TensorView* const other :
         {&statistics.entropy, &statistics.dentropy, &statistics.dmax_logit, &statistics.dcolumn_sums}) {
      changes.emplace_back([other, view] { *other = view; });
    }
  });
}

Forward plain(std::int64_t s) {
  const auto tensor = [s](std::uintptr_t n) { return TensorView(at(n << 40), DType::bf16, {2, 4, s, 128}); };
  return {{tensor(1), tensor(2), tensor(3)}, {tensor(4), {}}, {}};
}

TEST_F(KnownCalls, AreThoseThatCameTwice) {
  config_.head_dim = 128;
  const Attention attention = Attention::create(config_);
  const Forward call = plain(512);
  const auto knows = [&](const Forward& of) { return api::KnownCallsAccess::knows(attention, of.inputs, of.outputs); };
  call.run(attention);
  EXPECT_FALSE(knows(call));
  call.run(attention);
  EXPECT_TRUE(knows(call));
  EXPECT_TRUE(knows(moved(call, 5)));
  EXPECT_FALSE(knows(plain(513)));
}

// As many as there is room for: the oldest go.
TEST_F(KnownCalls, AreAFew) {
  config_.head_dim = 128;
  const Attention attention = Attention::create(config_);
  for (int round = 0; round < 2; ++round) {
    for (std::int64_t s = 1; s <= 100; ++s) {
      plain(s).run(attention);
      plain(s).run(attention);
      ASSERT_TRUE(api::KnownCallsAccess::knows(attention, plain(s).inputs, plain(s).outputs)) << s;
      expect_equal(attention, config_, moved(plain(s), 1));
    }
  }
  int known = 0;
  for (std::int64_t s = 1; s <= 100; ++s) {
    known += api::KnownCallsAccess::knows(attention, plain(s).inputs, plain(s).outputs);
  }
  EXPECT_GE(known, 4);
  EXPECT_LE(known, 8);
}

// Tensors whose spans meet are looked at closely: here rows of O lie between rows of V, and then on them.
TEST_F(KnownCalls, MayWriteBetweenWhatTheyRead) {
  config_.head_dim = 128;
  const Attention attention = Attention::create(config_);
  Forward call = plain(256);
  const std::array<std::int64_t, 4> shape{2, 4, 256, 128}, strides{4 * 256 * 256, 256 * 256, 256, 1};
  call.inputs.v = TensorView(call.inputs.v.data, DType::bf16, shape, strides);
  call.outputs.o = TensorView(static_cast<std::byte*>(call.inputs.v.data) + 256, DType::bf16, shape, strides);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(outcome(attention, call).served());
  EXPECT_TRUE(api::KnownCallsAccess::knows(attention, call.inputs, call.outputs));
  call.outputs.o.data = static_cast<std::byte*>(call.outputs.o.data) - 16;
  EXPECT_TRUE(api::KnownCallsAccess::knows(attention, call.inputs, call.outputs));
  const Outcome refused = expect_equal(attention, config_, call);
  EXPECT_NE(refused.refusal.find("memory shared with v"), std::string::npos) << refused.refusal;
}

// What looks at results, reads lengths back or writes more than its kernels do goes the long way.
TEST_F(KnownCalls, AreNotThoseThatDoMore) {
  config_.head_dim = 128;
  const auto becomes_known = [&](const AttentionConfig& config, const Forward& call) {
    const Attention attention = Attention::create(config);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(outcome(attention, call).served());
    return api::KnownCallsAccess::knows(attention, call.inputs, call.outputs);
  };
  EXPECT_TRUE(becomes_known(config_, plain(64)));
  AttentionConfig with_statistics = config_;
  with_statistics.statistics.entropy = true;
  Forward call = plain(64);
  call.outputs.statistics.entropy = TensorView(at(std::uintptr_t{9} << 40), DType::f32, {2, 4, 64});
  EXPECT_FALSE(becomes_known(with_statistics, call));
  AttentionConfig looks = config_;
  looks.debug = true;
  EXPECT_FALSE(becomes_known(looks, plain(64)));
  call = plain(64);
  call.inputs.place =
      ShardPlace{.whole_b = 9, .whole_h_q = 9, .whole_s_q = 99, .whole_s_kv = 99, .begin = array_at<std::int64_t>(0)};
  EXPECT_FALSE(becomes_known(config_, call));
}

}  // namespace
}  // namespace fa
