// Every variant of docs/variants.md on the host device: what one row of attention over eight keys makes of it.

#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

namespace {

using fa::DType;
using fa::TensorView;

constexpr std::int64_t kHeads = 2, kLength = 8, kHeadDim = 8;
using Configure = std::function<void(fa::AttentionConfig&)>;

/// Prints the weights of the last row of head 0: v is the identity, so that o holds them.
void show(const std::string& name, const Configure& configure, const fa::Captures& captures = {},
          const TensorView& sink = {}) {
  std::vector<float> q(kHeads * kLength * kHeadDim), k(q), v(q), o(q), lse(kHeads * kLength);
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(i));
    k[i] = std::cos(2 * static_cast<float>(i));
    v[i] = i / kHeadDim % kLength == i % kHeadDim ? 1.0f : 0.0f;
  }
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = DType::f32;
  configure(config);
  const auto view = [](std::vector<float>& memory) {
    return TensorView(memory.data(), DType::f32, {1, kHeads, kLength, kHeadDim});
  };
  fa::Attention::create(config, fa::Device::host())
      .forward({view(q), view(k), view(v), captures, sink},
               {view(o), TensorView(lse.data(), DType::f32, {1, kHeads, kLength})});
  std::printf("%-16s", name.c_str());
  for (std::int64_t j = 0; j < kHeadDim; ++j) {
    std::printf(" %.3f", static_cast<double>(o[(kLength - 1) * kHeadDim + j]));
  }
  std::printf("   lse %.3f\n", static_cast<double>(lse[kLength - 1]));
}

void run() {
  namespace f = fa::functions;
  std::vector<float> slope{0.5f, 0.25f}, bias(kLength * kLength), table(kHeads * 5), sink{1.0f, -1.0f};
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(i % 5);
  std::vector<std::int32_t> doc{0, 0, 0, 1, 1, 1, 1, 1}, prefix{3};
  const TensorView slopes(slope.data(), DType::f32, {kHeads}), sinks(sink.data(), DType::f32, {kHeads});
  const TensorView pairs(bias.data(), DType::f32, {kLength, kLength}), tables(table.data(), DType::f32, {kHeads, 5});
  const TensorView docs(doc.data(), DType::i32, {kLength}), prefixes(prefix.data(), DType::i32, {1});

  show("plain", [](auto&) {});
  show("softcap", [](auto& config) { config.score = f::softcap(0.5); });
  show("alibi", [](auto& config) { config.score = f::alibi(); }, {{"slope", slopes}});
  show("bias", [](auto& config) { config.score = f::bias("qk"); }, {{"bias", pairs}});
  show("relative table", [](auto& config) { config.score = f::relative_table(2); }, {{"table", tables}});
  show("softcap of alibi", [](auto& config) { config.score = f::compose(f::alibi(), f::softcap(0.5)); },
       {{"slope", slopes}});
  show("own score",
       [](auto& config) {
         config.score = {"score * gain + (kv % 2 == 0 ? 1.0 : 0.0)", {{"gain"}}};
       },
       {{"gain", 0.5}});
  show("sliding window", [](auto& config) { config.window_left = 2, config.window_right = 0; });
  show("chunks", [](auto& config) { config.chunk = 5; });
  show("documents", [](auto& config) { config.mask = f::documents(), config.causal = true; }, {{"doc", docs}});
  show("prefix-LM", [](auto& config) { config.mask = f::prefix_lm(); }, {{"prefix", prefixes}});
  std::vector<std::int32_t> blocks{1, 0, 0, 1};
  show("block sparse", [](auto& config) { config.mask = f::block_sparse(4, 4); },
       {{"blocks", TensorView(blocks.data(), DType::i32, {2, 2})}});
  show("own mask", [](auto& config) { config.mask = {"q >= kv && (q - kv) % 3 == 0", {}}; });
  show(
      "sink", [](auto& config) { config.sink = true; }, {}, sinks);
}

}  // namespace

int main() {
  try {
    run();
    return 0;
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
