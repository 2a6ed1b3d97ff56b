#ifndef FA_SRC_PLAN_FORWARD_LAUNCH_HPP_
#define FA_SRC_PLAN_FORWARD_LAUNCH_HPP_

#include <cstdint>

#include <common/padding_params.cuh>
#include <common/stored_params.cuh>
#include <common/variant_params.cuh>
#include <fa/tensor.hpp>
#include <sm90/sm90_fp8_params.cuh>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"
#include "plan/tensor_map.hpp"
#include "plan/variant_launch.hpp"

namespace fa::plan {

/// The tensors of a forward call: q, k, v, o as views of rank 4, lse of rank 3; lse may be undefined.
struct ForwardTensors {
  TensorView q;    ///< [b, h_q, s_q, d_qk]
  TensorView k;    ///< [b, h_kv, s_kv, d_qk], or pages [pages, h_kv, page_size, d_qk]
  TensorView v;    ///< [b, h_kv, s_kv, d_v], or pages
  TensorView o;    ///< [b, h_q, s_q, d_v]
  TensorView lse;  ///< [b, h_q, s_q]
  VariantTensors variant = {};
  TensorView k_scale = {};  ///< [b, h_kv, s_kv], or of pages [pages, h_kv, page_size]; where K is stored in 8 bits
  TensorView v_scale = {};
  TensorView q_scale = {};  ///< [b, h_q, s_q]; of 8-bit floats, whose other scales are of heads
  StatisticsOutputs statistics = {};
  TensorView row_bias = {};  ///< [b, h_q, s_q]; of i8
};

/// What a call needs besides its tensors: of a packed batch, or over pages, where its sequences are, and with dropout
/// its state. All as the kernels take them, but for what follows from the problem.
struct PackedArgs {
  kernel::SequenceParams sequences{};  ///< without totals and alignment
  kernel::DropoutParams dropout{};
  kernel::PagedParams paged{};  ///< without the number of pages
};

/// `threshold`, `low_threshold`, `keep` and `inverse_keep` for a probability of being dropped, which is rounded to a
/// multiple of 2^-16.
kernel::DropoutParams dropout_params(double probability) noexcept;

/// The sequences as a kernel for `problem` takes them.
kernel::SequenceParams sequence_params(const Problem& problem, kernel::SequenceParams given) noexcept;

/// Query heads of a KV head that share a query tile. Of the wide Hopper kernel those that fit one, beside as many
/// positions as divide the rows of a request: its tiles are heads of the grid then, which read the same keys at a time.
std::int64_t heads_of_a_tile(const KernelSpec& spec, std::int64_t group, std::int64_t s_q) noexcept;

/// Slots of a grid over the tiles of a packed batch (templates/common/sequences.cuh).
std::int64_t slots(std::int64_t total_rows, std::int64_t tile, std::int64_t b) noexcept;

/// Waves of a persistent grid of unequal tiles: each takes half of the rounds that are left (sm90/sm90_ring.cuh), until
/// there are none.
int waves(std::int64_t rounds) noexcept;

/// The blocks of such a grid over `tiles` tiles; tells `sequences` how many a wave has: at most `most`.
std::int64_t in_waves(kernel::SequenceParams& sequences, std::int64_t tiles, std::int64_t most) noexcept;

/// Rows of a packed tensor that belong to no sequence, for clear_padding.
struct PaddingLaunch {
  kernel::PaddingParams params;
  std::int64_t grid = 0;
};
/// `view` is [1, h, total, d], or [1, h, total]; `cu` and `used` those of q or of k.
PaddingLaunch padding_launch(const TensorView& view, std::int64_t b, const std::int32_t* cu, const std::int32_t* used,
                             std::int64_t longest, float value, int warps) noexcept;

/// How many query tiles a forward has, and on how many thread blocks it runs: as many of an sm80 kernel; an sm90 kernel
/// has one block for each multiprocessor, or for each tile if those are fewer, and of packed batches and listed tiles
/// several waves of as many.
struct ForwardGrid {
  std::int64_t tiles = 0;  ///< may exceed an int: to be checked before the launch
  std::int64_t grid = 0;
};

/// Fills in what a forward kernel of any family is launched with. Places in the workspace stay null. `most_blocks`:
/// CallFacts.
ForwardGrid forward_params(const Problem& problem, const ForwardTensors& tensors, double scale, int splits,
                           const KernelSpec& spec, int multiprocessors, const PackedArgs& packed,
                           kernel::ForwardVariantParams& params, int most_blocks = 0) noexcept;

kernel::ScaleParams scale_params(const ForwardTensors& tensors) noexcept;
kernel::Fp8ScaleParams fp8_scale_params(const ForwardTensors& tensors) noexcept;
kernel::RowBiasParams row_bias_params(const ForwardTensors& tensors) noexcept;

/// Whether tensor maps can describe q, k, v and o: axes longer than 1 have strides above 0 and below 2^40 bytes, of a
/// packed batch rows of k, v and o below 2^35, and so of pages, which are whole heads apart. That rows start at
/// multiples of 16 bytes is Problem::aligned.
bool sm90_forward_describable(const ForwardTensors& tensors, bool varlen = false, bool paged = false) noexcept;

/// The maps of an sm90 kernel, as templates/sm90/sm90_forward_params.cuh describes them.
struct Sm90ForwardMaps {
  TensorMapSpec q, k, v, o;
};
Sm90ForwardMaps sm90_forward_maps(const ForwardTensors& tensors, const KernelSpec& spec) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_FORWARD_LAUNCH_HPP_
