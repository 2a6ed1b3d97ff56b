#ifndef FA_TOOLS_FA_RUN_TENSORS_HPP_
#define FA_TOOLS_FA_RUN_TENSORS_HPP_

#include <cstdint>
#include <optional>
#include <vector>

#include <fa/attention.hpp>

#include "tools/safetensors.hpp"

namespace fa::cli {

/// What `fa run` reads: [b, h, s, d] or [b, s, d]; dlse without the last axis. With dout it computes gradients too. Of
/// a packed batch: [total, h, d], dlse [h, total].
struct RunInputs {
  tools::Tensor q;
  tools::Tensor k;
  tools::Tensor v;
  std::optional<tools::Tensor> dout = std::nullopt;
  std::optional<tools::Tensor> dlse = std::nullopt;
  std::vector<std::int32_t> cumulative_q = {};  ///< where the sequences of a packed batch start; else empty
  std::vector<std::int32_t> cumulative_kv = {};
  DropoutState dropout = {};

  bool packed() const noexcept { return !cumulative_q.empty(); }
  /// With the arrays of this host, or copies of them.
  PackedSequences sequences() const noexcept { return sequences(cumulative_q.data(), cumulative_kv.data()); }
  PackedSequences sequences(const std::int32_t* cu_q, const std::int32_t* cu_kv) const noexcept;
};

struct RunGradients {
  tools::Tensor dq;
  tools::Tensor dk;
  tools::Tensor dv;
};

/// What `fa run` writes.
struct RunOutputs {
  tools::Tensor o;
  tools::Tensor lse;
  std::optional<RunGradients> gradients = std::nullopt;
};

/// Zeros of `shape`.
tools::Tensor make_tensor(DType dtype, std::vector<std::int64_t> shape);

/// Room for what `inputs` ask for.
RunOutputs make_outputs(const RunInputs& inputs);

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
  BackwardInputs in{make_view(inputs.q),
                    make_view(inputs.k),
                    make_view(inputs.v),
                    make_view(outputs.o),
                    make_view(outputs.lse),
                    make_view(*inputs.dout),
                    {},
                    sequences,
                    dropout};
  if (inputs.dlse) {
    in.dlse = make_view(*inputs.dlse);
  }
  auto& gradients = *outputs.gradients;
  attention.backward(in, {make_view(gradients.dq), make_view(gradients.dk), make_view(gradients.dv)}, stream,
                     workspace);
}

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_RUN_TENSORS_HPP_
