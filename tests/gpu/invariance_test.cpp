// The same bits on the device, whatever the company, the chunks, the layout and the pages.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gpu/device_case.hpp"
#include "support/invariance_call.hpp"

namespace fa::test {
namespace {

constexpr std::int64_t kHeadsQ = 8;
constexpr std::int64_t kHeadsKv = 2;

/// Whether pages may be of any size: on Hopper they are of multiples of 8 keys where rows are computed by wgmma.
bool has_any_pages(AttentionConfig config) {
  config.page_size = 7;
  try {
    Attention::create(config);
  } catch (const Error&) {
    return false;
  }
  return true;
}

/// Configurations whose bits have to be the same: one text, in all layouts.
std::vector<AttentionConfig> layouts_of(const AttentionConfig& base) {
  std::vector<AttentionConfig> layouts;
  const bool any = has_any_pages(base);
  for (const bool varlen : {false, true}) {
    for (const std::int64_t page_size : {0, any ? 1 : 8, any ? 7 : 24, 16, 64, 256}) {
      AttentionConfig config = base;
      config.varlen = varlen;
      config.page_size = page_size;
      layouts.push_back(config);
    }
  }
  return layouts;
}

/// What is on the device as long as a call runs.
class OnDevice {
 public:
  OnDevice(const ChunkCall& call, const AttentionConfig& config)
      : call_(call), outputs_(call.outputs()), o_(outputs_.o), lse_(outputs_.lse) {
    const auto tensor = [&](const HostTensor& host) { return tensors_.emplace_back(host).const_view(); };
    const auto array = [&](const std::vector<std::int32_t>& values) -> const std::int32_t* {
      if (values.empty()) return nullptr;
      std::vector<std::byte> bytes(values.size() * sizeof(std::int32_t));
      std::memcpy(bytes.data(), values.data(), bytes.size());
      return static_cast<const std::int32_t*>(arrays_.emplace_back(bytes).data());
    };
    TensorView sink;
    if (config.sink) {
      HostTensor logits(DType::f32, 1, 1, kHeadsQ);
      for (std::int64_t h = 0; h < kHeadsQ; ++h) logits.set(0, 0, h, 0, double(h) / 4 - 1);
      sink = TensorView(tensors_.emplace_back(logits).view().data, DType::f32, {kHeadsQ});
    }
    inputs_ = inputs_of(call, tensor, array, sink);
  }

  std::vector<RowBits> run(Attention& attention, const DropoutState& dropout = {}) {
    inputs_.dropout = dropout;
    attention.forward(inputs_, outputs_of(call_, o_.view(), lse_.view()), nullptr);
    o_.read(outputs_.o);
    lse_.read(outputs_.lse);
    return call_.bits_of(outputs_);
  }
  const AttentionOutputs& outputs() const { return outputs_; }

 private:
  const ChunkCall& call_;
  AttentionOutputs outputs_;
  DeviceTensor o_, lse_;
  std::deque<DeviceTensor> tensors_;
  std::deque<DeviceBuffer> arrays_;
  ForwardInputs inputs_;
};

struct Kind {
  std::string name;
  AttentionConfig config;
  int calls;  ///< random ones
};

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  const auto add = [&](std::string name, DType dtype, int d, int d_v, int calls) -> AttentionConfig& {
    Kind kind{std::move(name), {}, calls};
    kind.config.dtype = dtype;
    kind.config.head_dim = d;
    kind.config.head_dim_v = d_v;
    kind.config.causal = true;
    kind.config.invariance = Invariance::rows;
    return all.emplace_back(std::move(kind)).config;
  };
  add("bf16_d128", DType::bf16, 128, 128, 700);
  add("f16_d64", DType::f16, 64, 64, 500);
  add("bf16_d96x72", DType::bf16, 96, 72, 100);
  add("bf16_d256", DType::bf16, 256, 256, 200);
  add("f32_d64", DType::f32, 64, 64, 200);
  add("sink_d128x64", DType::bf16, 128, 64, 200).sink = true;
  AttentionConfig& window = add("window_sink_softcap", DType::bf16, 128, 128, 200);
  window.window_left = 700;
  window.sink = true;
  window.score = functions::softcap(20);
  AttentionConfig& chunked = add("chunks_distance", DType::bf16, 64, 64, 100);
  chunked.chunk = 300;
  chunked.score = {"score + 0.03125 * float(kv - q - (s_kv - s_q))"};
  add("mask_function", DType::bf16, 128, 128, 200).mask = {
      "kv >= 700 || (kv / 64) % 3 != 1 && (q + s_kv - s_q - kv) % 67 != 3"};
  return all;
}

/// A whole text is finite, and without variants what float64 says; other calls are held to its bits.
void expect_right(const AttentionConfig& config, const Document& text, const AttentionOutputs& found) {
  const TensorView rows = found.lse.view();
  for (std::int64_t h = 0; h < rows.shape[1]; ++h) {
    for (std::int64_t s = 0; s < rows.shape[2]; ++s) {
      ASSERT_TRUE(std::isfinite(found.o.at(0, h, s, 0)) && std::isfinite(found.lse.at(0, h, s))) << h << ' ' << s;
    }
  }
  if (config.sink || config.chunk > 0 || !config.mask.expression.empty() || text.rows() > 600) return;
  const AttentionCase c{.h_q = kHeadsQ,
                        .h_kv = kHeadsKv,
                        .s_q = text.rows(),
                        .s_kv = text.rows(),
                        .d_qk = config.head_dim,
                        .d_v = config.head_dim_v,
                        .dtype = config.dtype,
                        .causal = true};
  const AttentionOutputs wanted = reference_f64(c, text.inputs);
  const double unit = config.dtype == DType::bf16 ? 1.0 / 256 : config.dtype == DType::f16 ? 1.0 / 2048 : 2e-6;
  EXPECT_LT(compare(found.o.view(), wanted.o.view()).max_abs, 8 * unit);  // no |v| reaches 6
  EXPECT_LT(compare(found.lse.view(), wanted.lse.view()).max_abs, 1e-4);
}

/// A hundred random calls of a kind.
struct Turn {
  std::size_t kind;
  int begin;
};

std::vector<Turn> turns() {
  std::vector<Turn> all;
  for (std::size_t kind = 0; kind < kinds().size(); ++kind) {
    for (int begin = 0; begin < kinds()[kind].calls; begin += 100) all.push_back({kind, begin});
  }
  return all;
}

class GpuInvariance : public GpuTest, public testing::WithParamInterface<Turn> {};

TEST_P(GpuInvariance, RandomCallsHaveTheBitsOfWholeTexts) {
  const Kind kind = kinds()[GetParam().kind];
  std::vector<Document> texts;
  std::vector<RowBits> whole;
  Attention dense = Attention::create(kind.config);
  for (const std::int64_t rows : {2100, 1030, 513, 60}) {
    texts.push_back(make_document(kind.config, kHeadsQ, kHeadsKv, rows, static_cast<std::uint64_t>(rows)));
  }
  for (const Document& text : texts) {
    const ChunkCall call(kind.config, {{&text, 0, text.rows()}}, 0, 1);
    OnDevice device(call, kind.config);
    whole.push_back(device.run(dense).front());
    expect_right(kind.config, text, device.outputs());
  }
  const std::vector<AttentionConfig> layouts = layouts_of(kind.config);
  std::vector<Attention> attentions;
  for (const AttentionConfig& config : layouts) attentions.push_back(Attention::create(config));
  for (int i = GetParam().begin; i < std::min(kind.calls, GetParam().begin + 100); ++i) {
    const auto seed = static_cast<std::uint64_t>(i);
    const std::size_t which = seed % layouts.size();
    const std::vector<Chunk> chunks = random_chunks(layouts[which], texts, seed);
    const std::int64_t spare = seed / layouts.size() % 3 == 0 ? 3000 : 0;
    const ChunkCall call(layouts[which], chunks, spare, seed);
    const std::vector<RowBits> found = OnDevice(call, layouts[which]).run(attentions[which]);
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      const auto text = static_cast<std::size_t>(chunks[c].document - texts.data());
      ASSERT_EQ(found[c], rows_of(whole[text], chunks[c]))
          << "call " << i << ", rows " << chunks[c].begin << " to " << chunks[c].end << " of text " << text
          << ", varlen " << layouts[which].varlen << ", page_size " << layouts[which].page_size;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, GpuInvariance, testing::ValuesIn(turns()),
                         [](const testing::TestParamInfo<Turn>& parameter) {
                           return kinds()[parameter.param.kind].name + "_" + std::to_string(parameter.param.begin);
                         });

using InvariantTraining = GpuTest;

/// Dropout's mask is a function of entry, head, row and key: the first request keeps its bits in any company.
TEST_F(InvariantTraining, DropoutKeepsTheBits) {
  for (const Invariance invariance : {Invariance::rows, Invariance::batch}) {
    for (const int d : {64, 128}) {
      AttentionConfig base;
      base.head_dim = d;
      base.causal = true;
      base.invariance = invariance;
      base.dropout = 0.2F;
      const DropoutState state{.seed = 31, .offset = 4};
      std::vector<Document> texts;
      for (std::uint64_t i = 0; i < 5; ++i) texts.push_back(make_document(base, kHeadsQ, kHeadsKv, 1100, 90 + i));
      const Chunk own{&texts[0], 0, 1100};
      std::vector<Chunk> company{own};
      for (std::size_t i = 1; i < texts.size(); ++i) company.push_back({&texts[i], 0, 1100});
      RowBits of_layout[2];
      for (const bool varlen : {false, true}) {
        AttentionConfig config = base;
        config.varlen = varlen;
        Attention attention = Attention::create(config);
        const ChunkCall alone(config, {own}, 0, 1);
        const RowBits expected = OnDevice(alone, config).run(attention, state).front();
        of_layout[varlen ? 1 : 0] = expected;
        EXPECT_FALSE(OnDevice(alone, config).run(attention, {.seed = 32, .offset = 4}).front() == expected);
        if (varlen) company[2] = {&texts[2], 17, 400};
        const ChunkCall together(config, company, 0, 2);
        EXPECT_EQ(OnDevice(together, config).run(attention, state).front(), expected) << d << ", varlen " << varlen;
      }
      if (invariance == Invariance::rows) {
        EXPECT_EQ(of_layout[0], of_layout[1]) << d;
      }
    }
  }
}

/// Bits of dq, dk and dv of a text's deterministic backward, given o and lse.
std::vector<std::vector<std::byte>> gradients_of(AttentionConfig config, const Document& text,
                                                 const AttentionOutputs& of) {
  config.deterministic = true;
  const DeviceTensor q(text.inputs.q), k(text.inputs.k), v(text.inputs.v), o(of.o), lse(of.lse), dout(text.inputs.q);
  HostTensor results[] = {text.inputs.q, text.inputs.k, text.inputs.v};
  for (HostTensor& result : results) result.fill_with_nan();
  DeviceTensor dq(results[0]), dk(results[1]), dv(results[2]);
  Attention::create(config).backward(
      {q.const_view(), k.const_view(), v.const_view(), o.const_view(), lse.const_view(), dout.const_view()},
      {dq.view(), dk.view(), dv.view()}, nullptr);
  dq.read(results[0]);
  dk.read(results[1]);
  dv.read(results[2]);
  return {results[0].bytes(), results[1].bytes(), results[2].bytes()};
}

/// o and lse of prefills, chunks and decodes, in any layout, give one backward the same gradients.
TEST_F(InvariantTraining, ABackwardOfChunksHasTheGradientsOfTheWhole) {
  for (const int d : {64, 128}) {
    AttentionConfig base;
    base.head_dim = d;
    base.causal = true;
    base.invariance = Invariance::rows;
    const Document text = make_document(base, kHeadsQ, kHeadsKv, 1100, 40);
    const auto run = [&](const AttentionConfig& config, const std::vector<Chunk>& chunks) {
      Attention attention = Attention::create(config);
      std::vector<RowBits> bits;
      for (const Chunk& chunk : chunks) {
        const ChunkCall call(config, {chunk}, 0, 1);
        bits.push_back(OnDevice(call, config).run(attention).front());
      }
      return gradients_of(base, text, joined(base, chunks, bits));
    };
    const auto wanted = run(base, {{&text, 0, text.rows()}});
    for (const auto& [varlen, page_size] : {std::pair{false, 0}, {true, 0}, {false, 16}, {true, 64}}) {
      AttentionConfig config = base;
      config.varlen = varlen;
      config.page_size = page_size;
      for (const std::vector<Chunk>& chunks : cuts_of(text, 6)) {
        EXPECT_TRUE(run(config, chunks) == wanted)
            << d << ", varlen " << varlen << ", page_size " << page_size << ", " << chunks.size() << " chunks";
      }
    }
  }
}

using BatchInvariance = GpuTest;

/// With `batch` a request alone has the bits that it has among others of the same call.
TEST_F(BatchInvariance, ARequestAloneHasTheBitsThatItHasAmongOthers) {
  for (const std::int64_t rows : {1, 5, 130, 1100}) {
    for (const auto& [varlen, page_size] : {std::pair{false, 0}, {true, 0}, {false, 16}, {true, 16}}) {
      AttentionConfig config;
      config.head_dim = 128;
      config.causal = true;
      config.varlen = varlen;
      config.page_size = page_size;
      config.invariance = Invariance::batch;
      Attention attention = Attention::create(config);
      std::vector<Document> texts;
      for (std::uint64_t i = 0; i < 9; ++i) texts.push_back(make_document(config, kHeadsQ, kHeadsKv, 1200, 70 + i));
      const Chunk own{&texts[0], 1200 - rows, 1200};
      const ChunkCall alone(config, {own}, 0, 1);
      const RowBits expected = OnDevice(alone, config).run(attention).front();
      std::vector<Chunk> company{own};
      for (std::size_t i = 1; i < texts.size(); ++i) company.push_back({&texts[i], 1200 - rows, 1200});
      if (varlen) company[3] = {&texts[3], 17, 1111};
      const ChunkCall together(config, company, 3000, 2);
      EXPECT_EQ(OnDevice(together, config).run(attention).front(), expected)
          << rows << " rows, varlen " << varlen << ", page_size " << page_size;
    }
  }
}

/// Over pages neither their size nor the limits of the batch change a bit: splits follow from a request's own length.
TEST_F(BatchInvariance, PagesAndLimitsChangeNoBits) {
  for (const int d : {64, 128}) {
    for (const std::int64_t rows : {1, 5, 300}) {
      RowBits expected;
      for (const int page_size : {16, 8, 64, 256}) {
        AttentionConfig config;
        config.head_dim = d;
        config.causal = true;
        config.sink = d == 64;
        config.page_size = page_size;
        config.invariance = Invariance::batch;
        Attention attention = Attention::create(config);
        std::vector<Document> texts;
        for (std::uint64_t i = 0; i < 5; ++i) texts.push_back(make_document(config, kHeadsQ, kHeadsKv, 3300, 170 + i));
        const Chunk own{&texts[0], 1900 - rows, 1900};
        if (expected.o.empty()) expected = OnDevice(ChunkCall(config, {own}, 0, 1), config).run(attention).front();
        const std::vector<Chunk> few{own}, many{own,
                                                {&texts[1], 3300 - rows, 3300},
                                                {&texts[2], 0, rows},
                                                {&texts[3], 1025 - rows, 1025},
                                                {&texts[4], 512 - rows, 512}};
        for (const std::int64_t spare : {0, 140, 9000}) {
          EXPECT_EQ(OnDevice(ChunkCall(config, few, spare, 3), config).run(attention).front(), expected)
              << d << ", " << rows << " rows, pages of " << page_size << ", " << spare << " keys to spare, alone";
          EXPECT_EQ(OnDevice(ChunkCall(config, many, spare, 4), config).run(attention).front(), expected)
              << d << ", " << rows << " rows, pages of " << page_size << ", " << spare << " keys to spare";
        }
      }
    }
  }
}

/// Of many requests blocks take query tiles whole, and of lengths that differ the short ones. Alone each split is a
/// block's.
TEST_F(BatchInvariance, WholeTilesChangeNoBits) {
  struct Setting {
    int d, page_size;
    std::int64_t rows;
    bool differ;  // lengths
  };
  for (const auto& [d, page_size, rows, differ] :
       {Setting{64, 0, 3, false}, {128, 0, 1, false}, {64, 16, 1, false}, {128, 16, 3, false}, {128, 16, 1, true}}) {
    AttentionConfig config;
    config.head_dim = d;
    config.causal = true;
    config.sink = d == 64;
    config.page_size = page_size;
    config.invariance = Invariance::batch;
    Attention attention = Attention::create(config);
    const std::int64_t requests = page_size == 0 ? 63 : 127;  // of two KV heads
    const std::int64_t longest = 1600;
    const Document texts[] = {make_document(config, kHeadsQ, kHeadsKv, longest, 270),
                              make_document(config, kHeadsQ, kHeadsKv, longest, 271)};
    std::vector<Chunk> many;
    for (std::int64_t i = 0; i < requests; ++i) {
      const std::int64_t length = differ ? (i * 977 + 100) % 1500 + rows : longest;
      many.push_back({&texts[i % 2], length - rows, length});
    }
    const std::vector<RowBits> together = OnDevice(ChunkCall(config, many, 0, 5), config).run(attention);
    for (const std::size_t i : {0, 1, 8, 62}) {
      EXPECT_EQ(together[i], OnDevice(ChunkCall(config, {many[i]}, 0, 6), config).run(attention).front())
          << d << ", page_size " << page_size << ", " << rows << " rows, request " << i << " of " << many[i].end
          << " keys";
    }
  }
}

}  // namespace
}  // namespace fa::test
