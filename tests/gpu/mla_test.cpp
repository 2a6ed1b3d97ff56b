// Multi-head latent attention on the device: head dims of 576 and 512, V in the columns of K.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "gpu/backward_case.hpp"
#include "gpu/paged_case.hpp"
#include "gpu/paged_runs.hpp"

namespace fa::test {
namespace {

using Mla = GpuTest;

PagedCase latent(std::int64_t heads, DType dtype = DType::bf16) {
  PagedCase c;
  c.attention = {.h_q = heads, .h_kv = 1, .d_qk = 576, .d_v = 512, .dtype = dtype, .causal = true};
  c.attention.layout = Layout::bshd;
  c.page_size = 64;
  c.value_in_key = true;
  return c;
}

/// Tiles of 16, 32 and 64 rows; keys that blocks share, and that none does.
TEST_F(Mla, DecodesAndDraftsMatchFloat64) {
  for (const std::int64_t heads : {16, 32, 128}) {
    for (const std::int32_t rows : {1, 2, 8}) {
      for (const std::int64_t page_size : {1, 24, 64}) {
        PagedCase c = latent(heads, heads == 32 ? DType::f16 : DType::bf16);
        c.page_size = page_size;
        c.bounded = rows == 2;
        c.rows = {rows, rows, rows, rows};
        c.keys = {1500, 64, rows, 701};
        run(c);
        c.rows.push_back(rows);  // by a schedule
        c.keys.push_back(9000);
        run(c);
      }
    }
  }
}

/// 128 heads are two tiles of rows, and more with several positions.
TEST_F(Mla, ClustersCopyKeysForBothBlocks) {
  if (driver::device_info(0).arch != plan::parse_arch("sm_90a")) GTEST_SKIP() << "GPU 0 is no Hopper";
  for (const std::int32_t rows : {1, 2, 3, 8}) {
    for (const std::int64_t page_size : {std::int64_t{16}, std::int64_t{64}, kContiguous}) {
      PagedCase c = latent(128, rows == 3 ? DType::f16 : DType::bf16);
      c.variant.config.kernel = KernelOverride{"sm90_wide", "multicast=1"};
      c.variant.config.sink = rows == 8;
      c.page_size = page_size;
      c.packed = rows == 2;
      c.rows = {rows, rows, rows, rows, rows};
      c.keys = {1500, 64, rows, 20000, 0};
      const std::string spec = Attention::create(config_of(c)).kernel_info(limits_of(DevicePaged(c))).spec;
      EXPECT_NE(spec.find(" multicast=1"), std::string::npos) << spec;
      run_scheduled(c);
    }
  }
}

TEST_F(Mla, PackedPrefillsAndDecodesMatchFloat64) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    PagedCase c = latent(16, dtype);
    c.packed = true;
    c.rows = {200, 1, 0, 3, 65};
    c.keys = {200, 900, 40, 3, 333};
    c.begin = {0, 77, 0, 1, 300};
    c.indexed = true;
    run(c);
  }
}

/// Latent rows: 512 codes of e4m3, their scales and columns of bf16, in one row of 656 bytes.
TEST_F(Mla, LatentRowsMatchFloat64OfWhatTheyStandFor) {
  for (const std::int64_t heads : {16, 32, 128}) {
    for (const std::int32_t rows : {1, 2, 8}) {
      for (const std::int64_t page_size : {1, 24, 64}) {
        PagedCase c = latent(heads, heads == 32 ? DType::f16 : DType::bf16);
        c.k_dtype = DType::e4m3;
        c.page_size = page_size;
        c.bounded = rows == 2;
        c.rows = {rows, rows, rows, rows};
        c.keys = {1500, 64, rows, 701};
        run(c);
      }
    }
  }
  PagedCase c = latent(16);
  c.k_dtype = DType::e4m3;
  c.packed = true;
  c.rows = {200, 1, 0, 3, 65};
  c.keys = {200, 900, 40, 3, 333};
  c.begin = {0, 77, 0, 1, 300};
  c.variant.config.window_left = 100;
  c.variant.config.sink = true;
  run(c);
}

TEST_F(Mla, WindowsAndSinksMatchFloat64) {
  PagedCase c = latent(16);
  c.variant.config.window_left = 100;
  c.variant.config.sink = true;
  c.rows = {4, 4, 4};
  c.keys = {1100, 90, 4};
  run(c);
}

/// Other head dims, which need not be wide; K is read again where a kernel does not take V from it.
TEST_F(Mla, OtherHeadDimsMatchFloat64) {
  const std::pair<std::int64_t, std::int64_t> kDims[] = {{576, 8}, {320, 264}, {512, 512}, {192, 128}, {72, 64}};
  for (const auto& [d_qk, d_v] : kDims) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      PagedCase c = latent(20, dtype);
      c.attention.d_qk = d_qk;
      c.attention.d_v = d_v;
      c.page_size = 16;
      c.rows = {3, 3};
      c.keys = {650, 35};
      run(c);
    }
  }
}

/// V in K reads the same numbers as a v of its own, by the same tile.
TEST_F(Mla, DenseCallsTakeValuesFromK) {
  const AttentionCase c{.b = 2, .h_q = 16, .h_kv = 1, .s_q = 130, .s_kv = 300, .d_qk = 576, .d_v = 512, .causal = true};
  DeviceCase device(c);
  AttentionConfig config = config_of(c);
  config.head_dim_v = 0;
  config.value_in_key = 512;
  ForwardInputs in = device.inputs();
  in.v = TensorView();
  Attention::create(config).forward(in, device.outputs());
  for (std::int64_t b = 0; b < c.b; ++b) {
    for (std::int64_t s = 0; s < c.s_kv; ++s) {
      for (std::int64_t d = 0; d < c.d_v; ++d) {
        device.host_inputs.v.set(b, 0, s, d, device.host_inputs.k.at(b, 0, s, d));
      }
    }
  }
  expect_correct(device);
}

/// The Hopper kernel for wide heads and that of all GPUs, on the same calls: tiles of heads and of positions, keys that
/// blocks share, pages that boxes are parts of.
TEST_F(Mla, WideKernelsMatchFloat64) {
  for (const char* const kernel : {"", "sm80"}) {
    for (const auto& [heads, rows] : {std::pair{128, 1}, {128, 2}, {128, 3}, {64, 4}, {16, 1}, {16, 64}}) {
      PagedCase c = latent(heads, heads == 64 ? DType::f16 : DType::bf16);
      c.page_size = rows == 1 ? 16 : rows == 3 ? 8 : 128;
      c.variant.config.kernel = KernelOverride{kernel, ""};
      c.rows = {rows, rows, rows};
      c.keys = {5000, 64, 777};
      run(c);
    }
  }
}

/// Rows over plain tensors, with a V of its own: one block a tile, and blocks that share the keys of one.
TEST_F(Mla, WideDenseForwardsMatchFloat64) {
  for (const auto& [d_qk, d_v] : {std::pair{512, 512}, {264, 320}, {576, 512}, {320, 72}}) {
    for (const bool causal : {false, true}) {
      for (const std::int64_t s_q : {1, 333}) {
        const AttentionCase c{.b = 2,
                              .h_q = 8,
                              .h_kv = 2,
                              .s_q = s_q,
                              .s_kv = 2100,
                              .d_qk = d_qk,
                              .d_v = d_v,
                              .dtype = causal ? DType::bf16 : DType::f16,
                              .causal = causal};
        DeviceCase device(c);
        Attention::create(config_of(c)).forward(device.inputs(), device.outputs());
        expect_correct(device);
      }
    }
  }
}

/// Gradients of head dims above 256.
TEST_F(Mla, GradientsOfWideHeadsMatchFloat64) {
  for (const std::int64_t d : {264, 320, 512}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const AttentionCase c{
          .b = 2, .h_q = 4, .h_kv = 2, .s_q = 200, .s_kv = 300, .d_qk = d, .d_v = d, .dtype = dtype, .causal = true};
      run_backward_case(c, config_of(c));
    }
  }
}

}  // namespace
}  // namespace fa::test
