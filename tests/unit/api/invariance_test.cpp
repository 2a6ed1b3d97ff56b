// What invariance refuses, and the bits of the host device, which has one arithmetic for all layouts.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <utility>
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

std::vector<RowBits> run_on_host(const AttentionConfig& config, const ChunkCall& call,
                                 const DropoutState& dropout = {}) {
  Attention attention = Attention::create(config, Device::host());
  test::AttentionOutputs outputs = call.outputs();
  ForwardInputs inputs = test::inputs_of(
      call, [](const test::HostTensor& tensor) { return tensor.view(); },
      [](const std::vector<std::int32_t>& values) { return values.empty() ? nullptr : values.data(); });
  inputs.dropout = dropout;
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

// Dropout's mask is a function of entry, head, row and key: the first request of a call keeps its bits in any company
// and layout, and another seed gives others.
TEST(HostInvariance, DropoutKeepsTheBits) {
  for (const Invariance invariance : {Invariance::rows, Invariance::batch}) {
    AttentionConfig base = rows_config(DType::f32);
    base.invariance = invariance;
    base.dropout = 0.3F;
    std::vector<Document> texts;
    for (const std::int64_t rows : {160, 160, 45}) {
      texts.push_back(test::make_document(base, 4, 2, rows, 5 + texts.size()));
    }
    const Document& text = texts[0];
    const DropoutState state{.seed = 11, .offset = 3};
    const Chunk own{&text, 0, text.rows()};
    const RowBits whole = run_on_host(base, ChunkCall(base, {own}, 0, 1), state).front();
    AttentionConfig none = base;
    none.dropout = 0;
    EXPECT_FALSE(run_on_host(none, ChunkCall(none, {own}, 0, 1)).front() == whole);
    EXPECT_FALSE(run_on_host(base, ChunkCall(base, {own}, 0, 1), {.seed = 12, .offset = 3}).front() == whole);
    for (const bool varlen : {false, true}) {
      AttentionConfig config = base;
      config.varlen = varlen;
      std::vector<std::vector<Chunk>> calls{{own}, {own, {&texts[1], 0, 160}}, {own, own, {&texts[1], 0, 160}}};
      if (varlen) calls.push_back({own, {&texts[2], 3, 9}, {&texts[1], 100, 101}});
      for (const std::vector<Chunk>& chunks : calls) {
        EXPECT_EQ(run_on_host(config, ChunkCall(config, chunks, 0, 1), state).front(), whole)
            << "varlen " << varlen << ", " << chunks.size() << " requests";
      }
    }
  }
}

/// Bits of dq, dk and dv of a text's backward, given o and lse.
std::vector<std::vector<std::byte>> backward_on_host(AttentionConfig config, const Document& text,
                                                     const test::AttentionOutputs& of) {
  config.deterministic = true;
  const test::AttentionInputs& in = text.inputs;
  const auto like = [](const test::HostTensor& tensor) {
    test::HostTensor result = tensor;
    result.fill_with_nan();
    return result;
  };
  test::HostTensor dq = like(in.q), dk = like(in.k), dv = like(in.v);
  test::HostTensor dout = of.o;
  for (std::int64_t h = 0; h < text.heads(); ++h) {
    for (std::int64_t s = 0; s < text.rows(); ++s) {
      for (std::int64_t c = 0; c < dout.view().shape[3]; ++c) {
        dout.set(0, h, s, c, double((7 * h + 5 * s + 3 * c) % 11) / 8 - 0.5);
      }
    }
  }
  const BackwardInputs inputs{in.q.view(), in.k.view(), in.v.view(), of.o.view(), of.lse.view(), dout.view()};
  Attention::create(config, Device::host()).backward(inputs, {dq.view(), dk.view(), dv.view()});
  return {dq.bytes(), dk.bytes(), dv.bytes()};
}

// o and lse of prefills, chunks and decodes, in any layout, give one backward the same gradients.
TEST(HostInvariance, ABackwardOfChunksHasTheGradientsOfTheWhole) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const AttentionConfig base = rows_config(dtype);
    const Document text = test::make_document(base, 4, 2, 131, 9);
    const auto run = [&](const AttentionConfig& config, const std::vector<Chunk>& chunks) {
      std::vector<RowBits> bits;
      for (const Chunk& chunk : chunks) bits.push_back(run_on_host(config, ChunkCall(config, {chunk}, 0, 1)).front());
      return backward_on_host(base, text, test::joined(base, chunks, bits));
    };
    const auto wanted = run(base, {{&text, 0, text.rows()}});
    for (const std::vector<std::byte>& bytes : wanted) {
      EXPECT_TRUE(
          std::ranges::any_of(bytes, [](std::byte byte) { return byte != std::byte{0} && byte != std::byte{0xff}; }));
    }
    for (const auto& [varlen, page_size] : {std::pair{false, 0}, {true, 0}, {false, 16}, {true, 7}}) {
      AttentionConfig config = base;
      config.varlen = varlen;
      config.page_size = page_size;
      for (const std::vector<Chunk>& chunks : test::cuts_of(text, 4)) {
        EXPECT_TRUE(run(config, chunks) == wanted)
            << "varlen " << varlen << ", page_size " << page_size << ", " << chunks.size() << " chunks";
      }
    }
    // A bit of one row's lse reaches the gradients.
    test::AttentionOutputs off = test::joined(base, {{&text, 0, text.rows()}},
                                              run_on_host(base, ChunkCall(base, {{&text, 0, text.rows()}}, 0, 1)));
    off.lse.set(0, 1, 100, 0, off.lse.at(0, 1, 100) + 0.25);
    EXPECT_FALSE(backward_on_host(base, text, off) == wanted);
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
