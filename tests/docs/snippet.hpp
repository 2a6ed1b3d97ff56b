#ifndef FA_TESTS_DOCS_SNIPPET_HPP_
#define FA_TESTS_DOCS_SNIPPET_HPP_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>
#include <fa/dlpack.hpp>
#include <fa/parallel.hpp>

namespace fa_docs {

constexpr std::int64_t b = 2, h_q = 4, h_kv = 2, s_q = 5, s_kv = 7;

/// The Attention of what a snippet has made of `config` by then.
class AttentionOfConfig {
 public:
  explicit AttentionOfConfig(const fa::AttentionConfig& config) : config_(config) {}

  void forward(const fa::ForwardInputs& inputs, const fa::ForwardOutputs& outputs, fa::Stream stream = nullptr) const {
    create().forward(inputs, outputs, stream);
  }
  void backward(const fa::BackwardInputs& inputs, const fa::BackwardOutputs& outputs,
                fa::Stream stream = nullptr) const {
    create().backward(inputs, outputs, stream);
  }
  void append(const fa::AppendInputs& inputs, fa::Stream stream = nullptr) const { create().append(inputs, stream); }
  void quantize(const fa::QuantizeInputs& inputs, fa::Stream stream = nullptr) const {
    create().quantize(inputs, stream);
  }
  void schedule(const fa::ScheduleInputs& inputs, const fa::Schedule& made, fa::Stream stream = nullptr) const {
    create().schedule(inputs, made, stream);
  }
  std::size_t schedule_size(const fa::AttentionShape& limits) const { return create().schedule_size(limits); }
  void merge(const fa::MergeInputs& inputs, const fa::ForwardOutputs& outputs, fa::Stream stream = nullptr) const {
    create().merge(inputs, outputs, stream);
  }
  std::size_t mask_tiles_size(const fa::AttentionShape& shape) const { return create().mask_tiles_size(shape); }

 private:
  fa::Attention create() const { return fa::Attention::create(config_, fa::Device::host()); }
  const fa::AttentionConfig& config_;
};

/// What the snippets of the pages name without declaring it. Their own declarations come before these.
struct Snippet {
  Snippet() {
    config.head_dim = 128;
    config.dtype = fa::DType::bf16;
  }
  virtual ~Snippet() = default;
  virtual void run() = 0;

  /// Of zeros.
  fa::TensorView tensor(fa::DType dtype, std::initializer_list<std::int64_t> axes) {
    fa::TensorView view(static_cast<void*>(nullptr), dtype, axes);
    view.data = owned.emplace_back(static_cast<std::size_t>(view.elements()) * fa::size_of(dtype)).data();
    return view;
  }
  fa::TensorView of_heads(std::int64_t heads, std::int64_t rows) {
    return tensor(fa::DType::bf16, {b, heads, rows, 128});
  }

  std::vector<std::vector<std::byte>> owned;
  const fa::Device device = fa::Device::host();
  const fa::Stream stream = nullptr;
  const std::shared_ptr<fa::Communicator> communicator = fa::make_local_group(1).front();
  void* const memory = nullptr;  // the host lists no tiles
  fa::AttentionConfig config;
  const AttentionOfConfig attention{config};
  const fa::AttentionShape shape{.b = b, .h_q = h_q, .h_kv = h_kv, .s_q = s_q, .s_kv = s_kv};

  const fa::TensorView q = of_heads(h_q, s_q), k = of_heads(h_kv, s_kv), v = of_heads(h_kv, s_kv);
  const fa::TensorView q2 = of_heads(h_q, s_q), k2 = of_heads(h_kv, s_kv), v2 = of_heads(h_kv, s_kv);
  const fa::TensorView o = of_heads(h_q, s_q), lse = tensor(fa::DType::f32, {b, h_q, s_q});
  const fa::TensorView o2 = of_heads(h_q, s_q), lse2 = tensor(fa::DType::f32, {b, h_q, s_q});
  const fa::TensorView dout = of_heads(h_q, s_q), dq = of_heads(h_q, s_q);
  const fa::TensorView dk = of_heads(h_kv, s_kv), dv = of_heads(h_kv, s_kv);
  void *const q_data = q.data, *const k_data = k.data, *const v_data = v.data, *const o_data = o.data;

  const fa::TensorView slope = tensor(fa::DType::f32, {h_q}), doc = tensor(fa::DType::i32, {s_kv});
  const fa::TensorView bias = tensor(fa::DType::bf16, {h_q, s_q, s_kv});
  const fa::TensorView dbias = tensor(fa::DType::f32, {h_q, s_q, s_kv});
  const fa::TensorView sink = tensor(fa::DType::f32, {h_q});
};

using Make = std::function<std::unique_ptr<Snippet>()>;
/// All of them, by page and line.
std::vector<std::pair<std::string, Make>>& snippets();

template <typename T>
bool add(const char* place) {
  snippets().emplace_back(place, [] { return std::make_unique<T>(); });
  return true;
}

}  // namespace fa_docs

#endif  // FA_TESTS_DOCS_SNIPPET_HPP_
