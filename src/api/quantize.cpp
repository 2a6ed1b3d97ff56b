#include "api/quantize.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "api/build.hpp"
#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/views.hpp"
#include "driver/nvtx.hpp"
#include "plan/catalogue.hpp"
#include "reference/quantize.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

/// Of q, k or v.
struct Names {
  const char* from;
  const char* codes;
  const char* scale;
};

/// What a tensor of rank 3 without a batch axis is in a packed batch: [h, ..] as [1, h, ..].
TensorView with_batch(const AttentionConfig& config, TensorView view) noexcept {
  if (!config.varlen || view.rank != 2) return view;
  view.rank = 3;
  std::shift_right(view.shape.begin(), view.shape.begin() + 3, 1);
  std::shift_right(view.strides.begin(), view.strides.begin() + 3, 1);
  view.shape[0] = 1;
  view.strides[0] = 0;
  return view;
}

/// A tensor of f32 of these sizes.
TensorView floats(const AttentionConfig& config, const char* name, const TensorView& given, std::int64_t b,
                  std::int64_t h, std::int64_t last, bool written) {
  const TensorView view = with_batch(config, given);
  const std::string axes =
      config.varlen ? fmt::format("f32 [{}, {}]", h, last) : fmt::format("f32 [{}, {}, {}]", b, h, last);
  if (!view.defined()) throw_invalid(name, "nothing", axes);
  if (view.dtype != DType::f32) throw_invalid(name, to_string(view.dtype), axes);
  if (view.rank != 3 || view.shape[0] != b || view.shape[1] != h || view.shape[2] != last) {
    throw_invalid(name, fmt::format("shape {}", shape_text(given)), axes);
  }
  check_memory(name, view);
  if (written) check_writable(name, view);
  return view;
}

class Check {
 public:
  Check(const AttentionConfig& config, const QuantizeInputs& inputs) : config_(config), in_(inputs) {}

  QuantizeCall call() {
    if (config_.dtype != DType::i8 && config_.dtype != DType::e4m3) {
      throw_invalid("dtype", to_string(config_.dtype), "i8 or e4m3 for quantize");
    }
    plan::QuantizePass q =
        rows({"q", "q_codes", "q_scale"}, in_.q, in_.q_codes, in_.q_scale, config_.head_dim, config_.dtype);
    plan::QuantizePass k =
        rows({"k", "k_codes", "k_scale"}, in_.k, in_.k_codes, in_.k_scale, config_.head_dim, config_.dtype);
    const plan::QuantizePass v =
        rows({"v", "v_codes", "v_scale"}, in_.v, in_.v_codes, in_.v_scale, d_v_of(config_), DType::e4m3);
    QuantizeCall call;
    const auto add = [&](const plan::QuantizePass& pass) {
      if (pass.x.defined() && pass.x.elements() != 0) call.passes[call.count++] = pass;
    };
    set_mean(q, k);
    if (k.mean.defined() && !in_.mean_given) {
      plan::QuantizePass means = k;
      means.means = true;
      means.codes = {};
      if (k.x.shape[0] * k.x.shape[1] != 0) call.passes[call.count++] = means;
    }
    add(q);
    add(k);
    add(v);
    if (tensors_.defined) tensors_.all.check_disjoint();
    return call;
  }

 private:
  /// Shared memory between what is written and anything else is refused.
  struct Tensors {
    CallTensors all;
    bool defined = false;
  };

  plan::QuantizePass rows(const Names& names, const TensorView& from, const TensorView& codes, const TensorView& scale,
                          std::int64_t d, DType dtype) {
    plan::QuantizePass pass;
    if (!from.defined()) {
      for (const auto& [name, view] : {std::pair{names.codes, &codes}, std::pair{names.scale, &scale}}) {
        if (view->defined()) throw_invalid(name, "given", fmt::format("nothing without {}", names.from));
      }
      return pass;
    }
    if (from.dtype != DType::f16 && from.dtype != DType::bf16 && from.dtype != DType::f32) {
      throw_invalid(names.from, to_string(from.dtype), "f16, bf16 or f32");
    }
    pass.x = tensor_of_call(names.from, from, config_, false, false, from.dtype);
    if (pass.x.shape[3] != d)
      throw_invalid(names.from, fmt::format("shape {}", shape_text(from)), fmt::format("rows of {}", d));
    pass.codes = tensor_of_call(names.codes, codes, config_, false, false, dtype);
    if (pass.codes.shape != pass.x.shape) {
      throw_invalid(names.codes, fmt::format("shape {}", shape_text(codes)), fmt::format("that of {}", names.from));
    }
    check_writable(names.codes, pass.codes);
    if (!rows_aligned(pass.codes)) {
      throw_invalid(names.codes, "rows that start elsewhere", "rows that start at multiples of 16 bytes");
    }
    pass.scale =
        floats(config_, names.scale, scale, pass.x.shape[0], pass.x.shape[1], pass.x.shape[2], !in_.scales_given);
    pass.scale_given = in_.scales_given;
    tensors_.defined = true;
    tensors_.all.add_read(names.from, from);
    tensors_.all.add_written(names.codes, codes);
    add(names.scale, scale, !in_.scales_given);
    return pass;
  }

  void add(const char* name, const TensorView& view, bool written) {
    if (written) {
      tensors_.all.add_written(name, view);
    } else {
      tensors_.all.add_read(name, view);
    }
  }

  void set_mean(plan::QuantizePass& q, plan::QuantizePass& k) {
    const TensorView& like = k.x.defined() ? k.x : q.x;
    if (!in_.k_mean.defined()) {
      if (in_.row_bias.defined()) throw_invalid("row_bias", "given", "nothing without k_mean");
      if (in_.mean_given) throw_invalid("mean_given", "true", "false without k_mean");
      return;
    }
    if (!k.x.defined() && (!in_.mean_given || !q.x.defined())) {
      throw_invalid("k_mean", "given", "nothing without k, or with mean_given and q");
    }
    const TensorView view = with_batch(config_, in_.k_mean);
    const std::int64_t heads = k.x.defined() ? k.x.shape[1] : view.shape[1];
    k.mean = floats(config_, "k_mean", in_.k_mean, like.shape[0], heads, config_.head_dim, !in_.mean_given);
    if (k.mean.shape[2] > 1 && k.mean.strides[2] != 1) {
      throw_invalid("k_mean", fmt::format("stride {} of the last axis", k.mean.strides[2]), "stride 1");
    }
    add("k_mean", in_.k_mean, !in_.mean_given);
    if (!in_.row_bias.defined()) return;
    if (!q.x.defined()) throw_invalid("row_bias", "given", "nothing without q");
    if (heads == 0 ? q.x.shape[1] != 0 : q.x.shape[1] % heads != 0) {
      throw_invalid("q", fmt::format("{} heads", q.x.shape[1]), fmt::format("a multiple of h_kv = {}", heads));
    }
    if (q.x.shape[0] != like.shape[0])
      throw_invalid("q", fmt::format("b = {}", q.x.shape[0]), fmt::format("{}, as k", like.shape[0]));
    q.mean = k.mean;
    q.bias = floats(config_, "row_bias", in_.row_bias, q.x.shape[0], q.x.shape[1], q.x.shape[2], true);
    add("row_bias", in_.row_bias, true);
  }

  const AttentionConfig& config_;
  const QuantizeInputs& in_;
  Tensors tensors_;
};

/// Never 0, and another for every kernel of a configuration.
std::uint64_t code_of(const plan::KernelSpec& spec) noexcept {
  auto code = static_cast<std::uint64_t>(spec.d_qk);
  code = code << 8 | static_cast<std::uint64_t>(spec.dtype);
  code = code << 1 | (spec.as<plan::Quantize>().e4m3 ? 1 : 0);
  code = code << 1 | (spec.as<plan::Quantize>().means ? 1 : 0);
  return code << 1 | (spec.aligned ? 1 : 0);
}

}  // namespace

QuantizeCall check_quantize(const AttentionConfig& config, const QuantizeInputs& inputs) {
  return Check(config, inputs).call();
}

void quantize_on_host(const QuantizeCall& call) {
  for (const plan::QuantizePass& pass : call.given()) {
    reference::quantize({pass.x, pass.codes, pass.scale, pass.mean, pass.bias, pass.scale_given, pass.means});
  }
}

DeviceQuantize::DeviceQuantize(const AttentionConfig& config, const driver::ContextRef& context,
                               std::shared_ptr<cache::Store> store)
    : config_(config), context_(context), store_(std::move(store)) {}

const Ready& DeviceQuantize::get(const plan::KernelSpec& spec) {
  const std::uint64_t code = code_of(spec);
  if (const Ready* const ready = ready_.find(code)) return *ready;
  Supply supply(config_);
  supply.accept.driver = driver::api().version;
  supply.command = [&] { return remedy(spec, config_); };
  const ChosenKernel chosen = choose_kernel({&spec, 1}, *store_, supply, config_.deterministic);
  Ready ready;
  ready.kernels[plan::Role::attention] = {load_kernel(chosen, context_, &ready.info),
                                          static_cast<unsigned>(spec.threads()),
                                          static_cast<unsigned>(plan::shared_bytes(spec))};
  return ready_.put_first(code, std::move(ready));
}

void DeviceQuantize::prepare(const QuantizeCall& call) {
  const driver::ContextScope scope(context_.context());
  for (const plan::QuantizePass& pass : call.given()) get(plan::quantize_spec(pass, context_.info().arch));
}

void DeviceQuantize::run(const QuantizeCall& call, Stream stream) {
  const driver::ContextScope scope(context_.context());
  std::array<kernel::QuantizeParams, 4> params;
  std::array<std::int64_t, 4> grids{};
  std::array<const Ready*, 4> ready{};
  for (std::size_t i = 0; i < call.count; ++i) {  // before anything is launched
    const plan::KernelSpec spec = plan::quantize_spec(call.passes[i], context_.info().arch);
    ready[i] = &get(spec);
    grids[i] = plan::quantize_params(call.passes[i], spec, params[i]);
  }
  for (std::size_t i = 0; i < call.count; ++i) {
    const ReadyKernel& kernel = ready[i]->kernels[plan::Role::attention];
    const driver::NvtxRange range(ready[i]->info.spec.c_str());
    driver::launch(kernel.loaded->function(), static_cast<unsigned>(grids[i]), kernel.threads, kernel.shared_bytes,
                   stream, &params[i]);
  }
}

}  // namespace fa::api
