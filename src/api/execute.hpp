#ifndef FA_SRC_API_EXECUTE_HPP_
#define FA_SRC_API_EXECUTE_HPP_

#include <memory>
#include <optional>

#include <fa/attention.hpp>

#include "api/held_tiles.hpp"
#include "driver/driver.hpp"
#include "plan/call_plan.hpp"
#include "plan/fixed.hpp"

namespace fa::api {

/// A kernel with what every launch of it needs.
struct ReadyKernel {
  std::shared_ptr<const driver::LoadedKernel> loaded;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
};

/// The kernels of one kind of problem, ready to launch.
struct Ready {
  plan::KernelSet specs;
  plan::ByRole<ReadyKernel> kernels;
  KernelInfo info;    ///< of the attention kernel, with the times of all
  bool open = false;  ///< tuning may find a better one
  /// In the place of the planned ones, which are compiled meanwhile; `fixed` then chooses what else a call does.
  bool interim = false;
  std::optional<plan::Fixed> fixed = std::nullopt;
};

/// Queues the steps of `call` in `workspace` or memory of the stream's pool, its tile lists in those of `tiles` where
/// there are any. Throws fa::Error before anything is queued: invalid_argument, out_of_memory; and cuda.
void execute(plan::CallPlan& call, const plan::Problem& problem, const Ready& ready, const GivenTiles& tiles,
             Stream stream, const Workspace& workspace);

}  // namespace fa::api

#endif  // FA_SRC_API_EXECUTE_HPP_
