#include <optional>
#include <utility>
#include <vector>

#include "api/append.hpp"
#include "api/build.hpp"
#include "api/problem.hpp"
#include "support/log.hpp"

namespace fa::api {
namespace {

/// Never 0, and another for every kernel of a configuration.
std::uint64_t code_of(const plan::AppendProblem& problem) noexcept {
  auto code = static_cast<std::uint64_t>(problem.rotary_dims);
  code = code << 2 | static_cast<std::uint64_t>(problem.table);
  code = code << 1 | (problem.interleaved ? 1 : 0);
  code = code << 1 | (problem.aligned ? 1 : 0);
  code = code << 1 | (problem.scales_given ? 1 : 0);
  return code << 1 | 1;
}

/// What pairs turn by, once for calls of a thread that want the same.
const plan::RotaryTurns& turns_of(const RotaryEmbedding& rotary) noexcept {
  struct Known {
    int dims = 0;
    double base = 0;
    plan::RotaryTurns turns{};
  };
  thread_local Known known;
  if (known.dims != rotary.dims || known.base != rotary.base) {
    known = {rotary.dims, rotary.base, plan::rotary_turns(rotary.dims, rotary.base)};
  }
  return known.turns;
}

/// A copy of an array of the device, in the place of which it is put; queued.
template <class Int>
void fetch(const Int*& array, std::vector<Int>& copy, std::int64_t count, Stream stream) {
  if (array == nullptr || count == 0) return;
  copy.resize(static_cast<std::size_t>(count));
  driver::check(driver::api().cuMemcpyDtoHAsync(copy.data(), reinterpret_cast<CUdeviceptr>(array),
                                                copy.size() * sizeof(Int), stream),
                "cuMemcpyDtoHAsync");
  array = copy.data();
}

/// Likewise of a tensor of ints, whatever its strides.
void fetch(TensorView& view, std::vector<std::int32_t>& copy, Stream stream) {
  if (!view.defined() || view.elements() == 0) return;
  std::int64_t low = 0, high = 0;
  for (std::size_t axis = 0; axis < 2; ++axis) {
    const std::int64_t length = (view.shape[axis] - 1) * view.strides[axis];
    (length < 0 ? low : high) += length;
  }
  const auto* first = static_cast<const std::int32_t*>(view.data) + low;
  fetch(first, copy, high - low + 1, stream);
  view.data = copy.data() - low;
}

}  // namespace

DeviceAppend::DeviceAppend(const AttentionConfig& config, const driver::ContextRef& context,
                           std::shared_ptr<cache::Store> store)
    : config_(config), context_(context), store_(std::move(store)) {}

const Ready& DeviceAppend::get(plan::AppendProblem problem) {
  const std::uint64_t code = code_of(problem);
  if (const Ready* const ready = ready_.find(code)) return *ready;
  const driver::ContextScope scope(context_.context());
  problem.arch = context_.info().arch;
  Supply supply(config_);
  supply.accept.driver = driver::api().version;
  const plan::Alternatives specs = plan::append_specs(problem);
  supply.command = [&] { return remedy(specs.front(), config_); };
  const ChosenKernel chosen = choose_kernel(specs, *store_, supply, config_.deterministic);
  Ready ready;
  ready.specs[plan::Role::append] = chosen.spec;
  ready.kernels[plan::Role::append] = {load_kernel(chosen, context_, &ready.info),
                                       static_cast<unsigned>(chosen.spec.threads()), 0};
  ready.info.chosen_by = "planner";
  support::logf(LogLevel::debug, "ready: {} ({})", ready.info.spec, ready.info.origin);
  return ready_.put_first(code, std::move(ready));
}

void DeviceAppend::check_values(const AppendCall& call, Stream stream) const {
  if (!config_.check_sequences) return;
  if (driver::is_capturing(stream)) {
    throw Error(ErrorCode::unsupported,
                "check_sequences = true: the stream is being captured, and lengths cannot be read back then",
                {{"argument", "check_sequences"}, {"value", "true"}, {"accepted", "false while a stream is captured"}});
  }
  AppendCall host = call;
  AppendInputs& inputs = host.inputs;
  PagedCache& cache = inputs.cache;
  const std::int64_t rows = inputs.k.shape[0] * inputs.k.shape[2];
  std::vector<std::int32_t> cu, used, table, index, slots, positions;
  std::vector<std::int64_t> slots_64, positions_64;
  fetch(inputs.cu_seqlens_k_new, cu, inputs.b + 1, stream);
  fetch(inputs.seqused_kv, used, inputs.b, stream);
  fetch(cache.block_table, table, stream);
  fetch(cache.batch_index, index, inputs.b, stream);
  fetch(inputs.slots, slots, rows, stream);
  fetch(inputs.slots_64, slots_64, rows, stream);
  fetch(inputs.rotary.positions, positions, rows, stream);
  fetch(inputs.rotary.positions_64, positions_64, rows, stream);
  driver::check(driver::api().cuStreamSynchronize(stream), "cuStreamSynchronize");
  check_append_values(host);
}

void DeviceAppend::run(const AppendCall& call, Stream stream) {
  if (call.empty) return;
  const driver::ContextScope scope(context_.context());
  check_values(call, stream);
  const Ready& ready = get(call.problem);
  const RotaryEmbedding& rotary = call.inputs.rotary;
  const bool by_base = rotary.dims > 0 && !rotary.cos.defined();
  plan::CallPlan plan;
  plan_call(call.problem, ready.specs[plan::Role::append], call.inputs, by_base ? &turns_of(rotary) : nullptr, plan);
  execute(plan, {}, ready, {}, stream, {});
}

}  // namespace fa::api
