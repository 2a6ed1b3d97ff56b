// The kernels of debug calls: which NaN or infinity is found, and P of one head against the host device.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "api/packed.hpp"
#include "emulator/emulator.hpp"
#include "emulator/inspect_specs.hpp"
#include "emulator/placement.hpp"
#include "emulator/registry.hpp"
#include "emulator/variant_run.hpp"
#include "plan/inspect.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::plan::KernelSpec;
using fa::plan::ScannedResult;
using fa::test::AttentionCase;
using fa::test::HostTensor;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void run_kernel(const KernelSpec& spec, const std::string& name, std::int64_t grid, const void* params, Memory& memory,
                std::uint64_t seed) {
  const RegisteredKernel& kernel = registered_kernel(name.empty() ? canonical(spec) : name);
  LaunchOptions options;
  options.grid = static_cast<int>(grid);
  options.threads = kernel.threads;
  options.resident = kernel.min_blocks;
  options.seed = seed;
  launch(kernel.entry, params, memory, options);
}

// ---- P ----

/// P of the case's head, [rows, keys], by the host device in double, which leaves the log-sum-exp too.
struct Expected {
  std::int64_t rows, keys;
  std::vector<float> p;
  std::vector<float> lse;
};

Expected expected_of(const DumpCase& c, const fa::test::StatisticsData& data) {
  const AttentionCase& a = c.of.attention;
  Expected expected{a.s_q, a.s_kv, {}, {}};
  expected.p.resize(static_cast<std::size_t>(a.s_q * a.s_kv));
  fa::AttentionConfig config = data.variant.config;
  config.host_f64 = config.debug = true;
  fa::test::StatisticsResults results(c.of);
  const fa::test::StatisticsMemory memory{[](const void* bytes, std::size_t) { return const_cast<void*>(bytes); },
                                          [](void* bytes, std::size_t) { return bytes; }};
  fa::ForwardOutputs outputs = outputs_of(c.of, results, memory);
  outputs.dump = {TensorView(expected.p.data(), DType::f32, {expected.rows, expected.keys}), c.b, c.h};
  fa::Attention::create(config, fa::Device::host()).forward(inputs_of(c.of, data, memory), outputs);
  expected.lse = results.lse;
  return expected;
}

std::vector<float> run_dump(const DumpCase& c, const fa::test::StatisticsData& data, const Expected& expected,
                            std::uint64_t seed, const std::string& name = {}) {
  const AttentionCase& a = c.of.attention;
  const Placement placement = c.of.packed() ? Placement::bshd : Placement::bhsd;
  Memory memory;
  fa::plan::ForwardTensors tensors;
  const auto input = [&](const char* label, const HostTensor& tensor) {
    return view_of(place_input(memory, label, tensor, placement, true), tensor);
  };
  tensors.q = input("q", data.inputs.q);
  tensors.k = input("k", data.inputs.k);
  tensors.v = tensors.k;
  tensors.o = tensors.q;
  std::byte* const lse = memory.add_input("lse", std::as_bytes(std::span(expected.lse)));
  tensors.lse = TensorView(lse, DType::f32, {a.b, a.h_q, a.s_q});
  const PlacedVariant variant(memory, data.variant, false);
  tensors.variant = variant.tensors();
  fa::PackedSequences sequences;
  sequences.cu_seqlens_q = place_array(memory, "cu_seqlens_q", c.of.cu_q);
  sequences.cu_seqlens_kv = place_array(memory, "cu_seqlens_kv", c.of.cu_kv);
  sequences.seqused_kv = place_array(memory, "seqused_kv", c.of.used_kv);
  fa::PagedCache cache;
  if (!data.table.empty()) {
    cache.block_table = TensorView(place_array(memory, "block_table", data.table), DType::i32, {a.b, data.pages_each});
  }
  const fa::plan::PackedArgs packed = fa::api::packed_args(data.variant.config, sequences, {}, cache);
  const fa::plan::Problem problem = problem_of(c, data.variant);
  std::byte* const p = memory.add_output("p", sizeof(float) * expected.p.size());
  fa::kernel::ProbabilitiesParams params;
  const KernelSpec spec = spec_of(c);
  const std::int64_t grid =
      probabilities_params(problem, spec, tensors, double{a.softmax_scale()}, packed,
                           TensorView(p, DType::f32, {expected.rows, expected.keys}), c.b, c.h, params);
  run_kernel(spec, name, grid, &params, memory, seed);
  std::vector<float> actual(expected.p.size());
  EXPECT_TRUE(memory.written(p, sizeof(float) * actual.size())) << "P is not written whole";
  std::memcpy(actual.data(), p, sizeof(float) * actual.size());
  return actual;
}

/// Of the largest difference, what is allowed: sums in another order, and fast exponentials.
double error_of(const std::vector<float>& actual, const std::vector<float>& expected) {
  double worst = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(double{actual[i]} - double{expected[i]}) / (2e-6 + 2e-5 * double{expected[i]});
    worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
    if ((actual[i] == 0) != (expected[i] == 0) && expected[i] > 1e-30f) worst = HUGE_VAL;
  }
  return worst;
}

class Dumps : public testing::TestWithParam<std::size_t> {};

TEST_P(Dumps, MatchTheHostDevice) {
  const DumpCase& c = dump_cases()[GetParam()];
  const fa::test::StatisticsData data(c.of);
  const Expected expected = expected_of(c, data);
  std::vector<float> first;
  ASSERT_NO_THROW(first = run_dump(c, data, expected, 1));
  EXPECT_LE(error_of(first, expected.p), 1);
  EXPECT_EQ(run_dump(c, data, expected, 2), first);
}
INSTANTIATE_TEST_SUITE_P(All, Dumps, testing::Range<std::size_t>(0, dump_cases().size()),
                         [](const auto& c) { return dump_cases()[c.param].of.name; });

// ---- results ----

/// Dense and packed results of several dtypes, and where they are broken.
class ScannedCall {
 public:
  ScannedCall() {
    HostTensor o(DType::bf16, 2, 3, 150, 24, fa::test::Layout::bhsd);
    o.set(1, 2, 149, 23, kNaN);
    o.set(1, 2, 70, 5, -kInfinity);
    o.set(1, 2, 70, 14, kInfinity);
    add(o, Placement::padded, false, ((5 * 150) + 70) * 24 + 5);
    HostTensor lse(DType::f32, 2, 3, 150, 8, fa::test::Layout::bhsd);
    lse.set(0, 0, 3, 1, -kInfinity);
    lse.set(0, 1, 3, 2, kInfinity);
    add(lse, Placement::bhsd, true, (150 + 3) * 8 + 2);
    HostTensor legal(DType::f16, 1, 2, 40, 8, fa::test::Layout::bhsd);
    legal.set(0, 0, 3, 1, -kInfinity);
    legal.set(0, 0, 4, 1, -65504);
    add(legal, Placement::bshd, true, -1);
    HostTensor finite(DType::bf16, 1, 2, 40, 16, fa::test::Layout::bhsd);
    for (std::int64_t s = 0; s < 40; ++s) finite.set(0, 1, s, 3, s % 2 == 0 ? 3.3e38 : -3.3e38);
    add(finite, Placement::gaps, false, -1);
    HostTensor codes(DType::e4m3, 1, 2, 40, 16, fa::test::Layout::bhsd);
    codes.set(0, 1, 7, 3, 448);
    codes.bytes()[(40 + 9) * 16 + 2] = std::byte{0xff};
    add(codes, Placement::bhsd, false, (40 + 9) * 16 + 2);
    HostTensor many(DType::f32, 270, 1, 1, 8, fa::test::Layout::bhsd);  // more heads than blocks
    many.set(268, 0, 0, 4, kInfinity);
    add(many, Placement::bhsd, false, 268 * 8 + 4);
    HostTensor early(DType::f32, 270, 1, 1, 8, fa::test::Layout::bhsd);
    early.set(3, 0, 0, 4, kInfinity);
    add(early, Placement::bhsd, false, 3 * 8 + 4);
    HostTensor odd(DType::f16, 1, 2, 70, 12, fa::test::Layout::bhsd);  // rows of no whole pieces of 16 bytes
    odd.set(0, 1, 66, 11, -kInfinity);
    add(odd, Placement::bhsd, false, (70 + 66) * 12 + 11);
    HostTensor unaligned(DType::bf16, 1, 1, 40, 16, fa::test::Layout::bhsd);
    unaligned.set(0, 0, 31, 7, kNaN);
    add(unaligned, Placement::bhsd, false, 31 * 16 + 7, false);
    HostTensor long_rows(DType::f32, 1, 1, 61, 100, fa::test::Layout::bhsd);  // 1,525 pieces of a chunk
    long_rows.set(0, 0, 60, 97, kNaN);
    add(long_rows, Placement::bhsd, false, 60 * 100 + 97);
    HostTensor packed(DType::f16, 1, 2, 200, 8, fa::test::Layout::bshd);
    packed.set(0, 1, 0, 0, kNaN);    // of no sequence
    packed.set(0, 1, 199, 0, kNaN);  // likewise
    packed.set(0, 1, 75, 3, kNaN);   // row 70 of the first
    packed.set(0, 0, 190, 4, kNaN);  // row 80 of the third
    add(packed, Placement::bshd, false, (1 * 100 + 70) * 8 + 3);
    static const std::vector<std::int32_t> cu{5, 105, 110, 196}, used{98, 5, 86};
    ScannedResult& last = results_.back();
    last.cu = place_array(memory_, "cu", cu);
    last.used = place_array(memory_, "used", used);
    last.b = 3;
    last.longest = 100;
    for (std::int64_t h = 0; h < 2; ++h) {  // nobody reads what is not there
      for (const std::int64_t s : {0, 4, 103, 104, 196, 199}) memory_.set_flags(placed_.row(0, h, s), 16, 0);
    }
  }

  /// Places that were found.
  std::vector<std::int64_t> run(std::uint64_t seed, const std::string& name = {}) {
    const std::vector<std::uint64_t> none(results_.size(), ~std::uint64_t{0});
    std::byte* const found = memory_.add_input("found", std::as_bytes(std::span(none)));
    memory_.set_flags(found, sizeof(std::uint64_t) * none.size(), Memory::kReadable | Memory::kWritable);
    fa::kernel::ScanResultsParams params;
    const std::int64_t grid = scan_results_params(results_, reinterpret_cast<std::uint64_t*>(found), params);
    run_kernel(scan_spec(), name, grid, &params, memory_, seed);
    std::vector<std::int64_t> places(none.size());
    std::memcpy(places.data(), found, sizeof(std::int64_t) * places.size());
    return places;
  }

  const std::vector<std::int64_t>& expected() const { return expected_; }
  const std::vector<ScannedResult>& results() const { return results_; }

 private:
  void add(const HostTensor& tensor, Placement placement, bool minus, std::int64_t place, bool aligned = true) {
    placed_ = place_input(memory_, "result", tensor, placement, aligned);
    ScannedResult result;
    result.view = view_of(placed_, tensor);
    result.minus = minus;
    results_.push_back(result);
    expected_.push_back(place);
  }

  Memory memory_;
  Placed placed_;
  std::vector<ScannedResult> results_;
  std::vector<std::int64_t> expected_;
};

TEST(ScannedResults, NameTheLowest) {
  ScannedCall call;
  EXPECT_EQ(call.run(1), call.expected());
  EXPECT_EQ(call.run(2), call.expected());
}

TEST(ScannedResults, PlacesAreElements) {
  const ScannedCall call;
  const auto element = [&](std::size_t i) {
    return fa::plan::found_element(call.results()[i], static_cast<std::uint64_t>(call.expected()[i]));
  };
  const fa::plan::FoundElement of_o = element(0), packed = element(10);
  EXPECT_EQ(of_o.b, 1);
  EXPECT_EQ(of_o.h, 2);
  EXPECT_EQ(of_o.s, 70);
  EXPECT_EQ(of_o.d, 5);
  EXPECT_EQ(packed.b, 0);
  EXPECT_EQ(packed.h, 1);
  EXPECT_EQ(packed.s, 70);
  EXPECT_EQ(packed.d, 3);
}

// ---- mistakes ----

class InspectMutants : public testing::TestWithParam<std::size_t> {};

TEST_P(InspectMutants, AreCaught) {
  const StatisticsMutation& mutation = inspect_mutations()[GetParam()];
  const std::string name = "mutant " + mutation.name;
  try {
    if (mutation.subject.empty()) {
      ScannedCall call;
      EXPECT_NE(call.run(1, name), call.expected());
      return;
    }
    const DumpCase& c = dump_case_named(mutation.subject);
    const fa::test::StatisticsData data(c.of);
    const Expected expected = expected_of(c, data);
    EXPECT_FALSE(error_of(run_dump(c, data, expected, 1, name), expected.p) <= 1);
  } catch (const Fault& fault) {
    EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
  }
}
INSTANTIATE_TEST_SUITE_P(All, InspectMutants, testing::Range<std::size_t>(0, inspect_mutations().size()),
                         [](const auto& mutant) { return inspect_mutations()[mutant.param].name; });

}  // namespace
}  // namespace emulator
