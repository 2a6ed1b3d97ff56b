#include "parallel/views.hpp"

#include <string>

#include "parallel/errors.hpp"
#include "parallel/layout.hpp"

namespace fa::parallel {
namespace {

std::string shape_text(const std::array<std::int64_t, 4>& shape, int rank) {
  std::string text = "[";
  for (int axis = 0; axis < rank; ++axis) {
    text += (axis > 0 ? ", " : "") + std::to_string(shape[static_cast<std::size_t>(axis)]);
  }
  return text + "]";
}

/// A view of the rank that plans have, of a tensor of any rank that calls take.
TensorView of_rank_4(const TensorView& given, bool is_packed, bool is_statistic) {
  TensorView view = given;
  view.rank = 4;
  const auto& n = given.shape;
  const auto& by = given.strides;
  if (is_statistic) {
    if (is_packed || given.rank == 2) {  // [h, total] or [b, s]
      view.shape = is_packed ? std::array{std::int64_t{1}, n[0], n[1], std::int64_t{1}}
                             : std::array{n[0], std::int64_t{1}, n[1], std::int64_t{1}};
      view.strides = {is_packed ? 0 : by[0], is_packed ? by[0] : 0, by[1], 1};
    } else {
      view.shape[3] = view.strides[3] = 1;
    }
    return view;
  }
  if (is_packed) {  // [total, h, d]
    view.shape = {1, n[1], n[0], n[2]};
    view.strides = {0, by[1], by[0], by[2]};
  } else if (given.rank == 3) {  // [b, s, d]
    view.shape = {n[0], 1, n[1], n[2]};
    view.strides = {by[0], 0, by[1], by[2]};
  }
  return view;
}

void check_rank(const char* name, const TensorView& given, bool is_packed, bool is_statistic) {
  const int most = is_statistic ? 3 : 4;
  const bool fits = is_packed ? given.rank == most - 1 : given.rank == most || given.rank == most - 1;
  if (fits) return;
  const char* const accepted = is_statistic
                                   ? (is_packed ? "a tensor [h_q, total]" : "a tensor [b, h_q, s], or [b, s]")
                                   : (is_packed ? "a tensor [total, h, d]" : "a tensor [b, h, s, d], or [b, s, d]");
  throw_invalid(name, given.defined() ? "of rank " + std::to_string(given.rank) : "nothing", accepted);
}

TensorView checked(const char* name, const TensorView& given, const std::array<std::int64_t, 4>& shape, DType dtype,
                   bool is_packed, bool is_statistic) {
  check_rank(name, given, is_packed, is_statistic);
  if (given.dtype != dtype) throw_invalid(name, to_string(given.dtype), to_string(dtype));
  const TensorView view = of_rank_4(given, is_packed, is_statistic);
  if (view.shape != shape) {
    throw_invalid(name, "shape " + shape_text(given.shape, given.rank),
                  "[b, h, s, d] = " + shape_text(shape, is_statistic ? 3 : 4) + " of this rank");
  }
  if (view.data == nullptr && view.elements() > 0) throw_invalid(name, "null", "memory of the communicator's device");
  return view;
}

}  // namespace

ShardSize shard_size(const char* name, const TensorView& given, bool packed) {
  check_rank(name, given, packed, false);
  const TensorView view = of_rank_4(given, packed, false);
  for (const std::int64_t size : view.shape) {
    if (size < 0 || size > kMaxSize) {
      throw_invalid(name, "shape " + shape_text(given.shape, given.rank),
                    "sizes from 0 to " + std::to_string(kMaxSize));
    }
  }
  return {view.shape[0], view.shape[1], view.shape[2]};
}

TensorView shard_view(const char* name, const TensorView& given, const std::array<std::int64_t, 4>& shape, DType dtype,
                      bool packed) {
  TensorView view = checked(name, given, shape, dtype, packed, false);
  if (view.shape[3] > 1 && view.strides[3] != 1) {
    throw_invalid(name, "last stride " + std::to_string(view.strides[3]), "1");
  }
  return view;
}

TensorView statistic_view(const char* name, const TensorView& given, const std::array<std::int64_t, 4>& shape,
                          DType dtype, bool packed) {
  return checked(name, given, shape, dtype, packed, true);
}

namespace {

/// The innermost first.
bool lie_in_order(const TensorView& view, const std::array<std::size_t, 4>& axes) {
  std::int64_t stride = 1;
  for (const std::size_t axis : axes) {
    if (view.shape[axis] > 1 && view.strides[axis] != stride) return false;
    stride *= view.shape[axis];
  }
  return true;
}

}  // namespace

bool is_dense(const TensorView& view) {
  return lie_in_order(view, {3, 2, 0, 1});
}

bool is_dense_by_rows(const TensorView& view) {
  return view.shape[0] == 1 && lie_in_order(view, {3, 1, 2, 0});
}

}  // namespace fa::parallel
