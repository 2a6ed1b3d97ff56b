// Hostile tensors: every one that a call can name, with every field that can be wrong, on the host.

#include "api/views.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "expect_error.hpp"
#include "hostile_tensors.hpp"
#include "plan/backward.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "plan/workspace.hpp"

namespace fa {
namespace {

constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kB = 2, kHq = 4, kHkv = 2, kSq = 3, kSkv = 5, kD = 8;

/// A backward with every tensor that there is, in f32, and the forward before it.
class EveryTensor : public test::HostileTensors {
 protected:
  EveryTensor() {
    config_.head_dim = kD;
    config_.dtype = DType::f32;
    config_.score = ScoreFunction{"score + bias[h, kv] + gain", {{"bias", DType::f32, true}, {"gain", DType::f32}}};
    config_.sink = true;
    config_.dropout = 0.25F;
    config_.statistics = {.max_logit = MaxLogit::softmax,
                          .entropy = true,
                          .column_sums = ColumnSums::query_heads,
                          .top_keys = 2,
                          .entropy_gradient = true,
                          .max_logit_gradient = true,
                          .column_sums_gradient = true};
    config_.debug = true;
    place_.whole_b = kB, place_.whole_h_q = kHq, place_.whole_s_q = kSq, place_.whole_s_kv = kSkv;
    place_.begin = array<std::int64_t>({0, 0, 0, 0});
  }

  Named forward_named() {
    return {{{"q", &q_},
             {"k", &k_},
             {"v", &v_},
             {"sink", &sink_},
             {"captures[bias]", &bias_},
             {"captures[gain]", &gain_},
             {"o", &o_, true},
             {"lse", &lse_, true},
             {"max_logit", &max_logit_, true},
             {"entropy", &entropy_, true},
             {"column_sums", &sums_, true},
             {"top_keys", &top_keys_, true},
             {"dump.p", &p_, true}},
            {{"dropout.device", &state_, 2}, {"place.begin", &place_.begin, 4}},
            {{"workspace", &workspace_.data, &workspace_.size}, {"tiles", &tiles_.data, &tiles_.size}}};
  }
  Named backward_named() {
    return {{{"q", &q_},
             {"k", &k_},
             {"v", &v_},
             {"o", &o_},
             {"lse", &lse_},
             {"dout", &dout_},
             {"dlse", &dlse_},
             {"sink", &sink_},
             {"captures[bias]", &bias_},
             {"captures[gain]", &gain_},
             {"entropy", &entropy_},
             {"dentropy", &dentropy_},
             {"dmax_logit", &dmax_logit_},
             {"dcolumn_sums", &dsums_},
             {"dq", &dq_, true},
             {"dk", &dk_, true},
             {"dv", &dv_, true},
             {"dsink", &dsink_, true},
             {"gradient of captures[bias]", &dbias_, true}},
            {{"dropout.device", &state_, 2}},
            {{"workspace", &workspace_.data, &workspace_.size}, {"tiles", &tiles_.data, &tiles_.size}}};
  }

  Captures captures() const { return {{"bias", bias_}, {"gain", gain_}}; }
  template <class Inputs>
  void set_common(Inputs& inputs) const {
    inputs.captures = captures();
    inputs.sink = sink_;
    inputs.dropout.device = state_;
    inputs.tiles = tiles_;
  }
  void forward() const {
    ForwardInputs inputs{q_, k_, v_};
    set_common(inputs);
    inputs.place = place_;
    Attention::create(config_, Device::host())
        .forward(inputs, {o_, lse_, {max_logit_, entropy_, sums_, top_keys_}, {p_, 1, 2}}, nullptr, workspace_);
  }
  void backward() const {
    BackwardInputs inputs{q_, k_, v_, o_, lse_, dout_, dlse_};
    set_common(inputs);
    inputs.statistics = {entropy_, dentropy_, dmax_logit_, dsums_};
    Attention::create(config_, Device::host())
        .backward(inputs, {dq_, dk_, dv_, {{"bias", dbias_}}, dsink_}, nullptr, workspace_);
  }

  AttentionConfig config_;
  TensorView q_ = tensor({kB, kHq, kSq, kD}), k_ = tensor({kB, kHkv, kSkv, kD}), v_ = tensor({kB, kHkv, kSkv, kD}),
             o_ = tensor({kB, kHq, kSq, kD}), lse_ = tensor({kB, kHq, kSq}), sink_ = tensor({kHq}),
             bias_ = tensor({kHq, kSkv}), gain_ = tensor({1}), dout_ = tensor({kB, kHq, kSq, kD}),
             dlse_ = tensor({kB, kHq, kSq}), dq_ = tensor({kB, kHq, kSq, kD}), dk_ = tensor({kB, kHkv, kSkv, kD}),
             dv_ = tensor({kB, kHkv, kSkv, kD}), dsink_ = tensor({kHq}), dbias_ = tensor({kHq, kSkv}),
             max_logit_ = tensor({kB, kHq, kSq}), entropy_ = tensor({kB, kHq, kSq}), sums_ = tensor({kB, kHq, kSkv}),
             top_keys_ = tensor(DType::i32, {kB, kHq, 2}), p_ = tensor({kSq, kSkv}), dentropy_ = tensor({kB, kHq, kSq}),
             dmax_logit_ = tensor({kB, kHq, kSq}), dsums_ = tensor({kB, kHq, kSkv});
  const std::uint64_t* state_ = array<std::uint64_t>({7, 9});
  ShardPlace place_;
  Workspace workspace_{bytes(), 256};
  MaskTiles tiles_{bytes(), 256};
};

TEST_F(EveryTensor, IsServedAsItIs) {
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(backward());
}

TEST_F(EveryTensor, IsRefusedWithEachFieldThatCannotBe) {
  check_fields(forward_named(), [this] { forward(); });
  check_fields(backward_named(), [this] { backward(); });
}

TEST_F(EveryTensor, SharesNoMemoryWithWhatIsWritten) {
  check_apart(forward_named(), [this] { forward(); });
  check_apart(backward_named(), [this] { backward(); });
}

/// A capture that has no axis with more than one element may have any strides, and one that is broadcast is read.
TEST_F(EveryTensor, MayHaveAnyStrideWhereItIsNotUsed) {
  gain_.strides[0] = kMin;
  bias_.shape = {1, 1, 0, 0};
  dbias_.shape = {1, 1, 0, 0};
  bias_.strides = {kMax, kMin, 0, 0};
  EXPECT_NO_THROW(forward());
  place_.whole_b = 1;
  for (TensorView* view : {&q_, &k_, &v_, &o_, &lse_, &max_logit_, &entropy_, &sums_, &top_keys_}) {
    view->shape[0] = 1;
    view->strides[0] = kMax;
  }
  p_ = {};
  EXPECT_NO_THROW(forward());
}

/// A call over a KV cache: in pages or not, of dense or packed queries, stored in 8 or in 4 bits.
class EveryTensorOfACache : public test::HostileTensors {
 protected:
  struct Kind {
    bool pages;
    bool packed;
    DType k_dtype;
    DType v_dtype;
  };
  static constexpr std::int64_t kColumns = 32, kRoom = 6;

  void make(const Kind& kind) {
    config_ = {};
    config_.head_dim = kColumns;
    config_.dtype = DType::f16;
    config_.page_size = kind.pages ? kRoom / 2 : kContiguous;
    config_.varlen = kind.packed;
    config_.k_dtype = kind.k_dtype;
    config_.v_dtype = kind.v_dtype;
    const std::int64_t rows = kind.pages ? kRoom / 2 : kRoom, pools = kind.pages ? 2 * kB : kB;
    const auto stored = [&](DType dtype, TensorView& view, TensorView& scale) {
      const bool u4 = dtype == DType::u4x2;
      view = tensor(dtype, {pools, kHkv, rows, u4 ? kColumns / 2 : kColumns});
      scale = u4 ? tensor(DType::f16, {pools, kHkv, rows, 2}) : tensor(DType::f32, {pools, kHkv, rows});
    };
    in_ = {};
    stored(kind.k_dtype, in_.k, in_.k_scale);
    stored(kind.v_dtype, in_.v, in_.v_scale);
    const auto of_rows = [&] {
      return kind.packed ? tensor(DType::f16, {kB * kSq, kHq, kColumns}) : tensor(DType::f16, {kB, kHq, kSq, kColumns});
    };
    in_.q = of_rows();
    out_ = {of_rows(), kind.packed ? tensor({kHq, kB * kSq}) : tensor({kB, kHq, kSq})};
    if (kind.packed) {
      in_.sequences.b = kB;
      in_.sequences.cu_seqlens_q = array<std::int32_t>({0, 3, 6});
      in_.sequences.seqused_q = array<std::int32_t>({3, 2});
    }
    in_.sequences.seqused_kv = array<std::int32_t>({4, 6});
    in_.cache.batch_index = array<std::int32_t>({1, 0});
    in_.cache.seq_begin = array<std::int32_t>({1, 0});
    if (!kind.pages) return;
    in_.cache.block_table = TensorView(array<std::int32_t>({0, 1, 2, 3}), DType::i32, {kB, 2});
  }

  Named named() {
    Named result{{{"q", &in_.q},
                  {"k", &in_.k},
                  {"v", &in_.v},
                  {"k_scale", &in_.k_scale},
                  {"v_scale", &in_.v_scale},
                  {"o", &out_.o, true},
                  {"lse", &out_.lse, true}},
                 {{"seqused_kv", &in_.sequences.seqused_kv, kB},
                  {"cache.batch_index", &in_.cache.batch_index, kB},
                  {"cache.seq_begin", &in_.cache.seq_begin, kB}},
                 {{"workspace", &workspace_.data, &workspace_.size},
                  {"tiles", &in_.tiles.data, &in_.tiles.size},
                  {"schedule", &in_.schedule.data, &in_.schedule.size}}};
    if (in_.cache.block_table.defined()) result.tensors.push_back({"cache.block_table", &in_.cache.block_table});
    if (!config_.varlen) return result;
    result.arrays.push_back({"cu_seqlens_q", &in_.sequences.cu_seqlens_q, kB + 1});
    result.arrays.push_back({"seqused_q", &in_.sequences.seqused_q, kB});
    return result;
  }

  void check(const Kind& kind) {
    make(kind);
    const auto call = [this] { Attention::create(config_, Device::host()).forward(in_, out_, nullptr, workspace_); };
    EXPECT_NO_THROW(call());
    check_fields(named(), call);
    in_.tiles = {bytes(), 256};
    in_.schedule = {bytes(), 256};
    check_apart(named(), call);
  }

  AttentionConfig config_;
  ForwardInputs in_;
  ForwardOutputs out_;
  Workspace workspace_{bytes(), 256};
};

TEST_F(EveryTensorOfACache, InPages) {
  check({true, false, DType::e4m3, DType::i8});
}

TEST_F(EveryTensorOfACache, InPagesOfPackedQueries) {
  check({true, true, DType::i8, DType::e4m3});
}

TEST_F(EveryTensorOfACache, WithoutPagesInFourBits) {
  check({false, false, DType::u4x2, DType::u4x2});
}

TEST_F(EveryTensorOfACache, OfASchedule) {
  make({true, true, DType::i8, DType::i8});
  ScheduleInputs of{{.b = kB, .h_q = kHq, .h_kv = kHkv, .s_q = kSq, .s_kv = kRoom, .total_q = kB * kSq}};
  of.sequences = in_.sequences;
  of.seq_begin = in_.cache.seq_begin;
  Schedule memory{bytes(), 256};
  check_apart({{},
               {{"cu_seqlens_q", &of.sequences.cu_seqlens_q, kB + 1},
                {"seqused_q", &of.sequences.seqused_q, kB},
                {"seqused_kv", &of.sequences.seqused_kv, kB},
                {"seq_begin", &of.seq_begin, kB}},
               {{"schedule", &memory.data, &memory.size}}},
              [&] { Attention::create(config_, Device::host()).schedule(of, memory); });
}

/// Queries and keys of whole numbers in 8 bits, with everything that multiplies them or is added.
using EveryTensorOf8Bits = test::HostileTensors;

TEST_F(EveryTensorOf8Bits, IsHeldAgainstTheOthers) {
  constexpr std::int64_t kColumns = 32;
  AttentionConfig config;
  config.head_dim = kColumns;
  config.dtype = DType::i8;
  config.key_scales = config.value_scales = true;
  ForwardInputs in{tensor(DType::i8, {kB, kHq, kSq, kColumns}), tensor(DType::i8, {kB, kHkv, kSkv, kColumns}),
                   tensor(DType::e4m3, {kB, kHkv, kSkv, kColumns})};
  in.q_scale = tensor({kB, kHq, kSq});
  in.k_scale = tensor({kB, kHkv, kSkv});
  in.v_scale = tensor({kB, kHkv, kSkv});
  in.row_bias = tensor({kB, kHq, kSq});
  ForwardOutputs out{tensor(DType::bf16, {kB, kHq, kSq, kColumns}), tensor({kB, kHq, kSq})};
  Workspace workspace{bytes(), 256};
  const Named named{{{"q", &in.q},
                     {"k", &in.k},
                     {"v", &in.v},
                     {"q_scale", &in.q_scale},
                     {"k_scale", &in.k_scale},
                     {"v_scale", &in.v_scale},
                     {"row_bias", &in.row_bias},
                     {"o", &out.o, true},
                     {"lse", &out.lse, true}},
                    {},
                    {{"workspace", &workspace.data, &workspace.size}}};
  const auto call = [&] { Attention::create(config, Device::host()).forward(in, out, nullptr, workspace); };
  EXPECT_NO_THROW(call());
  check_fields(named, call);
  check_apart(named, call);
}

/// A packed batch, whose arrays say which rows are whose, forward and backward.
using EveryTensorOfABatch = test::HostileTensors;

TEST_F(EveryTensorOfABatch, IsHeldAgainstTheOthers) {
  AttentionConfig config;
  config.head_dim = kD;
  config.dtype = DType::f32;
  config.varlen = true;
  const auto rows = [&] { return tensor({kB * kSq, kHq, kD}); };
  const auto keys = [&] { return tensor({kB * kSkv, kHkv, kD}); };
  TensorView q = rows(), k = keys(), v = keys(), o = rows(), dout = rows(), dq = rows(), dk = keys(), dv = keys(),
             lse = tensor({kHq, kB * kSq});
  PackedSequences sequences{.b = kB,
                            .cu_seqlens_q = array<std::int32_t>({0, 3, 6}),
                            .cu_seqlens_kv = array<std::int32_t>({0, 4, 10}),
                            .seqused_q = array<std::int32_t>({3, 1}),
                            .seqused_kv = array<std::int32_t>({2, 6})};
  Workspace workspace{bytes(), 256};
  const std::vector<Array> arrays{{"cu_seqlens_q", &sequences.cu_seqlens_q, kB + 1},
                                  {"cu_seqlens_kv", &sequences.cu_seqlens_kv, kB + 1},
                                  {"seqused_q", &sequences.seqused_q, kB},
                                  {"seqused_kv", &sequences.seqused_kv, kB}};
  const std::vector<Memory> memory{{"workspace", &workspace.data, &workspace.size}};
  const Attention attention = Attention::create(config, Device::host());
  const auto check = [&](const std::vector<Slot>& tensors, const Call& call) {
    EXPECT_NO_THROW(call());
    check_fields({tensors, arrays, memory}, call);
    check_apart({tensors, arrays, memory}, call);
  };
  check({{"q", &q}, {"k", &k}, {"v", &v}, {"o", &o, true}, {"lse", &lse, true}}, [&] {
    ForwardInputs inputs{q, k, v};
    inputs.sequences = sequences;
    attention.forward(inputs, {o, lse}, nullptr, workspace);
  });
  check({{"q", &q},
         {"k", &k},
         {"v", &v},
         {"o", &o},
         {"lse", &lse},
         {"dout", &dout},
         {"dq", &dq, true},
         {"dk", &dk, true},
         {"dv", &dv, true}},
        [&] {
          BackwardInputs inputs{q, k, v, o, lse, dout};
          inputs.sequences = sequences;
          attention.backward(inputs, {dq, dk, dv}, nullptr, workspace);
        });
}

/// Arrays of lengths are read as well.
TEST(PackedTensors, LengthsShareNoMemoryWithWhatIsWritten) {
  AttentionConfig config;
  config.head_dim = kD;
  config.dtype = DType::f32;
  config.varlen = true;
  std::vector<float> q(4 * kD, 1.0f), o(4 * kD + 8), lse(4);
  const Attention attention = Attention::create(config, Device::host());
  const TensorView in(static_cast<const void*>(q.data()), DType::f32, {4, 1, kD});
  auto* const cu = reinterpret_cast<std::int32_t*>(o.data() + 4 * kD - 2);
  const auto call = [&](std::int32_t* lengths) {
    ForwardInputs inputs{in, in, in};
    lengths[0] = 0, lengths[1] = 2, lengths[2] = 4;
    inputs.sequences = {.b = 2, .cu_seqlens_q = lengths, .cu_seqlens_kv = lengths};
    attention.forward(inputs, {TensorView(static_cast<void*>(o.data()), DType::f32, {4, 1, kD}),
                               TensorView(static_cast<void*>(lse.data()), DType::f32, {1, 4})});
  };
  EXPECT_NO_THROW(call(cu + 2));
  test::expect_invalid("o", [&] { call(cu); });
  test::expect_invalid("lse", [&] { call(reinterpret_cast<std::int32_t*>(lse.data())); });
}

/// The greatest shapes that are accepted, with the most that a plan may do with them.
TEST(Sizes, OfScratchDoNotWrap) {
  constexpr std::int64_t kLength = (std::int64_t{1} << 31) - 65536;
  constexpr std::int64_t kRows = std::int64_t{1} << 44;
  const plan::Arch arch = plan::parse_arch("sm_90a");
  AttentionConfig config;
  config.head_dim = 512;
  config.kernel = config.kernel_backward = KernelOverride{"", "splits=64"};
  config.mask = MaskFunction{"b + h + q > kv"};
  const api::Functions functions = api::read_functions(config, false);
  for (const AttentionShape& wanted : {AttentionShape{.b = kRows >> 31, .h_q = 1, .s_q = kLength, .s_kv = kLength},
                                       AttentionShape{.b = 1, .h_q = kRows >> 31, .s_q = kLength, .s_kv = kLength},
                                       AttentionShape{.b = 1 << 22, .h_q = 1 << 22, .s_q = 1, .s_kv = 1},
                                       AttentionShape{.b = kLength, .h_q = 1 << 13, .s_q = 1, .s_kv = 1},
                                       AttentionShape{.b = 1, .h_q = 1 << 13, .h_kv = 1, .s_q = 1, .s_kv = kLength}}) {
    const AttentionShape shape = api::checked(config, wanted);
    const plan::Problem problem = api::make_problem(config, shape, arch, &functions.variants);
    const double rows = double(shape.b) * double(shape.h_q) * double(shape.s_q);
    const double keys = double(shape.b) * double(shape.h_kv) * double(shape.s_kv);
    EXPECT_DOUBLE_EQ(double(plan::forward_workspace(problem, {.splits = 64}, plan::ForwardNeeds{}).bytes()),
                     64 * rows * (512 + 3) * 4);
    const auto choice = plan::choose_backward(problem, api::read_override(config, api::Operation::backward));
    const double floats = rows * (512 + 2) + 64 * keys * 2 * 512;
    EXPECT_GE(double(plan::backward_workspace(problem, choice, plan::BackwardNeeds{}).bytes()), floats * 4 * 0.999999);
    const plan::KernelSpec kernel =
        plan::plan_forward(problem, api::read_override(config, api::Operation::forward)).kernel;
    const double tiles = rows / kernel.tile_m * double(shape.s_kv) / kernel.tile_n;
    EXPECT_GE(double(plan::mask_tiles_bytes(problem, kernel)), std::min(0x1p60, tiles * 4));
  }
}

TEST(Sizes, BeyondTheseAreRefused) {
  AttentionConfig config;
  config.head_dim = 64;
  const auto refused = [&](const AttentionShape& shape, const char* argument) {
    test::expect_invalid(argument, [&] { api::checked(config, shape); });
  };
  constexpr std::int64_t kLength = (std::int64_t{1} << 31) - 65536;
  refused({.b = kMax}, "b");
  refused({.s_q = kMin}, "s_q");
  refused({.b = kLength, .h_q = kLength, .s_q = kLength}, "b * h_q * s_q");
  refused({.b = 1 << 22, .h_q = 1 << 22, .s_q = 2}, "b * h_q * s_q");
  config.varlen = true;
  refused({.b = 1, .h_q = kLength, .s_q = 1, .total_q = kLength - 16}, "h_q * total_q");
}

TEST(Views, AddressesFarApartDoNotOverlap) {
  const auto at = [](std::uintptr_t address) { return TensorView(reinterpret_cast<void*>(address), DType::f32, {4}); };
  for (const std::uintptr_t a :
       {std::uintptr_t{16}, std::uintptr_t{1} << 62, std::uintptr_t{1} << 63, ~std::uintptr_t{31}}) {
    for (const std::uintptr_t b :
         {std::uintptr_t{16}, std::uintptr_t{1} << 62, std::uintptr_t{1} << 63, ~std::uintptr_t{31}}) {
      EXPECT_EQ(api::overlap(at(a), at(b)), a == b) << a << " " << b;
    }
  }
}

TEST(Views, WhatCannotBeAddressedIsSaidToOverlap) {
  TensorView far(reinterpret_cast<void*>(std::uintptr_t{1} << 20), DType::f16, {2, 4096});
  far.strides = {std::int64_t{1} << 62, 1, 0, 0};
  const TensorView other(reinterpret_cast<void*>(std::uintptr_t{1} << 30), DType::f16, {4});
  EXPECT_TRUE(api::overlaps_itself(far));
  EXPECT_TRUE(api::overlap(far, other));
  EXPECT_TRUE(api::overlap(other, far));
  far.rank = 1'000'000;
  EXPECT_TRUE(api::overlaps_itself(far));
  EXPECT_EQ(far.elements(), 0);
  EXPECT_THROW(far.swap_axes(0, 10), Error);
}

}  // namespace
}  // namespace fa
