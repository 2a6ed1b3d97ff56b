// A tree of drafts behind a context, as speculative decoding checks them: one call over pages gives each draft what a
// causal call over its own path, the context and what it hangs on, gives it.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <numeric>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr std::int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 16, kPage = 8, kContext = 21;
const std::vector<std::int32_t> kParents{-1, 0, 0, 1, 1, 2, -1, 6, 5};  // -1: hangs on the context

std::vector<float> numbers(std::int64_t count, float step) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(step * static_cast<float>(i));
  return values;
}

fa::TensorView view(std::vector<float>& memory, std::initializer_list<std::int64_t> shape) {
  return fa::TensorView(static_cast<void*>(memory.data()), fa::DType::f32, shape);
}

/// O of the last row of a causal call over the context and the drafts that `draft` hangs on.
std::vector<float> along_path(std::int64_t draft, const std::vector<float>& q, const std::vector<float>& k,
                              const std::vector<float>& v) {
  std::vector<std::int64_t> keys(static_cast<std::size_t>(kContext));
  std::iota(keys.begin(), keys.end(), 0);
  for (std::int64_t at = draft; at >= 0; at = kParents[static_cast<std::size_t>(at)]) keys.push_back(kContext + at);
  std::sort(keys.begin(), keys.end());
  const auto count = static_cast<std::int64_t>(keys.size()), drafts = static_cast<std::int64_t>(kParents.size());
  std::vector<float> row(kHeads * kHeadDim), result(row), path_k, path_v;
  for (const std::int64_t key : keys) {  // a row of [s, h_kv, d]
    path_k.insert(path_k.end(), &k[static_cast<std::size_t>(key * kKvHeads * kHeadDim)],
                  &k[static_cast<std::size_t>(key * kKvHeads * kHeadDim)] + kKvHeads * kHeadDim);
    path_v.insert(path_v.end(), &v[static_cast<std::size_t>(key * kKvHeads * kHeadDim)],
                  &v[static_cast<std::size_t>(key * kKvHeads * kHeadDim)] + kKvHeads * kHeadDim);
  }
  for (std::int64_t h = 0; h < kHeads; ++h) {
    std::copy_n(&q[static_cast<std::size_t>((h * drafts + draft) * kHeadDim)], kHeadDim,
                &row[static_cast<std::size_t>(h * kHeadDim)]);
  }
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  fa::Attention::create(config, fa::Device::host())
      .forward({view(row, {1, kHeads, 1, kHeadDim}), view(path_k, {1, count, kKvHeads, kHeadDim}).swap_axes(1, 2),
                view(path_v, {1, count, kKvHeads, kHeadDim}).swap_axes(1, 2)},
               {view(result, {1, kHeads, 1, kHeadDim})});
  return result;
}

int run() {
  const auto drafts = static_cast<std::int64_t>(kParents.size());
  const std::int64_t pages = (kContext + drafts + kPage - 1) / kPage;
  std::vector<float> q = numbers(kHeads * drafts * kHeadDim, 1), o(q);
  std::vector<float> k = numbers(pages * kPage * kKvHeads * kHeadDim, 2),
                     v = numbers(pages * kPage * kKvHeads * kHeadDim, 3);
  std::vector<std::int32_t> table(static_cast<std::size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  const std::vector<std::int32_t> lengths{static_cast<std::int32_t>(kContext + drafts)};
  std::vector<std::int32_t> words = fa::functions::tree_words(kParents);

  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.page_size = kPage;
  config.mask = fa::functions::tree();
  fa::ForwardInputs inputs{view(q, {1, kHeads, drafts, kHeadDim}),
                           view(k, {pages, kPage, kKvHeads, kHeadDim}).swap_axes(1, 2),
                           view(v, {pages, kPage, kKvHeads, kHeadDim}).swap_axes(1, 2)};
  inputs.captures = {{"tree", {static_cast<void*>(words.data()), fa::DType::i32, {1, drafts, 1}}}};
  inputs.sequences.seqused_kv = lengths.data();
  inputs.cache.block_table = fa::TensorView(static_cast<void*>(table.data()), fa::DType::i32, {1, pages});
  fa::Attention::create(config, fa::Device::host()).forward(inputs, {view(o, {1, kHeads, drafts, kHeadDim})});

  float error = 0;
  for (std::int64_t draft = 0; draft < drafts; ++draft) {
    const std::vector<float> expected = along_path(draft, q, k, v);
    for (std::int64_t h = 0; h < kHeads; ++h) {
      for (std::int64_t d = 0; d < kHeadDim; ++d) {
        error = std::max(error, std::abs(o[static_cast<std::size_t>((h * drafts + draft) * kHeadDim + d)] -
                                         expected[static_cast<std::size_t>(h * kHeadDim + d)]));
      }
    }
  }
  std::printf("%lld drafts behind %lld keys: largest difference %.1e\n", static_cast<long long>(drafts),
              static_cast<long long>(kContext), static_cast<double>(error));
  const auto finite = [](float x) { return std::isfinite(x); };
  return error < 1e-5f && std::all_of(o.begin(), o.end(), finite) ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
