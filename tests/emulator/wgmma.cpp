// wgmma: products of a warpgroup that run while its warps go on.

#include <algorithm>
#include <bit>
#include <cstring>

#include <fmt/format.h>

#include "emulator/byte_products.hpp"
#include "emulator/instructions.hpp"
#include "emulator/machine.hpp"
#include "reference/convert.hpp"

namespace emulator {
namespace {

constexpr std::size_t kLanes = kWarpSize;
constexpr int kRows = 64;
constexpr int kDepth = 16;
constexpr std::uint32_t kChunk = 16;  // bytes
constexpr std::uint32_t kChunkElements = 8;

// Matrix descriptors.

/// A [extent, 16] operand in shared memory: rows of 128 bytes in groups of 8, permuted by the 128-byte swizzle; along K
/// also rows of 16 bytes without a swizzle, the second half of their depth `leading` bytes behind the first.
struct Operand {
  std::uint32_t start = 0;
  std::uint32_t leading = 0;
  std::uint32_t stride = 0;
  bool k_major = true;
  bool swizzles = true;
  std::uint32_t extent = 0;  // along M or N

  /// Calls visit(address, first index along the extent, first depth) for every 16-byte chunk: 8 elements along the
  /// depth, or along the extent.
  template <class Visit>
  void for_each_chunk(const Visit& visit) const {
    if (!swizzles) {
      for (std::uint32_t i = 0; i < extent; ++i) {
        for (std::uint32_t c = 0; c < 2; ++c) visit(start + i / 8 * stride + i % 8 * kChunk + c * leading, i, 8 * c);
      }
      return;
    }
    if (k_major) {
      for (std::uint32_t i = 0; i < extent; ++i) {
        const std::uint32_t row = start + i / 8 * stride + i % 8 * 128;
        for (std::uint32_t c = 0; c < 2; ++c) visit(swizzled(row + c * kChunk, Swizzle::bytes_128), i, 8 * c);
      }
      return;
    }
    for (std::uint32_t k = 0; k < kDepth; ++k) {
      for (std::uint32_t c = 0; c < extent / kChunkElements; ++c) {
        const std::uint32_t address = start + c / 8 * leading + k / 8 * stride + k % 8 * 128 + c % 8 * kChunk;
        visit(swizzled(address, Swizzle::bytes_128), kChunkElements * c, k);
      }
    }
  }
};

/// Returns what is wrong with the descriptor, or "". The start is that in the window of a block: there is no room for
/// its rank.
std::string decode(std::uint64_t descriptor, bool k_major, std::uint32_t extent, Operand& operand) {
  constexpr std::uint64_t kUnused = 0x3ff1c000c000c000;  // 14-15, 30-31, 46-48, 52-61
  operand.start = static_cast<std::uint32_t>(descriptor & 0x3fff) * 16;
  operand.leading = static_cast<std::uint32_t>(descriptor >> 16 & 0x3fff) * 16;
  operand.stride = static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) * 16;
  operand.k_major = k_major;
  operand.extent = extent;
  if ((descriptor & kUnused) != 0) return "bits that belong to no field are set";
  if ((descriptor >> 49 & 7) != 0) return "a base offset, which is not modelled";
  const std::uint64_t layout = descriptor >> 62;
  operand.swizzles = layout != 0;
  if (layout == 0 && k_major) return "";
  if (layout != 1) return fmt::format("layout {}, and only the 128-byte swizzle is modelled", layout);
  if ((operand.start >> 7 & 7) != 0) return fmt::format("start {:#x} in the middle of a swizzle atom", operand.start);
  if (k_major && operand.start % 128 > 96) return fmt::format("start {:#x} leaves no room in its row", operand.start);
  if (!k_major && operand.start % 128 != 0) return fmt::format("start {:#x} in the middle of a row", operand.start);
  if (operand.stride % 1024 != 0) return fmt::format("groups of 8 rows {} bytes apart", operand.stride);
  if (!k_major && extent > 64 && operand.leading % 1024 != 0) {
    return fmt::format("slabs of 64 columns {} bytes apart", operand.leading);
  }
  return "";
}

// Arithmetic.

float element(Half half, std::uint16_t bits) {
  return half == Half::bf16 ? std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16)
                            : fa::reference::decode_f16(bits);
}

void load(SharedMemory& shared, const Operand& operand, Half half, std::vector<float>& values,
          std::uint32_t extent_pitch, std::uint32_t depth_pitch) {
  operand.for_each_chunk([&](std::uint32_t address, std::uint32_t index, std::uint32_t k) {
    std::uint16_t bits[kChunkElements];
    std::memcpy(bits, shared.at(address), sizeof bits);
    for (std::uint32_t i = 0; i < kChunkElements; ++i) {
      const std::uint32_t along = operand.k_major ? index : index + i;
      const std::uint32_t depth = operand.k_major ? k + i : k;
      values[along * extent_pitch + depth * depth_pitch] = element(half, bits[i]);
    }
  });
}

/// Registers of mma.m16n8k16's A, one 16-row tile a warp.
void load_registers(const Product& product, std::vector<float>& a) {
  for (std::size_t thread = 0; thread < kWarpgroupThreads; ++thread) {
    const std::size_t g = thread / kLanes * 16 + thread % kLanes / 4;
    const std::size_t t = thread % 4;
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint32_t pair = product.a_values[thread][i];
      float* at = &a[(g + i % 2 * 8) * kDepth + i / 2 * 8 + 2 * t];
      at[0] = element(product.operands.half, static_cast<std::uint16_t>(pair));
      at[1] = element(product.operands.half, static_cast<std::uint16_t>(pair >> 16));
    }
  }
}

/// Products of two 16-bit floats are exact in float; they are added up in float, in the order of the depth.
void multiply(const float* a, const float* b, float* d, std::size_t columns) {
  constexpr std::size_t kBlock = 8;
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t n = 0; n < columns; n += kBlock) {
      float sums[kBlock];  // in registers
      std::copy_n(d + row * columns + n, kBlock, sums);
      for (std::size_t k = 0; k < kDepth; ++k) {
        const float factor = a[row * kDepth + k];
        for (std::size_t i = 0; i < kBlock; ++i) sums[i] += factor * b[k * columns + n + i];
      }
      std::copy_n(sums, kBlock, d + row * columns + n);
    }
  }
}

// Operands lie in the window of the block that multiplies.

Operand operand_a(const SharedMemory& shared, const WgmmaOperands& operands) {
  Operand a;
  decode(operands.a, !operands.a_transposed, kRows, a);
  a.start |= shared.window();
  return a;
}

Operand operand_b(const SharedMemory& shared, const WgmmaOperands& operands) {
  Operand b;
  decode(operands.b, !operands.b_transposed, static_cast<std::uint32_t>(operands.columns), b);
  b.start |= shared.window();
  return b;
}

/// [extent, 32] of an operand in shared memory, as rows of the extent or of the depth.
void load_bytes(SharedMemory& shared, const Operand& operand, std::vector<std::uint8_t>& values,
                std::uint32_t extent_pitch, std::uint32_t depth_pitch) {
  operand.for_each_chunk([&](std::uint32_t address, std::uint32_t index, std::uint32_t k) {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(shared.at(address));
    for (std::uint32_t i = 0; i < kChunk; ++i) values[index * extent_pitch + (2 * k + i) * depth_pitch] = bytes[i];
  });
}

/// A in registers: a thread has 4 neighbours of its row, and of that 8 further, and the same 16 columns further.
void load_byte_registers(const Product& product, std::vector<std::uint8_t>& a) {
  for (std::size_t thread = 0; thread < kWarpgroupThreads; ++thread) {
    const std::size_t g = thread / kLanes * 16 + thread % kLanes / 4;
    for (std::size_t i = 0; i < 4; ++i) {
      std::uint8_t* const at = &a[(g + i % 2 * 8) * kByteDepth + i / 2 * 16 + 4 * (thread % 4)];
      for (std::size_t e = 0; e < 4; ++e) at[e] = static_cast<std::uint8_t>(product.a_values[thread][i] >> 8 * e);
    }
  }
}

bool has_bytes(Half half) {
  return half == Half::e4m3 || half == Half::e5m2 || half == Half::s8;
}

void compute_bytes(SharedMemory& shared, Product& product) {
  const WgmmaOperands& operands = product.operands;
  const auto columns = static_cast<std::uint32_t>(operands.columns);
  std::vector<std::uint8_t> a(kRows * kByteDepth);
  std::vector<std::uint8_t> b(kByteDepth * columns);
  if (operands.a_registers != nullptr) {
    load_byte_registers(product, a);
  } else {
    load_bytes(shared, operand_a(shared, operands), a, kByteDepth, 1);
  }
  load_bytes(shared, operand_b(shared, operands), b, 1, columns);
  std::vector<float>& d = product.accumulator->tile;
  if (!operands.accumulate) std::fill(d.begin(), d.end(), 0.f);
  if (operands.half == Half::s8) {
    multiply_whole(a, b, d);
  } else {
    multiply_bytes(operands.half, operands.half_b, a, b, d);
  }
  product.computed = true;
}

void compute(SharedMemory& shared, Product& product) {
  const WgmmaOperands& operands = product.operands;
  if (has_bytes(operands.half)) return compute_bytes(shared, product);
  const auto columns = static_cast<std::uint32_t>(operands.columns);
  std::vector<float> a(kRows * kDepth);
  std::vector<float> b(kDepth * columns);
  if (operands.a_registers != nullptr) {
    load_registers(product, a);
  } else {
    load(shared, operand_a(shared, operands), operands.half, a, kDepth, 1);
  }
  load(shared, operand_b(shared, operands), operands.half, b, 1, columns);
  std::vector<float>& d = product.accumulator->tile;
  if (!operands.accumulate) std::fill(d.begin(), d.end(), 0.f);
  multiply(a.data(), b.data(), d.data(), columns);
  product.computed = true;
}

// Accumulators.

/// Element of the tile that register `i` of a thread of the warpgroup holds.
std::size_t place(std::size_t thread, std::size_t i, std::size_t columns) {
  const std::size_t row = thread / kLanes * 16 + thread % kLanes / 4 + i / 2 % 2 * 8;
  return row * columns + i / 4 * 8 + thread % 4 * 2 + i % 2;
}

std::size_t in_group(const Lane& lane) {
  return static_cast<std::size_t>(lane.thread % kWarpgroupThreads);
}

bool poisoned(const float* d, int count) {
  for (int i = 0; i < count; ++i) {
    if (std::bit_cast<std::uint32_t>(d[i]) != kPoison[i % 2]) return false;
  }
  return true;
}

std::shared_ptr<Accumulator> in_flight(const Warp& warp, std::size_t lane, const float* d) {
  const std::size_t thread = in_group(warp.lanes[lane]);
  for (const auto& accumulator : warp.products.in_flight) {
    const float* begin = accumulator->registers[thread];
    if (d >= begin && d < begin + accumulator->columns / 2) return accumulator;
  }
  return nullptr;
}

const WgmmaOperands& operands(const Warp& warp, std::size_t lane) {
  return *static_cast<const WgmmaOperands*>(warp.lanes[lane].operands);
}

[[noreturn]] void raise(const Machine& machine, FaultKind kind, const Warp& warp, std::size_t lane,
                        const std::string& detail) {
  machine.raise(kind, warp.lanes[lane], warp.instruction->name, 0, warp.site, detail);
}

/// The warp takes the accumulators over, or goes on with those of the product before.
void attach(Machine& machine, Warp& warp, Product& product) {
  const WgmmaOperands& first = operands(warp, 0);
  std::shared_ptr<Accumulator> chained = in_flight(warp, 0, first.d);
  const bool fresh = chained == nullptr;
  if (!fresh && (chained->columns != first.columns || chained->registers[in_group(warp.lanes[0])] != first.d)) {
    raise(machine, FaultKind::register_in_flight, warp, 0,
          "accumulators of a product of another shape, which has not been waited for");
  }
  if (product.accumulator == nullptr) {
    product.accumulator = fresh ? std::make_shared<Accumulator>() : chained;
    if (fresh) {
      product.accumulator->columns = first.columns;
      product.accumulator->first = product.number;
      product.accumulator->tile.resize(static_cast<std::size_t>(kRows * first.columns));
    }
  }
  Accumulator& accumulator = *product.accumulator;
  if (fresh ? accumulator.first != product.number : chained != product.accumulator) {
    raise(machine, FaultKind::divergence, warp, 0, "the warps of the warpgroup disagree about the accumulators");
  }
  accumulator.last[static_cast<std::size_t>(warp.index % 4)] = product.number;
  if (fresh) warp.products.in_flight.push_back(product.accumulator);
  const auto columns = static_cast<std::size_t>(first.columns);
  for (std::size_t i = 0; i < kLanes; ++i) {
    const std::size_t thread = in_group(warp.lanes[i]);
    float* d = operands(warp, i).d;
    if (!fresh && accumulator.registers[thread] != d) {
      raise(machine, FaultKind::divergence, warp, i, "the lanes of the warp disagree about the accumulators");
    }
    if (!fresh) continue;
    accumulator.registers[thread] = d;
    for (std::size_t r = 0; r < columns / 2; ++r) {
      if (first.accumulate) accumulator.tile[place(thread, r, columns)] = d[r];
      d[r] = std::bit_cast<float>(kPoison[r % 2]);
    }
  }
}

// Issue.

/// The first warp to come notes the read for all four.
void check_operand(Machine& machine, const Warp& warp, const Operand& operand, const Product& product) {
  const Reader reader{product.number, 1, static_cast<std::uint16_t>(warp.warpgroup()), Reader::product};
  bool noted = product.issued != 0;
  SharedMemory& shared = Machine::shared(warp);
  for (const Lane* lane : machine.witnesses(warp)) {
    const Observer observer = machine.async_observer(*lane);
    Stamp last;
    operand.for_each_chunk([&](std::uint32_t address, std::uint32_t, std::uint32_t) {
      const Conflict conflict =
          noted ? shared.check(address, observer, last) : shared.read(address, kChunk, observer, reader);
      if (conflict) {
        machine.raise(conflict, *lane, warp.instruction->name, address, warp.site);
      }
    });
    noted = true;
  }
}

void check_descriptor(const Machine& machine, const Warp& warp, std::uint64_t descriptor, bool k_major, int extent,
                      const char* which) {
  Operand operand;
  const std::string wrong = decode(descriptor, k_major, static_cast<std::uint32_t>(extent), operand);
  if (wrong.empty()) return;
  raise(machine, FaultKind::bad_descriptor, warp, 0, fmt::format("{} {:#018x}: {}", which, descriptor, wrong));
}

bool same(const WgmmaOperands& x, const WgmmaOperands& y) {
  return x.a == y.a && x.b == y.b && x.columns == y.columns && x.half == y.half && x.half_b == y.half_b &&
         x.a_transposed == y.a_transposed && x.b_transposed == y.b_transposed && x.accumulate == y.accumulate &&
         (x.a_registers == nullptr) == (y.a_registers == nullptr);
}

bool same(const Site& x, const Site& y) {
  return x.line() == y.line() && x.column() == y.column() && x.file_name() == y.file_name();
}

Product& next_product(Machine& machine, Warp& warp) {
  Warpgroup& group = machine.warpgroup(warp);
  const WgmmaOperands& own = operands(warp, 0);
  const std::uint32_t number = ++warp.products.issued;
  if (number > group.issued) {
    group.issued = number;
    Product product;
    product.number = number;
    product.operands = own;
    product.site = warp.site;
    group.products.push_back(std::move(product));
  }
  Product& product = group.product(number);
  if (!same(product.operands, own) || !same(product.site, warp.site)) {
    raise(machine, FaultKind::divergence, warp, 0,
          fmt::format("product {} of the warpgroup is another one for its other warps [{}]", number,
                      to_string(product.site)));
  }
  return product;
}

bool issued_by_all(const Warpgroup& group, std::uint32_t target) {
  for (const Product& product : group.products) {
    if (product.number > target) break;
    if (product.issued != 0xf) return false;
  }
  return group.issued >= target;
}

// Completion.

void check_a_registers(const Machine& machine, const Warp& warp, const Product& product) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    const std::size_t thread = in_group(warp.lanes[i]);
    if (product.a_registers[thread] == nullptr) return;
    if (std::equal(product.a_values[thread].begin(), product.a_values[thread].end(), product.a_registers[thread])) {
      continue;
    }
    machine.raise(FaultKind::register_in_flight, warp.lanes[i], warp.instruction->name, 0, warp.site,
                  fmt::format("the registers of A were written while the product ran [{}]", to_string(product.site)));
  }
}

void deliver(const Machine& machine, const Warp& warp, const Accumulator& accumulator) {
  const auto columns = static_cast<std::size_t>(accumulator.columns);
  for (std::size_t i = 0; i < kLanes; ++i) {
    const std::size_t thread = in_group(warp.lanes[i]);
    float* d = accumulator.registers[thread];
    if (!poisoned(d, accumulator.columns / 2)) {
      machine.raise(FaultKind::register_in_flight, warp.lanes[i], warp.instruction->name, 0, warp.site,
                    "accumulators were written while the product ran");
    }
    for (std::size_t r = 0; r < columns / 2; ++r) d[r] = accumulator.tile[place(thread, r, columns)];
  }
}

void finish_wait(Machine& machine, Warp& warp) {
  Warpgroup& group = machine.warpgroup(warp);
  WarpProducts& own = warp.products;
  for (Product& product : group.products) {
    if (product.number > own.target) break;
    if (!product.computed) compute(Machine::shared(warp), product);
    if (product.number > own.done) check_a_registers(machine, warp, product);
  }
  std::erase_if(own.in_flight, [&](const std::shared_ptr<Accumulator>& accumulator) {
    if (accumulator->last[static_cast<std::size_t>(warp.index % 4)] > own.target) return false;
    deliver(machine, warp, *accumulator);
    return true;
  });
  own.done = own.target;
  std::uint32_t all = own.done;
  for (int w = 4 * warp.warpgroup(); w < 4 * warp.warpgroup() + 4; ++w) {
    all = std::min(all, machine.warp(w).products.done);
  }
  while (!group.products.empty() && group.products.front().number <= all) group.products.pop_front();
}

void execute_wgmma(Machine& machine, Warp& warp) {
  const WgmmaOperands& own = operands(warp, 0);
  if (machine.threads() % kWarpgroupThreads != 0) {
    raise(machine, FaultKind::divergence, warp, 0, "the last warpgroup of the block is not whole");
  }
  for (std::size_t i = 1; i < kLanes; ++i) {
    if (!same(operands(warp, i), own)) {
      raise(machine, FaultKind::divergence, warp, i, "descriptors differ between the lanes of a warp");
    }
  }
  if (!warp.products.fenced) {
    raise(machine, FaultKind::unfenced, warp, 0, "no wgmma.fence since its registers were in other hands");
  }
  if (own.a_registers == nullptr) check_descriptor(machine, warp, own.a, !own.a_transposed, kRows, "A");
  check_descriptor(machine, warp, own.b, !own.b_transposed, own.columns, "B");
  Product& product = next_product(machine, warp);
  attach(machine, warp, product);
  if (own.a_registers == nullptr) {
    check_operand(machine, warp, operand_a(Machine::shared(warp), own), product);
  } else {
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::size_t thread = in_group(warp.lanes[i]);
      product.a_registers[thread] = operands(warp, i).a_registers;
      std::copy_n(operands(warp, i).a_registers, 4, product.a_values[thread].begin());
    }
  }
  check_operand(machine, warp, operand_b(Machine::shared(warp), own), product);
  product.issued |= 1u << warp.index % 4;
  if (product.issued != 0xf) return;
  const Warpgroup& group = machine.warpgroup(warp);
  for (int w = 4 * warp.warpgroup(); w < 4 * warp.warpgroup() + 4; ++w) {
    Warp& other = machine.warp(w);
    if (other.products.target <= other.products.done || !issued_by_all(group, other.products.target)) continue;
    finish_wait(machine, other);
    machine.resume(other);
  }
}
constexpr Instruction kWgmma{"wgmma.mma_async", execute_wgmma};

constexpr Instruction kWgmmaFence{"wgmma.fence", [](Machine&, Warp& warp) { warp.products.fenced = true; }};

constexpr Instruction kWgmmaCommit{"wgmma.commit_group",
                                   [](Machine&, Warp& warp) { warp.products.groups.push_back(warp.products.issued); }};

struct WaitOperands {
  int pending;
};

void execute_wgmma_wait(Machine& machine, Warp& warp) {
  WarpProducts& own = warp.products;
  const int pending = static_cast<const WaitOperands*>(warp.lanes[0].operands)->pending;
  own.fenced = false;
  while (static_cast<int>(own.groups.size()) > pending) {
    own.target = own.groups.front();
    own.groups.pop_front();
  }
  if (own.target <= own.done) return;
  if (issued_by_all(machine.warpgroup(warp), own.target)) {
    finish_wait(machine, warp);
  } else {
    machine.pause(warp);
  }
}
constexpr Instruction kWgmmaWait{"wgmma.wait_group", execute_wgmma_wait};

void converge(const Instruction& instruction, const void* operands, const Site& site) {
  Lane& lane = Machine::current();
  Machine::of(lane).converge(lane, instruction, operands, site);
}

}  // namespace

void wgmma(const WgmmaOperands& operands, const Site& site) {
  converge(kWgmma, &operands, site);
}

void wgmma_fence(const Site& site) {
  converge(kWgmmaFence, nullptr, site);
}

void wgmma_commit(const Site& site) {
  converge(kWgmmaCommit, nullptr, site);
}

void wgmma_wait(int pending, const Site& site) {
  const WaitOperands own{pending};
  converge(kWgmmaWait, &own, site);
}

void wgmma_tie(const float* d, int count, const Site& site) {
  Lane& lane = Machine::current();
  lane.warp->products.fenced = false;
  for (const auto& accumulator : lane.warp->products.in_flight) {
    const float* begin = accumulator->registers[in_group(lane)];
    if (begin + accumulator->columns / 2 <= d || d + count <= begin) continue;
    raise_register_in_flight("wgmma accumulators", site);
  }
}

void raise_register_in_flight(const char* name, const Site& site) {
  const Lane& lane = Machine::current();
  Machine::of(lane).raise(FaultKind::register_in_flight, lane, name, 0, site,
                          "comes from accumulators of a product that has not been committed and waited for");
}

}  // namespace emulator
