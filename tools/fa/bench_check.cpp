// What proves the answer of a problem that is timed: bench_problem.hpp.

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>

#include "bench_problem.hpp"
#include "elements.hpp"
#include "reference/backward.hpp"
#include "reference/forward.hpp"
#include "tolerance.hpp"

namespace fa::cli {
namespace {

constexpr std::int64_t kCheckedRows = 64;

std::vector<std::byte> download(const DeviceBuffer& buffer) {
  std::vector<std::byte> bytes(buffer.size());
  buffer.download(bytes.data(), bytes.size());
  return bytes;
}

/// The rows from `first` on of the last `heads` heads of the last batch.
TensorView last_heads(TensorView view, std::int64_t heads, std::int64_t first) {
  const std::int64_t offset =
      (view.shape[0] - 1) * view.strides[0] + (view.shape[1] - heads) * view.strides[1] + first * view.strides[2];
  view.data = static_cast<std::byte*>(view.data) + offset * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape = {1, heads, view.shape[2] - first, view.shape[3]};
  return view;
}

TensorView last_head(const TensorView& view, std::int64_t first) {
  return last_heads(view, 1, first);
}

/// A tensor of the shape of `like` in `memory`.
TensorView f64_like(const TensorView& like, std::vector<double>* memory) {
  memory->resize(static_cast<std::size_t>(like.elements()));
  return TensorView(memory->data(), DType::f64, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]});
}

double greatest_magnitude(const TensorView& view) {
  double greatest = 0;
  for (std::int64_t row = 0; row < view.shape[2]; ++row) {
    for (std::int64_t column = 0; column < view.shape[3]; ++column) {
      const auto index = static_cast<std::size_t>(row * view.strides[2] + column);
      greatest = std::max(greatest, std::abs(load_element(view.data, view.dtype, index)));
    }
  }
  return greatest;
}

double greatest_difference(const TensorView& view, const std::vector<double>& expected) {
  double greatest = 0;
  for (std::int64_t row = 0; row < view.shape[2]; ++row) {
    for (std::int64_t column = 0; column < view.shape[3]; ++column) {
      const auto index = static_cast<std::size_t>(row * view.strides[2] + column);
      const double difference = std::abs(load_element(view.data, view.dtype, index) -
                                         expected[static_cast<std::size_t>(row * view.shape[3] + column)]);
      greatest = std::isnan(difference) ? std::numeric_limits<double>::infinity() : std::max(greatest, difference);
    }
  }
  return greatest;
}

/// The scales of rows that all have the same.
TensorView one_scale(const float* scale) {
  TensorView view(scale, DType::f32, {1, 1, 1});
  view.strides = {};
  return view;
}

/// The scale and the offset of rows of 4 bits that all have the same.
TensorView one_pair(DType dtype, std::array<std::byte, 4>* memory) {
  for (std::size_t i = 0; i < 2; ++i) store_element(memory->data(), dtype, i, kPairOfBlock[i]);
  TensorView view(static_cast<const void*>(memory->data()), dtype, {1, 1, 1, 2});
  view.strides = {0, 0, 0, 1};
  return view;
}

/// Of the last batch entry: of its last `heads` heads, from a row and a key on.
reference::DropoutMask mask(const BenchProblem& problem, std::int64_t heads, std::int64_t row, std::int64_t key) {
  if (problem.packed.dropout == 0) return {};
  const reference::DropoutMask whole(double{problem.packed.dropout}, kBenchDropout.seed, kBenchDropout.offset);
  const ShardPlace at = problem.place_of(heads, row, key);
  return whole.part(at.b * at.whole_h_q + at.h_q, at.q, at.kv);
}

}  // namespace

/// The last batch entry, or sequence, as [1, h, s, d].
TensorView BenchTensors::last_entry(const TensorView& tensor, const std::vector<std::int32_t>& starts) const {
  TensorView view = tensor;
  std::int64_t offset = (view.shape[0] - 1) * view.strides[0];
  if (problem_.packed.varlen) {
    const bool statistic = view.rank == 2;  // [h, total], not [total, h, d]
    const std::size_t rows = statistic ? 1 : 0, heads = statistic ? 0 : 1;
    const std::int64_t first = starts[starts.size() - 2];
    offset = first * tensor.strides[rows];
    view.shape = {1, tensor.shape[heads], starts.back() - first, statistic ? 0 : tensor.shape[2]};
    view.strides = {0, tensor.strides[heads], tensor.strides[rows], 1};
    view.rank = tensor.rank + 1;
  } else {
    view.shape[0] = 1;
  }
  view.data = static_cast<std::byte*>(view.data) + offset * static_cast<std::int64_t>(size_of(view.dtype));
  return view;
}

double BenchTensors::variant_slack() const {
  return functions_.variants.score.find("tanh") == std::string::npos ? 1 : 3;
}

double BenchTensors::check() const {
  return problem_.op == Operation::backward ? check_backward() : check_forward();
}

namespace {

/// A part of a tensor on the GPU, on the host in `memory`.
TensorView fetch(const DeviceBuffer& buffer, TensorView view, std::vector<std::byte>* memory) {
  std::int64_t elements = 1;  // from its first to its last
  for (std::size_t axis = 0; axis < 4; ++axis) elements += (view.shape[axis] - 1) * view.strides[axis];
  memory->resize(static_cast<std::size_t>(elements) * size_of(view.dtype));
  const auto from = static_cast<std::byte*>(view.data) - static_cast<std::byte*>(buffer.data());
  buffer.download(memory->data(), memory->size(), static_cast<std::size_t>(from));
  view.data = memory->data();
  return view;
}

}  // namespace

TensorView BenchTensors::fetch_last(const DeviceBuffer& buffer, const TensorView& tensor,
                                    const std::vector<std::int32_t>& starts, std::vector<std::byte>* memory) const {
  return fetch(buffer, last_entry(tensor, starts), memory);
}

TensorView BenchTensors::fetch_last_row(const DeviceBuffer& buffer, const TensorView& cache,
                                        std::vector<std::byte>* memory) const {
  if (problem_.page_size > 0) return fetch_last_pages(buffer, cache, memory);
  TensorView view = cache;
  const std::int64_t offset = (view.shape[0] - 1) * view.strides[0];
  view.data = static_cast<std::byte*>(view.data) + offset * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[0] = 1;
  view.shape[2] = problem_.lengths_kv().back();
  return fetch(buffer, view, memory);
}

TensorView BenchTensors::fetch_last_pages(const DeviceBuffer& buffer, const TensorView& pool,
                                          std::vector<std::byte>* memory) const {
  const std::int64_t keys = problem_.lengths_kv().back(), heads = pool.shape[1], d = pool.shape[3];
  const std::int64_t page_size = problem_.page_size, pages = (keys + page_size - 1) / page_size;
  const auto page_bytes = static_cast<std::size_t>(pool.strides[0]) * size_of(pool.dtype);
  const std::size_t row =
      table_.size() / static_cast<std::size_t>(problem_.shape.b) * static_cast<std::size_t>(problem_.shape.b - 1);
  memory->resize(static_cast<std::size_t>(pages) * page_bytes);
  for (std::size_t i = 0; i < static_cast<std::size_t>(pages); ++i) {
    buffer.download(memory->data() + i * page_bytes, page_bytes,
                    static_cast<std::size_t>(table_[row + i]) * page_bytes);
  }
  if (problem_.layout == Layout::bshd) {
    TensorView view =
        TensorView(static_cast<void*>(memory->data()), pool.dtype, {1, pages * page_size, heads, d}).swap_axes(1, 2);
    view.shape[2] = keys;
    return view;
  }
  // [pages, h_kv, page_size, d] has no stride between the keys of a head: pages are taken apart.
  std::vector<std::byte> heads_first(memory->size());
  const auto piece = static_cast<std::size_t>(page_size * d) * size_of(pool.dtype);
  for (std::size_t i = 0; i < static_cast<std::size_t>(pages * heads); ++i) {
    const std::size_t page = i / static_cast<std::size_t>(heads), head = i % static_cast<std::size_t>(heads);
    std::copy_n(
        memory->begin() + static_cast<std::ptrdiff_t>(i * piece), piece,
        heads_first.begin() + static_cast<std::ptrdiff_t>((head * static_cast<std::size_t>(pages) + page) * piece));
  }
  memory->swap(heads_first);
  TensorView view(static_cast<void*>(memory->data()), pool.dtype, {1, heads, pages * page_size, d});
  view.shape[2] = keys;
  return view;
}

double BenchTensors::check_forward() const {
  std::vector<std::byte> q, k, v, o;
  const ForwardInputs in = inputs();
  const std::vector<std::int32_t>& starts =
      problem_.cumulative_kv.empty() ? problem_.cumulative : problem_.cumulative_kv;
  const auto keys = [&](const DeviceBuffer& buffer, const TensorView& tensor, std::vector<std::byte>* memory) {
    return problem_.page_size != 0 ? fetch_last_row(buffer, tensor, memory)
                                   : fetch_last(buffer, tensor, starts, memory);
  };
  const TensorView q_entry = fetch_last(q_, in.q, problem_.cumulative, &q);
  // The last rows keep their keys under a bottom-right mask; a top-left one is the same where s_q == s_kv.
  const std::int64_t first = std::max<std::int64_t>(q_entry.shape[2] - kCheckedRows, 0);
  const TensorView result = last_head(fetch_last(o_, outputs().o, problem_.cumulative, &o), first);
  std::vector<double> expected(static_cast<std::size_t>(result.elements()));
  reference::ForwardArgs args;
  args.q = last_head(q_entry, first);
  args.k = last_head(keys(k_, in.k, &k), 0);
  if (problem_.value_in_key) {
    args.v = args.k;
    args.v.shape[3] = problem_.d_v;
  } else {
    args.v = last_head(keys(v_, in.v, &v), 0);
  }
  const float k_scale = problem_.k_dtype ? scale_of_block(*problem_.k_dtype) : 1;
  const float v_scale = problem_.v_dtype ? scale_of_block(*problem_.v_dtype) : 1;
  std::array<std::byte, 4> pair{};
  const auto scales = [&](const std::optional<DType>& stored, const float* scale) {
    return *stored == DType::u4x2 ? one_pair(problem_.dtype, &pair) : one_scale(scale);
  };
  if (problem_.k_dtype && !problem_.latent()) args.k_scale = scales(problem_.k_dtype, &k_scale);
  if (problem_.v_dtype) args.v_scale = scales(problem_.v_dtype, &v_scale);
  args.dropout = mask(problem_, 1, first, 0);
  args.o = TensorView(expected.data(), DType::f64, {1, 1, result.shape[2], result.shape[3]});
  args.scale = problem_.softmax_scale();
  args.causal = problem_.causal;
  args.f64 = true;
  std::vector<expression::CapturedView> views;
  args.variant = variant_args(&views, 1, first, 0);
  reference::forward(args);
  const double most = problem_.v_dtype == DType::u4x2 ? -kPairOfBlock[1] : greatest_magnitude(args.v);
  return greatest_difference(result, expected) /
         (variant_slack() * output_tolerance(problem_.dtype) * most * args.dropout.scale());
}

double BenchTensors::check_backward() const {
  // A gradient is made of o, P and dS, each rounded once, and is rounded itself: twice what is allowed for o.
  const double tolerance = 2 * variant_slack() * output_tolerance(problem_.dtype);
  std::deque<std::vector<std::byte>> kept;
  const auto fetch = [&](const DeviceBuffer& buffer, TensorView device) {
    device.data = kept.emplace_back(download(buffer)).data();
    return last_entry(device, problem_.cumulative);
  };
  const BackwardInputs in = backward_inputs();
  const BackwardOutputs out = backward_outputs();
  const TensorView q = fetch(q_, in.q), k = fetch(k_, in.k), v = fetch(v_, in.v), o = fetch(o_, in.o);
  const TensorView lse = fetch(lse_, in.lse), dout = fetch(dout_, in.dout);
  reference::BackwardArgs args;
  args.scale = 1 / std::sqrt(static_cast<double>(problem_.d_qk));
  args.causal = problem_.causal;
  args.f64 = true;
  std::vector<double> dq, dk, dv;
  // Of the given heads: the query rows from `row` on with the keys from `key` on.
  const auto expect = [&](std::int64_t heads, std::int64_t row, std::int64_t key) {
    args.q = last_heads(q, heads, row);
    args.o = last_heads(o, heads, row);
    args.dout = last_heads(dout, heads, row);
    args.lse = last_heads(lse, heads, row);
    args.dropout = mask(problem_, heads, row, key);
    args.k = last_head(k, key);
    args.v = last_head(v, key);
    args.dq = f64_like(args.q, &dq);
    args.dk = f64_like(args.k, &dk);
    args.dv = f64_like(args.v, &dv);
    std::vector<expression::CapturedView> views;
    args.variant = variant_args(&views, heads, row, key);
    reference::backward(args);
  };
  const auto error = [&](const TensorView& actual, const TensorView& wanted, const std::vector<double>& values) {
    return greatest_difference(actual, values) / (tolerance * greatest_magnitude(wanted));
  };
  // As in forward: a top-left mask is the same where s_q == s_kv.
  const std::int64_t row = std::max<std::int64_t>(q.shape[2] - kCheckedRows, 0);
  const std::int64_t key = std::max<std::int64_t>(k.shape[2] - kCheckedRows, 0);
  const auto [wants_dq, wants_dk, wants_dv] = problem_.shape.gradients;
  expect(1, row, 0);
  double worst = wants_dq ? error(last_head(fetch(dq_, out.dq), row), args.dq, dq) : 0;
  expect(problem_.shape.h_q / problem_.shape.h_kv, 0, key);
  if (wants_dk) worst = std::max(worst, error(last_head(fetch(dk_, out.dk), key), args.dk, dk));
  if (wants_dv) worst = std::max(worst, error(last_head(fetch(dv_, out.dv), key), args.dv, dv));
  return worst;
}

}  // namespace fa::cli
