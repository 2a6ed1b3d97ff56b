// Caches of 4 bits on the host device: what is refused, what codes mean, and what append makes of a group.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
#include "support/attention_case.hpp"
#include "support/packed_codes.hpp"

namespace fa::test {
namespace {

constexpr std::int64_t kB = 2, kHeads = 2, kKeys = 40, kD = 64;

AttentionConfig config_of(DType dtype, int group_size = 32) {
  AttentionConfig config;
  config.head_dim = kD;
  config.dtype = dtype;
  config.k_dtype = config.v_dtype = DType::u4x2;
  config.group_size = group_size;
  return config;
}

/// A cache, its scales and offsets, and q.
struct Cache {
  explicit Cache(DType of, int group = 32)
      : dtype(of),
        group_size(group),
        k(DType::u4x2, kB, kHeads, kKeys, kD / 2, Layout::bshd),
        v(DType::u4x2, kB, kHeads, kKeys, kD / 2, Layout::bhsd),
        k_scale(of, kB, kHeads, kKeys, 2 * kD / group, Layout::bshd),
        v_scale(of, kB, kHeads, kKeys, 2 * kD / group, Layout::bhsd),
        q(of, kB, 2 * kHeads, 3, kD, Layout::bhsd),
        o(of, kB, 2 * kHeads, 3, kD, Layout::bhsd),
        lse(DType::f32, kB, 2 * kHeads, 3) {
    std::mt19937 random(5);
    for (HostTensor* codes : {&k, &v}) {
      for (std::byte& byte : codes->bytes()) byte = static_cast<std::byte>(random());
    }
    const auto fill = [&](HostTensor& tensor, double low, double high) {
      const TensorView view = tensor.view();
      std::uniform_real_distribution<double> uniform(low, high);
      for (std::int64_t i = 0; i < view.elements(); ++i) {
        const std::int64_t d = i % view.shape[3], s = i / view.shape[3] % view.shape[2];
        const std::int64_t h = i / view.shape[3] / view.shape[2] % view.shape[1];
        tensor.set(i / view.shape[3] / view.shape[2] / view.shape[1], h, s, d, uniform(random));
      }
    };
    fill(k_scale, -0.2, 0.3);
    fill(v_scale, -0.2, 0.3);
    fill(q, -2, 2);
  }

  ForwardInputs inputs() {
    ForwardInputs in{q.view(), k.view(), v.view()};
    in.k_scale = k_scale.view();
    in.v_scale = v_scale.view();
    return in;
  }
  ForwardOutputs outputs() { return {o.view(), lse.view()}; }

  /// What codes stand for, as a tensor of the queries' dtype.
  HostTensor numbers(const HostTensor& codes, const HostTensor& scales) const {
    HostTensor result(dtype, kB, kHeads, kKeys, kD, Layout::bhsd);
    const TensorView view = codes.view();
    for (std::int64_t i = 0; i < kB * kHeads * kKeys * kD; ++i) {
      const std::int64_t d = i % kD, s = i / kD % kKeys, h = i / kD / kKeys % kHeads, b = i / kD / kKeys / kHeads;
      const auto* const row =
          static_cast<const std::byte*>(view.data) + b * view.strides[0] + h * view.strides[1] + s * view.strides[2];
      const std::int64_t pair = 2 * (d / group_size);
      result.set(b, h, s, d, scales.at(b, h, s, pair) * packed_code(row, d) + scales.at(b, h, s, pair + 1));
    }
    return result;
  }

  DType dtype;
  int group_size;
  HostTensor k, v, k_scale, v_scale, q, o, lse;
};

TEST(U4, ConfigurationsThatHaveNoMeaningAreRefused) {
  const auto create = [](const AttentionConfig& config) { Attention::create(config, Device::host()); };
  EXPECT_NO_THROW(create(config_of(DType::bf16)));
  const auto refused = [&](const char* argument, auto change) {
    AttentionConfig config = config_of(DType::f16);
    change(config);
    expect_invalid(argument, [&] { create(config); });
  };
  refused("head_dim", [](AttentionConfig& c) { c.head_dim = 48; });
  refused("head_dim", [](AttentionConfig& c) { c.head_dim = 288; });
  refused("head_dim_v", [](AttentionConfig& c) { c.head_dim_v = 80; });
  refused("head_dim", [](AttentionConfig& c) { c.group_size = 128; });
  refused("group_size", [](AttentionConfig& c) { c.group_size = 16; });
  refused("group_size", [](AttentionConfig& c) { c.group_size = -32; });
  refused("group_size", [](AttentionConfig& c) { c.group_size = 96; });
  refused("group_size", [](AttentionConfig& c) { c.k_dtype = c.v_dtype = DType::i8; });
  refused("k_dtype", [](AttentionConfig& c) { c.dtype = DType::f32; });
  refused("k_dtype", [](AttentionConfig& c) { c.invariance = Invariance::rows; });
  refused("dropout", [](AttentionConfig& c) { c.dropout = 0.5F; });
  refused("varlen", [](AttentionConfig& c) { c.varlen = true; });
  AttentionConfig mixed = config_of(DType::bf16);
  mixed.v_dtype = DType::e4m3;
  mixed.head_dim_v = 48;
  EXPECT_NO_THROW(create(mixed));
  AttentionConfig elements;
  elements.head_dim = kD;
  elements.dtype = DType::u4x2;
  expect_invalid("dtype", [&] { create(elements); });
}

TEST(U4, TensorsThatDoNotFitAreRefused) {
  const Attention attention = Attention::create(config_of(DType::bf16), Device::host());
  const auto refused = [&](const char* argument, auto change) {
    Cache cache(DType::bf16);
    ForwardInputs in = cache.inputs();
    change(in);
    expect_invalid(argument, [&] { attention.forward(in, cache.outputs()); });
  };
  refused("k", [](ForwardInputs& in) { in.k.dtype = DType::i8; });
  refused("k", [](ForwardInputs& in) { in.k.shape[3] = kD; });
  refused("v", [](ForwardInputs& in) { in.v.strides[2] = kD / 2 + 8; });
  refused("k_scale", [](ForwardInputs& in) { in.k_scale = {}; });
  refused("k_scale", [](ForwardInputs& in) { in.k_scale.dtype = DType::f16; });
  refused("v_scale", [](ForwardInputs& in) { in.v_scale.shape[3] = 2; });
  refused("v_scale", [](ForwardInputs& in) { in.v_scale.shape[2] = kKeys - 1; });
  refused("v_scale", [](ForwardInputs& in) { in.v_scale.strides[2] = 5; });
  refused("v_scale", [](ForwardInputs& in) { in.v_scale.strides[3] = 2; });
  refused("k_scale", [](ForwardInputs& in) { in.k_scale.data = static_cast<std::byte*>(in.k_scale.data) + 2; });
}

/// Bit for bit what the numbers that codes stand for give.
TEST(U4, ACodeStandsForTheNearestNumberOfTheQueriesDtype) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int group : {32, 64}) {
      Cache cache(dtype, group);
      Attention::create(config_of(dtype, group), Device::host()).forward(cache.inputs(), cache.outputs());
      const HostTensor k = cache.numbers(cache.k, cache.k_scale), v = cache.numbers(cache.v, cache.v_scale);
      HostTensor o = cache.o, lse = cache.lse;
      o.fill_with_nan();
      lse.fill_with_nan();
      AttentionConfig plain = config_of(dtype, 0);
      plain.k_dtype = plain.v_dtype = std::nullopt;
      Attention::create(plain, Device::host()).forward({cache.q.view(), k.view(), v.view()}, {o.view(), lse.view()});
      EXPECT_EQ(cache.o.bytes(), o.bytes());
      EXPECT_EQ(cache.lse.bytes(), lse.bytes());
    }
  }
}

/// One request's new rows.
struct NewRows {
  explicit NewRows(const std::array<double, kD>& numbers) {
    for (std::int64_t d = 0; d < kD; ++d) {
      k.set(0, 0, 0, d, numbers[static_cast<std::size_t>(d)]);
      v.set(0, 0, 0, d, -numbers[static_cast<std::size_t>(d)]);
    }
  }

  void append(bool scales_given = false) {
    AppendInputs in{k.view(), v.view(), k_cache.view(), v_cache.view()};
    in.seqused_kv = &used;
    in.k_scale = k_scale.view();
    in.v_scale = v_scale.view();
    in.scales_given = scales_given;
    Attention::create(config_of(DType::bf16), Device::host()).append(in);
  }
  double k_at(std::int64_t d) { return number(k_cache, k_scale, d); }
  double v_at(std::int64_t d) { return number(v_cache, v_scale, d); }
  static double number(HostTensor& codes, const HostTensor& scales, std::int64_t d) {
    const auto* const row = static_cast<const std::byte*>(codes.view().data);
    return scales.at(0, 0, 0, 2 * (d / 32)) * packed_code(row, d) + scales.at(0, 0, 0, 2 * (d / 32) + 1);
  }

  std::int32_t used = 1;
  HostTensor k{DType::bf16, 1, 1, 1, kD, Layout::bhsd}, v{DType::bf16, 1, 1, 1, kD, Layout::bhsd};
  HostTensor k_cache{DType::u4x2, 1, 1, 1, kD / 2, Layout::bhsd}, v_cache{DType::u4x2, 1, 1, 1, kD / 2, Layout::bhsd};
  HostTensor k_scale{DType::bf16, 1, 1, 1, 4, Layout::bhsd}, v_scale{DType::bf16, 1, 1, 1, 4, Layout::bhsd};
};

TEST(U4, AppendKeepsSixteenEvenStepsExactly) {
  std::array<double, kD> numbers{};
  for (std::size_t d = 0; d < kD; ++d) numbers[d] = static_cast<double>(d * 7 % 16) * (d < 32 ? 0.5 : 2) - 3;
  NewRows rows(numbers);
  rows.append();
  for (std::int64_t d = 0; d < kD; ++d) {
    EXPECT_EQ(rows.k_at(d), numbers[static_cast<std::size_t>(d)]) << d;
    EXPECT_EQ(rows.v_at(d), -numbers[static_cast<std::size_t>(d)]) << d;
  }
}

TEST(U4, AGroupOfOneNumberIsKeptAndOneWithANanIsNan) {
  std::array<double, kD> numbers{};
  numbers.fill(0.75);
  numbers[40] = std::numeric_limits<double>::quiet_NaN();
  NewRows rows(numbers);
  rows.append();
  for (std::int64_t d = 0; d < kD; ++d) {
    if (d < 32) {
      EXPECT_EQ(rows.k_at(d), 0.75) << d;
    } else {
      EXPECT_TRUE(std::isnan(rows.k_at(d))) << d;
    }
  }
}

TEST(U4, GivenScalesAreReadAndKept) {
  std::array<double, kD> numbers{};
  for (std::size_t d = 0; d < kD; ++d) numbers[d] = static_cast<double>(d) - 20;
  NewRows rows(numbers);
  for (std::int64_t i = 0; i < 4; ++i) {
    rows.k_scale.set(0, 0, 0, i, i % 2 == 0 ? 2 : -4);
    rows.v_scale.set(0, 0, 0, i, i % 2 == 0 ? 2 : -4);
  }
  rows.append(true);
  for (std::int64_t d = 0; d < kD; ++d) {
    const double steps = std::clamp(std::nearbyint((static_cast<double>(d) - 20 + 4) / 2), 0.0, 15.0);
    EXPECT_EQ(rows.k_at(d), steps * 2 - 4) << d;
  }
  EXPECT_EQ(rows.k_scale.at(0, 0, 0, 3), -4);
}

}  // namespace
}  // namespace fa::test
