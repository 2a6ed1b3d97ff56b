// Packed batches and dropout: rendered kernels against float64, and their masks against the host's bit for bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "emulator/packed_run.hpp"
#include "emulator/packed_specs.hpp"

namespace emulator {
namespace {

using fa::CausalAlign;
using fa::DType;
using fa::plan::KernelSpec;
using fa::test::AttentionGradients;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;
using fa::test::Rows;

Sequences pack(const std::vector<int>& rows, const std::vector<int>& keys) {
  Sequences sequences;
  for (const auto& [lengths, cu] : {std::pair{&rows, &sequences.cu_q}, std::pair{&keys, &sequences.cu_kv}}) {
    cu->push_back(0);
    for (const int length : *lengths) cu->push_back(cu->back() + length);
  }
  return sequences;
}

/// One row, none, more than a tile, no keys; more sequences than a warp has lanes; rows and keys that are not used, and
/// some before and behind all sequences.
std::vector<Sequences> batches() {
  std::vector<Sequences> result{pack({5, 0, 33, 1, 20}, {9, 20, 40, 3, 0})};
  std::vector<int> many(41, 1), many_keys(41, 2);
  many[7] = 35;
  many_keys[7] = 70;
  many_keys[40] = 0;
  result.push_back(pack(many, many_keys));
  Sequences part = pack({40, 12, 8}, {35, 50, 8});
  part.used_q = {33, 0, 8};
  part.used_kv = {17, 50, 3};
  for (std::int32_t& at : part.cu_q) at += 3;
  for (std::int32_t& at : part.cu_kv) at += 5;
  result.push_back(part);
  return result;
}

/// The case of a kernel: of a packed batch with some rows behind the last sequence, else of two entries.
PackedCase make_case(const KernelSpec& spec, std::size_t batch) {
  PackedCase c;
  c.attention.dtype = spec.dtype;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.seed = 7 + batch;
  c.attention.causal_align = batch % 2 == 0 ? CausalAlign::bottom_right : CausalAlign::top_left;
  c.dropout = spec.dropout ? std::array{0.1f, 0.5f, 0.9f}[batch] : 0;
  c.state_in_memory = spec.dropout && batch == 1;
  c.dlse = batch == 2;
  c.splits = spec.split ? 3 : 1;
  if (!spec.varlen) {
    c.attention.b = 2;
    c.attention.s_q = 33 + static_cast<std::int64_t>(batch);
    c.attention.s_kv = 70;
    return c;
  }
  c.sequences = batches()[batch];
  c.attention.s_q = c.sequences->cu_q.back() + 2;
  c.attention.s_kv = c.sequences->cu_kv.back() + 4;
  c.clear = batch == 2;
  if (batch == 0) {  // the lengths of the longest ones are known
    c.max_s_q = 33;
    c.max_s_kv = 40;
  }
  return c;
}

double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 2e-2 : dtype == DType::f16 ? 2.5e-3 : 1e-5;
}

/// The greatest |x| of what is no NaN or infinity.
double largest_finite(const HostTensor& tensor) {
  const fa::TensorView view = tensor.view();
  double result = 0;
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
      const double value = std::abs(tensor.at(b, h, s, d));
      if (std::isfinite(value)) result = std::max(result, value);
    }
  });
  return result;
}

/// Rows that the kernels leave alone are those that the reference cleared: NaN here, `padding` there.
void expect_near(const char* name, const HostTensor& actual, const HostTensor& expected, double terms, bool cleared,
                 double bound) {
  const fa::TensorView view = expected.view();
  double worst = 0;
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
      const double wanted = expected.at(b, h, s, d);
      const double got = actual.at(b, h, s, d);
      if (!cleared && std::isnan(got) && (wanted == 0 || std::isinf(wanted))) continue;
      if (got == wanted) continue;
      const double error = std::abs(got - wanted);
      worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
    }
  });
  EXPECT_LE(worst, bound * std::max(largest_finite(expected), terms)) << name;
}

class PackedForward : public testing::TestWithParam<std::size_t> {};

TEST_P(PackedForward, MatchesTheReference) {
  const KernelSpec& spec = packed_forward_specs()[GetParam()];
  for (std::size_t batch = 0; batch < batches().size(); ++batch) {
    PackedCase c = make_case(spec, batch);
    SCOPED_TRACE(canonical(spec) + ", " + testing::PrintToString(c));
    const auto inputs = fa::test::make_inputs(c.attention);
    const AttentionOutputs expected = expected_of(c, inputs);
    const bool cleared = !c.sequences || c.clear;
    const std::uint64_t schedules = spec.dynamic() ? 3 : 1;  // other blocks are the first to ask the counter
    for (c.schedule = 1; c.schedule <= schedules; ++c.schedule) {
      AttentionOutputs actual;
      ASSERT_NO_THROW(actual = run_packed(spec, c, inputs)) << "schedule " << c.schedule;
      expect_near("o", actual.o, expected.o, 1, cleared, tolerance(spec.dtype));
      expect_near("lse", actual.lse, expected.lse, 1, cleared, 1e-4);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PackedForward, testing::Range<std::size_t>(0, packed_forward_specs().size()));

class PackedBackward : public testing::TestWithParam<std::size_t> {};

TEST_P(PackedBackward, MatchesTheReference) {
  const BackwardSpecs& specs = packed_backward_specs()[GetParam()];
  for (std::size_t batch = 0; batch < batches().size(); ++batch) {
    const PackedCase c = make_case(specs.main, batch);
    SCOPED_TRACE(canonical(specs.main) + ", " + testing::PrintToString(c));
    const BackwardData data = make_data(c);
    AttentionGradients actual;
    ASSERT_NO_THROW(actual = run_packed(specs, c, data));
    const AttentionGradients expected = expected_of(c, data);
    const bool cleared = !c.sequences || c.clear;
    const double dp = std::sqrt(static_cast<double>(c.attention.d_v)) / (1 - static_cast<double>(c.dropout));
    const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
    const double bound = tolerance(c.attention.dtype);
    expect_near("dq", actual.dq, expected.dq, dp * scale, cleared, bound);
    expect_near("dk", actual.dk, expected.dk, dp * scale, cleared, bound);
    expect_near("dv", actual.dv, expected.dv, 1, cleared, bound);
    const fa::test::GradientBounds bounds = bounds_of(c, data);
    EXPECT_LE(fa::test::worst_ratio(actual.dq, expected.dq, bounds.dq, !cleared), 1) << "dq";
    EXPECT_LE(fa::test::worst_ratio(actual.dk, expected.dk, bounds.dk, !cleared), 1) << "dk";
    EXPECT_LE(fa::test::worst_ratio(actual.dv, expected.dv, bounds.dv, !cleared), 1) << "dv";
  }
}

INSTANTIATE_TEST_SUITE_P(All, PackedBackward, testing::Range<std::size_t>(0, packed_backward_specs().size()));

/// NaN or infinity in all of one sequence leaves the bits of all others alone.
class Neighbours : public testing::TestWithParam<double> {
 protected:
  static constexpr std::int64_t kSpoiled = 2;  // of the sequences of the first batch, amid others

  static Rows spoiled(const std::vector<std::int32_t>& cu) { return {cu[kSpoiled], cu[kSpoiled + 1] - cu[kSpoiled]}; }

  static PackedCase case_of(const KernelSpec& spec) {
    PackedCase c = make_case(spec, 0);
    c.sequences = pack({5, 10, 33, 1, 20}, {9, 20, 40, 3, 7});
    c.attention.s_q = c.sequences->cu_q.back();
    c.attention.s_kv = c.sequences->cu_kv.back();
    return c;
  }
};

TEST_P(Neighbours, KeepTheirOutputs) {
  for (const KernelSpec& spec : packed_forward_specs()) {
    if (!spec.varlen) continue;
    const PackedCase c = case_of(spec);
    SCOPED_TRACE(canonical(spec));
    const Rows rows = spoiled(c.sequences->cu_q);
    const Rows keys = spoiled(c.sequences->cu_kv);
    fa::test::AttentionInputs inputs = fa::test::make_inputs(c.attention);
    const AttentionOutputs clean = run_packed(spec, c, inputs);
    fill(inputs.q, rows, GetParam());
    fill(inputs.k, keys, GetParam());
    fill(inputs.v, keys, GetParam());
    const AttentionOutputs beside = run_packed(spec, c, inputs);
    EXPECT_TRUE(equal_outside(beside.o, clean.o, rows)) << "o";
    EXPECT_TRUE(equal_outside(beside.lse, clean.lse, rows)) << "lse";
    EXPECT_FALSE(equal_outside(beside.o, clean.o, {})) << "nothing was spoiled";
  }
}

TEST_P(Neighbours, KeepTheirGradients) {
  for (const BackwardSpecs& specs : packed_backward_specs()) {
    if (!specs.main.varlen) continue;
    PackedCase c = case_of(specs.main);
    c.dlse = true;
    SCOPED_TRACE(canonical(specs.main));
    const Rows rows = spoiled(c.sequences->cu_q);
    const Rows keys = spoiled(c.sequences->cu_kv);
    BackwardData data = make_data(c);
    const AttentionGradients clean = run_packed(specs, c, data);
    for (HostTensor* tensor : {&data.inputs.q, &data.dout, &data.dlse, &data.outputs.o, &data.outputs.lse}) {
      fill(*tensor, rows, GetParam());
    }
    for (HostTensor* tensor : {&data.inputs.k, &data.inputs.v}) fill(*tensor, keys, GetParam());
    const AttentionGradients beside = run_packed(specs, c, data);
    EXPECT_TRUE(equal_outside(beside.dq, clean.dq, rows)) << "dq";
    EXPECT_TRUE(equal_outside(beside.dk, clean.dk, keys)) << "dk";
    EXPECT_TRUE(equal_outside(beside.dv, clean.dv, keys)) << "dv";
    EXPECT_FALSE(equal_outside(beside.dv, clean.dv, {})) << "nothing was spoiled";
  }
}

INSTANTIATE_TEST_SUITE_P(Values, Neighbours,
                         testing::Values(std::numeric_limits<double>::quiet_NaN(),
                                         std::numeric_limits<double>::infinity(),
                                         -std::numeric_limits<double>::infinity()));

/// Lengths of every wrong kind: none may lead a kernel out of its tensors.
TEST(Varlen, WrongLengthsStayInBounds) {
  const std::vector<std::vector<std::int32_t>> wrong{
      {0, 50, 20, 60},  {-7, 10, 30, 40}, {0, 1000000, 2000000000, 2147483647},
      {40, 30, 20, 10}, {0, 0, 0, 0},     {-2147483647 - 1, 2147483647, -5, 64}};
  const auto run = [&](const KernelSpec* forward, const BackwardSpecs* backward) {
    for (const std::vector<std::int32_t>& cu : wrong) {
      PackedCase c = make_case(forward != nullptr ? *forward : backward->main, 0);
      c.attention.s_q = c.attention.s_kv = 60;
      c.max_s_q = c.max_s_kv = 0;
      const Sequences right = pack({20, 20, 20}, {20, 20, 20});
      c.sequences = right;
      const BackwardData data = make_data(c);
      c.trust = false;
      for (const bool rows : {true, false}) {
        c.sequences = right;
        (rows ? c.sequences->cu_q : c.sequences->cu_kv) = cu;
        c.sequences->used_q = {-3, 1000000, 5};
        SCOPED_TRACE(testing::PrintToString(c));
        if (forward != nullptr) {
          EXPECT_NO_THROW(run_packed(*forward, c, data.inputs));
        } else {
          EXPECT_NO_THROW(run_packed(*backward, c, data));
        }
      }
    }
  };
  run(&packed_forward_specs()[0], nullptr);
  run(&packed_forward_specs()[3], nullptr);
  run(&packed_forward_specs()[6], nullptr);
  run(&packed_forward_specs()[8], nullptr);
  run(nullptr, &packed_backward_specs()[0]);
  run(nullptr, &packed_backward_specs()[2]);
}

/// A case whose P is 1 / s_kv everywhere: what a kernel multiplies with a unit matrix is its mask.
PackedCase uniform_case(const KernelSpec& spec, float dropout) {
  PackedCase c;
  c.attention.dtype = spec.dtype;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.b = 2;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.s_q = 57;
  c.attention.s_kv = 61;
  c.attention.scale = 1e-6f;
  c.dropout = dropout;
  c.splits = spec.split ? 3 : 1;
  if (!spec.varlen) return c;
  c.attention.b = 1;
  c.sequences = pack({57, 40}, {61, 33});
  c.attention.s_q = 97;
  c.attention.s_kv = 94;
  return c;
}

struct Entry {
  std::int64_t batch, first_row, first_key, rows, keys;
};
std::vector<Entry> entries_of(const PackedCase& c) {
  if (c.sequences) return {{0, 0, 0, 57, 61}, {1, 57, 61, 40, 33}};
  return {{0, 0, 0, c.attention.s_q, c.attention.s_kv}, {1, 0, 0, c.attention.s_q, c.attention.s_kv}};
}

/// Calls check(head, row, key, kept) for every element of the host's mask that a causal kernel keeps.
template <class Check>
void for_each_draw(const PackedCase& c, const Entry& entry, bool causal, const Check& check) {
  std::vector<std::uint8_t> keep(static_cast<std::size_t>(entry.keys));
  for (std::int64_t h = 0; h < c.attention.h_q; ++h) {
    for (std::int64_t i = 0; i < entry.rows; ++i) {
      c.mask().row(entry.batch * c.attention.h_q + h, i, 0, entry.keys, keep.data());
      for (std::int64_t j = 0; j < entry.keys; ++j) {
        if (!causal || j <= i + entry.keys - entry.rows) check(h, i, j, keep[static_cast<std::size_t>(j)] != 0);
      }
    }
  }
}

void set_unit(HostTensor& tensor, std::int64_t rows, std::int64_t first, std::int64_t batch) {
  for (std::int64_t h = 0; h < tensor.view().shape[1]; ++h) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t d = 0; d < tensor.view().shape[3]; ++d) tensor.set(batch, h, first + i, d, d == i ? 1 : 0);
    }
  }
}

class DropoutMask : public testing::TestWithParam<float> {};

TEST_P(DropoutMask, ForwardKernelsDrawWhatTheHostDraws) {
  int kernels = 0;
  for (const KernelSpec& spec : packed_forward_specs()) {
    if (!spec.dropout || spec.d_v < 61) continue;
    ++kernels;
    PackedCase c = uniform_case(spec, GetParam());
    c.attention.causal = spec.causal;
    SCOPED_TRACE(canonical(spec));
    auto inputs = fa::test::make_inputs(c.attention);
    for (const Entry& e : entries_of(c)) set_unit(inputs.v, e.keys, e.first_key, c.sequences ? 0 : e.batch);
    const AttentionOutputs outputs = run_packed(spec, c, inputs);
    int wrong = 0;
    for (const Entry& e : entries_of(c)) {
      for_each_draw(c, e, spec.causal, [&](std::int64_t h, std::int64_t i, std::int64_t j, bool kept) {
        wrong += (outputs.o.at(c.sequences ? 0 : e.batch, h, e.first_row + i, j) != 0) != kept;
      });
    }
    EXPECT_EQ(wrong, 0);
  }
  EXPECT_GE(kernels, 4);
}

TEST_P(DropoutMask, BackwardKernelsDrawWhatTheHostDraws) {
  int kernels = 0;
  for (const BackwardSpecs& specs : packed_backward_specs()) {
    if (!specs.main.dropout || specs.main.d_v < 57) continue;
    ++kernels;
    PackedCase c = uniform_case(specs.main, GetParam());
    c.attention.causal = specs.main.causal;
    c.attention.h_kv = c.attention.h_q;  // dV of one query head
    SCOPED_TRACE(canonical(specs.main));
    BackwardData data = make_data(c);
    for (const Entry& e : entries_of(c)) set_unit(data.dout, e.rows, e.first_row, c.sequences ? 0 : e.batch);
    const AttentionGradients gradients = run_packed(specs, c, data);
    int wrong = 0;
    for (const Entry& e : entries_of(c)) {
      for_each_draw(c, e, specs.main.causal, [&](std::int64_t h, std::int64_t i, std::int64_t j, bool kept) {
        wrong += (gradients.dv.at(c.sequences ? 0 : e.batch, h, e.first_key + j, i) != 0) != kept;
      });
    }
    EXPECT_EQ(wrong, 0);
  }
  EXPECT_GE(kernels, 3);
}

INSTANTIATE_TEST_SUITE_P(Probabilities, DropoutMask, testing::Values(0.4f, 0.99f));

}  // namespace
}  // namespace emulator
