// mbarriers, and the copy engine that signals them.

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "emulator/instructions.hpp"
#include "emulator/machine.hpp"

namespace emulator {
namespace {

constexpr std::uint32_t kTargetAlignment = 128;

/// Every byte of the box that lies in the tensor can be read.
void check_source(const Machine& machine, Machine& mutable_machine, const Lane& lane, const TensorBox& box,
                  const char* name, const Site& site) {
  Memory& memory = mutable_machine.memory();
  for (const TensorBox::Row& row : box.rows()) {
    if (row.bytes == 0) continue;
    const auto at = reinterpret_cast<std::uintptr_t>(row.source);
    if (memory.find(row.source, row.bytes) == nullptr) {
      machine.raise(FaultKind::global_out_of_bounds, lane, name, at, site,
                    fmt::format("{} bytes from {}", row.bytes, memory.describe(row.source)));
    }
    if (memory.written(row.source, row.bytes)) continue;
    machine.raise(FaultKind::global_uninitialised, lane, name, at, site,
                  fmt::format("not all of {} bytes was written from {}", row.bytes, memory.describe(row.source)));
  }
}

TensorShape decode(const Machine& machine, const Lane& lane, const void* map, const char* name, const Site& site) {
  const auto at = reinterpret_cast<std::uintptr_t>(map);
  if (at % 64 != 0) machine.raise(FaultKind::misaligned, lane, name, at, site, "tensor maps are 64-byte aligned");
  TensorShape shape;
  if (decode_tensor_map(static_cast<const unsigned char*>(map), shape)) return shape;
  machine.raise(FaultKind::bad_descriptor, lane, name, at, site, "no tensor map");
}

}  // namespace

void fence_proxy_async() {
  Lane& lane = Machine::current();
  Machine::of(lane).fence_async(lane);
}

void mbarrier_init(std::uint32_t barrier, int count, const Site& site) {
  Lane& lane = Machine::current();
  Machine::of(lane).init_barrier(lane, barrier, count, site);
}

void fence_mbarrier_init() {
  const Lane& lane = Machine::current();
  Machine::of(lane).fence_barriers(lane);
}

void mbarrier_arrive(std::uint32_t barrier, const Site& site) {
  Lane& lane = Machine::current();
  Machine::of(lane).arrive(lane, barrier, 0, "mbarrier.arrive", site);
}

void mbarrier_arrive_expect_tx(std::uint32_t barrier, int bytes, const Site& site) {
  Lane& lane = Machine::current();
  Machine::of(lane).arrive(lane, barrier, bytes, "mbarrier.arrive.expect_tx", site);
}

void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity, const Site& site) {
  Lane& lane = Machine::current();
  Machine::of(lane).wait(lane, barrier, parity, site);
}

void prefetch_tensor_map(const void* map, const Site& site) {
  const Lane& lane = Machine::current();
  decode(Machine::of(lane), lane, map, "prefetch.tensormap", site);
}

void tma_load(std::uint32_t shared, const void* map, std::uint32_t barrier, int rank, const int* at, const Site& site) {
  constexpr const char* kName = "cp.async.bulk.tensor";
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  const TensorShape shape = decode(machine, lane, map, kName, site);
  if (static_cast<int>(shape.dims.size()) != rank) {
    machine.raise(FaultKind::bad_descriptor, lane, kName, 0, site,
                  fmt::format("{} coordinates for a tensor map of {} axes", rank, shape.dims.size()));
  }
  if (shared % kTargetAlignment != 0) {
    machine.raise(FaultKind::misaligned, lane, kName, shared, site, "the destination is 128-byte aligned");
  }
  std::array<int, 5> coordinates{};
  std::copy_n(at, rank, coordinates.begin());
  const TensorBox box(shape, coordinates);
  check_source(machine, machine, lane, box, kName, site);
  machine.start_copy(lane, shared, box, barrier, kName, site);
}

}  // namespace emulator
