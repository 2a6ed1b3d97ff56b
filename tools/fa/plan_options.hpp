#ifndef FA_TOOLS_FA_PLAN_OPTIONS_HPP_
#define FA_TOOLS_FA_PLAN_OPTIONS_HPP_

#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/problem.hpp"
#include "options.hpp"
#include "plan/arch.hpp"
#include "plan/kernel_spec.hpp"
#include "variant_options.hpp"

namespace CLI {
class App;
}

namespace fa::cli {

/// What picks a kernel besides architecture, element type, d_qk and the mask, for commands that need no GPU.
struct PlanOptions {
  int head_dim_v = 0;  ///< 0: d_qk
  std::optional<float> scale;
  AttentionShape shape{.b = 16, .h_q = 16, .h_kv = 0, .s_q = 1024, .s_kv = 1024};
  bool unaligned = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  api::Operation op = api::Operation::forward;
  bool deterministic = false;  ///< of backward
  bool debug = false;          ///< or FA_DEBUG_KERNELS in the environment
  PackedOptions packed;
  std::int64_t page_size = 0;
  std::optional<DType> k_dtype = std::nullopt;
  std::optional<DType> v_dtype = std::nullopt;
  int group_size = 0;
  std::optional<DType> o_dtype = std::nullopt;  ///< of 8-bit floats
  bool key_scales = false;                      ///< likewise
  bool precise = false;                         ///< likewise: P and V in 16 bits
  bool value_scales = false;
  bool accumulate = false;
  int value_in_key = 0;
  Invariance invariance = Invariance::none;
  Statistics statistics = {};
  std::optional<AppendShape> append;  ///< of `fa pack`: the kernel of an append, and nothing else
  KernelOverride kernel;
  VariantOptions variant;
};

void add_plan_options(CLI::App& command, PlanOptions* options);

/// One choice of everything else.
struct PlanPoint {
  plan::Arch arch;
  DType dtype = DType::bf16;
  int head_dim = 128;
  bool causal = false;
};

/// The kernels that a call runs, in order; of those that list a mask function's tiles one for every tiling that the
/// attention kernel may have. Throws fa::Error: invalid_argument, unsupported.
std::vector<plan::Alternatives> plan_kernels(const PlanOptions& options, const PlanPoint& point);

/// The architecture of the first GPU, else sm_90a.
plan::Arch default_arch();

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_PLAN_OPTIONS_HPP_
