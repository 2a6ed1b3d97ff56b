#include "cached_attention.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace decode {
namespace {

std::size_t count(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

}  // namespace

CachedAttention::CachedAttention(const CacheShape& shape)
    : shape_(shape),
      gpu_(Gpu::open()),
      attention_([&] {
        std::unique_ptr<fa::Attention> attention;
        try {
          if (gpu_) attention = prepared(fa::Device::cuda(0), &workspace_bytes_);
        } catch (const fa::Error& error) {  // a GPU that fa has no kernels for
          std::printf("on the CPU, because: %s\n", error.what());
        }
        if (attention) return attention;
        gpu_.reset();
        return prepared(fa::Device::host(), &workspace_bytes_);
      }()),
      pools_(gpu_, count(2 * kLayers * shape.pages * shape.page_size * kKvWidth)),
      table_(gpu_, count(shape.requests * shape.pages_of_request)),
      lengths_(gpu_, count(shape.requests)),
      slots_(gpu_, count(shape.requests * shape.rows)),
      positions_(gpu_, slots_.size()),
      qkv_(gpu_, slots_.size() * kQkvWidth),
      o_(gpu_, slots_.size() * kWidth),
      workspace_(gpu_, workspace_bytes_) {
  std::fill_n(table_.data(), table_.size(), -1);
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    steps_.emplace_back(gpu_, [this, layer](fa::Stream stream) { queue(layer, 1, stream); });
  }
}

fa::AttentionConfig CachedAttention::config() const {
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = fa::DType::f32;
  config.causal = true;
  config.page_size = shape_.page_size;
  config.invariance = shape_.invariance;
  return config;
}

/// With its kernels compiled: a call may be captured then.
std::unique_ptr<fa::Attention> CachedAttention::prepared(fa::Device device, std::size_t* workspace) const {
  auto attention = std::make_unique<fa::Attention>(fa::Attention::create(config(), device));
  attention->prepare_append({.rotary_dims = kHeadDim});
  for (const std::int64_t rows : {std::int64_t{1}, shape_.rows}) {
    const fa::AttentionShape shape{.b = shape_.requests,
                                   .h_q = kHeads,
                                   .h_kv = kKvHeads,
                                   .s_q = rows,
                                   .s_kv = shape_.pages_of_request * shape_.page_size};
    attention->prepare(shape);
    *workspace = std::max(*workspace, attention->workspace_size(shape));
  }
  return attention;
}

const float* CachedAttention::run(std::int64_t layer, const Matrix& qkv, std::int64_t rows) {
  place(rows);
  std::copy(qkv.begin(), qkv.end(), qkv_.data());
  if (rows == 1) {
    steps_[count(layer)].run();
  } else {
    queue(layer, rows, gpu_ ? gpu_->stream() : nullptr);
    if (gpu_) gpu_->synchronize();
  }
  return o_.data();
}

/// A slot is page * page_size + row of the page; rows of no request go nowhere.
void CachedAttention::place(std::int64_t rows) {
  for (std::int64_t request = 0; request < shape_.requests; ++request) {
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t position = length(request) - rows + row;
      const bool there = length(request) > 0;
      const auto at = count(request * rows + row);
      positions_[at] = there ? static_cast<std::int32_t>(position) : 0;
      slots_[at] = there ? static_cast<std::int32_t>(page(request, position / shape_.page_size) * shape_.page_size +
                                                     position % shape_.page_size)
                         : -1;
    }
  }
}

/// [pages, kKvHeads, page_size, kHeadDim] of a layer.
fa::TensorView CachedAttention::pool(std::int64_t layer, bool values) {
  const std::int64_t size = shape_.pages * shape_.page_size * kKvWidth;
  float* const data = pools_.data() + (2 * layer + (values ? 1 : 0)) * size;
  return fa::TensorView(data, fa::DType::f32, {shape_.pages, shape_.page_size, kKvHeads, kHeadDim}).swap_axes(1, 2);
}

void CachedAttention::queue(std::int64_t layer, std::int64_t rows, fa::Stream stream) {
  const auto part = [&](std::int64_t first, std::int64_t heads) {  // [requests, heads, rows, kHeadDim] of qkv
    const std::int64_t shape[] = {shape_.requests, heads, rows, kHeadDim};
    const std::int64_t strides[] = {rows * kQkvWidth, kHeadDim, kQkvWidth, 1};
    return fa::TensorView(static_cast<void*>(qkv_.data() + first), fa::DType::f32, shape, strides);
  };
  const fa::TensorView q = part(0, kHeads);
  fa::AppendInputs rows_in{part(kWidth, kKvHeads), part(kWidth + kKvWidth, kKvHeads), pool(layer, false),
                           pool(layer, true)};
  rows_in.slots = slots_.data();
  rows_in.rotary.dims = kHeadDim;
  rows_in.rotary.positions = positions_.data();
  rows_in.q = rows_in.q_out = q;  // turned in place
  attention_->append(rows_in, stream);

  fa::ForwardInputs inputs{q, pool(layer, false), pool(layer, true)};
  inputs.sequences.seqused_kv = lengths_.data();
  inputs.cache.block_table = fa::TensorView(table_.data(), fa::DType::i32, {shape_.requests, shape_.pages_of_request});
  const fa::TensorView o(o_.data(), fa::DType::f32, {shape_.requests, rows, kHeads, kHeadDim});
  attention_->forward(inputs, {o.swap_axes(1, 2)}, stream, {workspace_.data(), workspace_bytes_});
}

}  // namespace decode
