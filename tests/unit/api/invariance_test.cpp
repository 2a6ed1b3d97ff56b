// What invariance refuses, and the bits of the host device, which has one arithmetic for all layouts.

#include <gtest/gtest.h>

#include <vector>

#include <fa/fa.h>
#include <fa/attention.hpp>

#include "api/validate.hpp"
#include "expect_error.hpp"
#include "support/invariance_call.hpp"

namespace fa {
namespace {

using test::Chunk;
using test::ChunkCall;
using test::Document;
using test::expect_invalid;
using test::RowBits;

AttentionConfig rows_config(DType dtype) {
  AttentionConfig config;
  config.head_dim = 40;
  config.head_dim_v = 24;
  config.dtype = dtype;
  config.causal = true;
  config.invariance = Invariance::rows;
  return config;
}

std::vector<RowBits> run_on_host(const AttentionConfig& config, const ChunkCall& call) {
  Attention attention = Attention::create(config, Device::host());
  test::AttentionOutputs outputs = call.outputs();
  const ForwardInputs inputs = test::inputs_of(
      call, [](const test::HostTensor& tensor) { return tensor.view(); },
      [](const std::vector<std::int32_t>& values) { return values.empty() ? nullptr : values.data(); });
  attention.forward(inputs, test::outputs_of(call, outputs.o.view(), outputs.lse.view()));
  return call.bits_of(outputs);
}

TEST(HostInvariance, RandomCallsHaveTheBitsOfWholeTexts) {
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64}) {
    const AttentionConfig base = rows_config(dtype);
    std::vector<Document> texts;
    std::vector<RowBits> whole;
    for (const std::int64_t rows : {301, 140, 67}) {
      texts.push_back(test::make_document(base, 4, 2, rows, static_cast<std::uint64_t>(rows)));
    }
    for (const Document& text : texts) {
      whole.push_back(run_on_host(base, ChunkCall(base, {{&text, 0, text.rows()}}, 0, 1)).front());
    }
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      AttentionConfig config = base;
      config.varlen = seed % 2 != 0;
      config.page_size = std::vector<std::int64_t>{0, 1, 7, 16}[seed / 2 % 4];
      const std::vector<Chunk> chunks = test::random_chunks(config, texts, seed);
      const std::vector<RowBits> found = run_on_host(config, ChunkCall(config, chunks, 0, seed));
      for (std::size_t i = 0; i < chunks.size(); ++i) {
        const auto text = static_cast<std::size_t>(chunks[i].document - texts.data());
        EXPECT_EQ(found[i], test::rows_of(whole[text], chunks[i])) << "seed " << seed << ", chunk " << i;
      }
    }
  }
}

TEST(Invariance, RefusesWhatItCannotPromise) {
  AttentionConfig config = rows_config(DType::bf16);
  EXPECT_NO_THROW(api::validate(config, false));
  config.accumulate = true;
  expect_invalid("accumulate", [&] { api::validate(config, false); });
  config.accumulate = false;
  config.kernel = KernelOverride{"sm80", "tile_n=64"};
  expect_invalid("kernel.text", [&] { api::validate(config, false); });
  config.kernel = KernelOverride{"sm80", ""};
  EXPECT_NO_THROW(api::validate(config, false));
  config.invariance = static_cast<Invariance>(3);
  expect_invalid("invariance", [&] { api::validate(config, false); });
}

TEST(Invariance, TheCInterfaceRefusesOtherNumbers) {
  fa_config config{};
  config.struct_size = sizeof config;
  config.head_dim = 64;
  config.dtype = FA_F32;
  config.invariance = 3;
  fa_attention* attention = nullptr;
  const fa_device device{FA_DEVICE_HOST, 0};
  EXPECT_EQ(fa_create(&config, device, &attention), FA_INVALID_ARGUMENT);
  config.invariance = FA_INVARIANCE_ROWS;
  ASSERT_EQ(fa_create(&config, device, &attention), FA_OK);
  fa_destroy(attention);
}

}  // namespace
}  // namespace fa
