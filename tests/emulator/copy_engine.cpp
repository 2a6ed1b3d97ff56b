// mbarriers, and the copy engine that signals them.

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "emulator/instructions.hpp"
#include "emulator/machine.hpp"

namespace emulator {
namespace {

constexpr std::uint32_t kSharedAlignment = 128;

/// Every byte of the box that lies in the tensor can be written.
void check_target(Machine& machine, const Lane& lane, const TensorBox& box, const char* name, const Site& site) {
  const Memory& memory = machine.memory();
  for (const TensorBox::Row& row : box.rows()) {
    if (row.bytes == 0) continue;
    const auto at = reinterpret_cast<std::uintptr_t>(row.source);
    const Memory::Region* region = memory.find(row.source, row.bytes);
    if (region == nullptr) {
      machine.raise(FaultKind::global_out_of_bounds, lane, name, at, site,
                    fmt::format("{} bytes from {}", row.bytes, memory.describe(row.source)));
    }
    machine.check_order(lane, row.source, row.bytes, name, site);
    const std::uint8_t* flags = region->flags.get() + (row.source - region->base);
    if (std::all_of(flags, flags + row.bytes, [](std::uint8_t flag) { return (flag & Memory::kWritable) != 0; })) {
      continue;
    }
    machine.raise(FaultKind::global_not_writable, lane, name, at, site,
                  fmt::format("not all of {} bytes from {}", row.bytes, memory.describe(row.source)));
  }
}

/// Every byte of the box that lies in the tensor can be read.
void check_source(Machine& machine, const Lane& lane, const TensorBox& box, const char* name, const Site& site) {
  const Memory& memory = machine.memory();
  for (const TensorBox::Row& row : box.rows()) {
    if (row.bytes == 0) continue;
    const auto at = reinterpret_cast<std::uintptr_t>(row.source);
    if (memory.find(row.source, row.bytes) == nullptr) {
      machine.raise(FaultKind::global_out_of_bounds, lane, name, at, site,
                    fmt::format("{} bytes from {}", row.bytes, memory.describe(row.source)));
    }
    machine.check_order(lane, row.source, row.bytes, name, site);
    if (memory.written(row.source, row.bytes)) continue;
    machine.raise(FaultKind::global_uninitialised, lane, name, at, site,
                  fmt::format("not all of {} bytes was written from {}", row.bytes, memory.describe(row.source)));
  }
}

/// Consecutive bytes as a box of one row. The instructions without a tensor map want every address and size a multiple
/// of 16 bytes.
TensorBox flat_box(const Machine& machine, const Lane& lane, const void* global, std::uint32_t shared, int bytes,
                   const char* name, const Site& site) {
  const auto at = reinterpret_cast<std::uintptr_t>(global);
  if (at % 16 != 0) machine.raise(FaultKind::misaligned, lane, name, at, site, "wants 16-byte alignment");
  if (shared % 16 != 0) machine.raise(FaultKind::misaligned, lane, name, shared, site, "wants 16-byte alignment");
  if (bytes <= 0 || bytes % 16 != 0) {
    machine.raise(FaultKind::misaligned, lane, name, at, site,
                  fmt::format("{} bytes, not a positive multiple of 16", bytes));
  }
  TensorShape shape;
  shape.base = global;
  shape.element_bytes = 1;
  shape.dims = {static_cast<std::uint64_t>(bytes)};
  shape.box = {static_cast<std::uint32_t>(bytes)};
  shape.swizzle = Swizzle::none;
  return {std::move(shape), {}};
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
  Machine::of(lane).wait(lane, barrier, parity, false, site);
}

bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity, const Site& site) {
  Lane& lane = Machine::current();
  return Machine::of(lane).test(lane, barrier, parity, site);
}

void mbarrier_arrive_remote(std::uint32_t cluster_barrier, const Site& site) {
  Lane& lane = Machine::current();
  Machine::of(lane).arrive_remote(lane, cluster_barrier, 0, "mbarrier.arrive.shared::cluster", site);
}

void mbarrier_arrive_expect_tx_remote(std::uint32_t cluster_barrier, int bytes, const Site& site) {
  Lane& lane = Machine::current();
  Machine::of(lane).arrive_remote(lane, cluster_barrier, bytes, "mbarrier.arrive.expect_tx.shared::cluster", site);
}

void mbarrier_wait_cluster(std::uint32_t barrier, std::uint32_t parity, const Site& site) {
  Lane& lane = Machine::current();
  Machine::of(lane).wait(lane, barrier, parity, true, site);
}

void prefetch_tensor_map(const void* map, const Site& site) {
  const Lane& lane = Machine::current();
  decode(Machine::of(lane), lane, map, "prefetch.tensormap", site);
}

namespace {

/// What both directions check.
TensorBox box_at(const Machine& machine, const Lane& lane, const void* map, std::uint32_t shared, int rank,
                 const int* at, const char* name, const Site& site) {
  const TensorShape shape = decode(machine, lane, map, name, site);
  if (static_cast<int>(shape.dims.size()) != rank) {
    machine.raise(FaultKind::bad_descriptor, lane, name, 0, site,
                  fmt::format("{} coordinates for a tensor map of {} axes", rank, shape.dims.size()));
  }
  if (shared % kSharedAlignment != 0) {
    machine.raise(FaultKind::misaligned, lane, name, shared, site, "shared addresses are 128-byte aligned");
  }
  std::array<int, 5> coordinates{};
  std::copy_n(at, rank, coordinates.begin());
  return {shape, coordinates};
}

}  // namespace

void tma_store(const void* map, std::uint32_t shared, int rank, const int* at, const Site& site) {
  constexpr const char* kName = "cp.async.bulk.tensor.global";
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  const TensorBox box = box_at(machine, lane, map, shared, rank, at, kName, site);
  // CUDA programming guide, "Negative indices and out of bounds": loads may begin before a tensor, stores may not.
  if (std::any_of(at, at + rank, [](int coordinate) { return coordinate < 0; })) {
    machine.raise(FaultKind::bad_descriptor, lane, kName, 0, site, "a store begins before the tensor");
  }
  check_target(machine, lane, box, kName, site);
  machine.start_store(lane, shared, box, TensorStore::overwrite, kName, site);
}

void bulk_add_f32(float* global, std::uint32_t shared, int bytes, const Site& site) {
  constexpr const char* kName = "cp.reduce.async.bulk.add.f32";
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  const TensorBox box = flat_box(machine, lane, global, shared, bytes, kName, site);
  check_source(machine, lane, box, kName, site);
  check_target(machine, lane, box, kName, site);
  machine.start_store(lane, shared, box, TensorStore::add_f32, kName, site);
}

void tma_commit() {
  Lane& lane = Machine::current();
  Machine::of(lane).commit_stores(lane);
}

void tma_wait(bool read) {
  const Lane& lane = Machine::current();
  Machine::of(lane).wait_stores(lane, read);
}

void bulk_load(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier, const Site& site) {
  constexpr const char* kName = "cp.async.bulk.shared";
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  const TensorBox box = flat_box(machine, lane, global, shared, bytes, kName, site);
  check_source(machine, lane, box, kName, site);
  machine.start_copy(lane, shared, box, barrier, kName, site);
}

void bulk_copy_to_cluster(std::uint32_t cluster_target, std::uint32_t source, int bytes, std::uint32_t cluster_barrier,
                          const Site& site) {
  constexpr const char* kName = "cp.async.bulk.shared::cluster.shared::cta";
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  if (source % 16 != 0) machine.raise(FaultKind::misaligned, lane, kName, source, site, "wants 16-byte alignment");
  const std::uint32_t extent = bytes > 0 ? static_cast<std::uint32_t>(bytes) : 0;
  if (!Machine::shared(lane).inside(source, extent)) {
    machine.raise({Conflict::out_of_bounds, {}, {}}, lane, kName, source, site);
  }
  const TensorBox box = flat_box(machine, lane, Machine::shared(lane).at(source), cluster_target, bytes, kName, site);
  machine.start_cluster_copy(lane, cluster_target, source, box, cluster_barrier, kName, site);
}

void tma_load_multicast(std::uint32_t shared, const void* map, std::uint32_t barrier, unsigned ranks, int rank,
                        const int* at, const Site& site) {
  constexpr const char* kName = "cp.async.bulk.tensor.multicast::cluster";
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  const TensorBox box = box_at(machine, lane, map, shared, rank, at, kName, site);
  check_source(machine, lane, box, kName, site);
  if (ranks == 0 || ranks >> machine.cluster() != 0) {
    machine.raise(FaultKind::shared_out_of_bounds, lane, kName, shared, site,
                  fmt::format("ranks {:b} of a cluster of {}", ranks, machine.cluster()));
  }
  for (int block = 0; block < machine.cluster(); ++block) {
    if ((ranks >> block & 1) == 0) continue;
    machine.start_remote_copy(lane, machine.map(lane, shared, block, site), box,
                              machine.map(lane, barrier, block, site), kName, site);
  }
}

void tma_load(std::uint32_t shared, const void* map, std::uint32_t barrier, int rank, const int* at, const Site& site) {
  constexpr const char* kName = "cp.async.bulk.tensor";
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  const TensorBox box = box_at(machine, lane, map, shared, rank, at, kName, site);
  check_source(machine, lane, box, kName, site);
  machine.start_copy(lane, shared, box, barrier, kName, site);
}

}  // namespace emulator
