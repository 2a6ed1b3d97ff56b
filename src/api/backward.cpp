#include "api/backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <utility>

#include <sm90/sm90_backward_params.cuh>

#include "api/build.hpp"
#include "api/held_tiles.hpp"
#include "api/problem.hpp"
#include "api/scratch.hpp"
#include "plan/candidates.hpp"
#include "plan/catalogue.hpp"
#include "plan/early_start.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "plan/sm90_backward.hpp"
#include "support/log.hpp"
#include "support/text.hpp"
#include "tune/bucket.hpp"

namespace fa::api {
namespace {

constexpr std::int64_t kMaxGrid = (std::int64_t{1} << 31) - 1;
static_assert(plan::BackwardChoice::kSlots <= tune::kSlots, "codes tell slots apart");

/// A kernel without variants reads the first of it only, which are its Sm90BackwardParams.
kernel::Sm90BackwardVariantParams sm90_params(const kernel::BackwardVariantParams& base,
                                              const plan::BackwardTensors& tensors, const plan::KernelSpec& spec) {
  const plan::Sm90BackwardMaps maps = plan::sm90_backward_maps(tensors, spec);
  kernel::Sm90BackwardVariantParams params;
  driver::encode_tensor_map(maps.q, params.map_q);
  driver::encode_tensor_map(maps.k, params.map_k);
  driver::encode_tensor_map(maps.v, params.map_v);
  driver::encode_tensor_map(maps.dout, params.map_dout);
  params.base = base;
  return params;
}

}  // namespace

DeviceBackward::DeviceBackward(const AttentionConfig& config, const Functions& functions, double scale,
                               const driver::ContextRef& context, std::shared_ptr<cache::Store> store,
                               DevicePacked& packed)
    : config_(config),
      fixed_(read_override(config, Operation::backward)),
      functions_(functions),
      scale_(scale),
      context_(context),
      store_(std::move(store)),
      packed_(packed),
      tuning_(config_, context_, Operation::backward) {
  if (!config_.kernel_backward) return;
  plan_backward(problem({.b = 1, .h_q = 1, .h_kv = 1, .s_q = 4096, .s_kv = 4096, .total_q = 4096, .total_kv = 4096}),
                fixed(), config_.deterministic);
}

plan::Problem DeviceBackward::problem(const AttentionShape& shape) const noexcept {
  return make_problem(config_, shape, context_.info().arch, &functions_.variants);
}

/// The ready kernels of a call: a look-up without locks once they exist.
const DeviceBackward::Ready& DeviceBackward::get(const plan::Problem& wanted, const plan::BackwardChoice& choice,
                                                 Stream stream) {
  const std::uint64_t code = tuning_.code(wanted, choice.slot());
  const Ready* ready = ready_.find(code);
  if (ready != nullptr && !ready->open) return *ready;
  return settle(
      ready_, tuning_, code, stream, [&] { return first_ready(wanted, choice, stream); },
      [&](const Ready& known) { decide(wanted, choice, known, stream, {}); });
}

/// With the main kernel that is known to be best, or else the planner's.
DeviceBackward::Ready DeviceBackward::first_ready(const plan::Problem& wanted, const plan::BackwardChoice& choice,
                                                  Stream stream) const {
  plan::BackwardPlan planned = plan_backward(wanted, fixed(), config_.deterministic);
  const char* by = kByPlanner;
  bool open = false;
  if (tuning_.sources().any()) {
    const auto all_candidates = [&] {
      plan::Alternatives all = plan::backward_candidates(wanted, fixed(), planned.main.front(), SIZE_MAX);
      all.insert(all.end(), planned.main.begin(), planned.main.end());
      return all;
    };
    const auto known = tuning_.known(tuning_.key(wanted, planned.main.front()), all_candidates);
    if (known) planned.main.insert(planned.main.begin(), known->spec);
    if (known) by = known->by;
    open = !known && tuning_.sources().tunes && tune::worth_tuning(wanted, true);
  }
  const Supply from = supply(wanted).serialized();
  std::unique_ptr<Prefetch> candidates;
  if (open && tuning_.may_begin(stream)) candidates = prefetch(wanted, planned.main.front(), from, {});
  Ready ready = make(wanted, choice, planned, from);
  ready.open = open;
  ready.info.chosen_by = ready.specs.main == planned.main.front() ? by : kByPlanner;
  return ready;
}

Supply DeviceBackward::supply(const plan::Problem& wanted) const {
  Supply supply(config_);
  supply.accept.driver = driver::api().version;
  supply.command = [this, wanted] { return remedy(wanted, config_, Operation::backward); };
  return supply;
}

DeviceBackward::Ready DeviceBackward::make(const plan::Problem& wanted, const plan::BackwardChoice& choice,
                                           const plan::BackwardPlan& planned, const Supply& from) const {
  Ready ready;
  KernelInfo around;  // what the kernels besides the main one took
  const auto choose = [&](const plan::Alternatives& specs) {
    return choose_kernel(specs, *store_, from, config_.deterministic);
  };
  // What has to be compiled is compiled side by side.
  const auto choose_aside = [&](plan::Alternatives specs) {
    return std::async(std::launch::async, [&choose, specs = std::move(specs)] { return choose(specs); });
  };
  const auto load = [&](const ChosenKernel& chosen, KernelInfo* info, plan::KernelSpec* taken = nullptr) {
    if (taken != nullptr) *taken = chosen.spec;
    KernelInfo own;
    Kernel kernel;
    kernel.loaded = load_kernel(chosen, context_, &own);
    kernel.threads = static_cast<unsigned>(chosen.spec.threads());
    kernel.shared_bytes = static_cast<unsigned>(plan::shared_bytes(chosen.spec));
    kernel.may_start_early = plan::may_start_early(chosen.spec);
    if (info != nullptr) {
      *info = own;
    } else {
      around.compile_ms += own.compile_ms;
      around.load_ms += own.load_ms;
    }
    return kernel;
  };
  std::future<ChosenKernel> reduce;
  std::future<ChosenKernel> sink;
  std::future<ChosenKernel> preprocess = choose_aside({planned.preprocess});
  const bool pass_for_dq = !planned.dq.empty();
  std::future<ChosenKernel> dq = choose_aside(pass_for_dq ? planned.dq : plan::Alternatives{planned.convert});
  if (choice.splits > 1) reduce = choose_aside({planned.reduce});
  if (config_.sink) sink = choose_aside({planned.sink});
  ready.main = load(choose(planned.main), &ready.info, &ready.specs.main);
  ready.preprocess = load(preprocess.get(), nullptr);
  if (choice.splits > 1) ready.reduce = load(reduce.get(), nullptr);
  if (pass_for_dq) {
    ready.dq = load(dq.get(), nullptr, &ready.specs.dq);
  } else {
    ready.convert = load(dq.get(), nullptr);
  }
  if (plan::needs_tile_lists(wanted)) {
    ready.mask = load(choose({plan::mask_tiles_spec(ready.specs.main)}), nullptr);
    if (pass_for_dq) ready.dq_mask = load(choose({plan::mask_tiles_spec(ready.specs.dq)}), nullptr);
  }
  if (config_.sink) ready.sink = load(sink.get(), nullptr);
  ready.specs.reduce_warps = planned.reduce.warps;
  ready.info.compile_ms += around.compile_ms;
  ready.info.load_ms += around.load_ms;
  support::logf(LogLevel::debug, "ready: {} ({})", ready.info.spec, ready.info.origin);
  if (const char* const obstacle = plan::backward_detour(wanted, fixed())) {
    support::logf(LogLevel::debug, "family sm80 serves what sm90 cannot: {}", obstacle);
  }
  return ready;
}

KernelInfo DeviceBackward::prepare(const AttentionShape& shape) {
  if (shape.b == 0 || (shape.h_q == 0 && shape.h_kv == 0)) return {};  // nothing will run
  const driver::ContextScope scope(context_.context());
  packed_.prepare();
  const plan::Problem wanted = problem(shape);
  return get(wanted, plan::choose_backward(wanted, fixed()), nullptr).info;
}

std::size_t DeviceBackward::workspace_size(const AttentionShape& shape) const {
  return most_bytes(problem(shape), [&](const plan::Problem& wanted) {
    return plan::backward_workspace_size(wanted, fixed(), config_.deterministic);
  });
}

std::size_t DeviceBackward::mask_tiles_size(const AttentionShape& shape) const {
  return most_bytes(problem(shape), [&](const plan::Problem& wanted) {
    return plan::backward_lists_size(wanted, fixed(), config_.deterministic);
  });
}

/// Starts to get what will compete with the main kernel `first`.
std::unique_ptr<Prefetch> DeviceBackward::prefetch(const plan::Problem& wanted, const plan::KernelSpec& first,
                                                   const Supply& from, const TuneOptions& options) const {
  return Tuning::prefetch(plan::backward_candidates(wanted, fixed(), first, options.candidates), *store_, from,
                          options);
}

/// Lets candidates compete with the main kernel of `known` on scratch memory; the kernels around it are the same.
TuneReport DeviceBackward::decide(const plan::Problem& wanted, const plan::BackwardChoice& choice, const Ready& known,
                                  Stream stream, const TuneOptions& options) const {
  plan::Problem measured = tune::representative(wanted, true);
  if (plan::choose_backward(measured, fixed()).slot() != choice.slot()) measured = wanted;
  const plan::BackwardChoice measured_choice = plan::choose_backward(measured, fixed());
  const plan::BackwardPlan planned = plan_backward(wanted, fixed(), config_.deterministic);
  const Supply from = supply(wanted).serialized();
  Contest contest;
  contest.specs = plan::backward_candidates(wanted, fixed(), known.specs.main, options.candidates);
  std::vector<Ready> made(contest.specs.size(), known);
  contest.make = [&](std::size_t i) {
    if (i == 0) return;
    const ChosenKernel chosen = contestant(contest.specs[i], *store_, from);
    made[i].main = {load_kernel(chosen, context_, nullptr), static_cast<unsigned>(chosen.spec.threads()),
                    static_cast<unsigned>(plan::shared_bytes(chosen.spec)), plan::may_start_early(chosen.spec)};
    made[i].specs.main = chosen.spec;
  };
  contest.launch = [&](std::size_t i, const TuneTensors& t, Stream on, Workspace workspace) {
    launch(measured, measured_choice, made[i], {t.q, t.k, t.v, t.o, t.dout, t.lse, {}, t.dq, t.dk, t.dv}, {}, {}, on,
           workspace);
  };
  contest.workspace = plan::backward_workspace(measured, measured_choice, config_.deterministic).bytes;
  return tuning_.decide(tuning_.key(wanted, planned.main.front()), measured, contest, stream, options);
}

TuneReport DeviceBackward::tune(const AttentionShape& shape, const TuneOptions& options) const {
  const plan::Problem wanted = problem(shape);
  const plan::BackwardChoice choice = plan::choose_backward(wanted, fixed());
  const plan::BackwardPlan planned = plan_backward(wanted, fixed(), config_.deterministic);
  const Supply from = supply(wanted).serialized();
  const auto candidates = prefetch(wanted, planned.main.front(), from, options);
  const Ready ready = make(wanted, choice, planned, from);
  return decide(wanted, choice, ready, nullptr, options);
}

namespace {

void clear(const TensorView& view, std::int64_t first, std::int64_t elements, Stream stream) {
  driver::check(driver::api().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(static_cast<float*>(view.data) + first), 0,
                                              static_cast<std::size_t>(elements) * sizeof(float), stream),
                "cuMemsetD8Async");
}

/// Gradients of captures are added to from zero. That of the sinks has a kernel, unless the call has no work for any.
void clear_gradients(const VariantCall& variant, bool empty, Stream stream) {
  for (const expression::CapturedView& captured : variant.views()) {
    const TensorView& view = captured.gradient;
    const std::int64_t elements = view.defined() ? view.elements() : 0;
    if (elements == 0) continue;
    clear(view, 0, elements, stream);
  }
  if (!empty || !variant.dsink.defined()) return;
  for (std::int64_t h = 0; h < variant.dsink.shape[0]; ++h)
    clear(variant.dsink, h * variant.dsink.strides[0], 1, stream);
}

}  // namespace

void DeviceBackward::run(const BackwardCall& call, const VariantCall& variant, const MaskTiles& tiles, Stream stream,
                         const Workspace& workspace) {
  const driver::ContextScope scope(context_.context());
  packed_.check(call.sequences, call.shape, stream);
  packed_.clear(call.dq, call.sequences, call.shape, false, 0, stream);
  packed_.clear(call.dk, call.sequences, call.shape, true, 0, stream);
  packed_.clear(call.dv, call.sequences, call.shape, true, 0, stream);
  clear_gradients(variant, call.empty, stream);
  if (call.empty) return;
  plan::Problem wanted = problem(call.shape);
  const plan::BackwardTensors tensors{call.q,    call.k,  call.v,  call.o,  call.dout,        call.lse,
                                      call.dlse, call.dq, call.dk, call.dv, variant.tensors()};
  wanted.tensor_maps = plan::sm90_backward_describable(tensors);
  const plan::BackwardChoice choice = plan::choose_backward(wanted, fixed());
  launch(wanted, choice, get(wanted, choice, stream), tensors, packed_args(config_, call.sequences, call.dropout),
         given_tiles(tiles, config_, functions_, variant), stream, workspace);
}

/// What lists of a call are of: those of the main kernel, and behind them those of the pass for dQ.
std::uint64_t DeviceBackward::tag_of(const plan::Problem& wanted, const Ready& ready,
                                     const GivenTiles& tiles) noexcept {
  const std::uint64_t main = plan::mask_tiles_tag(wanted, ready.specs.main);
  const std::uint64_t dq = ready.dq.loaded ? plan::mask_tiles_tag(wanted, ready.specs.dq) : 0;
  return plan::mix_tag(plan::mix_tag(main, dq), tiles.numbers);
}

void DeviceBackward::launch(const plan::Problem& wanted, const plan::BackwardChoice& choice, const Ready& ready,
                            const plan::BackwardTensors& tensors, const plan::PackedArgs& packed,
                            const GivenTiles& tiles, Stream stream, const Workspace& workspace) const {
  const std::size_t usual = plan::backward_workspace(wanted, choice, config_.deterministic).bytes;
  const std::size_t main_lists = plan::mask_tiles_bytes(wanted, ready.specs.main);
  const std::size_t dq_lists = ready.dq.loaded ? plan::mask_tiles_bytes(wanted, ready.specs.dq) : 0;
  const std::size_t lists = main_lists + dq_lists;
  check_tiles(tiles, lists);
  const std::uint64_t tag = tiles.data == nullptr ? 0 : tag_of(wanted, ready, tiles);
  expect_held(tiles, tag);
  const bool fills = tiles.data != nullptr && !tiles.filled;
  Scratch scratch(workspace, usual + (tiles.data == nullptr ? lists : 0), stream);
  std::byte* const lists_at =
      tiles.data == nullptr ? static_cast<std::byte*>(scratch.data()) + usual : static_cast<std::byte*>(tiles.data);
  plan::BackwardLaunch planned =
      plan::backward_launch(wanted, tensors, scale_, choice, config_.deterministic, ready.specs,
                            context_.info().multiprocessors, scratch.data(), packed);
  const plan::BackwardGrids& grids = planned.grids;
  for (const std::int64_t grid : {grids.preprocess, grids.main, grids.reduce, grids.dq, grids.sink}) {
    if (grid > kMaxGrid) {
      support::throw_invalid("b * h * s", grid, fmt::format("at most {} tiles of rows or keys", kMaxGrid));
    }
  }
  if (fills) set_held(tiles.data, 0);
  driver::LaunchChain chain;
  const auto queue = [&](const Kernel& kernel, std::int64_t grid, auto& params) {
    if (grid == 0) return;
    driver::launch(kernel.loaded->function(), static_cast<unsigned>(grid), kernel.threads, kernel.shared_bytes, stream,
                   &params, chain.next(kernel.may_start_early));
  };
  const auto list_tiles = [&](const Kernel& kernel, const plan::KernelSpec& spec, std::size_t offset,
                              kernel::BackwardVariantParams& params) {
    if (kernel.loaded == nullptr) return;
    plan::MaskTilesLaunch mask = plan::mask_tiles_launch(wanted, spec, lists_at + offset, &params.variant);
    if (mask.grid == 0 || tiles.filled) return;
    driver::launch(kernel.loaded->function(), static_cast<unsigned>(mask.grid), kernel.threads, 0, stream,
                   &mask.params);
  };
  queue(ready.preprocess, grids.preprocess, planned.params);
  list_tiles(ready.mask, ready.specs.main, 0, planned.params);
  if (ready.specs.main.kernel().tensor_maps) {
    kernel::Sm90BackwardVariantParams params = sm90_params(planned.params, tensors, ready.specs.main);
    queue(ready.main, grids.main, params);
  } else {
    queue(ready.main, grids.main, planned.params);
  }
  queue(ready.reduce, grids.reduce, planned.params);
  list_tiles(ready.dq_mask, ready.specs.dq, main_lists, planned.dq_params);
  queue(ready.dq, grids.dq, planned.dq_params);
  queue(ready.convert, grids.convert, planned.params);
  queue(ready.sink, grids.sink, planned.params);
  if (fills) set_held(tiles.data, tag);
  scratch.release();
}

}  // namespace fa::api
