#ifndef FA_TESTS_GPU_EXTREME_SETTING_HPP_
#define FA_TESTS_GPU_EXTREME_SETTING_HPP_

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "gpu/device_case.hpp"
#include "gpu/scoped_stream.hpp"
#include "plan/arch.hpp"
#include "support/softmax_judge.hpp"

namespace fa::test {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline bool on_hopper() {
  return driver::device_info(0).arch == plan::parse_arch("sm_90a");
}

/// Waits for what a stream was given. A kernel that does not end can only be got rid of with its process.
inline void wait_or_abort(CUstream stream) {
  constexpr std::chrono::seconds kLimit{20};
  CUcontext context = nullptr;
  driver::check(driver::api().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  auto done = std::async(std::launch::async, [stream, context] {
    driver::check(driver::api().cuCtxSetCurrent(context), "cuCtxSetCurrent");
    driver::check(driver::api().cuStreamSynchronize(stream), "cuStreamSynchronize");
  });
  if (done.wait_for(kLimit) == std::future_status::timeout) {
    std::fprintf(stderr, "FAILED: a kernel of %s.%s has not ended after %d s\n",
                 testing::UnitTest::GetInstance()->current_test_info()->test_suite_name(),
                 testing::UnitTest::GetInstance()->current_test_info()->name(), static_cast<int>(kLimit.count()));
    std::fflush(nullptr);
    std::_Exit(1);
  }
  done.get();
}

/// A function of scores, for the kernel and in float64. With `slopes` it captures slope [h_q], which the scale is a
/// factor of.
struct Function {
  ScoreFunction score = {};
  std::function<double(const ScorePlace&, double, double)> in_f64 = nullptr;  // place, score, scale
  bool slopes = false;
};

inline double slope_of(std::int64_t h, double scale) {
  return scale * static_cast<double>(h + 1);
}

inline Function magnitude() {
  return {{"abs(score)"}, [](const ScorePlace&, double score, double) { return std::abs(score); }};
}

inline Function halved_thirds() {
  return {{"kv % 3 == 0 ? 0.5 * score : score"},
          [](const ScorePlace& at, double score, double) { return at.kv % 3 == 0 ? 0.5 * score : score; }};
}

inline Function alibi() {
  return {functions::alibi(),
          [](const ScorePlace& at, double score, double scale) {
            return score - slope_of(at.h, scale) * static_cast<double>(std::abs(at.q + at.s_kv - at.s_q - at.kv));
          },
          true};
}

/// What a kernel is made for, and sizes of a call.
struct Setting {
  std::string name;
  AttentionCase attention;
  KernelOverride kernel = {};
  std::int64_t window_left = -1, window_right = -1;
  float dropout = 0;
  bool sink = false;
  bool blocks = false;  // a mask with holes
  Function function = {};
  std::vector<std::int32_t> cu_q = {}, cu_kv = {};
  double sign = 1;  // of the scale
};

inline void PrintTo(const Setting& setting, std::ostream* out) {
  *out << setting.name;
}

inline std::string name_of(const testing::TestParamInfo<Setting>& test) {
  return test.param.name;
}

inline AttentionConfig config_of(const Setting& setting, double scale) {
  AttentionConfig config = config_of(setting.attention);
  config.scale = static_cast<float>(scale);
  config.kernel = setting.kernel;
  config.window_left = setting.window_left;
  config.window_right = setting.window_right;
  config.dropout = setting.dropout;
  config.sink = setting.sink;
  config.score = setting.function.score;
  if (setting.blocks) config.mask = MaskFunction{"(kv / 20 + q / 30) % 3 != 1"};
  config.varlen = !setting.cu_q.empty();
  return config;
}

inline std::vector<double> sinks_of(const Setting& setting) {
  std::vector<double> sinks;
  for (std::int64_t h = 0; setting.sink && h < setting.attention.h_q; ++h)
    sinks.push_back(0.25 * static_cast<double>(h));
  return sinks;
}

inline JudgedCase judged(const Setting& setting) {
  JudgedCase c{.attention = setting.attention};
  c.cu_q = setting.cu_q;
  c.cu_kv = setting.cu_kv;
  c.window_left = setting.window_left;
  c.window_right = setting.window_right;
  c.dropout = setting.dropout;
  c.sink = sinks_of(setting);
  if (setting.blocks) c.keep = [](const ScorePlace& at) { return (at.kv / 20 + at.q / 30) % 3 != 1; };
  return c;
}

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline std::vector<float> floats_of(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

/// The tensors of a setting on the device.
class DeviceSetting {
 public:
  DeviceSetting(const Setting& setting, const AttentionInputs& inputs)
      : setting_(setting),
        q_(inputs.q),
        k_(inputs.k),
        v_(inputs.v),
        blank_(make_outputs(setting.attention)),
        o_(blank_.o),
        lse_(blank_.lse),
        sink_(bytes_of(floats_of(sinks_of(setting)))),
        slope_(static_cast<std::size_t>(setting.attention.h_q) * sizeof(float)),
        cu_q_(bytes_of(setting.cu_q)),
        cu_kv_(bytes_of(setting.cu_kv)) {}

  /// Outputs of a call that has ended, with a bias if the configuration names one.
  AttentionOutputs run(const AttentionConfig& config, const TensorView& bias = {}) {
    o_.buffer.write(blank_.o.bytes());
    lse_.buffer.write(blank_.lse.bytes());
    ForwardInputs in{q_.const_view(), k_.const_view(), v_.const_view()};
    const AttentionCase& a = setting_.attention;
    if (setting_.sink) in.sink = TensorView(sink_.data(), DType::f32, {a.h_q});
    if (setting_.function.slopes) {
      std::vector<float> slopes;
      for (std::int64_t h = 0; h < a.h_q; ++h) slopes.push_back(static_cast<float>(slope_of(h, double{*config.scale})));
      slope_.write(bytes_of(slopes));
      in.captures.add({"slope", TensorView(slope_.data(), DType::f32, {a.h_q})});
    }
    if (bias.defined()) in.captures.add({"bias", bias});
    if (setting_.dropout > 0) in.dropout = JudgedCase{}.state;
    if (!setting_.cu_q.empty()) {
      in.sequences.b = static_cast<std::int64_t>(setting_.cu_q.size()) - 1;
      in.sequences.cu_seqlens_q = static_cast<const std::int32_t*>(cu_q_.data());
      in.sequences.cu_seqlens_kv = static_cast<const std::int32_t*>(cu_kv_.data());
    }
    Attention::create(config).forward(in, {o_.view(), lse_.view()}, stream_.get());
    wait_or_abort(stream_.get());
    AttentionOutputs outputs = blank_;
    o_.read(outputs.o);
    lse_.read(outputs.lse);
    EXPECT_TRUE(o_.buffer.guards_intact() && lse_.buffer.guards_intact()) << "written outside of a tensor";
    return outputs;
  }

  void write_q(const HostTensor& q) { q_.buffer.write(q.bytes()); }

 private:
  const Setting& setting_;
  ScopedStream stream_;
  DeviceTensor q_, k_, v_;
  AttentionOutputs blank_;
  DeviceTensor o_, lse_;
  DeviceBuffer sink_, slope_, cu_q_, cu_kv_;
};

inline void expect_right(const Verdict& verdict) {
  EXPECT_LE(verdict.o, 1) << "o of " << verdict.where_o;
  EXPECT_LE(verdict.lse, 1) << "lse of " << verdict.where_lse;
}

}  // namespace fa::test

#endif  // FA_TESTS_GPU_EXTREME_SETTING_HPP_
