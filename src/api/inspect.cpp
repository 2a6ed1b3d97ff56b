#include "api/inspect.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <limits>
#include <utility>

#include "api/build.hpp"
#include "api/views.hpp"
#include "reference/elements.hpp"
#include "reference/geometry.hpp"
#include "reference/packed.hpp"
#include "reference/paged.hpp"
#include "reference/tensor_rows.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using plan::FoundElement;
using reference::Made;
using support::throw_invalid;
using support::throw_unsupported;

/// What a backward reads of what a forward does.
reference::ForwardArgs forward_args_of(const reference::BackwardArgs& from) {
  reference::ForwardArgs args;
  args.q = from.q;
  args.k = from.k;
  args.v = from.v;
  args.o = from.o;
  args.lse = from.lse;
  args.scale = from.scale;
  args.causal = from.causal;
  args.causal_align = from.causal_align;
  args.dropout = from.dropout;
  args.variant = from.variant;
  args.f64 = from.f64;
  return args;
}

void check_dump_shape(const AttentionConfig& config, const ForwardCall& call, const TensorView& p) {
  const DType dtype = config.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (p.dtype != dtype) throw_invalid("dump.p", to_string(p.dtype), to_string(dtype));
  if (p.rank != 2) throw_invalid("dump.p", shape_text(p), "[s_q, s_kv]");
  const bool ragged = config.varlen || config.page_size != 0;
  if (!ragged && (p.shape[0] != call.shape.s_q || p.shape[1] != call.shape.s_kv)) {
    throw_invalid("dump.p", shape_text(p), fmt::format("[{}, {}], as s_q and s_kv", call.shape.s_q, call.shape.s_kv));
  }
  for (const std::size_t axis : {std::size_t{0}, std::size_t{1}}) {
    if (p.shape[axis] > kMaxLength)
      throw_invalid("dump.p", shape_text(p), fmt::format("at most {} a axis", kMaxLength));
  }
}

}  // namespace

void check_dump(const AttentionConfig& config, const ForwardCall& call, const ForwardOutputs& outputs, bool host) {
  const ProbabilityDump& dump = outputs.dump;
  if (!dump.p.defined()) return;
  if (!wants_debug_kernels(config)) throw_invalid("dump.p", "given", "nothing without AttentionConfig::debug");
  check_memory("dump.p", dump.p);
  check_writable("dump.p", dump.p);
  check_dump_shape(config, call, dump.p);
  if (!call.lse.defined()) throw_invalid("lse", "nothing", "a tensor, where there is dump.p");
  if (dump.b < 0 || dump.b >= call.shape.b) throw_invalid("dump.b", dump.b, fmt::format("below {}", call.shape.b));
  if (dump.h < 0 || dump.h >= call.shape.h_q) throw_invalid("dump.h", dump.h, fmt::format("below {}", call.shape.h_q));
  if (host) return;
  if (is_fp8(config.dtype)) throw_unsupported("dump.p", to_string(config.dtype), "a dtype of 16 or 32 bits");
  if (config.k_dtype) throw_unsupported("dump.p", "given", "nothing with k_dtype, but on the host");
  if (call.place && call.place->begin != nullptr) {
    throw_unsupported("dump.p", "given", "nothing with ShardPlace::begin, but on the host");
  }
}

void check_without_dump(const ProbabilityDump& dump, const char* accepted) {
  if (dump.p.defined()) throw_invalid("dump.p", "given", accepted);
}

Inspection::Inspection(const AttentionConfig& config, const HostAttention& host, const ForwardCall& call,
                       const VariantCall& variant, const reference::Fetch* fetch)
    : config_(config), fetch_(fetch), sequences_(call.sequences), cache_(call.cache), shape_(call.shape) {
  call_.args = host.forward_args(call, variant, fetch);
  call_.fetch = fetch;
  add("o", call.o, Made::of_row);
  add("lse", call.lse, Made::of_row, true);
  const CheckedStatistics& statistics = call.statistics;
  add("max_logit", statistics.max_logit_rows, Made::of_row, true);
  if (statistics.heads > 0) add_of_heads("max_logit", statistics.outputs.max_logit, Made::of_anything, true);
  add("entropy", statistics.entropy_rows, Made::of_row);
  add("column_sums", statistics.column_sums, Made::of_p, false, true);
}

Inspection::Inspection(const AttentionConfig& config, const HostAttention& host, const BackwardCall& call,
                       const VariantCall& variant, const reference::Fetch* fetch)
    : config_(config), fetch_(fetch), sequences_(call.sequences), shape_(call.shape) {
  const reference::BackwardArgs args = host.backward_args(call, variant, fetch);
  call_.args = forward_args_of(args);
  call_.dout = args.dout;
  call_.dlse = args.dlse;
  call_.entropy = args.entropy;
  call_.dentropy = args.dentropy;
  call_.dmax_logit = args.dmax_logit;
  call_.dcolumn_sums = args.dcolumn_sums;
  call_.of_scaled = args.of_scaled;
  call_.fetch = fetch;
  add("dq", call.dq, Made::of_row);
  add("dk", call.dk, Made::of_key, false, true);
  add("dv", call.dv, Made::of_p, false, true);
  if (variant.dsink.defined()) add_of_heads("dsink", variant.dsink, Made::of_all_rows, false);
  for (const expression::CapturedView& captured : variant.views()) {
    const std::string& name = call_.args.variant.program->captures[&captured - variant.views().data()].name;
    if (captured.gradient.defined()) add_captured_gradient("d" + name, captured.gradient);
  }
}

void Inspection::add(const char* name, const TensorView& view, Made made, bool minus, bool keys) {
  if (!view.defined() || view.elements() == 0 || shape_.b == 0) return;
  InspectedResult result;
  result.name = name;
  result.scanned.view = view;
  result.scanned.minus = minus;
  result.keys = keys;
  result.made = made;
  result.group = view.shape[1] == 0 ? 1 : shape_.h_q / view.shape[1];
  if (config_.varlen && !(keys && config_.page_size != 0)) {
    result.scanned.b = sequences_.b;
    result.scanned.cu = keys ? sequences_.cu_seqlens_kv : sequences_.cu_seqlens_q;
    result.scanned.used = keys ? sequences_.seqused_kv : sequences_.seqused_q;
    result.scanned.longest = keys ? shape_.s_kv : shape_.s_q;
    if (result.scanned.longest == 0) return;
  }
  results_.push_back(std::move(result));
}

/// [h], as [1, h, 1].
void Inspection::add_of_heads(const char* name, const TensorView& view, Made made, bool minus) {
  if (view.elements() == 0) return;
  InspectedResult result;
  result.name = name;
  result.scanned.view = view;
  result.scanned.view.rank = 3;
  result.scanned.view.shape = {1, view.shape[0], 1, 0};
  result.scanned.view.strides = {0, view.strides[0], 0, 0};
  result.scanned.minus = minus;
  result.heads = true;
  result.made = made;
  results_.push_back(std::move(result));
}

/// Without gaps: with axes of 1 in front, so that it has three, or four.
void Inspection::add_captured_gradient(const std::string& name, const TensorView& gradient) {
  if (gradient.elements() == 0) return;
  InspectedResult result;
  result.name = name;
  result.capture_rank = gradient.rank;
  TensorView& view = result.scanned.view;
  view = gradient;
  view.rank = gradient.rank == 4 ? 4 : 3;
  const auto missing = static_cast<std::size_t>(view.rank - gradient.rank);
  std::int64_t stride = 1;
  for (std::size_t axis = static_cast<std::size_t>(view.rank); axis-- > 0;) {
    view.shape[axis] = axis >= missing ? gradient.shape[axis - missing] : 1;
    view.strides[axis] = stride;
    stride *= view.shape[axis];
  }
  results_.push_back(std::move(result));
}

void Inspection::use(const PackedSequences& sequences, const PagedCache& cache) {
  sequences_ = sequences;
  cache_ = cache;
}

std::int64_t Inspection::parts() const noexcept {
  return config_.varlen || config_.page_size != 0 ? sequences_.b : 1;
}

reference::ForwardArgs Inspection::part(std::int64_t i) const {
  if (config_.page_size != 0) return call_of_request(call_.args, sequences_, cache_, i);
  return config_.varlen ? call_of_sequence(call_.args, sequences_, i) : call_.args;
}

reference::InspectedCall Inspection::inspected(std::int64_t i) const {
  reference::InspectedCall part = call_;
  part.args = this->part(i);
  if (!config_.varlen || config_.page_size != 0) return part;
  for (TensorView reference::InspectedCall::*tensor :
       {&reference::InspectedCall::dout, &reference::InspectedCall::dlse, &reference::InspectedCall::entropy,
        &reference::InspectedCall::dentropy}) {
    part.*tensor = reference::rows_of_sequence(call_.*tensor, sequences_, i);
  }
  if (call_.dmax_logit.rank != 1) part.dmax_logit = reference::rows_of_sequence(call_.dmax_logit, sequences_, i);
  part.dcolumn_sums = reference::keys_of_sequence(call_.dcolumn_sums, sequences_, i);
  return part;
}

/// Of batch entry `b`, or of all where they are dense.
TensorView Inspection::rows_of(const InspectedResult& result, std::int64_t b) const {
  if (result.scanned.cu == nullptr) return result.scanned.view;
  return result.keys ? reference::keys_of_sequence(result.scanned.view, sequences_, b)
                     : reference::rows_of_sequence(result.scanned.view, sequences_, b);
}

void Inspection::check() const {
  for (const InspectedResult& result : results_) {
    const bool packed = result.scanned.cu != nullptr;
    for (std::int64_t i = 0; i < (packed ? sequences_.b : 1); ++i) {
      const auto broken = reference::first_not_finite(rows_of(result, i), result.scanned.minus);
      if (broken) report(result, {packed ? i : broken->b, broken->h, broken->q, std::max<std::int64_t>(broken->d, 0)});
    }
  }
}

void Inspection::report(const InspectedResult& result, const FoundElement& element) const {
  ErrorLocation found = cause(result, element).value_or(location(result, element));
  found.result = result.name;
  throw Error(found);
}

std::optional<ErrorLocation> Inspection::cause(const InspectedResult& result, const FoundElement& element) const {
  reference::BrokenResult broken;
  broken.made = result.made;
  broken.first_h = element.h * result.group;
  broken.end_h = (element.h + 1) * result.group;
  broken.at = element.s;
  const std::vector<double> greatest = greatest_logits(broken);
  if (result.made != Made::of_all_rows) return cause_in(element.b, broken, greatest);
  for (std::int64_t b = 0; b < shape_.b; ++b) {
    if (std::optional<ErrorLocation> found = cause_in(b, broken, greatest)) return found;
  }
  return std::nullopt;
}

/// Of heads, over all that the call is made of: one row of each has the gradient of the greatest.
std::vector<double> Inspection::greatest_logits(const reference::BrokenResult& broken) const {
  if (!call_.dmax_logit.defined() || call_.dmax_logit.rank != 1) return {};
  std::vector<double> greatest(static_cast<std::size_t>(shape_.h_q), -std::numeric_limits<double>::infinity());
  if (broken.made != Made::of_row && broken.made != Made::of_key) return greatest;
  for (std::int64_t i = 0; i < parts(); ++i) {
    reference::raise_greatest(inspected(i), broken.first_h, broken.end_h, greatest);
  }
  return greatest;
}

/// Each sequence, and each request, is a call with a batch of its own.
std::optional<ErrorLocation> Inspection::cause_in(std::int64_t b, reference::BrokenResult broken,
                                                  const std::vector<double>& greatest) const {
  const bool apart = config_.varlen || config_.page_size != 0;
  broken.b = apart ? 0 : b;
  reference::InspectedCall part = inspected(apart ? b : 0);
  part.greatest = greatest;
  std::optional<ErrorLocation> found = find_cause(part, broken);
  if (found && apart && found->b >= 0) found->b = b;
  return found;
}

/// Of the result itself.
ErrorLocation Inspection::location(const InspectedResult& result, const FoundElement& element) const {
  const TensorView rows = rows_of(result, element.b);
  const bool packed = result.scanned.cu != nullptr;
  ErrorLocation at;
  at.tensor = result.name;
  const std::int64_t offset = reference::row_offset(rows, packed ? 0 : element.b, element.h, element.s) + element.d;
  reference::TensorRows<double, true>(call_.args, fetch_).elements(rows, offset, 1, 1, &at.value);
  if (rows.dtype == DType::e4m3) at.value = std::numeric_limits<double>::quiet_NaN();
  if (result.capture_rank != 0) {
    at.index = {element.b, element.h, element.s};
    if (rows.rank == 4) at.index.push_back(element.d);
    at.index.erase(at.index.begin(), at.index.end() - result.capture_rank);
    return at;
  }
  at.h = element.h;
  if (result.heads) return at;
  at.b = element.b;
  (result.keys ? at.kv : at.q) = element.s;
  if (rows.rank == 4) at.d = element.d;
  return at;
}

void Inspection::dump(const ProbabilityDump& dump) const {
  const bool apart = config_.varlen || config_.page_size != 0;
  reference::probabilities(part(apart ? dump.b : 0), apart ? 0 : dump.b, dump.h, dump.p);
}

}  // namespace fa::api
