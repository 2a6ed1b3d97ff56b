#ifndef FA_SRC_PLAN_APPEND_HPP_
#define FA_SRC_PLAN_APPEND_HPP_

#include <array>
#include <cstdint>

#include <common/append_params.cuh>
#include <fa/append.hpp>

#include "plan/call_plan.hpp"
#include "plan/kernel_spec.hpp"

namespace fa::plan {

/// Every fact that picks the kernel of an append.
struct AppendProblem {
  Arch arch = {};
  DType dtype = DType::bf16;
  int d_qk = 0;
  int d_v = 0;
  int page_size = 0;    ///< 0: the cache is contiguous
  int rotary_dims = 0;  ///< 0: no rotary embedding
  bool interleaved = false;
  int table = 0;        ///< as Append::table
  bool aligned = true;  ///< rows of all tensors start at multiples of 16 bytes
  int k_storage = 0;    ///< as AppendStored::k_storage: 0: of dtype
  int v_storage = 0;
  bool scales_given = false;

  bool stored() const noexcept { return k_storage != 0 || v_storage != 0; }
  bool latent() const noexcept { return k_storage == kLatentRows; }
};

/// The kernels that serve it, in order of preference: with more blocks a multiprocessor, and with fewer.
Alternatives append_specs(const AppendProblem& problem);

/// Of each pair of columns the part of a revolution by which it turns with every position, in 2^-64:
/// base^(-2 i / dims) / (2 pi). `dims` is even and at most 256.
RotaryTurns rotary_turns(int dims, double base) noexcept;

/// Plans a call into an empty plan, in which it is the one step. `inputs` has passed checks (api::check_append): its
/// tensors have rank 4, those of a packed batch [1, h, total, d], and there are new rows. `turns` is null with a table
/// or without rotary embedding. Throws fa::Error(invalid_argument) for more heads or rows than a grid counts.
void plan_call(const AppendProblem& problem, const KernelSpec& kernel, const AppendInputs& inputs,
               const RotaryTurns* turns, CallPlan& call);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_APPEND_HPP_
