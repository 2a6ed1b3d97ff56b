#ifndef FA_SRC_REFERENCE_PACKED_HPP_
#define FA_SRC_REFERENCE_PACKED_HPP_

#include <fa/tensor.hpp>
#include <fa/types.hpp>

#include "reference/backward.hpp"
#include "reference/forward.hpp"

namespace fa::reference {

/// The calls of forward.hpp and backward.hpp for a packed batch: tensors of one batch entry, [1, h, total, d] (lse,
/// dlse: [1, h, total]), whose rows belong to `sequences`. The lengths were checked. What belongs to no sequence is
/// neither read nor, unless `clear`, written: then it becomes 0, and -inf in lse.
void forward(const ForwardArgs& args, const PackedSequences& sequences, bool clear);
void backward(const BackwardArgs& args, const PackedSequences& sequences, bool clear);

/// The rows of q, o or lse that sequence `i` has.
TensorView rows_of_sequence(const TensorView& view, const PackedSequences& sequences, std::int64_t i);

/// Likewise of k and v.
TensorView keys_of_sequence(const TensorView& view, const PackedSequences& sequences, std::int64_t i);

/// What `clear` asks for.
void clear_padding(const ForwardArgs& args, const PackedSequences& sequences);

/// The part of such a call that is sequence `i`. That of a backward adds to the gradients of captures and sinks.
ForwardArgs call_of_sequence(const ForwardArgs& args, const PackedSequences& sequences, std::int64_t i);
BackwardArgs call_of_sequence(const BackwardArgs& args, const PackedSequences& sequences, std::int64_t i);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_PACKED_HPP_
