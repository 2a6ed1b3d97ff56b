#include "emulator/packed_run.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <ostream>
#include <span>
#include <stdexcept>
#include <utility>

#include "emulator/forward_run.hpp"
#include "emulator/plan_run.hpp"
#include "emulator/registry.hpp"
#include "emulator/specs.hpp"
#include "emulator/variant_run.hpp"
#include "plan/call_plan.hpp"
#include "plan/catalogue.hpp"
#include "plan/forward_launch.hpp"
#include "plan/planner.hpp"
#include "reference/packed.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::plan::KernelSpec;
using fa::plan::Problem;
using fa::plan::Role;
using fa::test::AttentionCase;
using fa::test::AttentionGradients;
using fa::test::AttentionInputs;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;

constexpr int kBlocks = 3;  // of a persistent grid

Problem problem_of(const KernelSpec& spec, const PackedCase& c) {
  const AttentionCase& a = c.attention;
  Problem problem;
  problem.arch = spec.arch;
  problem.dtype = a.dtype;
  problem.d_qk = static_cast<int>(a.d_qk);
  problem.d_v = static_cast<int>(a.d_v);
  problem.causal = a.causal;
  problem.causal_align = a.causal_align;
  problem.aligned = spec.aligned;
  problem.varlen = spec.varlen;
  problem.dropout = spec.dropout;
  problem.b = c.sequences ? c.sequences->count() : a.b;
  problem.h_q = a.h_q;
  problem.h_kv = a.h_kv;
  problem.s_q = c.max_s_q != 0 ? c.max_s_q : a.s_q;
  problem.s_kv = c.max_s_kv != 0 ? c.max_s_kv : a.s_kv;
  if (c.sequences) {
    problem.total_q = a.s_q;
    problem.total_kv = a.s_kv;
  }
  problem.o_dtype = a.o_dtype;
  problem.bounded = spec.bounded;
  if (c.variant != nullptr) add_variant(problem, *c.variant);
  return problem;
}

/// What belongs to a sequence, by row.
std::vector<bool> rows_of_sequences(const std::vector<std::int32_t>& cu, const std::vector<std::int32_t>& used,
                                    std::int64_t total) {
  std::vector<bool> taken(static_cast<std::size_t>(total), false);
  for (std::size_t i = 0; i + 1 < cu.size(); ++i) {
    const std::int32_t count = used.empty() ? cu[i + 1] - cu[i] : used[i];
    for (std::int32_t row = cu[i]; row < cu[i] + count; ++row) taken[static_cast<std::size_t>(row)] = true;
  }
  return taken;
}

/// The memory of a call and its variants.
class Call {
 public:
  Call(const KernelSpec& spec, const PackedCase& c) : spec_(spec), c_(c) {
    if (c.sequences) {
      const Sequences& s = *c.sequences;
      variants_.sequences.cu_q = place_array(memory_, "cu_seqlens_q", s.cu_q);
      variants_.sequences.cu_kv = place_array(memory_, "cu_seqlens_kv", s.cu_kv);
      variants_.sequences.used_q = place_array(memory_, "seqused_q", s.used_q);
      variants_.sequences.used_kv = place_array(memory_, "seqused_kv", s.used_kv);
      if (c.trust) {
        rows_ = rows_of_sequences(s.cu_q, s.used_q, c.attention.s_q);
        keys_ = rows_of_sequences(s.cu_kv, s.used_kv, c.attention.s_kv);
      }
    }
    if (c.dropout == 0) return;
    variants_.dropout = fa::plan::dropout_params(double{c.dropout});
    if (c.state_in_memory) {
      const std::vector<std::uint64_t> state{c.seed, c.offset};
      variants_.dropout.state =
          reinterpret_cast<const std::uint64_t*>(memory_.add_input("dropout state", std::as_bytes(std::span(state))));
    } else {
      variants_.dropout.seed = c.seed;
      variants_.dropout.offset = c.offset;
    }
  }

  Memory& memory() { return memory_; }
  const fa::plan::PackedArgs& variants() const { return variants_; }

  /// `copied`: by the copy engine of an sm90 kernel, whose boxes reach over the rows of a sequence. What there is must
  /// not matter: it is NaN.
  TensorView input(const char* name, const HostTensor& tensor, bool keys, bool copied = false) {
    const Placed t = place_input(memory_, name, tensor, Placement::bshd, spec_.aligned);
    if (copied && spec_.kernel().tensor_maps) {
      spoil_padding(t, keys);
    } else {
      forbid_padding(t, keys);
    }
    return view_of(t, tensor);
  }

  TensorView scales(const char* name, const HostTensor& tensor, TensorView view) {
    view.data = place_input(memory_, name, tensor, Placement::bhsd, true).data;
    return view;
  }

  /// Q, of which the copy engine brings whole tiles.
  TensorView query_input(const HostTensor& tensor) {
    if (!spec_.kernel().tensor_maps) return input("q", tensor, false);
    const Placed t = place_input(memory_, "q", tensor, Placement::bshd, spec_.aligned);
    poison_padding(t);
    return view_of(t, tensor);
  }

  TensorView output(const char* name, HostTensor& tensor, bool keys, float padding = 0) {
    const Placed t = place_output(memory_, name, tensor, Placement::bshd, spec_.aligned);
    if (!c_.clear) forbid_padding(t, keys);
    outputs_.push_back({t, &tensor, keys});
    const TensorView view = view_of(t, tensor);
    if (c_.clear) clear(view, keys, padding);
    return view;
  }

  void run(const KernelSpec& spec, std::int64_t grid, const void* params) {
    if (grid == 0) return;
    const RegisteredKernel& kernel = registered_kernel(canonical(spec));
    LaunchOptions options;
    options.grid = static_cast<int>(grid);
    options.threads = kernel.threads;
    options.resident = kernel.min_blocks;
    options.shared_bytes = fa::plan::shared_bytes(spec);
    options.seed = c_.schedule;
    launch(kernel.entry, params, memory_, options);
  }

  /// Copies what has to be there to the host.
  void fetch_outputs() {
    for (const Output& output : outputs_) {
      const TensorView view = output.tensor->view();
      const Placed& t = output.placed;
      for_each_row(t.b, t.h, t.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
        const std::vector<bool>& taken = output.keys ? keys_ : rows_;
        if (c_.sequences && !c_.clear && (!c_.trust || !taken[static_cast<std::size_t>(s)])) return;
        const std::byte* row = t.row(b, h, s);
        if (!memory_.written(row, t.row_bytes)) throw std::runtime_error("not written: " + memory_.describe(row));
        const std::int64_t to = b * view.strides[0] + h * view.strides[1] + s * view.strides[2];
        std::copy_n(row, t.row_bytes, static_cast<std::byte*>(view.data) + to * static_cast<std::int64_t>(t.element));
      });
    }
  }

 private:
  struct Output {
    Placed placed;
    HostTensor* tensor;
    bool keys;
  };

  /// Of what may be read, but must not have a part in any result.
  void poison_padding(const Placed& t) {
    if (!c_.sequences || !c_.trust) return;
    for_each_row(t.b, t.h, t.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      if (!rows_[static_cast<std::size_t>(s)]) std::memset(t.row(b, h, s), 0xff, t.row_bytes);  // NaNs
    });
  }

  void forbid_padding(const Placed& t, bool keys) {
    if (!c_.sequences || !c_.trust) return;
    for_each_row(t.b, t.h, t.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      if (!(keys ? keys_ : rows_)[static_cast<std::size_t>(s)]) memory_.set_flags(t.row(b, h, s), t.row_bytes, 0);
    });
  }

  void spoil_padding(const Placed& t, bool keys) {
    if (!c_.sequences || !c_.trust) return;
    for_each_row(t.b, t.h, t.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      if (!(keys ? keys_ : rows_)[static_cast<std::size_t>(s)]) {
        std::fill_n(t.row(b, h, s), t.row_bytes, std::byte{0xff});
      }
    });
  }

  void clear(const TensorView& view, bool keys, float value) {
    if (view.elements() == 0) return;
    const KernelSpec spec = fa::plan::clear_padding_spec(spec_.arch, view.dtype);
    const Problem problem = problem_of(spec_, c_);
    fa::plan::PaddingLaunch launch =
        fa::plan::padding_launch(view, problem.b, keys ? variants_.sequences.cu_kv : variants_.sequences.cu_q,
                                 keys ? variants_.sequences.used_kv : variants_.sequences.used_q,
                                 keys ? problem.s_kv : problem.s_q, value, spec.warps);
    run(spec, launch.grid, &launch.params);
  }

  KernelSpec spec_;
  const PackedCase& c_;
  Memory memory_;
  fa::plan::PackedArgs variants_;
  std::vector<bool> rows_, keys_;
  std::vector<Output> outputs_;
};

template <class Args>
void set_common(const PackedCase& c, std::vector<fa::expression::CapturedView>& views, Args& args) {
  args.scale = static_cast<double>(c.attention.softmax_scale());
  args.causal = c.attention.causal;
  args.causal_align = c.attention.causal_align;
  args.dropout = c.mask();
  args.f64 = true;
  if (c.variant != nullptr) args.variant = fa::test::variant_args(*c.variant, views);
}

void copy_values(const HostTensor& from, HostTensor& to) {
  const TensorView view = from.view();
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    const std::int64_t d = view.rank == 4 ? view.shape[3] : 1;
    for (std::int64_t i = 0; i < d; ++i) to.set(b, h, s, i, from.at(b, h, s, i));
  });
}

}  // namespace

fa::PackedSequences Sequences::view() const {
  fa::PackedSequences view;
  view.b = count();
  view.cu_seqlens_q = cu_q.data();
  view.cu_seqlens_kv = cu_kv.data();
  view.seqused_q = used_q.empty() ? nullptr : used_q.data();
  view.seqused_kv = used_kv.empty() ? nullptr : used_kv.data();
  return view;
}

void PrintTo(const PackedCase& c, std::ostream* out) {
  fa::test::PrintTo(c.attention, out);
  *out << " dropout " << c.dropout << ", " << c.splits << " splits" << (c.clear ? ", cleared" : "");
  if (!c.sequences) return;
  for (const auto& cu : {c.sequences->cu_q, c.sequences->cu_kv}) {
    *out << ", cu";
    for (const std::int32_t at : cu) *out << ' ' << at;
  }
}

AttentionOutputs run_packed(const KernelSpec& spec, const PackedCase& c, const AttentionInputs& inputs) {
  AttentionOutputs outputs = fa::test::make_outputs(c.attention);
  Call call(spec, c);
  fa::plan::ForwardTensors tensors;
  tensors.q = call.query_input(inputs.q);
  tensors.k = call.input("k", inputs.k, true);
  tensors.v = call.input("v", inputs.v, true);
  if (!inputs.q_scale.bytes().empty()) {
    tensors.q_scale = call.scales("q_scale", inputs.q_scale, inputs.q_scale.view());
    if (!inputs.row_bias.bytes().empty()) {
      tensors.row_bias = call.scales("row_bias", inputs.row_bias, inputs.row_bias.view());
    }
    tensors.k_scale = call.scales("k_scale", inputs.k_scale, fa::test::scale_of_heads(inputs.k_scale, 1));
    tensors.v_scale = call.scales("v_scale", inputs.v_scale, fa::test::scale_of_heads(inputs.v_scale, 1));
  }
  tensors.o = call.output("o", outputs.o, false);
  tensors.lse = call.output("lse", outputs.lse, false, -std::numeric_limits<float>::infinity());
  std::optional<PlacedVariant> variant;
  if (c.variant != nullptr) tensors.variant = variant.emplace(call.memory(), *c.variant, false).tensors();
  const Problem problem = problem_of(spec, c);
  PlanKernels kernels;
  kernels.specs[Role::attention] = spec;
  kernels.specs[Role::combine] = combine_spec(spec);
  kernels.names[Role::attention] = c.main_kernel;
  add_companions(problem, kernels);
  const fa::plan::Choice choice{.pack_gqa = spec.pack_gqa, .family = spec.family(), .splits = c.splits};
  fa::plan::CallPlan plan;
  plan_call(problem, choice, kernels.specs, tensors,
            {static_cast<double>(c.attention.softmax_scale()), kBlocks, false, call.variants()}, plan);
  run_plan(plan, kernels, call.memory(), c.schedule);
  call.fetch_outputs();
  return outputs;
}

AttentionGradients run_packed(const BackwardSpecs& specs, const PackedCase& c, const BackwardData& data,
                              VariantResults* extra) {
  const KernelSpec& main = specs.main;
  AttentionGradients gradients = fa::test::make_gradients(c.attention);
  Call call(main, c);
  fa::plan::BackwardTensors tensors;
  tensors.q = call.input("q", data.inputs.q, false, true);
  tensors.k = call.input("k", data.inputs.k, true, true);
  tensors.v = call.input("v", data.inputs.v, true, true);
  tensors.o = call.input("o", data.outputs.o, false);
  tensors.dout = call.input("dout", data.dout, false, true);
  tensors.lse = call.input("lse", data.outputs.lse, false);
  if (c.dlse) tensors.dlse = call.input("dlse", data.dlse, false);
  const auto [wants_dq, wants_dk, wants_dv] = specs.gradients();
  if (wants_dq) tensors.dq = call.output("dq", gradients.dq, false);
  if (wants_dk) tensors.dk = call.output("dk", gradients.dk, true);
  if (wants_dv) tensors.dv = call.output("dv", gradients.dv, true);
  std::optional<PlacedVariant> variant;
  if (c.variant != nullptr) tensors.variant = variant.emplace(call.memory(), *c.variant, true).tensors();
  Problem problem = problem_of(main, c);
  problem.gradients = specs.gradients();
  PlanKernels kernels = plan_kernels(specs, problem);
  kernels.names[Role::attention] = c.main_kernel;
  fa::plan::CallPlan plan;
  plan_call(
      problem,
      fa::plan::BackwardChoice{
          .family = main.family(), .splits = c.splits, .in_turns = main.in_turns(), .gradients = problem.gradients},
      kernels.specs, tensors,
      {static_cast<double>(c.attention.softmax_scale()), main.bounded ? kBlocks : 1, false, call.variants()}, plan);
  if (c.main_blocks != 0) plan.step(Role::attention)->grid = c.main_blocks;
  run_plan(plan, kernels, call.memory(), c.schedule, c.trust);  // with wrong lengths not all that is read was written
  call.fetch_outputs();
  if (variant && extra != nullptr) {
    for (const fa::expression::CapturedView& captured : variant->views) {
      extra->captures.push_back(floats_of(captured.gradient));
    }
    extra->dsink = floats_of(variant->dsink);
  }
  return gradients;
}

AttentionOutputs expected_of(const PackedCase& c, const AttentionInputs& inputs) {
  AttentionCase f64 = c.attention;
  f64.dtype = DType::f64;
  AttentionOutputs outputs = fa::test::make_outputs(f64);
  fa::reference::ForwardArgs args;
  args.q = inputs.q.view();
  args.k = inputs.k.view();
  args.v = inputs.v.view();
  if (!inputs.q_scale.bytes().empty()) args.q_scale = inputs.q_scale.view();
  if (!inputs.row_bias.bytes().empty()) args.row_bias = inputs.row_bias.view();
  args.k_scale = fa::test::scale_of_heads(inputs.k_scale, 1);
  args.v_scale = fa::test::scale_of_heads(inputs.v_scale, 1);
  args.o = outputs.o.view();
  args.lse = outputs.lse.view();
  std::vector<fa::expression::CapturedView> views;
  set_common(c, views, args);
  if (c.sequences) {
    fa::reference::forward(args, c.sequences->view(), true);
  } else {
    fa::reference::forward(args);
  }
  return outputs;
}

namespace {

/// In float64, of the O and LSE of forward.
fa::reference::BackwardArgs backward_args(const PackedCase& c, const BackwardData& data,
                                          const AttentionOutputs& forward, AttentionGradients& gradients,
                                          std::vector<fa::expression::CapturedView>& views) {
  fa::reference::BackwardArgs args;
  args.q = data.inputs.q.view();
  args.k = data.inputs.k.view();
  args.v = data.inputs.v.view();
  args.o = forward.o.view();
  args.lse = forward.lse.view();
  args.dout = data.dout.view();
  if (c.dlse) args.dlse = data.dlse.view();
  args.dq = gradients.dq.view();
  args.dk = gradients.dk.view();
  args.dv = gradients.dv.view();
  set_common(c, views, args);
  return args;
}

AttentionGradients gradients_f64(const PackedCase& c) {
  AttentionCase f64 = c.attention;
  f64.dtype = DType::f64;
  return fa::test::make_gradients(f64);
}

}  // namespace

AttentionGradients expected_of(const PackedCase& c, const BackwardData& data, fa::test::VariantGradients* extra) {
  const AttentionOutputs forward = expected_of(c, data.inputs);
  AttentionGradients gradients = gradients_f64(c);
  std::vector<fa::expression::CapturedView> views;
  fa::reference::BackwardArgs args = backward_args(c, data, forward, gradients, views);
  if (extra != nullptr) {
    fa::test::add_gradients(*c.variant, views, extra->captures);
    extra->dsink.resize(static_cast<std::size_t>(c.variant->sink.elements()));
    if (!extra->dsink.empty()) {
      args.variant.dsink = TensorView(extra->dsink.data(), DType::f64, {c.attention.h_q});
    }
  }
  if (c.sequences) {
    fa::reference::backward(args, c.sequences->view(), true);
  } else {
    fa::reference::backward(args);
  }
  if (extra != nullptr) {
    const fa::PackedSequences sequences = c.sequences ? c.sequences->view() : fa::PackedSequences{};
    extra->bounds = fa::test::error_bounds(args, c.attention.dtype, c.sequences ? &sequences : nullptr);
  }
  return gradients;
}

fa::test::GradientBounds bounds_of(const PackedCase& c, const BackwardData& data) {
  const AttentionOutputs forward = expected_of(c, data.inputs);
  AttentionGradients gradients = gradients_f64(c);
  std::vector<fa::expression::CapturedView> views;
  const fa::reference::BackwardArgs args = backward_args(c, data, forward, gradients, views);
  const fa::PackedSequences sequences = c.sequences ? c.sequences->view() : fa::PackedSequences{};
  return fa::test::gradient_bounds(args, c.attention.dtype, c.sequences ? &sequences : nullptr);
}

BackwardData make_data(const PackedCase& c) {
  BackwardData data{fa::test::make_inputs(c.attention), fa::test::make_outputs(c.attention),
                    fa::test::make_dout(c.attention), fa::test::make_dlse(c.attention)};
  const AttentionOutputs exact = expected_of(c, data.inputs);
  copy_values(exact.o, data.outputs.o);
  copy_values(exact.lse, data.outputs.lse);
  return data;
}

}  // namespace emulator
