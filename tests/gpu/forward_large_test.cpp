#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "gpu/device_case.hpp"

namespace fa::test {
namespace {

using ForwardLarge = GpuTest;

/// Fills `size` bytes with copies of `block`.
void tile_bytes(void* target, std::size_t size, const std::vector<std::byte>& block) {
  const auto base = reinterpret_cast<CUdeviceptr>(target);
  std::size_t filled = std::min(size, block.size());
  driver::check(driver::api().cuMemcpyHtoD(base, block.data(), filled), "cuMemcpyHtoD");
  while (filled < size) {
    const std::size_t step = std::min(filled, size - filled);
    driver::check(driver::api().cuMemcpyDtoD(base + filled, base, step), "cuMemcpyDtoD");
    filled += step;
  }
}

/// The last rows of a tensor with more than 2^31 elements against the reference of one block: every block is a copy.
TEST_F(ForwardLarge, FarEndOfManyBatches) {
  const AttentionCase block{
      .b = 1, .h_q = 1, .h_kv = 1, .s_q = 64, .s_kv = 64, .d_qk = 128, .d_v = 128, .causal = true};
  const std::int64_t b = (std::int64_t{1} << 31) / (64 * 128) + 3;
  const AttentionInputs host = make_inputs(block);
  const std::size_t bytes = static_cast<std::size_t>(b) * host.q.bytes().size();
  DeviceBuffer q(bytes), k(bytes), v(bytes), o(bytes);
  tile_bytes(q.data(), bytes, host.q.bytes());
  tile_bytes(k.data(), bytes, host.k.bytes());
  tile_bytes(v.data(), bytes, host.v.bytes());
  const auto view = [&](const DeviceBuffer& buffer) { return TensorView(buffer.data(), DType::bf16, {b, 1, 64, 128}); };
  Attention::create(config_of(block)).forward({view(q), view(k), view(v)}, {.o = view(o)});
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");

  AttentionOutputs actual = make_outputs(block);
  const std::size_t block_bytes = actual.o.bytes().size();
  driver::check(driver::api().cuMemcpyDtoH(actual.o.bytes().data(),
                                           reinterpret_cast<CUdeviceptr>(o.data()) + bytes - block_bytes, block_bytes),
                "cuMemcpyDtoH");
  const AttentionOutputs expected = reference_f64(block, host);
  EXPECT_LE(compare(std::as_const(actual.o).view(), std::as_const(expected.o).view()).max_abs_over_max_ref,
            bounds(DType::bf16).o);
  EXPECT_TRUE(o.guards_intact());
}

TEST_F(ForwardLarge, FarEndOfALongSequence) {
  // Rows of q and o past element 2^31, [b, s, h, d] in memory so that the row stride is large too.
  const AttentionCase block{
      .b = 1, .h_q = 2, .h_kv = 2, .s_q = 128, .s_kv = 100, .d_qk = 128, .d_v = 128, .layout = Layout::bshd};
  const std::int64_t s_q = ((std::int64_t{1} << 31) / 256 / 128 + 2) * 128;
  const AttentionInputs host = make_inputs(block);
  const std::size_t bytes = static_cast<std::size_t>(s_q) * 256 * 2;
  DeviceBuffer q(bytes), o(bytes), k(host.k.bytes()), v(host.v.bytes());
  tile_bytes(q.data(), bytes, host.q.bytes());
  const auto long_view = [&](const DeviceBuffer& buffer) {
    return TensorView(buffer.data(), DType::bf16, {1, s_q, 2, 128}).swap_axes(1, 2);
  };
  const auto short_view = [&](const DeviceBuffer& buffer) {
    return TensorView(buffer.data(), DType::bf16, {1, 100, 2, 128}).swap_axes(1, 2);
  };
  Attention::create(config_of(block)).forward({long_view(q), short_view(k), short_view(v)}, {.o = long_view(o)});
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");

  AttentionOutputs actual = make_outputs(block);
  const std::size_t block_bytes = actual.o.bytes().size();
  driver::check(driver::api().cuMemcpyDtoH(actual.o.bytes().data(),
                                           reinterpret_cast<CUdeviceptr>(o.data()) + bytes - block_bytes, block_bytes),
                "cuMemcpyDtoH");
  const AttentionOutputs expected = reference_f64(block, host);
  EXPECT_LE(compare(std::as_const(actual.o).view(), std::as_const(expected.o).view()).max_abs_over_max_ref,
            bounds(DType::bf16).o);
}

}  // namespace
}  // namespace fa::test
