// What debug calls queue behind their kernels, and what they say when the device has found a number.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fa/error.hpp>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "driver/driver.hpp"
#include "fake_driver/launches_test.hpp"

namespace fa {
namespace {

constexpr std::int64_t kBatch = 2, kHeadsQ = 2, kHeadsKv = 1, kRows = 5, kKeys = 7, kDim = 8;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::uintptr_t address(int page) {
  return (std::uintptr_t{1} << 41) + (static_cast<std::uintptr_t>(page) << 32);
}
void* at(int page) {
  return reinterpret_cast<void*>(address(page));
}

class InspectLaunches : public LaunchesTest {
 protected:
  void SetUp() override {
    LaunchesTest::SetUp();
    if (IsSkipped()) return;
    const auto loaded = support::DynamicLibrary::open("libcuda.so.1", nullptr);
    contents_ = loaded.function<fake_driver::Contents>(fake_driver::kContents);
    capturing_ = loaded.function<fake_driver::Capturing>(fake_driver::kCapturing);
    stop_ = loaded.function<fake_driver::Stop>(fake_driver::kStop);
    contents_().clear();
    config_.head_dim = kDim;
    config_.dtype = DType::f32;
    config_.causal = config_.debug = true;
    q_.assign(kBatch * kHeadsQ * kRows * kDim, 0.5f);
    k_.assign(kBatch * kHeadsKv * kKeys * kDim, 0.25f);
    v_ = k_;
  }
  void TearDown() override {
    if (contents_ == nullptr) return;
    contents_().clear();
    capturing_() = false;
  }

  template <class T>
  void put(std::uintptr_t where, const std::vector<T>& values) {
    std::vector<std::byte> bytes(values.size() * sizeof(T));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    contents_()[where] = bytes;
  }
  /// What the kernel leaves of o and lse.
  void find(std::uint64_t of_o, std::uint64_t of_lse = ~std::uint64_t{0}) {
    put<std::uint64_t>(fake_driver::kPool, {of_o, of_lse});
  }

  ForwardInputs inputs() {
    put(address(1), q_);
    put(address(2), k_);
    put(address(3), v_);
    return {TensorView(at(1), DType::f32, {kBatch, kHeadsQ, kRows, kDim}),
            TensorView(at(2), DType::f32, {kBatch, kHeadsKv, kKeys, kDim}),
            TensorView(at(3), DType::f32, {kBatch, kHeadsKv, kKeys, kDim})};
  }
  static ForwardOutputs outputs() {
    return {TensorView(at(4), DType::f32, {kBatch, kHeadsQ, kRows, kDim}),
            TensorView(at(5), DType::f32, {kBatch, kHeadsQ, kRows})};
  }
  std::optional<ErrorLocation> location(const ForwardInputs& given) {
    launches_().clear();
    try {
      Attention::create(config_).forward(given, outputs());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::not_finite) << error.what();
      if (error.location() != nullptr) return *error.location();
    }
    return std::nullopt;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const fake_driver::Launch& launch : launches_()) all.push_back(launch.kernel);
    return all;
  }

  fake_driver::Contents contents_ = nullptr;
  fake_driver::Capturing capturing_ = nullptr;
  fake_driver::Stop stop_ = nullptr;
  std::vector<float> q_, k_, v_;
};

TEST_F(InspectLaunches, OneKernelLooksAtAllResults) {
  EXPECT_FALSE(location(inputs()));
  EXPECT_EQ(names(), (std::vector<std::string>{"fa_sm80_forward", fake_driver::kAllocation, fake_driver::kMemset,
                                               "fa_scan_results", fake_driver::kRelease}));
  EXPECT_EQ(launches_()[2].bytes, 2 * sizeof(std::uint64_t));
  EXPECT_EQ(launches_()[3].grid, 2 * 264U);
  EXPECT_EQ(launches_()[3].threads, 256U);
  config_.debug = false;
  EXPECT_FALSE(location(inputs()));
  EXPECT_EQ(names(), std::vector<std::string>{"fa_sm80_forward"});
}

/// What it says lies in the host's memory, and comes with the first error that the library meets.
TEST_F(InspectLaunches, AKernelThatStopsIsHeard) {
  const Attention attention = Attention::create(config_);
  const ForwardInputs given = inputs();
  attention.forward(given, outputs());
  const std::string words = "a barrier is never complete: q_full(stage), 0, at sm90/sm90_producer.cuh:1";
  for (int i = 0; i < 2; ++i) {
    stop_() = words;
    try {
      attention.forward(given, outputs());
      FAIL() << "nothing is thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::cuda);
      EXPECT_EQ(error.field("call"), "cuStreamSynchronize");
      EXPECT_EQ(error.field("stopped"), words + ", block 3, thread 128");
      EXPECT_NE(std::string(error.what()).find(error.field("stopped")), std::string::npos);
    }
  }
  EXPECT_NO_THROW(attention.forward(given, outputs()));
}

TEST_F(InspectLaunches, LastWordsThatNobodyTookAreWritten) {
  const auto scenario = [this] {
    const ForwardInputs given = inputs();
    Attention::create(config_).forward(given, outputs());
    stop_() = "a wrong address";
    driver::api().cuStreamSynchronize(nullptr);  // by who does not ask the library
    std::exit(0);
  };
  EXPECT_EXIT(scenario(), testing::ExitedWithCode(0),
              "a debug kernel has stopped: a wrong address, block 3, thread 128");
}

TEST_F(InspectLaunches, CapturedCallsAreNotLookedAt) {
  const Attention attention = Attention::create(config_);
  attention.prepare({.b = kBatch, .h_q = kHeadsQ, .h_kv = kHeadsKv, .s_q = kRows, .s_kv = kKeys});
  const ForwardInputs given = inputs();
  launches_().clear();
  capturing_() = true;
  attention.forward(given, outputs());
  EXPECT_EQ(names(), std::vector<std::string>{"fa_sm80_forward"});
}

TEST_F(InspectLaunches, ReadsWhatARowIsMadeOf) {
  // Row 3 of head 1 of the second entry: it sees keys 0 to 5.
  find(((1 * kHeadsQ + 1) * kRows + 3) * kDim + 2);
  k_[static_cast<std::size_t>((kKeys + 6) * kDim)] = kNaN;  // hidden
  put<float>(address(4), std::vector<float>(static_cast<std::size_t>(kBatch * kHeadsQ * kRows * kDim), kNaN));
  auto found = location(inputs());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tensor, "o");
  EXPECT_EQ(found->b, 1);
  EXPECT_EQ(found->h, 1);
  EXPECT_EQ(found->q, 3);
  EXPECT_EQ(found->d, 2);
  EXPECT_TRUE(std::isnan(found->value));
  v_[static_cast<std::size_t>((kKeys + 5) * kDim + 4)] = kNaN;
  found = location(inputs());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tensor, "v");
  EXPECT_EQ(found->h, 0);
  EXPECT_EQ(found->kv, 5);
  EXPECT_EQ(found->d, 4);
  EXPECT_EQ(found->result, "o");
  find(~std::uint64_t{0}, (1 * kHeadsQ + 1) * kRows + 3);
  EXPECT_EQ(location(inputs()).value_or(ErrorLocation{}).result, "lse");
}

TEST_F(InspectLaunches, ReadsElementsOfCaptures) {
  std::vector<float> bias(static_cast<std::size_t>(kHeadsQ * kKeys), 0.f);
  bias[static_cast<std::size_t>(kKeys + 4)] = std::numeric_limits<float>::infinity();
  put(address(6), bias);
  config_.score = {"score + bias[h, kv]", {{"bias", DType::f32}}};
  ForwardInputs given = inputs();
  given.captures = {{"bias", TensorView(at(6), DType::f32, {kHeadsQ, kKeys})}};
  find((1 * kRows + 3) * kDim);
  const auto found = location(given);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tensor, "bias");
  EXPECT_EQ(found->index, (std::vector<std::int64_t>{1, 4}));
  EXPECT_EQ(found->kv, 4);
}

/// dq is broken in row 3 of head 1 of the second entry, which sees keys 0 to 5.
TEST_F(InspectLaunches, ReadsGradientsOfStatistics) {
  config_.statistics = {.max_logit = MaxLogit::softmax,
                        .max_logit_by_head = true,
                        .entropy = true,
                        .column_sums = ColumnSums::kv_heads,
                        .entropy_gradient = true,
                        .max_logit_gradient = true,
                        .column_sums_gradient = true};
  const ForwardInputs read = inputs();
  const auto like_q = [](int page) { return TensorView(at(page), DType::f32, {kBatch, kHeadsQ, kRows, kDim}); };
  const auto rows = [](int page) { return TensorView(at(page), DType::f32, {kBatch, kHeadsQ, kRows}); };
  BackwardInputs given{read.q, read.k, read.v, like_q(6), rows(7), like_q(8)};
  given.statistics = {rows(9), rows(10), TensorView(at(11), DType::f32, {kHeadsQ}),
                      TensorView(at(12), DType::f32, {kBatch, kHeadsKv, kKeys})};
  std::vector<float> of_rows(kBatch * kHeadsQ * kRows, 1.0F), of_heads(kHeadsQ, 1.0F), of_keys(kBatch * kKeys, 1.0F);
  put(address(6), q_);
  put(address(7), of_rows);
  put(address(8), q_);
  put(address(9), of_rows);
  put(address(10), of_rows);
  put(address(11), of_heads);
  put(address(12), of_keys);
  put<std::uint64_t>(fake_driver::kPool, {((1 * kHeadsQ + 1) * kRows + 3) * kDim + 2});
  const auto expect = [&](const char* tensor, std::int64_t b, std::int64_t h, std::int64_t q, std::int64_t kv) {
    try {
      Attention::create(config_).backward(given, {like_q(13)});
      ADD_FAILURE() << "nothing was thrown, of " << tensor;
    } catch (const Error& error) {
      ASSERT_NE(error.location(), nullptr) << error.what();
      const ErrorLocation& found = *error.location();
      EXPECT_EQ(found.tensor, tensor);
      EXPECT_EQ(found.result, "dq");
      EXPECT_EQ(std::tie(found.b, found.h, found.q, found.kv), std::tie(b, h, q, kv)) << tensor;
    }
  };
  put(address(13), q_);
  expect("dq", 1, 1, 3, -1);
  of_keys[kKeys + 6] = kNaN;  // hidden: a tile has it
  put(address(12), of_keys);
  expect("dcolumn_sums", 1, 0, -1, 6);
  of_keys[kKeys + 5] = kNaN;
  put(address(12), of_keys);
  expect("dcolumn_sums", 1, 0, -1, 5);
  of_heads[1] = kNaN;
  put(address(11), of_heads);
  expect("dmax_logit", -1, 1, -1, -1);
  of_rows[(kHeadsQ + 1) * kRows + 3] = kNaN;
  put(address(10), of_rows);
  expect("dentropy", 1, 1, 3, -1);
  put(address(9), of_rows);
  expect("entropy", 1, 1, 3, -1);
}

TEST_F(InspectLaunches, ReadsLengthsOfPackedBatches) {
  config_.varlen = true;
  put<std::int32_t>(address(7), {1, 3, 9});
  constexpr std::int64_t kTotal = 10;
  q_.assign(kTotal * kDim, 0.5f);
  k_ = v_ = q_;
  k_[static_cast<std::size_t>((3 + 2) * kDim + 1)] = kNaN;
  inputs();
  const auto view = [&](int page) { return TensorView(at(page), DType::f32, {kTotal, 1, kDim}); };
  ForwardInputs given{view(1), view(2), view(3)};
  given.sequences = {
      2, static_cast<const std::int32_t*>(at(7)), static_cast<const std::int32_t*>(at(7)), nullptr, nullptr, 6, 6};
  find((1 * 6 + 4) * kDim);
  try {
    Attention::create(config_).forward(given, {view(4), TensorView(at(5), DType::f32, {1, kTotal})});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    ASSERT_NE(error.location(), nullptr) << error.what();
    EXPECT_EQ(error.location()->tensor, "k");
    EXPECT_EQ(error.location()->b, 1);
    EXPECT_EQ(error.location()->kv, 2);
    EXPECT_EQ(error.location()->d, 1);
  }
}

TEST_F(InspectLaunches, WritesPBehindTheForward) {
  ForwardOutputs to = outputs();
  to.dump = {TensorView(at(8), DType::f32, {kRows, kKeys}), 1, 1};
  const ForwardInputs given = inputs();
  launches_().clear();
  Attention::create(config_).forward(given, to);
  ASSERT_GE(names().size(), 2U);
  EXPECT_EQ(names()[1], "fa_probabilities");
  EXPECT_EQ(launches_()[1].grid, static_cast<unsigned>(kRows));
}

TEST_F(InspectLaunches, RefusesDumpsOfStoredKeys) {
  config_.dtype = DType::f16;
  config_.head_dim = 16;
  config_.k_dtype = DType::i8;
  const TensorView q(at(1), DType::f16, {1, 1, 1, 16}), o(at(4), DType::f16, {1, 1, 1, 16});
  ForwardInputs given{q, TensorView(at(2), DType::i8, {1, 1, 4, 16}), TensorView(at(3), DType::f16, {1, 1, 4, 16})};
  given.k_scale = TensorView(at(6), DType::f32, {1, 1, 4});
  ForwardOutputs to{o, TensorView(at(5), DType::f32, {1, 1, 1})};
  to.dump = {TensorView(at(8), DType::f32, {1, 4}), 0, 0};
  try {
    Attention::create(config_).forward(given, to);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
    EXPECT_EQ(error.field("argument"), "dump.p");
  }
}

TEST_F(InspectLaunches, PacksHaveTheKernelThatLooks) {
  const AttentionShape shape{.b = 1, .h_q = 2, .s_q = 64, .s_kv = 64};
  const auto has_scan = [&](const std::vector<KernelInfo>& kernels) {
    for (const KernelInfo& kernel : kernels) {
      if (kernel.name == "fa_scan_results") return true;
    }
    return false;
  };
  EXPECT_TRUE(has_scan(find_kernels(config_, shape, "sm_90a")));
  EXPECT_TRUE(has_scan(find_backward_kernels(config_, shape, "sm_90a")));
  config_.debug = false;
  EXPECT_FALSE(has_scan(find_kernels(config_, shape, "sm_90a")));
}

}  // namespace
}  // namespace fa
