// Decodes of requests that begin with one system prompt: its pages are read once for all of them, and the results are
// those of a call in which every request reads them.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include <fa/attention.hpp>

namespace {

constexpr std::int64_t kRequests = 6, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kPage = 8;
constexpr std::int64_t kPromptPages = 4, kOwnPages = 2, kMaxPages = kPromptPages + kOwnPages;
constexpr std::int64_t kPages = kPromptPages + kRequests * kOwnPages;
constexpr std::int32_t kPrompt = kPromptPages * kPage;

std::vector<float> numbers(std::int64_t count, float step) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(step * static_cast<float>(i));
  return values;
}

fa::TensorView view(std::vector<float>& memory, std::initializer_list<std::int64_t> shape) {
  return fa::TensorView(static_cast<void*>(memory.data()), fa::DType::f32, shape);
}

fa::TensorView table_view(std::vector<std::int32_t>& entries, std::int64_t rows) {
  return fa::TensorView(static_cast<void*>(entries.data()), fa::DType::i32, {rows, kMaxPages});
}

int run() {
  std::vector<float> q = numbers(kRequests * kHeads * kHeadDim, 1), shared(q), apart(q);
  std::vector<float> k = numbers(kPages * kPage * kKvHeads * kHeadDim, 2),
                     v = numbers(kPages * kPage * kKvHeads * kHeadDim, 3);
  std::vector<std::int32_t> lengths, begin(kRequests, kPrompt);
  std::vector<std::int32_t> prompt(kMaxPages, -1), own(kRequests * kMaxPages, -1), whole;
  for (std::int32_t page = 0; page < kPromptPages; ++page) prompt[static_cast<std::size_t>(page)] = page;
  for (std::int32_t i = 0; i < kRequests; ++i) {
    lengths.push_back(kPrompt + 1 + 2 * i);
    for (std::int32_t page = 0; page < kOwnPages; ++page) {
      own[static_cast<std::size_t>(i * kMaxPages + kPromptPages + page)] =
          static_cast<std::int32_t>(kPromptPages) + i * static_cast<std::int32_t>(kOwnPages) + page;
    }
  }
  whole = own;
  for (std::int64_t i = 0; i < kRequests; ++i) std::copy_n(prompt.begin(), kPromptPages, whole.begin() + i * kMaxPages);

  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  config.page_size = kPage;
  const auto attention = fa::Attention::create(config, fa::Device::host());
  fa::ForwardInputs inputs{view(q, {kRequests, kHeads, 1, kHeadDim}),
                           view(k, {kPages, kPage, kKvHeads, kHeadDim}).swap_axes(1, 2),
                           view(v, {kPages, kPage, kKvHeads, kHeadDim}).swap_axes(1, 2)};
  inputs.sequences.seqused_kv = lengths.data();
  inputs.cache.block_table = table_view(whole, kRequests);
  attention.forward(inputs, {view(apart, {kRequests, kHeads, 1, kHeadDim})});

  const std::vector<std::int32_t> cu_rows{0, kRequests}, prompt_length{kPrompt};  // one group, of all rows
  const std::vector<fa::SharedPrefix> levels{{table_view(prompt, 1), cu_rows.data(), prompt_length.data()}};
  inputs.cache.block_table = table_view(own, kRequests);
  inputs.cache.seq_begin = begin.data();
  inputs.prefixes = levels;
  attention.forward(inputs, {view(shared, {kRequests, kHeads, 1, kHeadDim})});

  float error = 0;
  for (std::size_t i = 0; i < shared.size(); ++i) error = std::max(error, std::abs(shared[i] - apart[i]));
  std::printf("%lld requests behind %d shared keys: largest difference %.1e\n", static_cast<long long>(kRequests),
              kPrompt, static_cast<double>(error));
  const auto finite = [](float x) { return std::isfinite(x); };
  return error < 1e-5f && std::all_of(shared.begin(), shared.end(), finite) ? 0 : 1;
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
