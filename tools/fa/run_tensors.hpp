#ifndef FA_TOOLS_FA_RUN_TENSORS_HPP_
#define FA_TOOLS_FA_RUN_TENSORS_HPP_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "tools/safetensors.hpp"

namespace fa::cli {

/// Where the keys of requests are in pools of pages, or in a contiguous cache.
struct RunCache {
  bool nhd = false;  ///< k and v are [pages, page_size, h_kv, d], else [pages, h_kv, page_size, d]; of rows likewise
  std::optional<tools::Tensor> block_table;  ///< [rows, max_pages], i32; none of a contiguous cache
  tools::Tensor seqused_kv;                  ///< [b], i32, like those below
  std::optional<tools::Tensor> seq_begin = std::nullopt;
  std::optional<tools::Tensor> batch_index = std::nullopt;
};

/// Factors of what is stored in 8 or 4 bits, of shapes that ForwardInputs takes; none: 1.
struct RunScales {
  std::optional<tools::Tensor> q = std::nullopt;
  std::optional<tools::Tensor> k = std::nullopt;
  std::optional<tools::Tensor> v = std::nullopt;
  std::optional<tools::Tensor> row_bias = std::nullopt;
  bool of_keys = false;    ///< of 8-bit q: k has a scale a row, not a head
  bool of_values = false;  ///< likewise v
};

/// The tensors that codes were made of, as far as the file has them: of the axes of q, k and v, of any float type.
struct RunOriginals {
  std::optional<tools::Tensor> q = std::nullopt;
  std::optional<tools::Tensor> k = std::nullopt;
  std::optional<tools::Tensor> v = std::nullopt;

  bool given() const noexcept { return q || k || v; }
};

/// Whose P is written: batch entry and query head.
struct RunDump {
  std::int64_t b = 0;
  std::int64_t h = 0;
};

/// What `fa run` reads: [b, h, s, d] or [b, s, d]; dlse without the last axis. With dout it computes gradients too. Of
/// a packed batch: [total, h, d], dlse [h, total]. With a cache, k and v are pools of pages, or its rows.
struct RunInputs {
  tools::Tensor q;
  tools::Tensor k;
  std::optional<tools::Tensor> v = std::nullopt;  ///< none with value_in_key
  std::optional<tools::Tensor> dout = std::nullopt;
  std::optional<tools::Tensor> dlse = std::nullopt;
  std::map<std::string, tools::Tensor> captures = {};  ///< what functions name
  std::optional<tools::Tensor> sink = std::nullopt;
  std::vector<std::int32_t> cumulative_q = {};  ///< where the sequences of a packed batch start; else empty
  std::vector<std::int32_t> cumulative_kv = {};
  DropoutState dropout = {};
  std::optional<RunCache> cache = std::nullopt;
  std::optional<RunDump> dump = std::nullopt;
  int value_in_key = 0;  ///< V is the first so many columns of K; 0: v is a tensor of its own
  RunScales scales = {};
  RunOriginals originals = {};

  /// Columns of V and o, which a byte of u4x2 has two of.
  std::int64_t d_v() const;
  bool packed() const noexcept { return !cumulative_q.empty(); }
  /// With the arrays of this host, or copies of them.
  PackedSequences sequences() const noexcept { return sequences(cumulative_q.data(), cumulative_kv.data()); }
  PackedSequences sequences(const std::int32_t* cu_q, const std::int32_t* cu_kv) const noexcept;
};

struct RunGradients {
  tools::Tensor dq;
  tools::Tensor dk;
  tools::Tensor dv;
  std::map<std::string, tools::Tensor> captures = {};  ///< of those that require a gradient
  std::optional<tools::Tensor> dsink = std::nullopt;
};

/// What `fa run` writes.
struct RunOutputs {
  tools::Tensor o;
  tools::Tensor lse;
  /// "max_logit", "entropy", "column_sums" and "top_keys", where asked for; and "p", where there is a dump.
  std::map<std::string, tools::Tensor> statistics = {};
  std::optional<RunGradients> gradients = std::nullopt;
  std::optional<RunDump> dump = std::nullopt;
};

/// Whether an element is a code that a scale goes with.
constexpr bool has_codes(DType dtype) {
  return size_of(dtype) == 1;
}

/// What o is of.
DType output_dtype(const AttentionConfig& config);

/// Zeros of `shape`.
tools::Tensor make_tensor(DType dtype, std::vector<std::int64_t> shape);

/// Room for what `inputs` ask for of `config`.
RunOutputs make_outputs(const AttentionConfig& config, const RunInputs& inputs);

template <typename Tensors, typename MakeView>
Captures captures_of(Tensors& tensors, const MakeView& make_view) {
  Captures captures;
  for (auto& [name, tensor] : tensors) captures.add({name, make_view(tensor)});
  return captures;
}

/// `cache` has the same members as RunCache.
template <typename Cache, typename MakeView>
void add_cache(Cache& cache, const MakeView& make_view, ForwardInputs* inputs) {
  const auto array = [&](auto& tensor) { return static_cast<const std::int32_t*>(make_view(tensor).data); };
  if (cache.nhd) {
    inputs->k = inputs->k.swap_axes(1, 2);
    if (inputs->v.defined()) inputs->v = inputs->v.swap_axes(1, 2);
  }
  inputs->sequences.seqused_kv = array(cache.seqused_kv);
  if (cache.block_table) inputs->cache.block_table = make_view(*cache.block_table);
  if (cache.seq_begin) inputs->cache.seq_begin = array(*cache.seq_begin);
  if (cache.batch_index) inputs->cache.batch_index = array(*cache.batch_index);
}

template <typename Inputs, typename MakeView>
ForwardInputs forward_inputs(Inputs& inputs, const MakeView& make_view, const PackedSequences& sequences,
                             const DropoutState& dropout) {
  const auto optional = [&](auto& tensor) { return tensor ? make_view(*tensor) : TensorView{}; };
  ForwardInputs result{make_view(inputs.q),
                       make_view(inputs.k),
                       optional(inputs.v),
                       captures_of(inputs.captures, make_view),
                       optional(inputs.sink),
                       sequences,
                       dropout};
  result.q_scale = optional(inputs.scales.q);
  result.k_scale = optional(inputs.scales.k);
  result.v_scale = optional(inputs.scales.v);
  result.row_bias = optional(inputs.scales.row_bias);
  if (inputs.cache) add_cache(*inputs.cache, make_view, &result);
  return result;
}

/// `outputs` has the same members as RunOutputs.
template <typename Outputs, typename MakeView>
ForwardOutputs forward_outputs(Outputs& outputs, const MakeView& make_view) {
  const auto statistic = [&](const char* name) {
    const auto found = outputs.statistics.find(name);
    return found == outputs.statistics.end() ? TensorView{} : make_view(found->second);
  };
  ForwardOutputs result{
      make_view(outputs.o),
      make_view(outputs.lse),
      {statistic("max_logit"), statistic("entropy"), statistic("column_sums"), statistic("top_keys")}};
  if (outputs.dump) result.dump = {statistic("p"), outputs.dump->b, outputs.dump->h};
  return result;
}

AttentionShape shape_of(const RunInputs& inputs);

/// Times in milliseconds of forward and, where it was asked for, backward.
struct RunTimes {
  double forward = 0;
  double backward = 0;
};
RunTimes run_on_host(const Attention& attention, RunInputs* inputs, RunOutputs* outputs);

/// `make_view` of every tensor of a backward call.
template <typename MakeView, typename Inputs, typename Outputs>
void call_backward(const Attention& attention, Inputs& inputs, Outputs& outputs, const MakeView& make_view,
                   const PackedSequences& sequences, const DropoutState& dropout, Stream stream, Workspace workspace) {
  const BackwardInputs in{make_view(inputs.q),
                          make_view(inputs.k),
                          make_view(*inputs.v),
                          make_view(outputs.o),
                          make_view(outputs.lse),
                          make_view(*inputs.dout),
                          inputs.dlse ? make_view(*inputs.dlse) : TensorView{},
                          captures_of(inputs.captures, make_view),
                          inputs.sink ? make_view(*inputs.sink) : TensorView{},
                          sequences,
                          dropout};
  auto& gradients = *outputs.gradients;
  attention.backward(
      in,
      {make_view(gradients.dq), make_view(gradients.dk), make_view(gradients.dv),
       captures_of(gradients.captures, make_view), gradients.dsink ? make_view(*gradients.dsink) : TensorView{}},
      stream, workspace);
}

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_RUN_TENSORS_HPP_
