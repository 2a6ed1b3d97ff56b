#include "emulator/placement.hpp"

#include <cstring>
#include <span>

#include "emulator/fault.hpp"
#include "emulator/tensor_map.hpp"

namespace emulator {
namespace {

using fa::TensorView;

/// Reserves memory for a tensor like `view`, none of it readable or writable yet.
Placed place(Memory& memory, const char* name, const TensorView& view, Placement placement, bool aligned) {
  Placed t;
  t.b = view.shape[0];
  t.h = view.shape[1];
  t.s = view.shape[2];
  t.element = size_of(view.dtype);
  const std::int64_t d = view.rank == 4 ? view.shape[3] : 1;
  t.row_bytes = static_cast<std::size_t>(d) * t.element;
  const std::int64_t chunk = 16 / static_cast<std::int64_t>(t.element);
  const std::int64_t gap = !aligned ? 1 : placement == Placement::padded || placement == Placement::gaps ? chunk : 0;
  const std::int64_t pitch = d + gap;
  const std::int64_t heads = placement == Placement::broadcast ? 1 : t.h;
  const std::int64_t batches = placement == Placement::broadcast ? 1 : t.b;
  const bool rows_outer = placement == Placement::bshd;
  t.stride_h = rows_outer ? pitch : t.s * pitch;
  t.stride_s = rows_outer ? heads * pitch : pitch;
  t.stride_b = heads * t.s * pitch;
  const std::int64_t front = aligned ? 0 : 1;
  const auto elements = static_cast<std::size_t>(batches * heads * t.s * pitch + front);
  t.region = memory.add_output(name, elements * t.element);
  memory.set_flags(t.region, elements * t.element, 0);
  t.data = t.region + static_cast<std::size_t>(front) * t.element;
  if (placement == Placement::broadcast) {
    t.stride_h = 0;
    t.stride_b = 0;
  } else if (placement == Placement::padded && heads > 0) {
    t.data += (heads - 1) * t.stride_h * static_cast<std::int64_t>(t.element);
    t.stride_h = -t.stride_h;
  }
  return t;
}

}  // namespace

Placed place_input(Memory& memory, const char* name, const fa::test::HostTensor& tensor, Placement placement,
                   bool aligned) {
  const TensorView view = tensor.view();
  const Placed t = place(memory, name, view, placement, aligned);
  for_each_row(t.b, t.h, t.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    const std::int64_t from = b * view.strides[0] + h * view.strides[1] + s * view.strides[2];
    std::byte* row = t.row(b, h, s);
    std::memcpy(row, static_cast<const std::byte*>(view.data) + from * static_cast<std::int64_t>(t.element),
                t.row_bytes);
    memory.set_flags(row, t.row_bytes, Memory::kReadable);
  });
  return t;
}

Placed place_state(Memory& memory, const char* name, const fa::test::HostTensor& tensor, Placement placement,
                   bool aligned) {
  const Placed t = place_input(memory, name, tensor, placement, aligned);
  for_each_row(t.b, t.h, t.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    memory.set_flags(t.row(b, h, s), t.row_bytes, Memory::kReadable | Memory::kWritable);
  });
  return t;
}

Placed place_output(Memory& memory, const char* name, const fa::test::HostTensor& tensor, Placement placement,
                    bool aligned) {
  const Placed t = place(memory, name, tensor.view(), placement, aligned);
  for_each_row(t.b, t.h, t.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    memory.set_flags(t.row(b, h, s), t.row_bytes, Memory::kWritable);
  });
  return t;
}

void fetch(const Memory& memory, const Placed& t, fa::test::HostTensor& tensor) {
  const TensorView view = tensor.view();
  for_each_row(t.b, t.h, t.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    const std::byte* row = t.row(b, h, s);
    if (!memory.written(row, t.row_bytes)) {
      throw Fault(FaultKind::global_uninitialised, 0, 0, "result", reinterpret_cast<std::uintptr_t>(row), Site(),
                  "not all of a row was written: " + memory.describe(row));
    }
    const std::int64_t to = b * view.strides[0] + h * view.strides[1] + s * view.strides[2];
    std::memcpy(static_cast<std::byte*>(view.data) + to * static_cast<std::int64_t>(t.element), row, t.row_bytes);
  });
}

void make_broadcast(fa::test::HostTensor& tensor) {
  const TensorView view = tensor.view();
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < view.shape[3]; ++d) tensor.set(b, h, s, d, tensor.at(0, 0, s, d));
  });
}

void encode(fa::kernel::TensorMap& map, const fa::plan::TensorMapSpec& spec) {
  TensorShape shape;
  shape.base = spec.base;
  shape.element_bytes = static_cast<int>(size_of(spec.dtype));
  shape.dims.assign(spec.sizes.begin(), spec.sizes.begin() + spec.rank);
  shape.strides.assign(spec.strides.begin(), spec.strides.begin() + spec.rank - 1);
  shape.box.assign(spec.box.begin(), spec.box.begin() + spec.rank);
  encode_tensor_map(map.bytes, shape);
}

TensorView view_of(const Placed& t, const fa::test::HostTensor& tensor) {
  TensorView view = tensor.view();
  view.data = t.data;
  view.strides[0] = t.stride_b;
  view.strides[1] = t.stride_h;
  view.strides[2] = t.stride_s;
  return view;
}

const std::int32_t* place_array(Memory& memory, const char* name, const std::vector<std::int32_t>& values) {
  if (values.empty()) return nullptr;
  return reinterpret_cast<const std::int32_t*>(memory.add_input(name, std::as_bytes(std::span(values))));
}

}  // namespace emulator
