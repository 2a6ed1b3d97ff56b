#include "emulator/instructions.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>

#include "emulator/byte_products.hpp"
#include "emulator/machine.hpp"
#include "reference/convert.hpp"

namespace emulator {
namespace {

constexpr std::size_t kLanes = kWarpSize;
constexpr const char* kPoll = "ld.relaxed.gpu.global";

template <class Operands>
const Operands& operands(const Warp& warp, std::size_t lane) {
  return *static_cast<const Operands*>(warp.lanes[lane].operands);
}

void converge(const Instruction& instruction, const void* operands, const Site& site) {
  Lane& lane = Machine::current();
  Machine::of(lane).converge(lane, instruction, operands, site);
}

// Barriers.

constexpr Instruction kBarSync{"bar.sync 0", [](Machine& machine, Warp& warp) { machine.block_barrier(warp); }};
constexpr Instruction kClusterSync{"barrier.cluster",
                                   [](Machine& machine, Warp& warp) { machine.cluster_barrier(warp, false); }};
constexpr Instruction kRelaxedClusterSync{"barrier.cluster.relaxed",
                                          [](Machine& machine, Warp& warp) { machine.cluster_barrier(warp, true); }};
constexpr Instruction kBarWarpSync{"bar.warp.sync", [](Machine& machine, Warp& warp) { machine.warp_barrier(warp); }};

struct NamedBarrierOperands {
  int id;
  int threads;
};

template <bool kWaits>
void execute_named_barrier(Machine& machine, Warp& warp) {
  const NamedBarrierOperands first = operands<NamedBarrierOperands>(warp, 0);
  for (std::size_t i = 1; i < kLanes; ++i) {
    const NamedBarrierOperands& own = operands<NamedBarrierOperands>(warp, i);
    if (own.id == first.id && own.threads == first.threads) continue;
    machine.raise(FaultKind::barrier_misuse, warp.lanes[i], warp.instruction->name, 0, warp.site,
                  fmt::format("barrier {} of {} threads, for lane 0 barrier {} of {}", own.id, own.threads, first.id,
                              first.threads));
  }
  machine.named_barrier(warp, first.id, first.threads, kWaits);
}
constexpr Instruction kNamedBarSync{"bar.sync", execute_named_barrier<true>};
constexpr Instruction kNamedBarArrive{"bar.arrive", execute_named_barrier<false>};

struct SetRegistersOperands {
  int registers;
};

template <bool kIncrease>
void execute_set_registers(Machine& machine, Warp& warp) {
  machine.set_registers(warp, operands<SetRegistersOperands>(warp, 0).registers, kIncrease);
}
constexpr Instruction kIncreaseRegisters{"setmaxnreg.inc", execute_set_registers<true>};
constexpr Instruction kDecreaseRegisters{"setmaxnreg.dec", execute_set_registers<false>};

// Exchanges within a warp.

struct ShuffleOperands {
  std::uint32_t value;
  std::size_t source;  // lane
  std::uint32_t* result;
};

void execute_shuffle(Machine&, Warp& warp) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    const ShuffleOperands& own = operands<ShuffleOperands>(warp, i);
    *own.result = operands<ShuffleOperands>(warp, own.source).value;
  }
}
constexpr Instruction kShuffle{"shfl.sync.bfly", execute_shuffle};
constexpr Instruction kShuffleIdx{"shfl.sync.idx", execute_shuffle};

struct VoteOperands {
  bool predicate;
  bool* result;
};

void execute_vote_any(Machine&, Warp& warp) {
  bool any = false;
  for (std::size_t i = 0; i < kLanes; ++i) any = any || operands<VoteOperands>(warp, i).predicate;
  for (std::size_t i = 0; i < kLanes; ++i) *operands<VoteOperands>(warp, i).result = any;
}
constexpr Instruction kVoteAny{"vote.sync.any", execute_vote_any};

struct BallotOperands {
  bool predicate;
  std::uint32_t* result;
};

void execute_vote_ballot(Machine&, Warp& warp) {
  std::uint32_t ballot = 0;
  for (std::size_t i = 0; i < kLanes; ++i) {
    if (operands<BallotOperands>(warp, i).predicate) ballot |= std::uint32_t{1} << i;
  }
  for (std::size_t i = 0; i < kLanes; ++i) *operands<BallotOperands>(warp, i).result = ballot;
}
constexpr Instruction kVoteBallot{"vote.sync.ballot", execute_vote_ballot};

// Matrix loads.

struct LdmatrixOperands {
  std::uint32_t* r;
  std::uint32_t row;
};

std::uint16_t load_half(const std::byte* at) {
  std::uint16_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

/// The row that lane `lane` gives the address of. All lanes of the warp read it.
const std::byte* matrix_row(Machine& machine, Warp& warp, std::size_t lane) {
  const std::uint32_t address = operands<LdmatrixOperands>(warp, lane).row;
  if (address % 16 != 0) {
    machine.raise(FaultKind::misaligned, warp.lanes[lane], warp.instruction->name, address, warp.site,
                  "rows of ldmatrix are 16-byte aligned");
  }
  if (const Conflict conflict = machine.read_as_warp(warp, address, 16)) {
    machine.raise(conflict, warp.lanes[lane], warp.instruction->name, address, warp.site);
  }
  return Machine::shared(warp).at(address);
}

template <int kMatrices, bool kTransposed>
void execute_ldmatrix(Machine& machine, Warp& warp) {
  for (std::size_t matrix = 0; matrix < kMatrices; ++matrix) {
    const std::byte* rows[8];
    for (std::size_t row = 0; row < 8; ++row) rows[row] = matrix_row(machine, warp, 8 * matrix + row);
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::size_t g = i / 4;
      const std::size_t t = i % 4;
      std::uint32_t value;
      if constexpr (kTransposed) {
        value = load_half(rows[2 * t] + 2 * g) | static_cast<std::uint32_t>(load_half(rows[2 * t + 1] + 2 * g)) << 16;
      } else {
        std::memcpy(&value, rows[g] + 4 * t, sizeof value);
      }
      operands<LdmatrixOperands>(warp, i).r[matrix] = value;
    }
  }
}
constexpr Instruction kLdmatrixX4{"ldmatrix.x4", execute_ldmatrix<4, false>};
constexpr Instruction kLdmatrixX2{"ldmatrix.x2", execute_ldmatrix<2, false>};
constexpr Instruction kLdmatrixX4Trans{"ldmatrix.x4.trans", execute_ldmatrix<4, true>};
constexpr Instruction kLdmatrixX2Trans{"ldmatrix.x2.trans", execute_ldmatrix<2, true>};

struct StmatrixOperands {
  const std::uint32_t* r;
  std::uint32_t row;
};

/// What lies in row `row` of the transpose at columns 2t and 2t + 1: row 2t of the matrix is with lanes 8t to 8t + 3,
/// and row 2t + 1 with the next four.
std::uint32_t transposed_pair(const Warp& warp, std::size_t matrix, std::size_t row, std::size_t t) {
  const auto element = [&](std::size_t column) -> std::uint32_t {
    return operands<StmatrixOperands>(warp, 4 * column + row / 2).r[matrix] >> (row % 2 * 16) & 0xffff;
  };
  return element(2 * t) | element(2 * t + 1) << 16;
}

/// The lane that gives the address of a row writes it.
template <int kMatrices, bool kTransposed>
void execute_stmatrix(Machine& machine, Warp& warp) {
  for (std::size_t i = 0; i < 8 * kMatrices; ++i) {
    const Lane& lane = warp.lanes[i];
    const std::uint32_t address = operands<StmatrixOperands>(warp, i).row;
    if (address % 16 != 0) {
      machine.raise(FaultKind::misaligned, lane, warp.instruction->name, address, warp.site,
                    "rows of stmatrix are 16-byte aligned");
    }
    if (const Conflict conflict =
            Machine::shared(warp).write(address, 16, machine.observer(lane), machine.stamp(lane))) {
      machine.raise(conflict, lane, warp.instruction->name, address, warp.site);
    }
    for (std::size_t t = 0; t < 4; ++t) {
      const std::uint32_t value = kTransposed ? transposed_pair(warp, i / 8, i % 8, t)
                                              : operands<StmatrixOperands>(warp, i % 8 * 4 + t).r[i / 8];
      std::memcpy(Machine::shared(warp).at(address) + 4 * t, &value, sizeof value);
    }
  }
}
constexpr Instruction kStmatrixX4{"stmatrix.x4", execute_stmatrix<4, false>};
constexpr Instruction kStmatrixX2{"stmatrix.x2", execute_stmatrix<2, false>};
constexpr Instruction kStmatrixX4Trans{"stmatrix.x4.trans", execute_stmatrix<4, true>};

// Matrix products. Products of two f16, bf16 or tf32 values are exact in float; they are added up in float, from the
// accumulator on and in the order of the depth.

struct MmaOperands {
  float* d;
  std::uint32_t a[4];
  std::uint32_t b[2];
};

template <int kDepth>
struct MmaTiles {
  float a[16][kDepth];
  float b[kDepth][8];
};

/// Calls visit(register of D, row, column) for all registers of the warp.
template <class Visit>
void for_accumulators(Warp& warp, const Visit& visit) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    float* const own = operands<MmaOperands>(warp, i).d;
    for (std::size_t e = 0; e < 4; ++e) visit(own[e], i / 4 + e / 2 * 8, 2 * (i % 4) + e % 2);
  }
}

template <int kDepth>
void multiply(Warp& warp, const MmaTiles<kDepth>& tiles) {
  float d[16][8];
  for_accumulators(warp, [&d](const float& own, std::size_t row, std::size_t n) { d[row][n] = own; });
  for (std::size_t row = 0; row < 16; ++row) {
    float sums[8];  // in registers
    std::copy_n(d[row], 8, sums);
    for (std::size_t k = 0; k < kDepth; ++k) {
      for (std::size_t n = 0; n < 8; ++n) sums[n] += tiles.a[row][k] * tiles.b[k][n];
    }
    std::copy_n(sums, 8, d[row]);
  }
  for_accumulators(warp, [&d](float& own, std::size_t row, std::size_t n) { own = d[row][n]; });
}

template <Half kHalfA, Half kHalfB>
void execute_mma_bytes(Machine&, Warp& warp) {
  std::vector<std::uint8_t> a(16 * kByteDepth), b(kByteDepth * 8);
  std::vector<float> d(16 * 8);
  for_accumulators(warp, [&d](const float& own, std::size_t row, std::size_t n) { d[8 * row + n] = own; });
  for (std::size_t i = 0; i < kLanes; ++i) {
    const MmaOperands& own = operands<MmaOperands>(warp, i);
    const std::size_t g = i / 4;
    for (std::size_t byte = 0; byte < 4; ++byte) {
      const std::size_t k = 4 * (i % 4) + byte;
      for (std::size_t word = 0; word < 4; ++word) {
        a[(g + word % 2 * 8) * kByteDepth + word / 2 * 16 + k] = static_cast<std::uint8_t>(own.a[word] >> 8 * byte);
      }
      for (std::size_t word = 0; word < 2; ++word) {
        b[(16 * word + k) * 8 + g] = static_cast<std::uint8_t>(own.b[word] >> 8 * byte);
      }
    }
  }
  multiply_bytes(kHalfA, kHalfB, a, b, d);
  for_accumulators(warp, [&d](float& own, std::size_t row, std::size_t n) { own = d[8 * row + n]; });
}

template <Half kHalf>
float low_half(std::uint32_t pair) {
  const auto bits = static_cast<std::uint16_t>(pair);
  return kHalf == Half::bf16 ? fa::reference::decode_bf16(bits) : fa::reference::decode_f16(bits);
}

template <Half kHalf, int kDepth>
void execute_mma_16(Machine&, Warp& warp) {
  MmaTiles<kDepth> tiles;
  for (std::size_t i = 0; i < kLanes; ++i) {
    const MmaOperands& own = operands<MmaOperands>(warp, i);
    const std::size_t g = i / 4;
    const std::size_t t = i % 4;
    for (std::size_t half = 0; half < kDepth / 8; ++half) {
      for (std::size_t odd = 0; odd < 2; ++odd) {
        const std::size_t k = 8 * half + 2 * t + odd;
        const std::uint32_t shift = odd == 0 ? 0 : 16;
        tiles.a[g][k] = low_half<kHalf>(own.a[2 * half] >> shift);
        tiles.a[g + 8][k] = low_half<kHalf>(own.a[2 * half + 1] >> shift);
        tiles.b[k][g] = low_half<kHalf>(own.b[half] >> shift);
      }
    }
  }
  multiply(warp, tiles);
}

float tf32(std::uint32_t bits) {
  return std::bit_cast<float>(bits & 0xffffe000u);
}

void execute_mma_tf32(Machine&, Warp& warp) {
  MmaTiles<8> tiles;
  for (std::size_t i = 0; i < kLanes; ++i) {
    const MmaOperands& own = operands<MmaOperands>(warp, i);
    const std::size_t g = i / 4;
    const std::size_t t = i % 4;
    for (std::size_t half = 0; half < 2; ++half) {
      tiles.a[g][t + 4 * half] = tf32(own.a[2 * half]);
      tiles.a[g + 8][t + 4 * half] = tf32(own.a[2 * half + 1]);
      tiles.b[t + 4 * half][g] = tf32(own.b[half]);
    }
  }
  multiply(warp, tiles);
}

template <Half kHalf>
constexpr Instruction kMma16{kHalf == Half::bf16 ? "mma.m16n8k16.bf16" : "mma.m16n8k16.f16", execute_mma_16<kHalf, 16>};
template <Half kHalf>
constexpr Instruction kMma8{kHalf == Half::bf16 ? "mma.m16n8k8.bf16" : "mma.m16n8k8.f16", execute_mma_16<kHalf, 8>};
template <Half kHalfA, Half kHalfB>
constexpr Instruction kMmaBytes{"mma.m16n8k32", execute_mma_bytes<kHalfA, kHalfB>};
constexpr Instruction kMmaTf32{"mma.m16n8k8.tf32", execute_mma_tf32};

// Global and shared accesses of one thread.

const Memory::Region& check_global(const void* address, std::size_t bytes, std::size_t alignment, const char* name,
                                   const Site& site) {
  Lane& lane = Machine::current();
  const Machine& machine = Machine::of(lane);
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  Memory& memory = Machine::of(lane).memory();
  if ((at & (alignment - 1)) != 0) {
    machine.raise(FaultKind::misaligned, lane, name, at, site,
                  fmt::format("{} wants {}-byte alignment", memory.describe(address), alignment));
  }
  const Memory::Region* region = memory.find(address, bytes);
  if (region == nullptr) {
    machine.raise(FaultKind::global_out_of_bounds, lane, name, at, site,
                  fmt::format("{} bytes from {}", bytes, memory.describe(address)));
  }
  machine.check_order(lane, address, bytes, name, site);
  return *region;
}

void check_shared_alignment(Lane& lane, std::uint32_t address, std::uint32_t bytes, const char* name,
                            const Site& site) {
  if ((address & (bytes - 1)) == 0) return;
  Machine::of(lane).raise(FaultKind::misaligned, lane, name, address, site,
                          fmt::format("wants {}-byte alignment", bytes));
}

// cp.async

void arrive(SharedMemory& shared, AsyncCopy& copy) {
  if (copy.arrived) return;
  copy.arrived = true;
  std::byte* target = shared.at(copy.target);
  if (copy.source != nullptr) {
    std::memcpy(target, copy.source, copy.bytes);
  } else {
    std::memset(target, 0, copy.bytes);
  }
}

}  // namespace

int thread_index() {
  return Machine::current().thread;
}

int block_index() {
  return Machine::current().warp->block->index;
}

int block_count() {
  return Machine::of(Machine::current()).blocks();
}

int cluster_rank() {
  return Machine::current().warp->block->rank;
}

std::uint32_t map_shared(std::uint32_t shared, int rank, const Site& site) {
  const Lane& lane = Machine::current();
  return Machine::of(lane).map(lane, shared, rank, site);
}

std::uint32_t dynamic_shared() {
  return Machine::shared(Machine::current()).base();
}

void bar_sync(const Site& site) {
  converge(kBarSync, nullptr, site);
}

void cluster_sync(const Site& site) {
  converge(kClusterSync, nullptr, site);
}

void cluster_sync_relaxed(const Site& site) {
  converge(kRelaxedClusterSync, nullptr, site);
}

void bar_warp_sync(const Site& site) {
  converge(kBarWarpSync, nullptr, site);
}

void bar_sync(int id, int threads, const Site& site) {
  const NamedBarrierOperands own{id, threads};
  converge(kNamedBarSync, &own, site);
}

void bar_arrive(int id, int threads, const Site& site) {
  const NamedBarrierOperands own{id, threads};
  converge(kNamedBarArrive, &own, site);
}

void set_max_registers(int registers, bool increase, const Site& site) {
  const SetRegistersOperands own{registers};
  converge(increase ? kIncreaseRegisters : kDecreaseRegisters, &own, site);
}

std::uint32_t shfl_bfly_b32(std::uint32_t value, int lane_mask, const Site& site) {
  std::uint32_t result = 0;
  const auto source = static_cast<std::size_t>((thread_index() ^ lane_mask) & 31);
  const ShuffleOperands own{value, source, &result};
  converge(kShuffle, &own, site);
  return result;
}

void griddepcontrol_wait() {
  Machine::current().waited_for_grid = true;
}

float shfl_bfly(float value, int lane_mask, const Site& site) {
  return std::bit_cast<float>(shfl_bfly_b32(std::bit_cast<std::uint32_t>(value), lane_mask, site));
}

std::uint32_t shfl_idx(std::uint32_t value, int source, const Site& site) {
  std::uint32_t result = 0;
  const ShuffleOperands own{value, static_cast<std::size_t>(source & 31), &result};
  converge(kShuffleIdx, &own, site);
  return result;
}

bool vote_any(bool predicate, const Site& site) {
  bool result = false;
  const VoteOperands own{predicate, &result};
  converge(kVoteAny, &own, site);
  return result;
}

std::uint32_t vote_ballot(bool predicate, const Site& site) {
  std::uint32_t result = 0;
  const BallotOperands own{predicate, &result};
  converge(kVoteBallot, &own, site);
  return result;
}

namespace {

/// Returns the region, every byte of which somebody has written.
const Memory::Region& check_readable(const void* address, std::size_t bytes, const char* name, const Site& site) {
  const Memory::Region& region = check_global(address, bytes, bytes, name, site);
  const std::uint8_t* flags = region.flags.get() + (static_cast<const std::byte*>(address) - region.base);
  for (std::size_t i = 0; i < bytes; ++i) {
    if ((flags[i] & Memory::kReadable) != 0) continue;
    Lane& lane = Machine::current();
    const std::byte* bad = static_cast<const std::byte*>(address) + i;
    Machine::of(lane).raise(FaultKind::global_uninitialised, lane, name, reinterpret_cast<std::uintptr_t>(bad), site,
                            "nobody has written " + Machine::of(lane).memory().describe(bad));
  }
  return region;
}

/// Returns the region, every byte of which is written now.
const Memory::Region& check_writable(const void* address, std::size_t bytes, const char* name, const Site& site) {
  const Memory::Region& region = check_global(address, bytes, bytes, name, site);
  std::uint8_t* flags = region.flags.get() + (static_cast<const std::byte*>(address) - region.base);
  Lane& lane = Machine::current();
  if (const int reader = Machine::of(lane).copying_from(address, bytes); reader >= 0) {
    Machine::of(lane).raise(FaultKind::source_overwritten, lane, name, reinterpret_cast<std::uintptr_t>(address), site,
                            Machine::of(lane).name(reader) + " has a copy of it in flight");
  }
  for (std::size_t i = 0; i < bytes; ++i) {
    if ((flags[i] & Memory::kWritable) == 0) {
      const std::byte* bad = static_cast<const std::byte*>(address) + i;
      Machine::of(lane).raise(FaultKind::global_not_writable, lane, name, reinterpret_cast<std::uintptr_t>(bad), site,
                              Machine::of(lane).memory().describe(bad));
    }
    flags[i] |= Memory::kReadable;
  }
  return region;
}

}  // namespace

void check_global_load(const void* address, std::size_t bytes, const char* name, const Site& site) {
  const Memory::Region& region = check_readable(address, bytes, name, site);
  if (region.stamps == nullptr) return;
  const Memory::Stamp* const stamps = region.stamps.get() + (static_cast<const std::byte*>(address) - region.base);
  Lane& lane = Machine::current();
  Memory& memory = Machine::of(lane).memory();
  for (std::size_t i = 0; i < bytes; ++i) {
    if (memory.may_read(lane.warp->block->index, stamps[i])) continue;
    Machine::of(lane).raise(FaultKind::unfenced, lane, name, reinterpret_cast<std::uintptr_t>(address), site,
                            fmt::format("block {} has written it, and no atomic in order tells", stamps[i].block));
  }
}

std::int32_t load_ahead(const std::int32_t* address, const Site& site) {
  constexpr const char* kName = "ld.relaxed.gpu.global.s32";
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  if (!machine.may_guess(lane)) {
    check_global_load(address, sizeof *address, kName, site);
    return *address;
  }
  if (machine.memory().find(address, sizeof *address) == nullptr) {
    machine.raise(FaultKind::global_out_of_bounds, lane, kName, reinterpret_cast<std::uintptr_t>(address), site,
                  "a guess is of the launch's memory too");
  }
  // Every other warp guesses right, and each lane of the others finds what it likes.
  if ((lane.warp->index + lane.warp->block->index) % 2 == 0) return *address;
  constexpr std::array<std::int32_t, 5> kFound{0, -7, 0x7fffffff, 193, 65};
  return kFound[reinterpret_cast<std::uintptr_t>(address) / sizeof *address % kFound.size()];
}

std::int32_t load_guessed(const std::int32_t* address, const Site& site) {
  constexpr std::int32_t kNobodys = 0x5eed;
  const Memory::Region& region = check_global(address, sizeof *address, sizeof *address, "ld.global", site);
  const std::uint8_t* flags = region.flags.get() + (reinterpret_cast<const std::byte*>(address) - region.base);
  return (*flags & Memory::kReadable) != 0 ? *address : kNobodys;
}

void check_global_store(const void* address, std::size_t bytes, const char* name, const Site& site) {
  const Memory::Region& region = check_writable(address, bytes, name, site);
  if (region.stamps == nullptr) return;
  const Lane& lane = Machine::current();
  const Memory::Stamp stamp = Machine::of(lane).memory().stamp_of(lane.warp->block->index);
  std::fill_n(region.stamps.get() + (static_cast<const std::byte*>(address) - region.base), bytes, stamp);
}

namespace {

/// red of one element: it becomes `value` where `is_better(value, element)`.
template <class T, class Better>
void reduce(T* address, T value, const char* name, const Site& site, const Better& is_better) {
  check_global_load(address, sizeof value, name, site);
  check_global_store(address, sizeof value, name, site);
  const std::atomic_ref<T> place(*address);
  T before = place.load();
  while (is_better(value, before) && !place.compare_exchange_weak(before, value)) continue;
}

}  // namespace

void red_max_s32(std::int32_t* address, std::int32_t value, const Site& site) {
  reduce(address, value, "red.relaxed.gpu.global.max.s32", site, std::greater());
}

void red_min_u32(std::uint32_t* address, std::uint32_t value, const Site& site) {
  reduce(address, value, "red.relaxed.gpu.global.min.u32", site, std::less());
}

void red_min_u64(std::uint64_t* address, std::uint64_t value, const Site& site) {
  reduce(address, value, "red.relaxed.gpu.global.min.u64", site, std::less());
}

void red_max_u64(std::uint64_t* address, std::uint64_t value, const Site& site) {
  reduce(address, value, "red.relaxed.gpu.global.max.u64", site, std::greater());
}

void red_max_u32(std::uint32_t* address, std::uint32_t value, const Site& site) {
  reduce(address, value, "red.global.max.u32", site, std::greater());
}

void red_add_f32(float* address, const float* values, int count, const char* name, const Site& site) {
  const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(count);
  check_global_load(address, bytes, name, site);
  check_global_store(address, bytes, name, site);
  for (int i = 0; i < count; ++i) std::atomic_ref<float>(address[i]).fetch_add(values[i]);
}

std::int32_t atomic_add_global(std::int32_t* address, std::int32_t value, const Site& site) {
  constexpr const char* kName = "atom.relaxed.gpu.global.add.s32";
  check_readable(address, sizeof value, kName, site);
  check_writable(address, sizeof value, kName, site);
  return std::atomic_ref<std::int32_t>(*address).fetch_add(value, std::memory_order_relaxed);
}

std::int32_t atomic_add_acq_rel_global(std::int32_t* address, std::int32_t value, const Site& site) {
  constexpr const char* kName = "atom.acq_rel.gpu.global.add.s32";
  check_readable(address, sizeof value, kName, site);
  check_writable(address, sizeof value, kName, site);
  Lane& lane = Machine::current();
  return Machine::of(lane).memory().in_order(lane.warp->block->index, address, [&] {
    return std::atomic_ref<std::int32_t>(*address).fetch_add(value, std::memory_order_acq_rel);
  });
}

namespace {

template <class Word>
void raise_flag(Word* address, Word value, const char* name, const Site& site) {
  check_writable(address, sizeof value, name, site);
  Lane& lane = Machine::current();
  Machine::of(lane).memory().in_order(lane.warp->block->index, address, [&] {
    std::atomic_ref<Word>(*address).store(value, std::memory_order_release);
    return 0;
  });
}

template <class Word>
void await_flag(const Word* address, Word value, const char* name, const Site& site) {
  check_global(address, sizeof value, sizeof value, name, site);
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  const std::atomic_ref<Word> flag(const_cast<Word&>(*address));
  const auto start = std::chrono::steady_clock::now();
  const auto is_up = [&] {
    machine.step(lane);
    return machine.memory().in_order(lane.warp->block->index, address,
                                     [&] { return flag.load(std::memory_order_acquire) == value ? 1 : 0; }) != 0;
  };
  while (!is_up()) {
    machine.tell_wait();
    std::this_thread::yield();  // to another block
    machine.check_others();
    if (std::chrono::steady_clock::now() - start > kPatience) {
      machine.raise(FaultKind::deadlock, lane, name, reinterpret_cast<std::uintptr_t>(address), site,
                    "no block raises the flag there");
    }
  }
}

}  // namespace

void raise_flag_global(std::uint64_t* address, std::uint64_t value, const Site& site) {
  raise_flag(address, value, "st.release.gpu.global.b64", site);
}
void raise_flag_global(std::int32_t* address, std::int32_t value, const Site& site) {
  raise_flag(address, value, "st.release.gpu.global.b32", site);
}

void await_flag_global(const std::uint64_t* address, std::uint64_t value, const Site& site) {
  await_flag(address, value, "ld.acquire.gpu.global.b64", site);
}
void await_flag_global(const std::int32_t* address, std::int32_t value, const Site& site) {
  await_flag(address, value, "ld.acquire.gpu.global.b32", site);
}

void signal_global(std::int32_t* address, std::int32_t value, const Site& site) {
  constexpr const char* kName = "st.relaxed.gpu.global";
  check_global_store(address, sizeof value, kName, site);
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  if (machine.has_stores(lane)) {
    machine.raise(FaultKind::unfenced, lane, kName, reinterpret_cast<std::uintptr_t>(address), site,
                  "its stores of shared memory are not complete");
  }
  const std::int32_t before = std::atomic_ref<std::int32_t>(*address).exchange(value, std::memory_order_release);
  if (before < value) return;
  machine.raise(FaultKind::out_of_turn, lane, kName, reinterpret_cast<std::uintptr_t>(address), site,
                fmt::format("{} after {}", value, before));
}

bool test_global(const std::int32_t* address, std::int32_t value, const Site& site) {
  check_global_load(address, sizeof value, kPoll, site);
  Lane& lane = Machine::current();
  Machine::of(lane).step(lane);
  const std::atomic_ref<std::int32_t> seen(const_cast<std::int32_t&>(*address));
  return seen.load(std::memory_order_acquire) == value;
}

void await_global(const std::int32_t* address, std::int32_t value, const Site& site) {
  Lane& lane = Machine::current();
  const auto start = std::chrono::steady_clock::now();
  while (!test_global(address, value, site)) {
    Machine::of(lane).tell_wait();
    std::this_thread::yield();  // to another block
    Machine::of(lane).check_others();
    if (std::chrono::steady_clock::now() - start > kPatience) {
      Machine::of(lane).raise(FaultKind::deadlock, lane, kPoll, reinterpret_cast<std::uintptr_t>(address), site,
                              fmt::format("no block stores {} there", value));
    }
  }
}

void load_shared(std::uint32_t address, void* value, std::uint32_t bytes, const char* name, const Site& site) {
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  check_shared_alignment(lane, address, bytes, name, site);
  if (const Conflict conflict =
          Machine::shared(lane).read(address, bytes, machine.observer(lane), machine.reader(lane))) {
    machine.raise(conflict, lane, name, address, site);
  }
  std::memcpy(value, Machine::shared(lane).at(address), bytes);
}

void load_shared_cluster(std::uint32_t cluster_address, void* value, std::uint32_t bytes, const char* name,
                         const Site& site) {
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  check_shared_alignment(lane, cluster_address, bytes, name, site);
  const Place place = machine.resolve(lane, cluster_address, name, site);
  SharedMemory& memory = place.block->shared;
  if (const Conflict conflict =
          memory.read(place.address, bytes, machine.observer(lane, *place.block), machine.reader(lane))) {
    machine.raise(conflict, lane, memory, name, place.address, site);
  }
  machine.reach(lane, *place.block);
  std::memcpy(value, memory.at(place.address), bytes);
}

void store_shared(std::uint32_t address, const void* value, std::uint32_t bytes, const char* name, const Site& site) {
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  check_shared_alignment(lane, address, bytes, name, site);
  if (const Conflict conflict =
          Machine::shared(lane).write(address, bytes, machine.observer(lane), machine.stamp(lane))) {
    machine.raise(conflict, lane, name, address, site);
  }
  std::memcpy(Machine::shared(lane).at(address), value, bytes);
}

std::uint32_t add_shared(std::uint32_t address, std::uint32_t value, const char* name, const Site& site) {
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  check_shared_alignment(lane, address, sizeof value, name, site);
  if (const Conflict conflict = Machine::shared(lane).add(address, machine.observer(lane), machine.stamp(lane))) {
    machine.raise(conflict, lane, name, address, site);
  }
  std::uint32_t before = 0;
  std::memcpy(&before, Machine::shared(lane).at(address), sizeof before);
  const std::uint32_t after = before + value;
  std::memcpy(Machine::shared(lane).at(address), &after, sizeof after);
  return before;
}

void cp_async(std::uint32_t shared, const void* global, std::uint32_t bytes, bool valid, const Site& site) {
  const char* const name = bytes == 16 ? "cp.async.cg.16" : "cp.async.ca.4";
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  check_shared_alignment(lane, shared, bytes, name, site);
  if (valid) {
    check_global_load(global, bytes, name, site);
  } else if (reinterpret_cast<std::uintptr_t>(global) % bytes != 0) {
    machine.raise(FaultKind::misaligned, lane, name, reinterpret_cast<std::uintptr_t>(global), site,
                  "an address that is not read is still aligned");
  }
  const Stamp writer{0, static_cast<std::uint16_t>(lane.agent), Stamp::copying};
  if (const Conflict conflict = Machine::shared(lane).write(shared, bytes, machine.observer(lane), writer)) {
    machine.raise(conflict, lane, name, shared, site);
  }
  std::memset(Machine::shared(lane).at(shared), 0xff, bytes);
  AsyncCopies& async = lane.async;
  async.copies.push_back({shared, valid ? static_cast<const std::byte*>(global) : nullptr, false, bytes});
  ++async.uncommitted;
  // Some arrive at once, some later, some only when they are waited for.
  const std::uint64_t dice = machine.random() >> 40;
  if ((dice & 3) == 0) arrive(Machine::shared(lane), async.copies.back());
  if ((dice & 12) == 0) arrive(Machine::shared(lane), async.copies[(dice >> 4) % async.copies.size()]);
}

void cp_async_16(std::uint32_t shared, const void* global, bool valid, const Site& site) {
  cp_async(shared, global, 16, valid, site);
}

void cp_async_4(std::uint32_t shared, const void* global, bool valid, const Site& site) {
  cp_async(shared, global, 4, valid, site);
}

void cp_async_commit() {
  AsyncCopies& async = Machine::current().async;
  async.groups.push_back(async.uncommitted);
  async.uncommitted = 0;
}

void cp_async_wait(int pending) {
  Lane& lane = Machine::current();
  Machine& machine = Machine::of(lane);
  AsyncCopies& async = lane.async;
  const int done = static_cast<int>(async.groups.size()) - pending;
  if (done <= 0) return;
  int copies = 0;
  for (int i = 0; i < done; ++i) copies += async.groups[static_cast<std::size_t>(i)];
  for (int i = 0; i < copies; ++i) {
    AsyncCopy& copy = async.copies[static_cast<std::size_t>(i)];
    arrive(Machine::shared(lane), copy);
    Machine::shared(lane).arrived(copy.target, copy.bytes, machine.stamp(lane));
  }
  async.copies.erase(async.copies.begin(), async.copies.begin() + copies);
  async.groups.erase(async.groups.begin(), async.groups.begin() + done);
}

void ldmatrix_x4(std::uint32_t* r, std::uint32_t row, const Site& site) {
  const LdmatrixOperands own{r, row};
  converge(kLdmatrixX4, &own, site);
}

void ldmatrix_x2(std::uint32_t* r, std::uint32_t row, const Site& site) {
  const LdmatrixOperands own{r, row};
  converge(kLdmatrixX2, &own, site);
}

void ldmatrix_x4_trans(std::uint32_t* r, std::uint32_t row, const Site& site) {
  const LdmatrixOperands own{r, row};
  converge(kLdmatrixX4Trans, &own, site);
}

void ldmatrix_x2_trans(std::uint32_t* r, std::uint32_t row, const Site& site) {
  const LdmatrixOperands own{r, row};
  converge(kLdmatrixX2Trans, &own, site);
}

void stmatrix_x4(std::uint32_t row, const std::uint32_t* r, const Site& site) {
  const StmatrixOperands own{r, row};
  converge(kStmatrixX4, &own, site);
}

void stmatrix_x2(std::uint32_t row, const std::uint32_t* r, const Site& site) {
  const StmatrixOperands own{r, row};
  converge(kStmatrixX2, &own, site);
}

void stmatrix_x4_trans(std::uint32_t column, const std::uint32_t* r, const Site& site) {
  const StmatrixOperands own{r, column};
  converge(kStmatrixX4Trans, &own, site);
}

template <Half kHalf>
void mma_m16n8k16(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, const Site& site) {
  const MmaOperands own{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  converge(kMma16<kHalf>, &own, site);
}
template void mma_m16n8k16<Half::f16>(float*, const std::uint32_t*, std::uint32_t, std::uint32_t, const Site&);
template void mma_m16n8k16<Half::bf16>(float*, const std::uint32_t*, std::uint32_t, std::uint32_t, const Site&);

template <Half kHalf>
void mma_m16n8k8(float* d, std::uint32_t a0, std::uint32_t a1, std::uint32_t b0, const Site& site) {
  const MmaOperands own{d, {a0, a1, 0, 0}, {b0, 0}};
  converge(kMma8<kHalf>, &own, site);
}
template void mma_m16n8k8<Half::f16>(float*, std::uint32_t, std::uint32_t, std::uint32_t, const Site&);
template void mma_m16n8k8<Half::bf16>(float*, std::uint32_t, std::uint32_t, std::uint32_t, const Site&);

template <Half kHalfA, Half kHalfB>
void mma_m16n8k32(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, const Site& site) {
  const MmaOperands own{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  converge(kMmaBytes<kHalfA, kHalfB>, &own, site);
}
template void mma_m16n8k32<Half::e4m3, Half::e4m3>(float*, const std::uint32_t*, std::uint32_t, std::uint32_t,
                                                   const Site&);
template void mma_m16n8k32<Half::e4m3, Half::e5m2>(float*, const std::uint32_t*, std::uint32_t, std::uint32_t,
                                                   const Site&);
template void mma_m16n8k32<Half::e5m2, Half::e5m2>(float*, const std::uint32_t*, std::uint32_t, std::uint32_t,
                                                   const Site&);

void mma_m16n8k8_tf32(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, const Site& site) {
  const MmaOperands own{d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  converge(kMmaTf32, &own, site);
}

float flush(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
}

float ex2(float x) {
  return flush(std::exp2(flush(x)));
}

float rcp(float x) {
  return flush(1.f / flush(x));
}

float lg2(float x) {
  return std::log2(x);
}

float tanh(float x) {
  const float exact = std::tanh(x);
  constexpr std::uint32_t kDropped = 0xfffu;  // as inexact as the instruction
  return std::isnan(exact) ? exact : std::bit_cast<float>(std::bit_cast<std::uint32_t>(exact) & ~kDropped);
}

std::uint16_t convert_f16(float x) {
  return std::isnan(x) ? std::uint16_t{0x7fff} : fa::reference::encode_f16(x);
}

std::uint16_t convert_bf16(float x) {
  return std::isnan(x) ? std::uint16_t{0x7fff} : fa::reference::encode_bf16(x);
}

float convert_from_f16(std::uint16_t bits) {
  return static_cast<float>(fa::reference::decode_f16(bits));
}

}  // namespace emulator
