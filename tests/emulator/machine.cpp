#include "emulator/machine.hpp"

#include <fmt/format.h>

#include <utility>

#include "emulator/stack_pool.hpp"

namespace emulator {
namespace {

using boost::context::fiber;

constexpr std::uint32_t kAllLanes = 0xffffffffu;
constexpr std::uint64_t kPreemptMask = 31;  // another warp gets its turn after one in 32 instructions

thread_local Machine* current_machine = nullptr;
thread_local Lane* current_lane = nullptr;

struct FiberStack {
  void deallocate(boost::context::stack_context& stack) noexcept { StackPool::deallocate(stack); }
};

std::string who(Stamp stamp) {
  if (stamp.everyone()) return "threads of several warps";
  if ((stamp.who() & Stamp::kWarpFlag) != 0) return fmt::format("warp {}", stamp.warp());
  return fmt::format("thread {}", stamp.who());
}

std::string lanes_text(std::uint32_t mask) {
  return mask == kAllLanes ? std::string("all lanes") : fmt::format("lanes {:#010x}", mask);
}

}  // namespace

Lane& Machine::current() {
  return *current_lane;
}

Machine& Machine::of(const Lane&) {
  return *current_machine;
}

Machine::Machine(int threads, int shared_bytes, Memory& memory) : memory_(memory), shared_(shared_bytes) {
  for (int w = 0; w < threads / kWarpSize; ++w) {
    Warp& warp = *warps_.emplace_back(std::make_unique<Warp>());
    warp.index = w;
    for (int i = 0; i < kWarpSize; ++i) {
      warp.lanes[static_cast<std::size_t>(i)].warp = &warp;
      warp.lanes[static_cast<std::size_t>(i)].thread = w * kWarpSize + i;
    }
  }
  start_fibers();
}

/// Fibers between two blocks end when they are told to; those that a fault left inside the kernel are unwound by their
/// destructors.
Machine::~Machine() {
  quit_ = true;
  for (const auto& warp : warps_) {
    if (fault_) break;
    for (Lane& lane : warp->lanes) transfer(scheduler_, lane.context);
  }
}

void Machine::start_fibers() {
  for (const auto& warp : warps_) {
    for (Lane& lane : warp->lanes) {
      const boost::context::stack_context stack = StackPool::allocate();
      lane.context = fiber(std::allocator_arg, StackPool::place(stack, lane.index()), FiberStack{},
                           [this, &lane](fiber&& from) { return lane_main(lane, std::move(from)); });
    }
  }
}

void Machine::prepare(int block, std::uint64_t seed) {
  shared_.reset();
  block_ = block;
  at_barrier_ = 0;
  finished_ = 0;
  block_epoch_ = 1;
  random_ = (seed + 1) * 0x9e3779b97f4a7c15u ^ (static_cast<std::uint64_t>(block) + 1) * 0xd1b54a32d192ed03u;
  if (random_ == 0) random_ = 1;
  for (int i = 0; i < 4; ++i) random();  // neighbouring seeds part ways
  for (const auto& warp : warps_) {
    warp->state = Warp::State::runnable;
    warp->waiting = 0;
    warp->exited = 0;
    warp->epoch = 0;
    warp->step = static_cast<int>(random() >> 32 & 31) | 1;
    warp->resume = &warp->lanes[random() >> 40 & 31];
  }
}

void Machine::run_block(Kernel kernel, const void* context, int block, std::uint64_t seed) {
  kernel_ = kernel;
  context_ = context;
  prepare(block, seed);
  current_machine = this;
  transfer(scheduler_, pick_warp()->resume->context);
  current_lane = nullptr;
  if (fault_) std::rethrow_exception(fault_);
}

/// Leaves `from` and goes on in `to`; returns when somebody goes on in `from`.
void Machine::transfer(fiber& from, fiber& to) {
  previous_ = &from;
  fiber left = std::move(to).resume();
  *previous_ = std::move(left);
}

fiber Machine::lane_main(Lane& lane, fiber from) {
  *previous_ = std::move(from);
  while (!quit_) {
    run_lane(lane);
    go_on_after(lane);
  }
  previous_ = &lane.context;
  return std::move(scheduler_);
}

void Machine::run_lane(Lane& lane) {
  current_lane = &lane;
  try {
    kernel_(context_);
    finish_lane(lane);
  } catch (const std::exception&) {  // not the forced unwinding of fibers, which has to get through
    fault_ = std::current_exception();
  }
}

/// No switch may happen inside a handler, so failing and going on are done here.
void Machine::go_on_after(Lane& lane) {
  if (fault_ || finished_ == static_cast<int>(warps_.size())) {
    transfer(lane.context, scheduler_);
  } else if (lane.warp->exited == kAllLanes) {
    transfer(lane.context, pick_warp()->resume->context);
  } else {
    next_lane(lane);
  }
}

void Machine::finish_lane(Lane& lane) {
  Warp& warp = *lane.warp;
  if (!lane.async.copies.empty()) {
    raise(FaultKind::copies_at_exit, lane, "exit", lane.async.copies.front().target, Site(),
          fmt::format("{} asynchronous copies were never waited for", lane.async.copies.size()));
  }
  if (warp.waiting != 0) raise_divergence(lane, "exit", Site());
  warp.exited |= 1u << lane.index();
  if (warp.exited != kAllLanes) return;
  warp.state = Warp::State::finished;
  if (++finished_ + at_barrier_ == static_cast<int>(warps_.size()) && at_barrier_ > 0) raise_deadlock(lane);
}

void Machine::next_lane(Lane& lane) {
  Warp& warp = *lane.warp;
  const std::uint32_t done = warp.waiting | warp.exited;
  int next = lane.index();
  do {
    next = (next + warp.step) % kWarpSize;
  } while ((done >> next & 1) != 0);
  transfer(lane.context, warp.lanes[static_cast<std::size_t>(next)].context);
}

Warp* Machine::pick_warp() {
  const std::size_t count = warps_.size();
  const std::size_t start = static_cast<std::size_t>(random() >> 33) % count;
  for (std::size_t i = 0; i < count; ++i) {
    Warp* warp = warps_[(start + i) % count].get();
    if (warp->state == Warp::State::runnable) return warp;
  }
  return nullptr;
}

void Machine::switch_warp(Lane& lane) {
  lane.warp->resume = &lane;
  Warp* warp = pick_warp();
  if (warp == nullptr) raise_deadlock(lane);
  if (warp->resume != &lane) transfer(lane.context, warp->resume->context);
}

void Machine::converge(Lane& lane, const Instruction& instruction, const void* operands, const Site& site) {
  Warp& warp = *lane.warp;
  lane.operands = operands;
  if (warp.waiting == 0) {
    warp.instruction = &instruction;
    warp.site = site;
    warp.first_arrived = lane.index();
  }
  const bool same_site = warp.site.line() == site.line() && warp.site.column() == site.column() &&
                         warp.site.file_name() == site.file_name();
  if (warp.instruction != &instruction || !same_site || warp.exited != 0) {
    raise_divergence(lane, instruction.name, site);
  }
  warp.waiting |= 1u << lane.index();
  if (warp.waiting != kAllLanes) {
    next_lane(lane);
    current_lane = &lane;
    return;
  }
  ++instructions_;
  instruction.execute(*this, warp);
  warp.waiting = 0;
  const std::uint64_t dice = random();
  warp.step = static_cast<int>(dice >> 32 & 31) | 1;
  if (warp.state != Warp::State::runnable || (dice >> 40 & kPreemptMask) == 0) {
    switch_warp(lane);
    current_lane = &lane;
  }
}

void Machine::block_barrier(Warp& warp) {
  warp.state = Warp::State::at_barrier;
  if (++at_barrier_ < static_cast<int>(warps_.size())) return;
  at_barrier_ = 0;
  ++block_epoch_;
  for (const auto& other : warps_) {
    other->state = Warp::State::runnable;
    other->epoch = 0;
  }
}

/// xorshift64*
const Lane* Machine::copying_from(const void* address, std::size_t bytes) const {
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  for (const auto& warp : warps_) {
    for (const Lane& lane : warp->lanes) {
      for (const AsyncCopy& copy : lane.async.copies) {
        const auto source = reinterpret_cast<std::uintptr_t>(copy.source);
        if (copy.source != nullptr && first < source + 16 && source < first + bytes) return &lane;
      }
    }
  }
  return nullptr;
}

std::uint64_t Machine::random() {
  random_ ^= random_ >> 12;
  random_ ^= random_ << 25;
  random_ ^= random_ >> 27;
  return random_ * 0x2545f4914f6cdd1du;
}

void Machine::raise(FaultKind kind, const Lane& lane, const char* instruction, std::uint64_t address, const Site& site,
                    const std::string& detail) const {
  throw Fault(kind, block_, lane.thread, instruction, address, site, detail);
}

void Machine::raise(const Conflict& conflict, const Lane& lane, const char* instruction, std::uint32_t address,
                    const Site& site) const {
  const std::string other = who(conflict.other);
  switch (conflict.kind) {
    case Conflict::out_of_bounds:
      raise(FaultKind::shared_out_of_bounds, lane, instruction, address, site,
            fmt::format("dynamic shared memory is [{:#x}, {:#x})", SharedMemory::kBase,
                        SharedMemory::kBase + shared_.bytes()));
    case Conflict::uninitialised:
      raise(FaultKind::shared_uninitialised, lane, instruction, address, site, "nobody has written here");
    case Conflict::in_flight:
      raise(FaultKind::shared_in_flight, lane, instruction, address, site,
            fmt::format("thread {} has not waited for its asynchronous copy to here", conflict.other.who()));
    case Conflict::write_then_read:
      raise(FaultKind::shared_race, lane, instruction, address, site,
            fmt::format("{} wrote here, and no barrier is in between", other));
    case Conflict::write_then_write:
      raise(FaultKind::shared_race, lane, instruction, address, site,
            fmt::format("{} wrote here too, and no barrier is in between", other));
    case Conflict::read_then_write:
    case Conflict::none:
      break;
  }
  raise(FaultKind::shared_race, lane, instruction, address, site,
        fmt::format("{} may still read here: no barrier is in between", other));
}

void Machine::raise_divergence(const Lane& lane, const char* instruction, const Site& site) const {
  const Warp& warp = *lane.warp;
  std::string detail;
  if (warp.waiting != 0) {
    detail = fmt::format("{} of its warp (lane {} first) wait at {} [{}]", lanes_text(warp.waiting), warp.first_arrived,
                         warp.instruction->name, to_string(warp.site));
  } else {
    detail = fmt::format("{} of its warp have exited", lanes_text(warp.exited));
  }
  raise(FaultKind::divergence, lane, instruction, 0, site, "divergence at a convergent instruction: " + detail);
}

void Machine::raise_deadlock(const Lane& lane) const {
  raise(FaultKind::deadlock, lane, lane.warp->state == Warp::State::finished ? "exit" : lane.warp->instruction->name, 0,
        lane.warp->state == Warp::State::finished ? Site() : lane.warp->site, waiting_lanes());
}

std::string Machine::waiting_lanes() const {
  std::string text;
  for (const auto& warp : warps_) {
    if (!text.empty()) text += ", ";
    text += fmt::format("warp {} ", warp->index);
    text += warp->state == Warp::State::at_barrier
                ? fmt::format("waits at {} [{}]", warp->instruction->name, to_string(warp->site))
                : std::string("has exited");
  }
  return text;
}

}  // namespace emulator
