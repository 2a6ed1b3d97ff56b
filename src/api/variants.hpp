#ifndef FA_SRC_API_VARIANTS_HPP_
#define FA_SRC_API_VARIANTS_HPP_

#include <array>
#include <span>

#include <fa/attention.hpp>

#include "expression/program.hpp"
#include "expression/ranges.hpp"
#include "plan/variant_launch.hpp"
#include "plan/variants.hpp"

namespace fa::api {

/// A configuration's score and mask function, read once, and what its kernels are made of.
struct Functions {
  expression::Program program;
  plan::Variants variants;
  plan::Variants placed;   ///< of calls that are parts of a whole
  plan::Variants strided;  ///< likewise, with steps between rows or keys

  const plan::Variants& of(const AttentionShape& shape) const noexcept {
    return !shape.placed ? variants : shape.strided ? strided : placed;
  }
  bool any() const noexcept { return variants.any(); }
};

/// Whether a configuration has no function, window, chunks or sinks.
bool is_plain(const AttentionConfig& config) noexcept;

/// One number a query head, [h_q]: logits of sinks, their gradient, greatest logits. Throws
/// fa::Error(invalid_argument).
TensorView checked_of_heads(const char* argument, const AttentionConfig& config, const TensorView& view,
                            std::int64_t h_q);

/// Throws fa::Error: invalid_argument for what does not parse, names a capture wrongly or contradicts another mask;
/// unsupported for what `host` alone can do.
Functions read_functions(const AttentionConfig& config, bool host);

/// What a call gives besides the usual tensors.
struct VariantCall {
  std::array<expression::CapturedView, Captures::kMax> captures;  ///< as Functions::program has them
  std::size_t count = 0;
  TensorView sink;   ///< [h_q]
  TensorView dsink;  ///< [h_q]; optional

  std::span<const expression::CapturedView> views() const { return {captures.data(), count}; }
  plan::VariantTensors tensors() const { return {views(), sink, dsink}; }
};

/// Throws fa::Error(invalid_argument) for captures or sinks that a call of `place` must not be launched with.
VariantCall check_variants(const AttentionConfig& config, const Functions& functions, const AttentionShape& shape,
                           const std::optional<ShardPlace>& place, const ForwardInputs& inputs);

/// The same of backward, with the gradients of sinks and captures.
VariantCall check_variants(const AttentionConfig& config, const Functions& functions, const AttentionShape& shape,
                           const std::optional<ShardPlace>& place, const BackwardInputs& inputs,
                           const BackwardOutputs& outputs);

/// Holds the memory that a call gives for tile lists, if any, to what they take. Throws fa::Error: invalid_argument,
/// out_of_memory.
void check_tiles(const MaskTiles& tiles, std::size_t needed);

}  // namespace fa::api

#endif  // FA_SRC_API_VARIANTS_HPP_
