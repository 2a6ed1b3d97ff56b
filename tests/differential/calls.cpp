#include "differential/calls.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "differential/inputs.hpp"
#include "differential/random.hpp"
#include "driver/driver.hpp"

namespace fa::differential {
namespace {

/// Arrays that a call names besides tensors.
Tensor integers(const std::vector<std::int32_t>& values, Where where) {
  Tensor t;
  if (values.empty()) return t;
  t = Tensor::dense(DType::i32, {static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) t.set(values[i], static_cast<std::int64_t>(i));
  t.upload(where);
  return t;
}

const std::int32_t* pointer(const Tensor& t) {
  return t.defined() ? static_cast<const std::int32_t*>(t.view().data) : nullptr;
}

/// As include/fa/attention.hpp says it.
bool has_aligned_rows(const TensorView& view) {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] * element % 16 != 0) return false;
  }
  return true;
}

/// Scales of 8-bit elements, [b, h, s], or of heads [b, h, 1], as a call has them: [b, h, s], [b, h] or [h, total].
TensorView scale_view(const Tensor& scales, bool packed_rows) {
  TensorView view = scales.const_view();
  if (!scales.defined() || (scales.shape()[2] != 1 && !packed_rows)) return view;
  if (!packed_rows) {
    view.rank = 2;
    return view;
  }
  view.shape = {view.shape[1], view.shape[2]};
  view.strides = {view.strides[1], view.strides[2]};
  view.rank = 2;
  return view;
}

}  // namespace

Calls::Calls(const Configuration& c, const Call& call, Where where, const Attention& attention)
    : c_(c), call_(call), where_(where), attention_(attention), in_(make_inputs(c, call)) {
  if (c.config.page_size != 0) make_pages();
  for (Tensor* t :
       {&in_.q, &in_.k, &in_.v, &in_.dout, &in_.dlse, &in_.sink, &in_.stored_k.codes, &in_.stored_k.scales,
        &in_.stored_v.codes, &in_.stored_v.scales, &in_.stored_q.codes, &in_.stored_q.scales, &in_.row_bias}) {
    if (t->defined()) t->upload(where);
  }
  for (std::size_t i = 0; i < in_.captures.size(); ++i) {
    if (!in_.captures[i].defined()) continue;
    in_.captures[i].upload(where);
  }
  cu_q_ = integers(call.cu_q, where);
  cu_kv_ = integers(call.cu_kv, where);
  used_q_ = integers(call.used_q, where);
  used_kv_ = integers(pages_ ? pages_->lengths : call.used_kv, where);
  if (c.config.dropout > 0 && call.dropout_on_device && where == Where::cuda) {
    state_ = Tensor::dense(DType::f64, {2});  // two words of 64 bits
    double words[2];
    std::memcpy(&words[0], &call.dropout.seed, 8);
    std::memcpy(&words[1], &call.dropout.offset, 8);
    state_.set(words[0], 0), state_.set(words[1], 1);
    state_.upload(where);
  }
}

void Calls::forward() {
  const AttentionConfig& config = c_.config;
  o_ = output({call_.b, call_.h_q, call_.s_q, config.head_dim_v}, call_.o, output_dtype(config));
  const bool sums = config.statistics.column_sums != ColumnSums::none;  // by lse
  if (call_.lse || call_.backward || config.accumulate || sums)
    lse_ = output({call_.b, call_.h_q, call_.s_q}, call_.lse_layout, statistics(c_));
  if (config.accumulate) make_state();
  ForwardInputs in{queries().const_view(), keys().const_view(), values().const_view()};
  set_scales(in);
  in.cache = cache();
  in.captures = captures();
  if (config.sink) in.sink = in_.sink.const_view();
  in.sequences = sequences();
  in.dropout = dropout();
  in.place = call_.place;
  const StatisticsOutputs to = make_statistics();
  const AttentionShape shape = shape_of({&queries(), &keys(), &values(), &o_});
  const Tensor tiles =
      scratch(call_.tiles && where_ == Where::cuda && c_.mask != nullptr ? attention_.mask_tiles_size(shape) : 0);
  in.tiles = {tiles.defined() ? tiles.view().data : nullptr,
              tiles.defined() ? static_cast<std::size_t>(tiles.elements()) * 4 : 0, false};
  const Tensor workspace = scratch(call_.workspace ? attention_.workspace_size(shape) : 0);
  const Tensor lists = schedule(shape, in);
  attention_.forward(in, {o_.view(), lse_.view(), to}, nullptr, given(workspace));
  if (tiles.defined()) {  // again, with what is known now
    in.tiles.filled = true;
    synchronize();
    o_.refresh();
    if (config.accumulate) lse_.refresh();
    attention_.forward(in, {o_.view(), lse_.view(), to}, nullptr, given(workspace));
  }
  synchronize();
  check(tiles), check(workspace), check(lists);
  o_.download();
  for (Tensor* t : {&lse_, &max_logit_, &entropy_, &sums_}) {
    if (t->defined()) t->download();
  }
  if (where_ == Where::host && !config.accumulate) look_inside(in);
}

void Calls::backward(const Results& expected) {
  const AttentionConfig& config = c_.config;
  if (call_.positive_empty_lse) raise_empty_rows(expected);
  BackwardOutputs out;
  const auto [wants_dq, wants_dk, wants_dv] = call_.gradients;
  if (wants_dq) out.dq = (dq_ = output(in_.q.shape(), call_.dq, config.dtype)).view();
  if (wants_dk) out.dk = (dk_ = output(in_.k.shape(), call_.dk, config.dtype)).view();
  if (wants_dv) out.dv = (dv_ = output(in_.v.shape(), call_.dv, config.dtype)).view();
  gradients_.resize(c_.captures.size());
  for (std::size_t i = 0; i < c_.captures.size(); ++i) {
    if (!c_.captures[i].requires_grad || !in_.captures[i].defined() || !declared(i)) continue;
    gradients_[i] = Tensor::dense(statistics(c_), in_.captures[i].shape());
    gradients_[i].upload(where_);
    out.captures.add({c_.captures[i].name, gradients_[i].view()});
  }
  if (config.sink && call_.dsink) {
    dsink_ = Tensor::dense(statistics(c_), {call_.h_q});
    dsink_.upload(where_);
    out.dsink = dsink_.view();
  }
  BackwardInputs in;
  in.q = in_.q.const_view(), in.k = in_.k.const_view(), in.v = in_.v.const_view();
  in.o = o_.const_view(), in.lse = lse_.const_view(), in.dout = in_.dout.const_view(), in.dlse = in_.dlse.const_view();
  in.captures = captures();
  if (config.sink) in.sink = in_.sink.const_view();
  in.sequences = sequences();
  in.dropout = dropout();
  in.place = call_.place;
  AttentionShape shape = shape_of({&in_.q, &in_.k, &in_.v, &o_, &in_.dout, &dq_, &dk_, &dv_});
  shape.gradients = call_.gradients;
  const Tensor workspace = scratch(call_.workspace ? attention_.backward_workspace_size(shape) : 0);
  attention_.backward(in, out, nullptr, given(workspace));
  synchronize();
  check(workspace);
  for (Tensor* gradient : {&dq_, &dk_, &dv_}) {
    if (gradient->defined()) gradient->download();
  }
  for (Tensor& gradient : gradients_) {
    if (gradient.defined()) gradient.download();
  }
  if (dsink_.defined()) dsink_.download();
}

void Calls::judge_forward(const Results& e, Judge* judge) const {
  judge->hold("o", o_, e.o, untouched(e.q_rows));
  judge->hold("lse", lse_, e.lse, untouched(e.q_rows));
  judge->hold("max_logit", max_logit_, e.max_logit, untouched(e.q_rows));
  judge->hold("entropy", entropy_, e.entropy, untouched(e.q_rows));
  if (!sums_.defined() || (c_.config.varlen && call_.s_q == 0)) return;
  const bool everywhere = pages_.has_value();
  const std::vector<bool> all(everywhere ? static_cast<std::size_t>(positions()) : 0, true);
  judge->hold("column_sums", sums_, in_places(e), untouched(everywhere ? all : e.kv_rows));
}

StatisticsOutputs Calls::make_statistics() {
  const Statistics& wanted = c_.config.statistics;
  StatisticsOutputs to;
  const auto make = [this](Tensor& t, const std::vector<std::int64_t>& shape) {
    t = Tensor::dense(statistics(c_), shape);
    t.poison();
    t.upload(where_);
    return t.view();
  };
  const std::vector<std::int64_t> rows{call_.b, call_.h_q, call_.s_q};
  if (wanted.max_logit != MaxLogit::none) to.max_logit = make(max_logit_, rows);
  if (wanted.entropy) to.entropy = make(entropy_, rows);
  if (wanted.column_sums == ColumnSums::none) return to;
  const std::int64_t heads = wanted.column_sums == ColumnSums::kv_heads ? call_.h_kv : call_.h_q;
  const std::int64_t b = pages_ ? call_.sequences(c_.config.varlen) : call_.b;
  to.column_sums = make(sums_, {b, heads, pages_ ? positions() : call_.s_kv});
  return to;
}

std::int64_t Calls::positions() const {
  const std::int64_t all = pages_->k.shape()[2] * (c_.config.page_size > 0 ? pages_->max_pages : 1);
  return pages_->longest > 0 ? std::min(pages_->longest, all) : all;
}

Expected Calls::in_places(const Results& e) const {
  const std::int64_t heads = sums_.shape()[1], keys = sums_.shape()[2];
  Expected result;
  result.value.assign(static_cast<std::size_t>(sums_.elements()), 0);
  result.bound.assign(result.value.size(), 0);
  std::size_t from = 0;
  for (const Segment& segment : e.summed) {
    const std::int64_t entry = pages_ ? segment.b : segment.tensor_b, first = pages_ ? 0 : segment.first_kv;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t j = 0; j < segment.s_kv; ++j, ++from) {
        if (first + j >= keys) continue;  // of a mistake
        const auto to = static_cast<std::size_t>((entry * heads + h) * keys + first + j);
        result.value[to] = e.column_sums.value[from];
        result.bound[to] = e.column_sums.bound[from];
      }
    }
  }
  return result;
}

void Calls::judge_backward(const Results& e, Judge* judge) const {
  judge->hold("dq", dq_, e.dq, untouched(e.q_rows));
  judge->hold("dk", dk_, e.dk, untouched(e.kv_rows));
  judge->hold("dv", dv_, e.dv, untouched(e.kv_rows));
  const auto never = [](std::int64_t) { return false; };
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    judge->hold(("gradient of " + c_.captures[i].name).c_str(), gradients_[i],
                gradients_[i].defined() ? e.captures[i] : Expected{}, never);
  }
  judge->hold("dsink", dsink_, e.dsink, never);
}

void Calls::make_state() {
  Random random(call_.values + 977);
  const std::int64_t d_v = c_.config.head_dim_v;
  other_keys_.o.assign(static_cast<std::size_t>(call_.b * call_.h_q * call_.s_q * d_v), std::nan(""));
  other_keys_.lse.assign(static_cast<std::size_t>(call_.b * call_.h_q * call_.s_q), std::nan(""));
  for (const Segment& segment : segments_of(c_, call_)) {
    for (std::int64_t h = 0; h < call_.h_q; ++h) {
      for (std::int64_t i = 0; i < segment.s_q; ++i) {
        const std::int64_t s = segment.first_q + i;
        const auto row = static_cast<std::size_t>((segment.tensor_b * call_.h_q + h) * call_.s_q + s);
        const bool none = random.percent(25);
        const double infinity = random.percent(50) ? HUGE_VAL : -HUGE_VAL;
        const double lse = none ? infinity : random.pick({0.0, 3.0, 6.0, 60.0, -60.0}) + random.normal();
        lse_.set(lse, segment.tensor_b, h, s);
        other_keys_.lse[row] = lse_.rounded(lse);
        for (std::int64_t d = 0; d < d_v; ++d) {
          const double value = none ? std::nan("") : random.normal();
          o_.set(value, segment.tensor_b, h, s, d);
          other_keys_.o[row * static_cast<std::size_t>(d_v) + static_cast<std::size_t>(d)] = o_.rounded(value);
        }
      }
    }
  }
  o_.upload(where_), lse_.upload(where_);
}

void Calls::make_pages() {
  pages_.emplace(c_, call_, in_);
  for (Tensor* t : {&pages_->k, &pages_->v, &pages_->k_scale, &pages_->v_scale}) {
    if (t->defined()) t->upload(where_);
  }
  table_ = integers(pages_->table, where_);
  index_ = integers(pages_->index, where_);
  begin_ = integers(call_.begin, where_);
}

void Calls::set_scales(ForwardInputs& in) const {
  if (!has_bytes(c_.config)) {
    in.k_scale = (pages_ ? pages_->k_scale : in_.stored_k.scales).const_view();
    in.v_scale = (pages_ ? pages_->v_scale : in_.stored_v.scales).const_view();
    return;
  }
  const bool packed = c_.config.varlen;
  const auto of_keys = [&](const Stored& stored, const Tensor* pool, bool rows) {
    if (rows && pool != nullptr) return pool->const_view();
    return scale_view(stored.scales, rows && packed);
  };
  in.q_scale = scale_view(in_.stored_q.scales, packed);
  in.k_scale = of_keys(in_.stored_k, pages_ ? &pages_->k_scale : nullptr, c_.config.key_scales);
  in.v_scale = of_keys(in_.stored_v, pages_ ? &pages_->v_scale : nullptr, c_.config.value_scales);
  in.row_bias = scale_view(in_.row_bias, packed);
}

const Tensor& Calls::values() const {
  return pages_ ? pages_->v : in_.stored_v.codes.defined() ? in_.stored_v.codes : in_.v;
}

Tensor Calls::schedule(const AttentionShape& shape, ForwardInputs& in) {
  if (!pages_ || !call_.scheduled) return {};
  AttentionShape limits = shape;
  limits.s_kv = pages_->longest;
  Tensor lists = scratch(attention_.schedule_size(limits));
  if (lists.defined()) in.schedule = {lists.view().data, static_cast<std::size_t>(lists.elements()) * 4};
  attention_.schedule({limits, in.sequences, in.cache.seq_begin}, in.schedule);
  return lists;
}

PagedCache Calls::cache() const {
  PagedCache cache;
  if (!pages_) return cache;
  if (c_.config.page_size > 0) {
    cache.block_table =
        TensorView(static_cast<const void*>(pointer(table_)), DType::i32, {pages_->rows, pages_->max_pages});
  }
  cache.batch_index = pointer(index_);
  cache.seq_begin = pointer(begin_);
  return cache;
}

bool Calls::declared(std::size_t i) const {
  return std::ranges::any_of(c_.config.score.captures, [&](const Capture& capture) {
    return capture.name == c_.captures[i].name && capture.requires_grad;
  });
}

Tensor Calls::output(const std::vector<std::int64_t>& shape, const Layout& layout, DType dtype) const {
  Tensor t(dtype, shape, layout);
  t.poison();
  t.upload(where_);
  return t;
}

Tensor Calls::scratch(std::size_t bytes) const {
  if (bytes == 0) return {};
  Tensor t = Tensor::dense(DType::i32, {static_cast<std::int64_t>((bytes + 3) / 4)});
  t.upload(where_);
  return t;
}

void Calls::check(Tensor t) {
  if (!t.defined()) return;
  t.download();
  if (t.touched_outside()) scratch_touched_ = true;
}

Workspace Calls::given(const Tensor& t) {
  return t.defined() ? Workspace{t.view().data, static_cast<std::size_t>(t.elements()) * 4} : Workspace{};
}

AttentionShape Calls::shape_of(std::initializer_list<const Tensor*> tensors) const {
  AttentionShape shape{.b = call_.b, .h_q = call_.h_q, .h_kv = call_.h_kv, .s_q = call_.s_q, .s_kv = call_.s_kv};
  shape.aligned =
      std::ranges::all_of(tensors, [](const Tensor* t) { return !t->defined() || has_aligned_rows(t->view()); });
  shape.placed = call_.place.has_value();
  shape.strided = call_.place && (call_.place->q_step != 1 || call_.place->kv_step != 1);
  if (!c_.config.varlen) return shape;
  shape.b = call_.sequences(true);
  shape.s_q = call_.max_s_q, shape.s_kv = pages_ ? pages_->longest : call_.max_s_kv;
  shape.total_q = call_.s_q, shape.total_kv = call_.s_kv;
  return shape;
}

PackedSequences Calls::sequences() const {
  if (pages_) {
    return {.b = call_.sequences(c_.config.varlen),
            .cu_seqlens_q = pointer(cu_q_),
            .seqused_q = pointer(used_q_),
            .seqused_kv = pointer(used_kv_),
            .max_s_q = call_.max_s_q,
            .max_s_kv = pages_->longest};
  }
  if (!c_.config.varlen) return {};
  return {.b = call_.sequences(true),
          .cu_seqlens_q = pointer(cu_q_),
          .cu_seqlens_kv = pointer(cu_kv_),
          .seqused_q = pointer(used_q_),
          .seqused_kv = pointer(used_kv_),
          .max_s_q = call_.max_s_q,
          .max_s_kv = call_.max_s_kv};
}

DropoutState Calls::dropout() const {
  if (c_.config.dropout == 0) return {};
  if (!state_.defined()) return call_.dropout;
  return {.device = static_cast<const std::uint64_t*>(state_.view().data)};
}

Captures Calls::captures() const {
  Captures given;
  const std::vector<bool> used = used_captures(c_);
  for (std::size_t i = 0; i < c_.captures.size(); ++i) {
    if (!used[i]) continue;
    const CaptureChoice& choice = c_.captures[i];
    if (choice.axes.empty() && choice.as_number) {
      given.add({choice.name, in_.numbers[i]});
    } else {
      given.add({choice.name, in_.captures[i].const_view()});
    }
  }
  return given;
}

void Calls::raise_empty_rows(const Results& expected) {
  std::size_t n = 0;
  for (std::int64_t b = 0; b < call_.b; ++b) {
    for (std::int64_t h = 0; h < call_.h_q; ++h) {
      for (std::int64_t s = 0; s < call_.s_q; ++s, ++n) {
        if (expected.empty_rows[n] && !c_.config.sink) lse_.set(std::numeric_limits<double>::infinity(), b, h, s);
      }
    }
  }
  lse_.refresh();
}

std::function<bool(std::int64_t)> Calls::untouched(const std::vector<bool>& rows) const {
  const bool alone = c_.config.varlen && !c_.config.zero_padding;
  return [alone, &rows](std::int64_t s) { return alone && !rows[static_cast<std::size_t>(s)]; };
}

void Calls::synchronize() const {
  if (where_ == Where::cuda) driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
}

}  // namespace fa::differential
