// Fixed split sizes: a row has the same bits in whatever company, chunk, layout and kernel it is computed.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "api/variants.hpp"
#include "emulator/fault.hpp"
#include "emulator/invariance_run.hpp"
#include "emulator/invariance_specs.hpp"
#include "emulator/plan_run.hpp"
#include "emulator/specs.hpp"
#include "reference/forward.hpp"
#include "support/extreme_case.hpp"
#include "support/invariance_case.hpp"

namespace emulator {
namespace {

using fa::test::Chunk;
using fa::test::ChunkCall;
using fa::test::Document;
using fa::test::RowBits;

constexpr std::int64_t kRows = 150;  // five splits of 32 keys

/// A text, and the bits of all of its rows by the first path of an arithmetic, alone in its call.
struct Expected {
  Document document;
  RowBits bits;
};

/// A key whose scores pass the others' by so much that P of some rows is lost, and of others in their warps is not.
void put_steep_key(fa::test::HostTensor& k) {
  constexpr std::int64_t kKey = 36;  // in the second KV tile of a split
  for (std::int64_t h = 0; h < kInvariantHeadsKv; ++h) {
    for (std::int64_t i = 0; i < k.view().shape[3]; ++i) k.set(0, h, kKey, i, 128 * k.at(0, h, kKey, i));
  }
}

const std::vector<Expected>& expected_of(const InvariantPath& path) {
  static std::map<std::string, std::vector<Expected>> known;
  std::vector<Expected>& texts = known[path.arithmetic];
  if (!texts.empty()) return texts;
  const auto first = std::ranges::find(invariant_paths(), path.arithmetic, &InvariantPath::arithmetic);
  for (const std::int64_t rows : {kRows, std::int64_t{41}}) {
    texts.push_back({fa::test::make_document(first->config, kInvariantHeadsQ, kInvariantHeadsKv, rows,
                                             static_cast<std::uint64_t>(rows)),
                     {}});
  }
  for (Expected& text : texts) {
    if (path.arithmetic == "steep") put_steep_key(text.document.inputs.k);
    const ChunkCall call(first->config, {{&text.document, 0, text.document.rows()}}, 0, 1);
    text.bits = call.bits_of(run_chunks(*first, call, {})).front();
  }
  return texts;
}

/// How many chunks have other bits.
int differing(const InvariantPath& path, const std::vector<Chunk>& chunks, const InvariantRun& run) {
  const std::vector<Expected>& texts = expected_of(path);
  const ChunkCall call(path.config, chunks, run.spare, run.seed);
  const std::vector<RowBits> found = call.bits_of(run_chunks(path, call, run));
  int count = 0;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const Expected& text = chunks[i].document == &texts[0].document ? texts[0] : texts[1];
    count += found[i] == rows_of(text.bits, chunks[i]) ? 0 : 1;
  }
  return count;
}

/// Calls that a path can do: chunks of both texts where it takes several lengths.
std::vector<std::vector<Chunk>> calls_of(const InvariantPath& path, std::uint64_t seed) {
  const std::vector<Expected>& texts = expected_of(path);
  const Document* const text = &texts[0].document;
  const Document* const other = &texts[1].document;
  std::mt19937_64 random(seed);
  const auto place = [&] { return std::int64_t(random() % kRows); };
  if (path.config.varlen) {
    const std::int64_t a = place(), b = 1 + place();
    const std::int64_t cut = std::min(std::max(a, b - 1), kRows - 1);
    return {{{text, 0, cut}, {other, 0, 41}, {text, cut, kRows}},
            {{other, 40, 41}, {text, b - 1, b}, {text, std::max<std::int64_t>(b - 5, 0), b}, {other, 3, 30}}};
  }
  const std::int64_t end = 1 + place();
  const std::int64_t rows = std::min<std::int64_t>(1 + place() % 7, end);
  std::vector<std::vector<Chunk>> calls{{{text, end - rows, end}}, {{text, 0, kRows}}};
  if (path.config.page_size > 0) calls.push_back({{text, end - rows, end}, {other, 41 - 1, 41}});
  if (path.config.page_size > 0 && rows != 1) calls.back() = {{text, end - rows, end}, {other, 41 - rows, 41}};
  return calls;
}

class Invariance : public testing::TestWithParam<std::size_t> {
 protected:
  const InvariantPath& path_ = invariant_paths()[GetParam()];
};

TEST_P(Invariance, RowsHaveTheBitsOfTheWholeText) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    for (const std::vector<Chunk>& chunks : calls_of(path_, seed)) {
      EXPECT_EQ(differing(path_, chunks, {.seed = seed}), 0);
    }
  }
}

TEST_P(Invariance, LimitsThatNoRequestReachesChangeNothing) {
  if (!path_.config.varlen && path_.config.page_size == 0) GTEST_SKIP() << "no limits beyond the sizes";
  const std::vector<Chunk> chunks = calls_of(path_, 4).front();
  for (const std::int64_t spare : {1, 70, 200}) {
    EXPECT_EQ(differing(path_, chunks, {.seed = 4, .spare = spare}), 0);
  }
}

TEST_P(Invariance, BlocksThatTakeSeveralSplitsChangeNothing) {
  if (!path_.spec.split || !path_.config.varlen) GTEST_SKIP() << "its blocks take one split each";
  const Document& text = expected_of(path_)[0].document;
  EXPECT_EQ(differing(path_, std::vector<Chunk>(6, {&text, 0, kRows}), {}), 0);
}

/// The case that engines report: another request grows from 9 tokens to 10.
TEST_P(Invariance, ARequestBesideNineOrTenTokens) {
  if (!path_.config.varlen) GTEST_SKIP() << "its requests are of one length";
  const std::vector<Expected>& texts = expected_of(path_);
  for (const std::int64_t rows : {9, 10}) {
    EXPECT_EQ(differing(path_, {{&texts[1].document, 0, rows}, {&texts[0].document, kRows - 1, kRows}}, {}), 0);
  }
}

/// A whole text in float64, with what the path's config has of sinks, windows and functions.
fa::test::AttentionOutputs whole_in_float64(const InvariantPath& path, const fa::test::AttentionInputs& inputs,
                                            double scale = 1 / 4.0) {
  fa::test::AttentionOutputs outputs{
      fa::test::HostTensor(fa::DType::f64, 1, kInvariantHeadsQ, kRows, path.spec.d_v, fa::test::Layout::bshd),
      fa::test::HostTensor(fa::DType::f64, 1, kInvariantHeadsQ, kRows)};
  const fa::api::Functions functions = fa::api::read_functions(path.config, true);
  fa::reference::ForwardArgs args;
  args.q = inputs.q.view();
  args.k = inputs.k.view();
  args.v = inputs.v.view();
  args.o = outputs.o.view();
  args.lse = outputs.lse.view();
  args.scale = scale;
  args.causal = args.f64 = true;
  if (functions.program.score || functions.program.mask) args.variant.program = &functions.program;
  args.variant.window_left = path.config.window_left;
  std::vector<float> sinks(kInvariantSinks.begin(), kInvariantSinks.end());
  if (path.config.sink) {
    args.variant.sink = fa::TensorView(static_cast<void*>(sinks.data()), fa::DType::f32, {kInvariantHeadsQ});
  }
  fa::reference::forward(args);
  return outputs;
}

TEST(InvariantArithmetic, IsThatOfFloat64UpToRoundings) {
  std::set<std::string> compared;
  for (const InvariantPath& path : invariant_paths()) {
    if (path.config.varlen || path.config.page_size > 0) continue;  // the same bits as these
    if (path.arithmetic == "steep") continue;                       // no float has what is asked for below
    const Document& text = expected_of(path)[0].document;
    const ChunkCall call(path.config, {{&text, 0, kRows}}, 0, 1);
    const fa::test::AttentionOutputs found = run_chunks(path, call, {});
    const fa::test::AttentionOutputs wanted = whole_in_float64(path, text.inputs);
    const double unit = path.config.dtype == fa::DType::f32 ? 1e-6 : 1.0 / 256;
    EXPECT_LT(fa::test::compare(found.o.view(), wanted.o.view()).max_abs, 2 * unit * 4)
        << path.name;  // no |v| reaches 6
    EXPECT_LT(fa::test::compare(found.lse.view(), wanted.lse.view()).max_abs, 1e-5) << path.name;
    compared.insert(path.arithmetic);
  }
  EXPECT_EQ(compared, (std::set<std::string>{"f32", "masked", "plain", "sink", "variant", "wgmma", "wide"}));
}

/// All keys are alike, beside a maximum of 2^60 and more: a row's O is the mean of what it sees, in whichever splits.
TEST(InvariantArithmetic, WeighsSplitsBesideALargeMaximum) {
  constexpr float kScale = 0.3f * 0x1p40f;
  int compared = 0;
  for (const InvariantPath& path : invariant_paths()) {
    if (path.arithmetic == "variant" || path.arithmetic == "steep") continue;  // its scores differ
    Document text = expected_of(path)[0].document;
    fa::test::put_equal_scores(text.inputs, 4096, 1);
    const ChunkCall call(path.config, {{&text, 0, kRows}}, 0, 1);
    const RowBits found = call.bits_of(run_chunks(path, call, {.scale = kScale})).front();
    const auto first = std::ranges::find(invariant_paths(), path.arithmetic, &InvariantPath::arithmetic);
    const ChunkCall alone(first->config, {{&text, 0, kRows}}, 0, 1);
    const fa::test::AttentionOutputs outputs = run_chunks(*first, alone, {.scale = kScale});
    EXPECT_EQ(found, alone.bits_of(outputs).front()) << path.name;
    if (path.name != first->name) continue;
    const fa::test::AttentionOutputs wanted = whole_in_float64(path, text.inputs, double{kScale});
    const double unit = path.config.dtype == fa::DType::f32 ? 1e-6 : 1.0 / 256;
    EXPECT_LT(fa::test::compare(outputs.o.view(), wanted.o.view()).max_abs, 2 * unit * 4) << path.name;
    ++compared;
  }
  EXPECT_EQ(compared, 6);
}

INSTANTIATE_TEST_SUITE_P(Kernel, Invariance, testing::Range<std::size_t>(0, invariant_paths().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           return invariant_paths()[parameter.param].name;
                         });

class InvarianceMutants : public testing::TestWithParam<std::size_t> {};

TEST_P(InvarianceMutants, HaveOtherBits) {
  const InvarianceMutation& mutation = invariance_mutations()[GetParam()];
  const InvariantPath& path = path_of(mutation);
  int caught = 0;
  for (const std::uint64_t seed : {1, 2, 3}) {
    for (const std::vector<Chunk>& chunks : calls_of(path, seed)) {
      try {
        caught += differing(path, chunks, {.seed = seed, .kernel = "mutant " + mutation.name});
      } catch (const NotWritten&) {
        return;
      } catch (const Fault&) {
        ++caught;
      }
    }
  }
  EXPECT_GT(caught, 0) << mutation.before;
}

/// Bits of the last `rows` of the first `end` tokens: alone in a call whose limit is their number, by the first path of
/// an arithmetic; or by any, in other pages and up to another limit, between requests of other lengths.
struct Request {
  std::int64_t rows, end;

  Chunk of(const Document& document) const { return {&document, std::max<std::int64_t>(end - rows, 0), end}; }
  Chunk as_many(const Document& document, std::int64_t last) const { return {&document, last - rows, last}; }
};

const std::vector<Document>& batch_texts(const InvariantPath& path) {
  static std::map<std::string, std::vector<Document>> known;
  std::vector<Document>& texts = known[path.arithmetic];
  for (const std::uint64_t seed : {1, 2}) {
    if (texts.size() < 2)
      texts.push_back(fa::test::make_document(path.config, kInvariantHeadsQ, kInvariantHeadsKv, kRows, seed));
  }
  return texts;
}

/// How many calls give a request other bits than it has alone.
int differing_batches(const InvariantPath& path, const std::string& kernel = {}, const std::string& merge = {}) {
  const std::vector<Document>& texts = batch_texts(path);
  const auto first = std::ranges::find(batch_paths(), path.arithmetic, &InvariantPath::arithmetic);
  int count = 0;
  const std::vector<Request> requests = path.spec.split
                                            ? std::vector<Request>{{1, 150}, {3, 97}, {6, 140}, {2, 63}, {1, 17}}
                                            : std::vector<Request>{{kRows, kRows}, {90, 120}};
  for (const Request& request : requests) {
    const Chunk chunk = request.of(texts[0]);
    const ChunkCall alone(first->config, {chunk}, 0, 1);
    const RowBits wanted = alone.bits_of(run_chunks(*first, alone, {})).front();
    const Chunk others[] = {request.as_many(texts[1], kRows), request.as_many(texts[1], request.rows)};
    std::vector<std::vector<Chunk>> calls{{chunk}, {others[0], chunk}, {others[1], chunk, others[0]}};
    for (std::size_t place = 0; place < calls.size(); ++place) {
      const std::int64_t spare = std::int64_t{40} * static_cast<std::int64_t>(place);
      const ChunkCall call(path.config, calls[place], spare, 3 + place);
      const InvariantRun run{.seed = 3 + place, .spare = spare, .kernel = kernel, .merge = merge};
      const std::vector<RowBits> found = call.bits_of(run_chunks(path, call, run));
      count += found[place == 0 ? 0 : 1] == wanted ? 0 : 1;
    }
  }
  return count;
}

class InvariantBatches : public testing::TestWithParam<std::size_t> {};

TEST_P(InvariantBatches, GiveARequestTheBitsThatItHasAlone) {
  EXPECT_EQ(differing_batches(batch_paths()[GetParam()]), 0);
}

INSTANTIATE_TEST_SUITE_P(Kernel, InvariantBatches, testing::Range<std::size_t>(0, batch_paths().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           return batch_paths()[parameter.param].name;
                         });

/// The last rows of a text, whose keys are all those of the whole text's rows.
TEST_P(InvariantBatches, AreThoseOfFloat64UpToRoundings) {
  const InvariantPath& path = batch_paths()[GetParam()];
  const Document& text = batch_texts(path)[0];
  const std::int64_t rows = path.spec.split ? 3 : kRows;
  const ChunkCall call(path.config, {{&text, kRows - rows, kRows}}, 40, 1);
  const fa::test::AttentionOutputs found = run_chunks(path, call, {.spare = 40});
  const fa::test::AttentionOutputs wanted = whole_in_float64(path, text.inputs);
  double most = 0;
  for (std::int64_t h = 0; h < kInvariantHeadsQ; ++h) {
    for (std::int64_t row = 0; row < rows; ++row) {
      EXPECT_NEAR(found.lse.at(0, h, row), wanted.lse.at(0, h, kRows - rows + row), 1e-5);
      for (std::int64_t i = 0; i < path.spec.d_v; ++i) {
        most = std::max(most, std::abs(found.o.at(0, h, row, i) - wanted.o.at(0, h, kRows - rows + row, i)));
      }
    }
  }
  EXPECT_LT(most, 8.0 / 256);  // no |v| reaches 6
}

/// Dense requests, whose splits go from block to block, or whose query tiles are all taken whole.
class InvariantDenseBatches : public testing::TestWithParam<std::size_t> {};

TEST_P(InvariantDenseBatches, GiveARequestTheBitsThatItHasAloneOverPages) {
  const InvariantPath& path = dense_batch_paths()[GetParam()];
  const std::vector<Document>& texts = batch_texts(path);
  const auto first = std::ranges::find(batch_paths(), path.arithmetic, &InvariantPath::arithmetic);
  for (const Request& request : {Request{1, 150}, {3, 97}, {6, 140}, {2, 64}}) {
    const Chunk chunk = request.of(texts[0]), other = request.as_many(texts[1], request.end);
    const ChunkCall alone(first->config, {chunk}, 0, 1);
    const RowBits wanted = alone.bits_of(run_chunks(*first, alone, {})).front();
    for (const std::vector<Chunk>& chunks : {std::vector<Chunk>{chunk}, {chunk, other}, {chunk, other, other}}) {
      const ChunkCall call(path.config, chunks, 0, 2);
      EXPECT_EQ(call.bits_of(run_chunks(path, call, {.seed = 2})).front(), wanted)
          << request.rows << " rows of " << request.end << ", " << chunks.size() << " requests";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernel, InvariantDenseBatches, testing::Range<std::size_t>(0, dense_batch_paths().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           return dense_batch_paths()[parameter.param].name;
                         });

class BatchMutants : public testing::TestWithParam<std::size_t> {};

TEST_P(BatchMutants, HaveOtherBits) {
  const InvarianceMutation& mutation = batch_mutations()[GetParam()];
  try {
    const InvariantPath& path = path_of(mutation);
    const std::string mutant = "mutant " + mutation.name;
    const bool of_merge = is_of_merge(mutation.header, path.spec);
    EXPECT_GT(differing_batches(path, of_merge ? "" : mutant, of_merge ? mutant : ""), 0) << mutation.before;
  } catch (const NotWritten&) {
  } catch (const Fault&) {
  }
}

INSTANTIATE_TEST_SUITE_P(Kernel, BatchMutants, testing::Range<std::size_t>(0, batch_mutations().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           return batch_mutations()[parameter.param].name;
                         });

INSTANTIATE_TEST_SUITE_P(Kernel, InvarianceMutants, testing::Range<std::size_t>(0, invariance_mutations().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           return invariance_mutations()[parameter.param].name;
                         });

}  // namespace
}  // namespace emulator
