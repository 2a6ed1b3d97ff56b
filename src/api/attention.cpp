#include <fa/attention.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <sm90/sm90_forward_params.cuh>

#include "api/backward.hpp"
#include "api/build.hpp"
#include "api/held_tiles.hpp"
#include "api/packed.hpp"
#include "api/problem.hpp"
#include "api/ready_table.hpp"
#include "api/scratch.hpp"
#include "api/tuning.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/candidates.hpp"
#include "plan/catalogue.hpp"
#include "plan/early_start.hpp"
#include "plan/forward_launch.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "plan/sm90_forward.hpp"
#include "reference/backward.hpp"
#include "reference/forward.hpp"
#include "reference/packed.hpp"
#include "support/log.hpp"
#include "support/text.hpp"
#include "tune/bucket.hpp"

namespace fa {
namespace {

// Persistent kernels count tiles in an int, up to a round past the last one.
constexpr std::int64_t kMaxTiles = (std::int64_t{1} << 31) - 65536;

/// The kernels of one kind of problem, ready to launch.
struct Ready {
  plan::KernelSpec spec;
  std::shared_ptr<const driver::LoadedKernel> kernel;
  std::shared_ptr<const driver::LoadedKernel> combine;  ///< when the keys are split
  std::shared_ptr<const driver::LoadedKernel> mask;     ///< with a mask function
  std::shared_ptr<const driver::LoadedKernel> norms;    ///< when tiles are left out by norms
  plan::KernelSpec norms_spec;
  unsigned mask_threads = 0;
  unsigned shared_bytes = 0;
  unsigned combine_threads = 0;
  KernelInfo info;
  bool open = false;  ///< tuning may find a better one
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

class Attention::Impl {
 public:
  Impl(const AttentionConfig& config, Device device) : config_(config), device_(device) {
    api::validate(config_, device.kind() == Device::Kind::host);
    fixed_ = api::read_override(config_, api::Operation::forward);
    functions_ = api::read_functions(config_, device.kind() == Device::Kind::host);
    api::cache_pack_pins(config_.cache);
    api::tune_sources(config_, api::Operation::forward);
    scale_ = config_.scale ? double{*config_.scale} : 1.0 / std::sqrt(double(config_.head_dim));
    if (device.kind() == Device::Kind::host) return;
    context_.emplace(driver::ContextRef::acquire(device));
    device_ = Device::cuda(context_->info().ordinal);
    plan::limits(context_->info().arch);
    // A kernel override that can never fit is refused here, not at the first call.
    plan::check_forward_override(problem({}), fixed());
    store_ = api::open_store(config_.cache, driver::api().version);
    tuning_.emplace(config_, *context_, api::Operation::forward);
    packed_.emplace(config_, *context_, store_);
    backward_.emplace(config_, functions_, scale_, *context_, store_, *packed_);
  }

  const AttentionConfig& config() const noexcept { return config_; }
  Device device() const noexcept { return device_; }

  CacheCounters cache_counters() const {
    if (store_ == nullptr) return {};
    const cache::Counters from = store_->counters();
    return {.memory_hits = from.memory_hits,
            .pack_hits = from.pack_hits,
            .disk_hits = from.disk_hits,
            .compiles = from.builds,
            .damaged = from.damaged,
            .unaccepted = from.unaccepted,
            .publish_failures = from.publish_failures,
            .evictions = from.evictions};
  }

  void forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream, Workspace workspace) {
    const api::ForwardCall call = api::check_forward(config_, inputs, outputs);
    const api::VariantCall variant = api::check_variants(config_, functions_, call.shape, inputs);
    api::check_disjoint(inputs, outputs);
    if (call.empty && !config_.zero_padding) return;
    if (!context_) return forward_on_host(call, variant);
    const driver::ContextScope scope(context_->context());
    packed_->check(call.sequences, call.shape, stream);
    packed_->clear(call.o, call.sequences, call.shape, false, 0, stream);
    packed_->clear(call.lse, call.sequences, call.shape, false, -std::numeric_limits<float>::infinity(), stream);
    if (call.empty) return;
    const plan::ForwardTensors tensors = tensors_of(call, variant);
    plan::Problem wanted = problem(call.shape);
    wanted.tensor_maps = plan::sm90_forward_describable(tensors, config_.varlen);
    const plan::Choice choice = plan::choose(wanted, fixed());
    const Ready& ready = get(wanted, choice, stream);
    launch(tensors, wanted, choice, ready, api::packed_args(config_, call.sequences, call.dropout),
           api::given_tiles(inputs.tiles, config_, functions_, variant), stream, workspace);
  }

  void backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream, Workspace workspace) {
    const api::BackwardCall call = api::check_backward(config_, inputs, outputs);
    const api::VariantCall variant = api::check_variants(config_, functions_, call.shape, inputs, outputs);
    api::check_disjoint(inputs, outputs);
    if (!context_) return backward_on_host(call, variant);
    backward_->run(call, variant, inputs.tiles, stream, workspace);
  }

  KernelInfo prepare(const AttentionShape& wanted) {
    const AttentionShape shape = api::checked(config_, wanted);
    if (!context_) return host_info("forward");
    packed_->prepare();
    if (shape.b == 0 || shape.h_q == 0 || shape.s_q == 0) return {};  // nothing will run
    const plan::Problem problem_of_shape = problem(shape);
    const driver::ContextScope scope(context_->context());
    return get(problem_of_shape, plan::choose(problem_of_shape, fixed()), nullptr).info;
  }

  KernelInfo prepare_backward(const AttentionShape& wanted) {
    const AttentionShape shape = api::checked(config_, wanted);
    if (!context_) return host_info("backward");
    return backward_->prepare(shape);
  }

  /// A decision about `op` for `shape`, whatever is known already.
  api::TuneReport tune(api::Operation op, const AttentionShape& wanted, const api::TuneOptions& options) {
    const AttentionShape shape = api::checked(config_, wanted);
    if (!context_) support::throw_unsupported("device", "host", "a GPU: the host device has one kernel");
    if (config_.varlen) support::throw_unsupported("varlen", "true", "false: packed batches are not tuned");
    if (config_.dropout > 0) support::throw_unsupported("dropout", config_.dropout, "0: dropout is not tuned");
    if (!api::is_plain(config_)) {
      support::throw_unsupported("config", "functions, windows, chunks or sinks", "none: these are not tuned");
    }
    const driver::ContextScope scope(context_->context());
    if (op == api::Operation::backward) return backward_->tune(shape, options);
    const plan::Problem problem_of_shape = problem(shape);
    const plan::Choice choice = plan::choose(problem_of_shape, fixed());
    const plan::ForwardPlan planned = plan::plan_forward(problem_of_shape, fixed());
    const plan::Alternatives specs = plan::kernels_of(planned).front();
    const api::Supply from = supply(problem_of_shape).serialized();
    const auto candidates = prefetch(problem_of_shape, specs.front(), from, options);
    const Ready ready = make(problem_of_shape, choice, specs, planned.combine, from);
    return decide(problem_of_shape, choice, ready, nullptr, options);
  }

  std::size_t backward_workspace_size(const AttentionShape& wanted) const {
    const AttentionShape shape = api::checked(config_, wanted);
    return context_ ? backward_->workspace_size(shape) : 0;
  }

  std::size_t mask_tiles_size(const AttentionShape& wanted) const {
    const AttentionShape shape = api::checked(config_, wanted);
    if (!context_) return 0;
    return api::most_bytes(problem(shape),
                           [&](const plan::Problem& call) { return plan::forward_lists_size(call, fixed()); });
  }

  std::size_t backward_mask_tiles_size(const AttentionShape& wanted) const {
    const AttentionShape shape = api::checked(config_, wanted);
    return context_ ? backward_->mask_tiles_size(shape) : 0;
  }

  std::size_t workspace_size(const AttentionShape& wanted) const {
    const AttentionShape shape = api::checked(config_, wanted);
    if (!context_) return 0;
    return api::most_bytes(problem(shape),
                           [&](const plan::Problem& call) { return plan::forward_workspace_size(call, fixed()); });
  }

 private:
  const plan::Fixed& fixed() const noexcept { return fixed_; }

  int d_v() const noexcept { return config_.head_dim_v != 0 ? config_.head_dim_v : config_.head_dim; }

  plan::Problem problem(const AttentionShape& shape) const noexcept {
    return api::make_problem(config_, shape, context_->info().arch, &functions_.variants);
  }

  /// The ready kernels of a call: a look-up without locks once they exist.
  const Ready& get(const plan::Problem& wanted, const plan::Choice& choice, Stream stream) {
    const std::uint64_t code = tuning_->code(wanted, choice.slot());
    const Ready* ready = ready_.find(code);
    if (ready != nullptr && !ready->open) return *ready;
    return api::settle(
        ready_, *tuning_, code, stream, [&] { return first_ready(wanted, choice, stream); },
        [&](const Ready& known) { decide(wanted, choice, known, stream, {}); });
  }

  /// With the kernel that is known to be best, or else the planner's.
  Ready first_ready(const plan::Problem& wanted, const plan::Choice& choice, Stream stream) const {
    const plan::ForwardPlan planned = plan::plan_forward(wanted, fixed());
    plan::Alternatives specs = plan::kernels_of(planned).front();
    const char* by = api::kByPlanner;
    bool open = false;
    if (tuning_->sources().any()) {
      const auto all_candidates = [&] {
        plan::Alternatives all = plan::forward_candidates(wanted, fixed(), planned.kernel, SIZE_MAX);
        all.insert(all.end(), specs.begin(), specs.end());
        return all;
      };
      const auto known = tuning_->known(tuning_->key(wanted, planned.kernel), all_candidates);
      if (known) specs.insert(specs.begin(), known->spec);
      if (known) by = known->by;
      open = !known && tuning_->sources().tunes && tune::worth_tuning(wanted, false);
    }
    const api::Supply from = supply(wanted).serialized();
    std::unique_ptr<api::Prefetch> candidates;
    if (open && tuning_->may_begin(stream)) candidates = prefetch(wanted, specs.front(), from, {});
    Ready ready = make(wanted, choice, specs, planned.combine, from);
    ready.open = open;
    ready.info.chosen_by = ready.spec == specs.front() ? by : api::kByPlanner;
    return ready;
  }

  api::Supply supply(const plan::Problem& wanted) const {
    api::Supply supply(config_);
    supply.accept.driver = driver::api().version;
    supply.command = [this, wanted] { return api::remedy(wanted, config_, api::Operation::forward); };
    return supply;
  }

  Ready make(const plan::Problem& wanted, const plan::Choice& choice, const plan::Alternatives& specs,
             const plan::KernelSpec& combine_spec, const api::Supply& from) const {
    Ready ready;
    const api::ChosenKernel chosen = api::choose_kernel(specs, *store_, from, config_.deterministic);
    ready.spec = chosen.spec;
    ready.shared_bytes = static_cast<unsigned>(plan::shared_bytes(chosen.spec));
    ready.kernel = api::load_kernel(chosen, *context_, &ready.info);
    const auto load_beside = [&](const plan::KernelSpec& spec) {
      KernelInfo info;
      auto kernel = api::load_kernel({spec, api::get_kernel(spec, *store_, from)}, *context_, &info);
      ready.info.compile_ms += info.compile_ms;
      ready.info.load_ms += info.load_ms;
      return kernel;
    };
    if (plan::needs_tile_lists(wanted)) {
      const plan::KernelSpec mask_spec = plan::mask_tiles_spec(chosen.spec);
      ready.mask = load_beside(mask_spec);
      ready.mask_threads = static_cast<unsigned>(mask_spec.threads());
    }
    if (chosen.spec.affine_reach()) {
      ready.norms_spec = plan::row_norms_spec(chosen.spec);
      ready.norms = load_beside(ready.norms_spec);
    }
    if (choice.splits > 1) {
      ready.combine = load_beside(combine_spec);
      ready.combine_threads = static_cast<unsigned>(combine_spec.threads());
    }
    support::logf(LogLevel::debug, "ready: {} ({})", ready.info.spec, ready.info.origin);
    if (const char* const obstacle = plan::forward_detour(wanted, fixed())) {
      support::logf(LogLevel::debug, "family sm80 serves what sm90 cannot: {}", obstacle);
    }
    return ready;
  }

  /// Starts to get what will compete with `first`.
  std::unique_ptr<api::Prefetch> prefetch(const plan::Problem& wanted, const plan::KernelSpec& first,
                                          const api::Supply& from, const api::TuneOptions& options) const {
    return api::Tuning::prefetch(plan::forward_candidates(wanted, fixed(), first, options.candidates), *store_, from,
                                 options);
  }

  /// Lets candidates compete with `known`, whose choice is `choice`, on scratch memory.
  api::TuneReport decide(const plan::Problem& wanted, const plan::Choice& choice, const Ready& known, Stream stream,
                         const api::TuneOptions& options) const {
    plan::Problem measured = tune::representative(wanted, false);
    if (plan::choose(measured, fixed()).slot() != choice.slot()) measured = wanted;
    const plan::Choice measured_choice = plan::choose(measured, fixed());
    const plan::ForwardPlan planned = plan::plan_forward(wanted, fixed());
    const api::Supply from = supply(wanted).serialized();
    api::Contest contest;
    contest.specs = plan::forward_candidates(wanted, fixed(), known.spec, options.candidates);
    std::vector<Ready> made(contest.specs.size(), known);
    contest.make = [&](std::size_t i) {
      if (i == 0) return;
      const api::ChosenKernel chosen = api::contestant(contest.specs[i], *store_, from);
      made[i].kernel = api::load_kernel(chosen, *context_, nullptr);
      made[i].spec = chosen.spec;
      made[i].shared_bytes = static_cast<unsigned>(plan::shared_bytes(chosen.spec));
    };
    contest.launch = [&](std::size_t i, const api::TuneTensors& t, Stream on, Workspace workspace) {
      launch({t.q, t.k, t.v, t.o, t.lse}, measured, measured_choice, made[i], {}, {}, on, workspace);
    };
    contest.workspace = plan::forward_workspace(measured, measured_choice, contest.specs).bytes;
    return tuning_->decide(tuning_->key(wanted, planned.kernel), measured, contest, stream, options);
  }

  static plan::ForwardTensors tensors_of(const api::ForwardCall& call, const api::VariantCall& variant) noexcept {
    return {call.q, call.k, call.v, call.o, call.lse, variant.tensors()};
  }

  void launch(const plan::ForwardTensors& tensors, const plan::Problem& wanted, const plan::Choice& choice,
              const Ready& ready, const plan::PackedArgs& packed, const api::GivenTiles& tiles, Stream stream,
              Workspace workspace) const {
    plan::ForwardLaunch planned = plan::forward_launch(wanted, tensors, scale_, choice.splits, ready.spec,
                                                       context_->info().multiprocessors, packed);
    if (planned.tiles > kMaxTiles) {
      support::throw_invalid("b * h_q * s_q", planned.tiles, fmt::format("at most {} query tiles", kMaxTiles));
    }
    const plan::ForwardWorkspace layout = plan::forward_workspace(wanted, choice, {&ready.spec, 1});
    const std::size_t lists = layout.lists;
    const std::size_t partial = layout.partial;
    api::check_tiles(tiles, lists);
    const std::uint64_t tag =
        tiles.data == nullptr ? 0 : plan::mix_tag(plan::mask_tiles_tag(wanted, ready.spec), tiles.numbers);
    api::expect_held(tiles, tag);
    if (ready.spec.dynamic() || ready.spec.affine_reach()) {
      return launch_counted(tensors, layout.cleared, wanted, ready, planned, stream, workspace);
    }
    const std::size_t own_lists = tiles.data == nullptr ? lists : 0;
    if (partial + lists == 0) return launch_attention(tensors, ready, planned, stream);
    std::optional<api::Scratch> scratch;
    if (partial + own_lists != 0) scratch.emplace(workspace, partial + own_lists, stream);
    if (lists != 0) {
      void* memory = own_lists == 0 ? tiles.data : static_cast<std::byte*>(scratch->data()) + partial;
      plan::MaskTilesLaunch mask = plan::mask_tiles_launch(wanted, ready.spec, memory, &planned.params.variant);
      const auto list_tiles = [&] {
        driver::launch(ready.mask->function(), static_cast<unsigned>(mask.grid), ready.mask_threads, 0, stream,
                       &mask.params);
      };
      if (own_lists != 0) {
        list_tiles();
      } else if (!tiles.filled) {
        api::set_held(memory, 0);
        list_tiles();
        api::set_held(memory, tag);
      }
    }
    if (choice.splits == 1) {
      launch_attention(tensors, ready, planned, stream);
    } else {
      launch_split(tensors, ready, planned, stream, static_cast<float*>(scratch->data()));
    }
    if (scratch) scratch->release();
  }

  static void launch_attention(const plan::ForwardTensors& tensors, const Ready& ready, plan::ForwardLaunch& planned,
                               Stream stream) {
    const auto start = plan::may_start_early(ready.spec) ? driver::Start::early : driver::Start::in_order;
    const auto queue = [&](void* params) {
      driver::launch(ready.kernel->function(), static_cast<unsigned>(planned.grid),
                     static_cast<unsigned>(ready.spec.threads()), ready.shared_bytes, stream, params, start);
    };
    if (!ready.spec.kernel().tensor_maps) return queue(&planned.params);
    const plan::Sm90ForwardMaps maps = plan::sm90_forward_maps(tensors, ready.spec);
    kernel::Sm90ForwardVariantParams params;  // a plain kernel takes the first part of it
    driver::encode_tensor_map(maps.q, params.map_q);
    driver::encode_tensor_map(maps.k, params.map_k);
    driver::encode_tensor_map(maps.v, params.map_v);
    driver::encode_tensor_map(maps.o, params.map_o);
    params.base = planned.params;
    queue(&params);
  }

  /// With a counter of query tiles, with norms that leave some of KV tiles out, or with both: they start from zeros.
  static void launch_counted(const plan::ForwardTensors& tensors, std::size_t bytes, const plan::Problem& wanted,
                             const Ready& ready, plan::ForwardLaunch& planned, Stream stream,
                             const Workspace& workspace) {
    api::Scratch scratch(workspace, bytes, stream);
    const bool reaches = ready.spec.affine_reach();
    const std::size_t cleared = reaches ? bytes : sizeof(*planned.params.next_tile);
    driver::check(driver::api().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(scratch.data()), 0, cleared, stream),
                  "cuMemsetD8Async");
    planned.params.next_tile = static_cast<std::int32_t*>(scratch.data());
    if (reaches) {
      planned.params.variant.norms =
          reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(scratch.data()) + plan::kCounterBytes);
      driver::launch(ready.norms->function(), static_cast<unsigned>(plan::row_norms_blocks(wanted, ready.norms_spec)),
                     static_cast<unsigned>(ready.norms_spec.threads()), 0, stream, &planned.params);
    }
    launch_attention(tensors, ready, planned, stream);
    scratch.release();
  }

  void launch_split(const plan::ForwardTensors& tensors, const Ready& ready, plan::ForwardLaunch& planned,
                    Stream stream, float* partial) const {
    kernel::ForwardVariantParams& arguments = planned.params;
    const std::int64_t rows = std::int64_t{arguments.b} * arguments.h_q * arguments.s_q;
    arguments.partial_o = partial;
    arguments.partial_lse = arguments.partial_o + rows * arguments.splits * d_v();
    launch_attention(tensors, ready, planned, stream);
    const std::int64_t warps = ready.combine_threads / 32;
    driver::launch(ready.combine->function(), static_cast<unsigned>(ceil_div(rows, warps)), ready.combine_threads, 0,
                   stream, &arguments);
  }

  // ---- the host device ----

  KernelInfo host_info(const char* operation) const {
    KernelInfo info;
    info.name = fmt::format("fa_reference_{}", operation);
    info.spec = fmt::format("reference_{} dtype={} f64={:d}", operation, to_string(config_.dtype), config_.host_f64);
    info.origin = "host";
    return info;
  }

  reference::DropoutMask dropout_mask(const DropoutState& state) const noexcept {
    if (config_.dropout == 0) return {};
    const bool in_memory = state.device != nullptr;
    return {double{config_.dropout}, in_memory ? state.device[0] : state.seed,
            in_memory ? state.device[1] : state.offset};
  }

  bool host_f64() const noexcept { return config_.host_f64 || config_.dtype == DType::f64; }

  reference::VariantArgs variant_args(const api::VariantCall& variant) const {
    reference::VariantArgs args;
    if (functions_.any()) args.program = &functions_.program;
    args.captures = variant.views();
    args.sink = variant.sink;
    args.dsink = variant.dsink;
    args.window_left = config_.window_left;
    args.window_right = config_.window_right;
    args.chunk = config_.chunk;
    return args;
  }

  void backward_on_host(const api::BackwardCall& call, const api::VariantCall& variant) const {
    reference::BackwardArgs args;
    args.variant = variant_args(variant);
    args.q = call.q;
    args.k = call.k;
    args.v = call.v;
    args.o = call.o;
    args.lse = call.lse;
    args.dout = call.dout;
    args.dlse = call.dlse;
    args.dq = call.dq;
    args.dk = call.dk;
    args.dv = call.dv;
    args.scale = scale_;
    args.causal = config_.causal;
    args.causal_align = config_.causal_align;
    args.dropout = dropout_mask(call.dropout);
    args.f64 = host_f64();
    if (config_.varlen) {
      api::check_lengths(call.sequences, call.shape);
      reference::backward(args, call.sequences, config_.zero_padding);
    } else {
      reference::backward(args);
    }
  }

  void forward_on_host(const api::ForwardCall& call, const api::VariantCall& variant) const {
    reference::ForwardArgs args;
    args.variant = variant_args(variant);
    args.q = call.q;
    args.k = call.k;
    args.v = call.v;
    args.o = call.o;
    args.lse = call.lse;
    args.scale = scale_;
    args.causal = config_.causal;
    args.causal_align = config_.causal_align;
    args.dropout = dropout_mask(call.dropout);
    args.f64 = host_f64();
    if (config_.varlen) {
      api::check_lengths(call.sequences, call.shape);
      reference::forward(args, call.sequences, config_.zero_padding);
    } else {
      reference::forward(args);
    }
  }

  AttentionConfig config_;
  plan::Fixed fixed_;  ///< by its override
  api::Functions functions_;
  Device device_;
  double scale_ = 1;
  std::optional<driver::ContextRef> context_;  ///< empty on the host device
  std::shared_ptr<cache::Store> store_;
  std::optional<api::DevicePacked> packed_;      ///< likewise
  std::optional<api::DeviceBackward> backward_;  ///< likewise

  std::optional<api::Tuning> tuning_;  ///< likewise
  api::ReadyTable<Ready> ready_;
};

Attention::Attention(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;
Attention::~Attention() = default;

Attention Attention::create(const AttentionConfig& config, Device device) {
  return Attention(std::make_unique<Impl>(config, device));
}

void Attention::forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream,
                        Workspace workspace) const {
  impl_->forward(inputs, outputs, stream, workspace);
}

void Attention::backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream,
                         Workspace workspace) const {
  impl_->backward(inputs, outputs, stream, workspace);
}

void Attention::prepare(const AttentionShape& shape) const {
  impl_->prepare(shape);
}

std::size_t Attention::mask_tiles_size(const AttentionShape& shape) const {
  return impl_->mask_tiles_size(shape);
}

std::size_t Attention::backward_mask_tiles_size(const AttentionShape& shape) const {
  return impl_->backward_mask_tiles_size(shape);
}

std::size_t Attention::workspace_size(const AttentionShape& shape) const {
  return impl_->workspace_size(shape);
}

KernelInfo Attention::kernel_info(const AttentionShape& shape) const {
  return impl_->prepare(shape);
}

void Attention::prepare_backward(const AttentionShape& shape) const {
  impl_->prepare_backward(shape);
}

std::size_t Attention::backward_workspace_size(const AttentionShape& shape) const {
  return impl_->backward_workspace_size(shape);
}

KernelInfo Attention::backward_kernel_info(const AttentionShape& shape) const {
  return impl_->prepare_backward(shape);
}

const AttentionConfig& Attention::config() const noexcept {
  return impl_->config();
}

Device Attention::device() const noexcept {
  return impl_->device();
}

CacheCounters Attention::cache_counters() const {
  return impl_->cache_counters();
}

api::TuneReport api::TuningAccess::tune(const Attention& attention, Operation op, const AttentionShape& shape,
                                        const TuneOptions& options) {
  return attention.impl_->tune(op, shape, options);
}

void dropout_mask(const DropoutState& state, float probability, std::int64_t b, std::int64_t h_q, std::int64_t s_q,
                  std::int64_t s_kv, std::uint8_t* keep) {
  AttentionConfig config;
  config.head_dim = 8;
  config.dropout = probability;
  api::validate(config, true);
  api::checked(config, {.b = b, .h_q = h_q, .s_q = s_q, .s_kv = s_kv});
  const bool empty = b == 0 || h_q == 0 || s_q == 0 || s_kv == 0;
  if (keep == nullptr && !empty) support::throw_invalid("keep", "a null pointer", "memory for the mask");
  reference::dropout_mask({double{probability}, state.seed, state.offset}, b, h_q, s_q, s_kv, keep);
}

const char* version() noexcept {
  return FA_VERSION_STRING;
}

}  // namespace fa
