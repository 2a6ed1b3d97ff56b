#include "fake_driver/random_calls.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fa/error.hpp>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/validate.hpp"
#include "fake_driver/launches_test.hpp"
#include "plan/workspace.hpp"

// What holds of every call, whatever its configuration, sizes and strides. The compiler is a fake one, too, so that
// there may be many.
namespace fa {
namespace {

constexpr std::uintptr_t kMemoryAt = std::uintptr_t{1} << 60;
void* const kMemory = reinterpret_cast<void*>(kMemoryAt);
void* const kTileMemory = reinterpret_cast<void*>(std::uintptr_t{3} << 59);

class RandomCallsTest : public LaunchesTest {
 protected:
  /// An Attention of some configuration; none where that is refused.
  static std::optional<Attention> create(const AttentionConfig& config) {
    try {
      return Attention::create(config);
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::unsupported || error.code() == ErrorCode::invalid_argument)
          << error.what();
      return std::nullopt;
    }
  }

  AttentionConfig random_config(RandomCalls& random) const {
    AttentionConfig config = random.config();
    config.tune = config_.tune;
    config.cache = config_.cache;
    return config;
  }

  /// Whether `call` is served.
  template <class Function>
  static bool serves(const Function& call) {
    try {
      call();
      return true;
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::unsupported || error.code() == ErrorCode::invalid_argument)
          << error.what();
      return false;
    }
  }

  /// What was cleared, too, lies in the workspace.
  void expect_within(std::size_t bytes) {
    for (const fake_driver::Launch& launch : launches_()) {
      if (launch.address < kMemoryAt || launch.address - kMemoryAt > (std::uintptr_t{1} << 59)) continue;
      EXPECT_LE(launch.address + launch.bytes, kMemoryAt + bytes);
    }
  }

  /// A call of `random`, and of `more` its place and its bound.
  static RandomCalls::Call drawn(const AttentionConfig& config, RandomCalls& random, RandomCalls& more) {
    RandomCalls::Call call = random.call(config, random.shape(config));
    if (config.k_dtype) store_in_few_bits(call.inputs, call.forward_shape, config);
    if (size_of(config.dtype) == 1) call.outputs.o.dtype = DType::bf16;
    call.forward_shape.aligned = call.forward_shape.aligned && api::rows_aligned(call.outputs.o);
    place(call.inputs, call.forward_shape, config, more);
    place(call.backward_inputs, call.backward_shape, config, more);
    return call;
  }

  struct Served {
    bool forward, backward;
  };

  /// Which of both was not refused; their launches stay within workspaces of the sizes that are said.
  Served serve(const Attention& attention, const RandomCalls::Call& call) {
    launches_().clear();
    const bool forward = serves([&] {
      const std::size_t bytes = attention.workspace_size(call.forward_shape);
      attention.forward(call.inputs, call.outputs, nullptr, {kMemory, bytes});
      expect_within(bytes);
    });
    launches_().clear();
    const bool backward = serves([&] {
      const std::size_t bytes = attention.backward_workspace_size(call.backward_shape);
      attention.backward(call.backward_inputs, call.backward_outputs, nullptr, {kMemory, bytes});
      expect_within(bytes);
    });
    return {forward, backward};
  }
};

TEST_F(RandomCallsTest, AWorkspaceOfTheSizeThatIsSaidIsEnough) {
  int forward = 0;
  int backward = 0;
  int packed = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    RandomCalls random(seed);
    const AttentionConfig config = random_config(random);
    const auto attention = create(config);
    if (!attention) continue;
    for (int i = 0; i < 4; ++i) {
      const RandomCalls::Call call = random.call(config, random.shape(config));
      SCOPED_TRACE("seed " + std::to_string(seed) + ": " + text_of(config, call.forward_shape));
      const bool shares_tiles = !config.mask.expression.empty() && random.one_in(2);
      launches_().clear();
      forward += serves([&] {
        ForwardInputs inputs = call.inputs;
        if (shares_tiles) inputs.tiles = {kTileMemory, attention->mask_tiles_size(call.forward_shape)};
        const std::size_t bytes = attention->workspace_size(call.forward_shape);
        attention->forward(inputs, call.outputs, nullptr, {kMemory, bytes});
        expect_within(bytes);
      });
      launches_().clear();
      const bool served = serves([&] {
        BackwardInputs inputs = call.backward_inputs;
        if (shares_tiles) inputs.tiles = {kTileMemory, attention->backward_mask_tiles_size(call.backward_shape)};
        const std::size_t bytes = attention->backward_workspace_size(call.backward_shape);
        attention->backward(inputs, call.backward_outputs, nullptr, {kMemory, bytes});
        expect_within(bytes);
      });
      backward += served;
      packed += served && config.varlen;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(forward, 1200);
  EXPECT_GT(backward, 1200);
  EXPECT_GT(packed, 300);
}

TEST_F(RandomCallsTest, SoItIsOfStatesPartsOfLargerCallsBoundsAnd8Bits) {
  std::map<std::string, int> served;
  for (unsigned seed = 3000; seed < 3700; ++seed) {
    RandomCalls random(seed), more(seed + 1000000);
    AttentionConfig config = more.one_in(4) ? random.paged_config() : random.config();
    config.tune = config_.tune;
    config.cache = config_.cache;
    add_to(config, more);
    const auto attention = create(config);
    if (!attention) continue;
    for (int i = 0; i < 3; ++i) {
      const RandomCalls::Call call = drawn(config, random, more);
      SCOPED_TRACE("seed " + std::to_string(seed) + ": " + text_of(config, call.forward_shape));
      const auto [forward, backward] = serve(*attention, call);
      served["invariant"] += forward && config.invariance != Invariance::none;
      served["accumulating"] += forward && config.accumulate;
      served["stored in 8 bits"] += forward && config.k_dtype.has_value();
      served["of 8 bits"] += forward && size_of(config.dtype) == 1;
      served["placed"] += forward && call.forward_shape.placed;
      served["strided"] += forward && call.forward_shape.strided;
      served["placed in memory"] += forward && call.forward_shape.place_in_memory;
      served["bounded"] += forward && call.forward_shape.bounded;
      served["backward, placed"] += backward && call.backward_shape.placed;
      served["backward, bounded"] += backward && call.backward_shape.bounded;
    }
    if (HasFailure()) return;
  }
  for (const auto& [kind, count] : served) EXPECT_GT(count, 20) << kind;
}

TEST_F(RandomCallsTest, SoItIsOfWideHeadsStatisticsValuesInKeysAnd4Bits) {
  std::map<std::string, int> served;
  for (unsigned seed = 5000; seed < 8000; ++seed) {
    RandomCalls random(seed), more(seed + 1000000), wider(seed + 2000000);
    AttentionConfig config = more.one_in(4) ? random.paged_config() : random.config();
    config.tune = config_.tune;
    config.cache = config_.cache;
    add_to(config, more);
    widen(config, wider);
    const auto attention = create(config);
    if (!attention) continue;
    const Statistics& statistics = config.statistics;
    for (int i = 0; i < 3; ++i) {
      const RandomCalls::Call call = drawn(config, random, more);
      SCOPED_TRACE("seed " + std::to_string(seed) + ": " + text_of(config, call.forward_shape));
      const auto [forward, backward] = serve(*attention, call);
      served["of wide heads"] += forward && config.head_dim > 256;
      served["of the widest heads"] += forward && config.head_dim > 512;
      served["backward, of wide heads"] += backward && config.head_dim > 256;
      served["with statistics of rows"] += forward && (statistics.entropy || statistics.max_logit != MaxLogit::none);
      served["with column sums"] += forward && statistics.column_sums != ColumnSums::none;
      served["with top keys"] += forward && statistics.top_keys > 0;
      served["with statistics of wide heads"] += forward && statistics.any() && config.head_dim > 256;
      served["packed, with statistics"] += forward && statistics.any() && config.varlen;
      served["backward, of entropy"] += backward && statistics.entropy_gradient;
      served["backward, of greatest logits"] += backward && statistics.max_logit_gradient;
      served["backward, of those of heads"] += backward && statistics.gradient_of_heads();
      served["backward, of column sums"] += backward && statistics.column_sums_gradient;
      served["of values in keys"] += forward && config.value_in_key > 0;
      served["stored in 4 bits"] += forward && (config.k_dtype == DType::u4x2 || config.v_dtype == DType::u4x2);
      served["in pages of 4 bits"] += forward && config.page_size > 0 && config.k_dtype == DType::u4x2;
    }
    if (HasFailure()) return;
  }
  for (const auto& [kind, count] : served) EXPECT_GT(count, 20) << kind;
}

TEST_F(RandomCallsTest, CallsOverPagesNeedOneKernelWithASchedule) {
  int served = 0;
  int scheduled = 0;
  int by_copy_engine = 0;
  for (unsigned seed = 1000; seed < 1100; ++seed) {
    RandomCalls random(seed);
    AttentionConfig config = random.paged_config();
    config.tune = config_.tune;
    config.cache = config_.cache;
    config.zero_padding = false;
    const auto attention = create(config);
    if (!attention) continue;
    for (int i = 0; i < 4; ++i) {
      const RandomCalls::Call call = random.call(config, random.shape(config));
      SCOPED_TRACE("seed " + std::to_string(seed) + ": " + text_of(config, call.forward_shape));
      launches_().clear();
      ForwardInputs inputs = call.inputs;
      std::size_t bytes = 0;
      const bool serves_call = serves([&] {
        bytes = attention->workspace_size(call.forward_shape);
        attention->forward(inputs, call.outputs, nullptr, {kMemory, bytes});
        expect_within(bytes);
      });
      if (!serves_call) continue;
      const std::size_t size = attention->schedule_size(call.forward_shape);
      EXPECT_EQ(bytes <= plan::kCounterBytes, size == 0) << "what shares no keys may count its query tiles";
      if (size > 0) {
        scheduled += 1;
        inputs.schedule = {kTileMemory, size};
        attention->schedule({call.forward_shape, inputs.sequences, inputs.cache.seq_begin}, inputs.schedule);
        launches_().clear();
        attention->forward(inputs, call.outputs, nullptr, {kMemory, bytes});
      }
      const bool empty = call.forward_shape.b == 0 || call.outputs.o.elements() == 0;
      const bool merged = !empty && launches_().back().kernel == "fa_forward_combine";  // the splits of one request
      EXPECT_TRUE(!merged || call.forward_shape.b == 1);
      // The schedule is of tensors that the copy engine has maps for: a call of others makes its own.
      const bool own = !empty && launches_().front().kernel == "fa_schedule";
      ASSERT_EQ(launches_().size(), empty ? 0U : merged || own ? 2U : 1U);
      if (empty) continue;
      const std::string& kernel = launches_()[own ? 1 : 0].kernel;
      EXPECT_TRUE(!own || kernel == "fa_sm80_forward") << kernel;
      EXPECT_TRUE(kernel == "fa_sm80_forward" || kernel == "fa_sm90_forward") << kernel;
      by_copy_engine += kernel == "fa_sm90_forward";
      EXPECT_NE(attention->kernel_info(call.forward_shape).spec.find(" page_size="), std::string::npos);
      ++served;
    }
  }
  EXPECT_GT(served, 200);
  EXPECT_GT(scheduled, 50);
  EXPECT_GT(by_copy_engine, 5);
}

// The kernel of a shape is a matter of the shape: what was called before has no say.
TEST_F(RandomCallsTest, KernelsDoNotDependOnTheOrderOfCalls) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    RandomCalls random(seed);
    AttentionConfig config = random_config(random);
    config.deterministic = true;
    config.tune = TunePolicy::on;  // of `deterministic`: tables alone
    config.kernel = config.kernel_backward = std::nullopt;
    std::vector<AttentionShape> shapes;
    for (int i = 0; i < 12; ++i) shapes.push_back(random.shape(config));
    for (const std::int64_t s_q : {512, 768, 1024, 1536, 2048, 3072, 4096}) {
      shapes.push_back({.b = 1, .h_q = 8, .h_kv = 8, .s_q = s_q, .s_kv = 512});
    }
    std::vector<std::vector<std::string>> specs;
    for (const bool backwards : {false, true}) {
      const auto attention = create(config);
      if (!attention) break;
      std::vector<std::string>& of_order = specs.emplace_back(shapes.size());
      for (std::size_t n = 0; n < shapes.size(); ++n) {
        const std::size_t i = backwards ? shapes.size() - 1 - n : n;
        of_order[i] = attention->kernel_info(shapes[i]).spec + attention->backward_kernel_info(shapes[i]).spec;
      }
    }
    if (specs.empty()) continue;
    ASSERT_EQ(specs[0], specs[1]) << "seed " << seed << ": " << text_of(config, shapes.front());
  }
}

}  // namespace
}  // namespace fa
