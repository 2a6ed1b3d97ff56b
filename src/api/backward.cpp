#include "api/backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "api/build.hpp"
#include "api/problem.hpp"
#include "api/scratch.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "support/log.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

constexpr std::int64_t kMaxGrid = (std::int64_t{1} << 31) - 1;

}  // namespace

DeviceBackward::DeviceBackward(const AttentionConfig& config, const Functions& functions, double scale,
                               const driver::ContextRef& context, std::shared_ptr<cache::Store> store)
    : config_(config), functions_(functions), scale_(scale), context_(context), store_(std::move(store)) {
  if (!config_.kernel_backward) return;
  plan_backward(problem({.b = 1, .h_q = 1, .h_kv = 1, .s_q = 4096, .s_kv = 4096}), fixed(), config_.deterministic);
}

const KernelOverride& DeviceBackward::fixed() const noexcept {
  static constexpr KernelOverride kNone;
  return config_.kernel_backward ? *config_.kernel_backward : kNone;
}

plan::Problem DeviceBackward::problem(const AttentionShape& shape) const noexcept {
  return make_problem(config_, shape, context_.info().arch, &functions_.variants);
}

/// The ready kernels of a choice: one atomic load once they exist.
const DeviceBackward::Ready& DeviceBackward::get(const plan::Problem& wanted, const plan::BackwardChoice& choice) {
  std::atomic<const Ready*>& slot = slots_[static_cast<std::size_t>(choice.slot())];
  if (const Ready* ready = slot.load(std::memory_order_acquire)) return *ready;
  Ready made = make(wanted, choice);  // other threads may do the same: the store compiles each kernel once
  const std::lock_guard lock(mutex_);
  if (const Ready* ready = slot.load(std::memory_order_acquire)) return *ready;
  kept_.push_back(std::move(made));
  slot.store(&kept_.back(), std::memory_order_release);
  return kept_.back();
}

DeviceBackward::Ready DeviceBackward::make(const plan::Problem& wanted, const plan::BackwardChoice& choice) const {
  const plan::BackwardPlan planned = plan_backward(wanted, fixed(), config_.deterministic);
  const Supply supply(config_);
  Ready ready;
  KernelInfo around;  // what the kernels besides the main one took
  const auto load = [&](const plan::Alternatives& specs, KernelInfo* info, plan::KernelSpec* taken = nullptr) {
    const ChosenKernel chosen = choose_kernel(specs, *store_, supply, config_.deterministic);
    if (taken != nullptr) *taken = chosen.spec;
    KernelInfo own;
    Kernel kernel;
    kernel.loaded = load_kernel(chosen, context_, &own);
    kernel.threads = static_cast<unsigned>(chosen.spec.threads());
    kernel.shared_bytes = static_cast<unsigned>(plan::shared_bytes(chosen.spec));
    if (info != nullptr) {
      *info = own;
    } else {
      around.compile_ms += own.compile_ms;
      around.load_ms += own.load_ms;
    }
    return kernel;
  };
  ready.main = load(planned.main, &ready.info, &ready.specs.main);
  ready.preprocess = load({planned.preprocess}, nullptr);
  if (choice.splits > 1) ready.reduce = load({planned.reduce}, nullptr);
  if (config_.deterministic) {
    ready.dq = load(planned.dq, nullptr, &ready.specs.dq);
  } else {
    ready.convert = load({planned.convert}, nullptr);
  }
  if (plan::needs_tile_lists(functions_.variants)) {
    ready.mask = load({plan::mask_tiles_spec(ready.specs.main)}, nullptr);
    if (config_.deterministic) ready.dq_mask = load({plan::mask_tiles_spec(ready.specs.dq)}, nullptr);
  }
  if (config_.sink) ready.sink = load({planned.sink}, nullptr);
  ready.specs.reduce_warps = planned.reduce.warps;
  ready.info.compile_ms += around.compile_ms;
  ready.info.load_ms += around.load_ms;
  support::logf(LogLevel::debug, "ready: {} ({})", ready.info.spec, ready.info.origin);
  return ready;
}

KernelInfo DeviceBackward::prepare(const AttentionShape& shape) {
  if (shape.b == 0 || (shape.h_q == 0 && shape.h_kv == 0)) return {};  // nothing will run
  const driver::ContextScope scope(context_.context());
  const plan::Problem wanted = problem(shape);
  return get(wanted, plan::choose_backward(wanted, fixed())).info;
}

std::size_t DeviceBackward::workspace_size(const AttentionShape& shape) const {
  const plan::Problem wanted = problem(shape);
  const std::size_t usual =
      plan::backward_workspace(wanted, plan::choose_backward(wanted, fixed()).splits, config_.deterministic).bytes;
  return usual + mask_tiles_size(shape);
}

std::size_t DeviceBackward::mask_tiles_size(const AttentionShape& shape) const {
  if (!plan::needs_tile_lists(functions_.variants)) return 0;
  const plan::Problem wanted = problem(shape);
  const plan::BackwardPlan planned = plan_backward(wanted, fixed(), config_.deterministic);
  return plan::mask_tiles_bytes(wanted, planned.main) + plan::mask_tiles_bytes(wanted, planned.dq);
}

namespace {

/// Gradients of captures are added to from zero.
void clear_gradients(const VariantCall& variant, Stream stream) {
  for (const expression::CapturedView& captured : variant.views()) {
    const TensorView& view = captured.gradient;
    const std::int64_t elements = view.defined() ? view.elements() : 0;
    if (elements == 0) continue;
    driver::check(driver::api().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(view.data), 0,
                                                static_cast<std::size_t>(elements) * sizeof(float), stream),
                  "cuMemsetD8Async");
  }
}

}  // namespace

void DeviceBackward::run(const BackwardCall& call, const VariantCall& variant, const MaskTiles& tiles, Stream stream,
                         const Workspace& workspace) {
  const driver::ContextScope scope(context_.context());
  clear_gradients(variant, stream);
  if (call.empty) return;
  const plan::Problem wanted = problem(call.shape);
  const plan::BackwardChoice choice = plan::choose_backward(wanted, fixed());
  const Ready& ready = get(wanted, choice);
  const plan::BackwardTensors tensors{call.q,    call.k,  call.v,  call.o,  call.dout,        call.lse,
                                      call.dlse, call.dq, call.dk, call.dv, variant.tensors()};
  const std::size_t usual = plan::backward_workspace(wanted, choice.splits, config_.deterministic).bytes;
  const std::size_t main_lists = plan::mask_tiles_bytes(wanted, ready.specs.main);
  const std::size_t lists = main_lists + (config_.deterministic ? plan::mask_tiles_bytes(wanted, ready.specs.dq) : 0);
  check_tiles(tiles, lists);
  Scratch scratch(workspace, usual + (tiles.data == nullptr ? lists : 0), stream);
  std::byte* const lists_at =
      tiles.data == nullptr ? static_cast<std::byte*>(scratch.data()) + usual : static_cast<std::byte*>(tiles.data);
  plan::BackwardLaunch launch =
      plan::backward_launch(wanted, tensors, scale_, choice.splits, config_.deterministic, ready.specs, scratch.data());
  const plan::BackwardGrids& grids = launch.grids;
  for (const std::int64_t grid : {grids.preprocess, grids.main, grids.reduce, grids.dq, grids.sink}) {
    if (grid > kMaxGrid) {
      support::throw_invalid("b * h * s", grid, fmt::format("at most {} tiles of rows or keys", kMaxGrid));
    }
  }
  const auto queue = [&](const Kernel& kernel, std::int64_t grid, kernel::BackwardVariantParams& params) {
    if (grid == 0) return;
    driver::launch(kernel.loaded->function(), static_cast<unsigned>(grid), kernel.threads, kernel.shared_bytes, stream,
                   &params);
  };
  const auto list_tiles = [&](const Kernel& kernel, const plan::KernelSpec& spec, std::size_t offset,
                              kernel::BackwardVariantParams& params) {
    if (kernel.loaded == nullptr) return;
    plan::MaskTilesLaunch mask = plan::mask_tiles_launch(wanted, spec, lists_at + offset, &params.variant);
    if (mask.grid == 0 || tiles.filled) return;
    driver::launch(kernel.loaded->function(), static_cast<unsigned>(mask.grid), kernel.threads, 0, stream,
                   &mask.params);
  };
  queue(ready.preprocess, grids.preprocess, launch.params);
  list_tiles(ready.mask, ready.specs.main, 0, launch.params);
  queue(ready.main, grids.main, launch.params);
  queue(ready.reduce, grids.reduce, launch.params);
  list_tiles(ready.dq_mask, ready.specs.dq, main_lists, launch.dq_params);
  queue(ready.dq, grids.dq, launch.dq_params);
  queue(ready.convert, grids.convert, launch.params);
  queue(ready.sink, grids.sink, launch.params);
  scratch.release();
}

}  // namespace fa::api
