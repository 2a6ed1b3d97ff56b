#include "emulator/machine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

#include "emulator/stack_pool.hpp"

namespace emulator {
namespace {

using boost::context::fiber;

constexpr std::uint32_t kAllLanes = 0xffffffffu;
constexpr std::uint64_t kPreemptMask = 31;  // another warp gets its turn after one in 32 instructions
constexpr std::uint64_t kStepMask = 7;      // and after one in 8 of those that one thread executes alone
constexpr std::uint64_t kLandMask = 7;      // a copy lands after one in 8 instructions
constexpr int kRegisterFile = 65536;
constexpr int kMaxRegisters = 256;

/// What a thread gets whose block shares a multiprocessor with others: all there is.
int launch_registers(int threads, int resident) {
  return std::min(kMaxRegisters, kRegisterFile / (threads * resident) / 8 * 8);
}

thread_local Machine* current_machine = nullptr;
thread_local Lane* current_lane = nullptr;

struct FiberStack {
  void deallocate(boost::context::stack_context& stack) noexcept { StackPool::deallocate(stack); }
};

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

Machine::Machine(int threads, int shared_bytes, int blocks, int cluster, Memory& memory, int resident)
    : memory_(memory),
      blocks_(blocks),
      resident_(resident),
      first_product_(
          std::max<std::size_t>(1024, static_cast<std::size_t>(cluster) * static_cast<std::size_t>(threads))),
      first_barrier_(first_product_ + first_product_ / kWarpSize) {
  for (int rank = 0; rank < cluster; ++rank) {
    Block& block = *cluster_.emplace_back(std::make_unique<Block>(shared_bytes, rank));
    for (int w = 0; w < threads / kWarpSize; ++w) {
      Warp& warp = *warps_.emplace_back(std::make_unique<Warp>());
      warp.block = &block;
      warp.number = w;
      warp.index = static_cast<int>(warps_.size()) - 1;
      block.warps.push_back(&warp);
      for (int i = 0; i < kWarpSize; ++i) {
        Lane& lane = warp.lanes[static_cast<std::size_t>(i)];
        lane.warp = &warp;
        lane.thread = warp.number * kWarpSize + i;
        lane.agent = warp.index * kWarpSize + i;
      }
    }
  }
  start_fibers();
}

/// Fibers between two clusters end when they are told to; those that a fault left inside the kernel are unwound by
/// their destructors.
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

void Machine::prepare(int first_block, std::uint64_t seed) {
  for (const auto& block : cluster_) {
    block->shared.reset();
    block->index = first_block + block->rank;
    block->at_barrier = 0;
    block->finished = 0;
    block->free_registers = 0;  // a block has what it was launched with, also where the multiprocessor has more
    block->floor = 0;
    block->named = {};
    block->reached = {};
    block->over = {};
  }
  at_cluster_barrier_ = 0;
  finished_ = 0;
  tick_ = 1;
  floor_ = 0;
  barriers_.clear();
  copies_.clear();
  stores_.clear();
  writes_.clear();
  warpgroups_.assign((warps_.size() + 3) / 4, {});
  joined_a_ = joined_b_ = joined_ = {};
  random_ = (seed + 1) * 0x9e3779b97f4a7c15u ^ (static_cast<std::uint64_t>(first_block) + 1) * 0xd1b54a32d192ed03u;
  if (random_ == 0) random_ = 1;
  for (int i = 0; i < 4; ++i) random();  // neighbouring seeds part ways
  for (const auto& warp : warps_) prepare(*warp, launch_registers(threads(), resident_));
}

void Machine::prepare(Warp& warp, int registers) {
  warp.state = Warp::State::runnable;
  warp.waiting = 0;
  warp.exited = 0;
  warp.blocked = 0;
  warp.floor = 0;
  warp.products = {};
  warp.registers = registers;
  warp.wanted_registers = registers;
  warp.wants_registers = false;
  warp.at_cluster_barrier = false;
  warp.register_steps.clear();
  for (Lane& lane : warp.lanes) {
    lane.knowledge = {};
    lane.waited_for_grid = false;
    lane.bulk_groups = 0;
    lane.polls_since = {};
  }
  warp.step = static_cast<int>(random() >> 32 & 31) | 1;
  warp.resume = &warp.lanes[random() >> 40 & 31];
}

void Machine::run_cluster(Kernel kernel, const void* context, int first_block, std::uint64_t seed) {
  kernel_ = kernel;
  context_ = context;
  prepare(first_block, seed);
  current_machine = this;
  transfer(scheduler_, pick_warp()->resume->context);
  current_lane = nullptr;
  if (fault_) std::rethrow_exception(fault_);
  check_waited_for_grid();
}

void Machine::check_order(const Lane& lane, const void* address, std::size_t bytes, const char* name,
                          const Site& site) const {
  if (!early_ || lane.waited_for_grid) return;
  const Memory::Region* region = memory_.find(address, bytes);
  if (region == nullptr) return;
  const std::uint8_t* flags = region->flags.get() + (static_cast<const std::byte*>(address) - region->base);
  const auto writable = [](std::uint8_t flag) { return (flag & Memory::kWritable) != 0; };
  if (!early_inputs_ && std::none_of(flags, flags + bytes, writable)) return;
  raise(FaultKind::too_early, lane, name, reinterpret_cast<std::uintptr_t>(address), site,
        "the kernel before may still use " + memory_.describe(address));
}

/// A kernel that ends without waiting would be taken for the end of those before it.
void Machine::check_waited_for_grid() const {
  if (!early_) return;
  for (const auto& block : cluster_) {
    const auto waited = [](const Warp* warp) {
      return std::any_of(warp->lanes.begin(), warp->lanes.end(), [](const Lane& lane) { return lane.waited_for_grid; });
    };
    if (std::any_of(block->warps.begin(), block->warps.end(), waited)) continue;
    raise(FaultKind::too_early, block->warps.front()->lanes.front(), "exit", 0, Site(),
          "no thread of the block has waited for the kernel before");
  }
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
  const bool over = fault_ || finished_ == static_cast<int>(warps_.size());
  transfer(lane.context, over ? scheduler_ : next_->context);
}

void Machine::check_exit(const Lane& lane) const {
  if (!lane.async.copies.empty()) {
    raise(FaultKind::copies_at_exit, lane, "exit", lane.async.copies.front().target, Site(),
          fmt::format("{} asynchronous copies were never waited for", lane.async.copies.size()));
  }
  const WarpProducts& products = lane.warp->products;
  if (products.done != products.issued) {
    raise(FaultKind::copies_at_exit, lane, "exit", 0, Site(),
          fmt::format("{} products were never waited for", products.issued - products.done));
  }
  for (const TensorStore& store : stores_) {
    if (store.lane != &lane) continue;
    raise(FaultKind::copies_at_exit, lane, "exit", store.source, Site(), "a tensor store was never waited for");
  }
  if (lane.warp->waiting != 0) raise_divergence(lane, "exit", Site());
}

void Machine::finish_lane(Lane& lane) {
  check_exit(lane);
  Warp& warp = *lane.warp;
  warp.exited |= 1u << lane.index();
  if (warp.exited == kAllLanes) {
    warp.state = Warp::State::finished;
    check_register_steps(warp, Site());
    ++finished_;
    ++warp.block->finished;
    if (warp.block->exited()) check_block_exit(lane);
    if (finished_ == static_cast<int>(warps_.size())) {
      while (!writes_.empty()) finish_write(writes_.size() - 1);
      return;
    }
    finish_cluster_barrier_if_complete();
  }
  next_ = successor(lane);
  if (next_ == nullptr) raise_deadlock(lane);
}

/// With its last thread a block's shared memory is gone: whatever reaches it comes before, in that a thread of the
/// block knows of it.
void Machine::check_block_exit(const Lane& lane) {
  const Block& block = *lane.warp->block;
  for (const TensorCopy& copy : copies_) {
    const bool to_here = copy.target.block == &block;
    if (to_here && copy.source.block == nullptr) {
      const auto count = std::count_if(copies_.begin(), copies_.end(),
                                       [&](const TensorCopy& other) { return other.target.block == &block; });
      raise(FaultKind::copies_at_exit, lane, "exit", copy.target.address, Site(),
            fmt::format("{} boxes are still to land", count));
    }
    if (to_here || copy.source.block == &block) {
      raise(FaultKind::exited_block, lane, "exit", to_here ? copy.target.address : copy.source.address, Site(),
            fmt::format("the last thread leaves, and a copy of {} {} here", name(copy.agent),
                        to_here ? "is still to land" : "still reads"));
    }
  }
  if (block.reached.entries.empty()) return;
  Gathered gathered;
  for (const Warp* warp : block.warps) release(*warp, gathered);
  gathered.known.join(block.over);
  for (std::size_t agent = 0; agent < block.reached.entries.size(); ++agent) {
    const std::uint32_t tick = block.reached.entries[agent];
    if (gathered.known.at(agent) >= tick || (agent < first_product_ && tick < floor_)) continue;
    raise(
        FaultKind::exited_block, lane, "exit", 0, Site(),
        agent < first_product_
            ? fmt::format(
                  "the last thread leaves, and {} may still arrive at a barrier here, or read: nobody waited for that",
                  name(static_cast<int>(agent)))
            : fmt::format("the last thread leaves, and a copy for the {} may still be under way: nobody waited for "
                          "that",
                          barriers_[agent - first_barrier_].describe()));
  }
}

/// The next lane of the same warp that can run, in the order of this round.
Lane* Machine::ready_lane(const Lane& lane) {
  Warp& warp = *lane.warp;
  const std::uint32_t busy = warp.waiting | warp.exited | warp.blocked;
  if (busy == kAllLanes) return nullptr;
  int next = lane.index();
  do {
    next = (next + warp.step) % kWarpSize;
  } while ((busy >> next & 1) != 0);
  return &warp.lanes[static_cast<std::size_t>(next)];
}

/// Who runs when `lane` cannot, nullptr when nobody can any more.
Lane* Machine::successor(Lane& lane) {
  Warp& warp = *lane.warp;
  if (warp.state == Warp::State::runnable) {
    if (Lane* next = ready_lane(lane)) return next;
    warp.state = Warp::State::blocked;
  }
  Warp* other = pick_warp();
  while (other == nullptr && land_any()) other = pick_warp();
  return other == nullptr ? nullptr : other->resume;
}

/// Lets others run until somebody goes on with this lane.
void Machine::yield(Lane& lane) {
  Lane* next = successor(lane);
  if (next == nullptr) raise_deadlock(lane);
  if (next != &lane) transfer(lane.context, next->context);
  current_lane = &lane;
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
  while (warp == nullptr && land_any()) warp = pick_warp();
  if (warp == nullptr) raise_deadlock(lane);
  if (warp->resume != &lane) transfer(lane.context, warp->resume->context);
  current_lane = &lane;
}

void Machine::step(Lane& lane) {
  const std::uint64_t dice = random();
  land_some(dice);
  if ((dice >> 50 & kStepMask) == 0) switch_warp(lane);
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
    yield(lane);
    return;
  }
  ++instructions_;
  instruction.execute(*this, warp);
  warp.waiting = 0;
  const std::uint64_t dice = random();
  warp.step = static_cast<int>(dice >> 32 & 31) | 1;
  land_some(dice);
  if (warp.state != Warp::State::runnable || (dice >> 40 & kPreemptMask) == 0) switch_warp(lane);
}

void Machine::block_barrier(Warp& warp) {
  Block& block = *warp.block;
  pause(warp);
  if (++block.at_barrier < static_cast<int>(block.warps.size())) return;
  block.at_barrier = 0;
  Gathered gathered;
  // Somebody knows or has done more than block barriers tell; other blocks do not know of those.
  bool partial = cluster() > 1;
  for (const Warp* other : block.warps) {
    partial = partial || other->products.done != 0;
    for (const Lane& lane : other->lanes) partial = partial || lane.knowledge.known || lane.knowledge.fenced;
  }
  if (partial) {
    for (const Warp* other : block.warps) release(*other, gathered);
    const Knowledge shared = gathered.share();
    for (Warp* other : block.warps) {
      for (Lane& lane : other->lanes) lane.knowledge = shared;
    }
  }
  block.floor = ++tick_;
  if (cluster() == 1) floor_ = block.floor;
  for (Warp* other : block.warps) resume(*other);
}

void Machine::cluster_barrier(Warp& warp, bool relaxed) {
  pause(warp);
  warp.at_cluster_barrier = true;
  warp.relaxed = relaxed;
  ++at_cluster_barrier_;
  finish_cluster_barrier_if_complete();
}

/// Threads that have exited are not waited for, and hand on nothing.
void Machine::finish_cluster_barrier_if_complete() {
  if (at_cluster_barrier_ == 0 || at_cluster_barrier_ + finished_ < static_cast<int>(warps_.size())) return;
  at_cluster_barrier_ = 0;
  Gathered gathered;
  bool relaxed = false;
  for (const auto& warp : warps_) {
    if (!warp->at_cluster_barrier) continue;
    release(*warp, gathered);
    relaxed = relaxed || warp->relaxed;
  }
  const Knowledge shared = gathered.share();
  ++tick_;
  for (const auto& warp : warps_) {
    if (!warp->at_cluster_barrier) continue;
    warp->at_cluster_barrier = false;
    if (!relaxed) {
      for (Lane& lane : warp->lanes) lane.knowledge = shared;
    }
    resume(*warp);
  }
  if (relaxed) {
    for (const auto& block : cluster_) block->over.join(gathered.known);
  }
  if (relaxed || finished_ != 0) return;
  floor_ = tick_;
  for (const auto& block : cluster_) block->floor = tick_;
}

void Machine::warp_barrier(Warp& warp) {
  const Knowledge& first = warp.lanes[0].knowledge;
  const bool same = std::all_of(warp.lanes.begin(), warp.lanes.end(), [&](const Lane& lane) {
    return lane.knowledge.known == first.known && lane.knowledge.fenced == first.fenced;
  });
  if (!same) {
    Gathered gathered;
    release(warp, gathered);
    const Knowledge shared = gathered.share();
    for (Lane& lane : warp.lanes) lane.knowledge = shared;
  }
  warp.floor = ++tick_;
}

void Machine::named_barrier(Warp& warp, int id, int threads, bool waits) {
  const auto refuse = [&](const std::string& detail) {
    raise(FaultKind::barrier_misuse, warp.lanes[0], warp.instruction->name, 0, warp.site, detail);
  };
  if (id < 1 || id > 15) refuse(fmt::format("named barriers are 1 to 15, this is {}", id));
  if (threads < kWarpSize || threads % kWarpSize != 0 || threads > this->threads()) {
    refuse(fmt::format("barrier {} of {} threads in a block of {}", id, threads, this->threads()));
  }
  NamedBarrier& barrier = warp.block->named[static_cast<std::size_t>(id)];
  if (barrier.arrived == 0) barrier.threads = threads;
  if (barrier.threads != threads) {
    refuse(fmt::format("barrier {} of {} threads, but warps {:#x} came for {}", id, threads, barrier.arrived,
                       barrier.threads));
  }
  if ((barrier.arrived >> warp.number & 1) != 0) {
    refuse(fmt::format("warp {} comes to barrier {} twice while warps {:#x} have come of {} threads", warp.number, id,
                       barrier.arrived, threads));
  }
  barrier.arrived |= 1u << warp.number;
  release(warp, barrier.gathered);
  ++tick_;
  if (waits) {
    pause(warp);
    barrier.waiting.push_back(&warp);
  }
  if (std::popcount(barrier.arrived) * kWarpSize < threads) return;
  const Knowledge shared = barrier.gathered.share();
  for (Warp* waiting : barrier.waiting) {
    for (Lane& lane : waiting->lanes) acquire(lane, shared);
    resume(*waiting);
  }
  barrier = {};
}

// Registers.

void Machine::set_registers(Warp& warp, int registers, bool increase) {
  const auto refuse = [&](const std::string& detail) {
    raise(FaultKind::register_pool, warp.lanes[0], warp.instruction->name, 0, warp.site, detail);
  };
  if (registers < 24 || registers > kMaxRegisters || registers % 8 != 0) {
    refuse(fmt::format("{} registers, not a multiple of 8 from 24 to 256", registers));
  }
  if (increase ? registers < warp.registers : registers > warp.registers) {
    refuse(fmt::format("from {} to {} registers", warp.registers, registers));
  }
  warp.register_steps.push_back(registers);
  check_register_steps(warp, warp.site);
  warp.wanted_registers = registers;
  if (increase) {
    warp.wants_registers = true;
    pause(warp);
  } else {
    warp.block->free_registers += (warp.registers - registers) * kWarpSize;
    warp.registers = registers;
  }
  grant_registers(*warp.block);
}

void Machine::grant_registers(Block& block) {
  for (Warp* warp : block.warps) {
    const int missing = (warp->wanted_registers - warp->registers) * kWarpSize;
    if (!warp->wants_registers || missing > block.free_registers) continue;
    block.free_registers -= missing;
    warp->registers = warp->wanted_registers;
    warp->wants_registers = false;
    resume(*warp);
  }
}

/// All warps of a warpgroup execute the same setmaxnreg, as far as they have come; at their end, all of them.
void Machine::check_register_steps(const Warp& warp, const Site& site) const {
  for (int w = 4 * warp.warpgroup(); w < std::min(4 * warp.warpgroup() + 4, static_cast<int>(warps_.size())); ++w) {
    const Warp& other = *warps_[static_cast<std::size_t>(w)];
    const std::size_t common = std::min(warp.register_steps.size(), other.register_steps.size());
    const bool same =
        std::equal(warp.register_steps.begin(), warp.register_steps.begin() + static_cast<std::ptrdiff_t>(common),
                   other.register_steps.begin());
    const bool both_over = warp.state == Warp::State::finished && other.state == Warp::State::finished;
    if (same && (!both_over || warp.register_steps.size() == other.register_steps.size())) continue;
    raise(FaultKind::register_pool, warp.lanes[0], "setmaxnreg", 0, site,
          fmt::format("warps {} and {} of one warpgroup differ in their setmaxnreg", warp.number, other.number));
  }
}

// The order of accesses.

Observer Machine::observer(const Lane& lane, const Block& block) const {
  const Warp& warp = *lane.warp;
  Observer observer;
  observer.thread = lane.agent;
  observer.warp = warp.index;
  observer.floor = &block == warp.block ? block.floor : floor_;
  observer.warp_floor = warp.floor;
  observer.products = warp.products.done;
  observer.first_product = first_product_;
  observer.first_barrier = first_barrier_;
  observer.known = lane.knowledge.known.get();
  observer.fenced = lane.knowledge.fenced.get();
  return observer;
}

Observer Machine::async_observer(const Lane& lane, const Block& block) const {
  Observer result = observer(lane, block);
  result.async = true;
  return result;
}

std::vector<const Lane*> Machine::witnesses(const Warp& warp) const {
  std::vector<const Lane*> result;
  for (const Lane& lane : warp.lanes) {
    const bool known = std::any_of(result.begin(), result.end(), [&](const Lane* other) {
      return other->knowledge.known == lane.knowledge.known && other->knowledge.fenced == lane.knowledge.fenced;
    });
    if (!known) result.push_back(&lane);
  }
  return result;
}

Conflict Machine::read_as_warp(const Warp& warp, std::uint32_t address, std::uint32_t bytes) {
  const std::shared_ptr<const Clock>* seen = nullptr;
  for (const Lane& lane : warp.lanes) {
    if (seen != nullptr && *seen == lane.knowledge.known) continue;
    seen = &lane.knowledge.known;
    Observer observer = this->observer(lane);
    observer.thread = -1;
    if (const Conflict conflict = shared(warp).read(address, bytes, observer, reader(warp))) return conflict;
  }
  return {};
}

void Machine::release(const Lane& lane, Gathered& gathered) {
  const Warp& warp = *lane.warp;
  if (lane.knowledge.known) gathered.known.join(*lane.knowledge.known);
  if (lane.knowledge.fenced) gathered.fenced.join(*lane.knowledge.fenced);
  if (warp.floor > 0) {
    for (const Lane& other : warp.lanes) {
      gathered.known.raise(static_cast<std::size_t>(other.agent), warp.floor - 1);
    }
  }
  gathered.known.raise(static_cast<std::size_t>(lane.agent), tick_);
  if (warp.products.done > 0) {
    gathered.known.raise(first_product_ + static_cast<std::size_t>(warp.index), warp.products.done);
  }
}

void Machine::release(const Warp& warp, Gathered& gathered) {
  const Lane* before = nullptr;
  for (const Lane& lane : warp.lanes) {
    if (before == nullptr || before->knowledge.known != lane.knowledge.known ||
        before->knowledge.fenced != lane.knowledge.fenced) {
      release(lane, gathered);
    } else {
      gathered.known.raise(static_cast<std::size_t>(lane.agent), tick_);
    }
    before = &lane;
  }
}

namespace {

std::shared_ptr<const Clock> join(const std::shared_ptr<const Clock>& a, const std::shared_ptr<const Clock>& b) {
  if (!a || a == b) return b;
  if (!b) return a;
  auto result = std::make_shared<Clock>(*a);
  result->join(*b);
  return result;
}

}  // namespace

void Machine::acquire(Lane& lane, const Knowledge& knowledge) {
  Knowledge& own = lane.knowledge;
  const bool repeated = own.known == joined_a_.known && own.fenced == joined_a_.fenced &&
                        knowledge.known == joined_b_.known && knowledge.fenced == joined_b_.fenced;
  if (!repeated) {
    joined_a_ = own;
    joined_b_ = knowledge;
    joined_ = {join(own.known, knowledge.known), join(own.fenced, knowledge.fenced)};
  }
  own = joined_;
}

void Machine::fence_async(Lane& lane) {
  Gathered gathered;
  release(lane, gathered);
  ++tick_;
  if (cluster() == 1) gathered.known.floor = floor_;
  if (cluster() > 1) keep_own_block(lane, gathered.known);
  gathered.known.join(gathered.fenced);
  lane.knowledge.fenced = std::make_shared<const Clock>(gathered.known);
}

/// The fence is of the own block's shared memory, which its threads alone store to.
void Machine::keep_own_block(const Lane& lane, Clock& clock) const {
  const int first = lane.agent - lane.thread;
  const int agents = std::min(cluster() * threads(), static_cast<int>(clock.entries.size()));
  for (int agent = 0; agent < agents; ++agent) {
    if (agent < first || agent >= first + threads()) clock.entries[static_cast<std::size_t>(agent)] = 0;
  }
}

// mbarriers.

std::string Mbarrier::describe() const {
  std::string text = fmt::format("mbarrier at {:#x}", address);
  if (in_cluster) text += fmt::format(" of block {}", block->index);
  text += fmt::format(": phase {} lacks {} of {} arrivals", phase, pending, count);
  if (bytes > 0) text += fmt::format(" and {} bytes that were announced", bytes);
  if (bytes < 0) text += fmt::format(", and {} bytes came that nobody announced", -bytes);
  return text;
}

void Machine::init_barrier(Lane& lane, std::uint32_t address, int count, const Site& site) {
  constexpr const char* kName = "mbarrier.init";
  if (address % 8 != 0) raise(FaultKind::misaligned, lane, kName, address, site, "wants 8-byte alignment");
  if (!shared(lane).inside(address, 8)) raise({Conflict::out_of_bounds, {}, {}}, lane, kName, address, site);
  if (count < 1 || count > Mbarrier::kMaxCount) {
    raise(FaultKind::barrier_misuse, lane, kName, address, site, fmt::format("a count of {} arrivals", count));
  }
  for (const Mbarrier& other : barriers_) {
    if (other.address != address || other.block != lane.warp->block) continue;
    raise(FaultKind::barrier_misuse, lane, kName, address, site, "initialised again; " + other.describe());
  }
  shared(lane).make_barrier(address);
  Mbarrier barrier;
  barrier.address = address;
  barrier.block = lane.warp->block;
  barrier.in_cluster = cluster() > 1;
  barrier.number = barriers_.size();
  barrier.count = count;
  barrier.pending = count;
  barrier.initialised = stamp(lane);
  barriers_.push_back(std::move(barrier));
}

void Machine::fence_barriers(const Lane& lane) {
  for (Mbarrier& barrier : barriers_) {
    barrier.fenced = barrier.fenced || barrier.initialised.who == lane.agent;
  }
}

Mbarrier& Machine::barrier_at(const Lane& lane, const Place& place, const char* name, const Site& site) {
  const std::uint32_t address = place.address;
  if (address % 8 != 0) raise(FaultKind::misaligned, lane, name, address, site, "wants 8-byte alignment");
  for (Mbarrier& barrier : barriers_) {
    if (barrier.address != address || barrier.block != place.block) continue;
    if (observer(lane, *place.block).knows(barrier.initialised)) return barrier;
    raise(FaultKind::shared_race, lane, name, address, site,
          this->name(barrier.initialised.who) + " initialised this mbarrier, and no barrier is in between");
  }
  if (address >> kMappedShift != 0) raise({Conflict::out_of_bounds, {}, {}}, lane, name, address, site);
  raise(FaultKind::barrier_misuse, lane, name, address, site, "no mbarrier was initialised here");
}

void Machine::arrive(Lane& lane, std::uint32_t address, int bytes, const char* name, const Site& site) {
  arrive(lane, barrier_at(lane, own(lane, address), name, site), bytes, name, site);
}

void Machine::arrive(Lane& lane, Mbarrier& barrier, int bytes, const char* name, const Site& site) {
  if (bytes < 0 || bytes > Mbarrier::kMaxCount) {
    raise(FaultKind::barrier_misuse, lane, name, barrier.address, site, fmt::format("{} bytes announced", bytes));
  }
  if (barrier.pending == 0) {
    raise(FaultKind::barrier_misuse, lane, name, barrier.address, site,
          "one arrival more than the count of the phase; " + barrier.describe());
  }
  const bool remote = barrier.block != lane.warp->block;
  release(lane, remote ? barrier.gathered_remotely : barrier.gathered);
  reach(lane, *barrier.block);
  ++tick_;
  barrier.bytes += bytes;
  --barrier.pending;
  finish_phase_if_complete(barrier);
  step(lane);
}

void Machine::finish_phase_if_complete(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  barrier.gathered.known.raise(first_barrier_ + barrier.number, barrier.phase);
  barrier.completed = barrier.completed_cluster = barrier.gathered.share();
  if (!barrier.gathered_remotely.known.entries.empty()) {
    barrier.gathered.known.join(barrier.gathered_remotely.known);
    barrier.gathered.fenced.join(barrier.gathered_remotely.fenced);
    barrier.completed_cluster = barrier.gathered.share();
    barrier.gathered_remotely = {};
  }
  barrier.gathered = {};
  for (Lane* lane : barrier.waiting) {
    Warp& warp = *lane->warp;
    warp.blocked &= ~(1u << lane->index());
    if (warp.state != Warp::State::blocked) continue;
    resume(warp);
    warp.resume = lane;
  }
  barrier.waiting.clear();
}

void Machine::wait(Lane& lane, std::uint32_t address, std::uint32_t parity, bool cluster, const Site& site) {
  constexpr const char* kName = "mbarrier.try_wait.parity";
  const std::size_t number = barrier_at(lane, own(lane, address), kName, site).number;
  if (parity > 1) {
    raise(FaultKind::barrier_misuse, lane, kName, address, site, fmt::format("a parity of {}", parity));
  }
  lane.awaited_barrier = address;
  lane.awaited_parity = parity;
  lane.awaited_site = site;
  while (barriers_[number].phase % 2 == parity) {
    barriers_[number].waiting.push_back(&lane);
    lane.warp->blocked |= 1u << lane.index();
    yield(lane);
  }
  acquire(lane, cluster ? barriers_[number].completed_cluster : barriers_[number].completed);
  step(lane);
}

// Hands nothing on. A lane that tests for ever counts as one that waits.
bool Machine::test(Lane& lane, std::uint32_t address, std::uint32_t parity, const Site& site) {
  constexpr const char* kName = "mbarrier.test_wait.parity";
  const std::size_t number = barrier_at(lane, own(lane, address), kName, site).number;
  if (parity > 1) {
    raise(FaultKind::barrier_misuse, lane, kName, address, site, fmt::format("a parity of {}", parity));
  }
  step(lane);
  const bool complete = barriers_[number].phase % 2 != parity;
  const auto now = std::chrono::steady_clock::now();
  if (complete) {
    lane.polls_since = {};
  } else if (lane.polls_since == std::chrono::steady_clock::time_point{}) {
    lane.polls_since = now;
  } else if (now - lane.polls_since > kPatience) {
    raise(FaultKind::deadlock, lane, kName, address, site, "tested for ever: " + barriers_[number].describe());
  }
  check_others();
  return complete;
}

// Copies of boxes.

namespace {

template <class Visit>
void for_each_chunk(const TensorBox& box, std::uint32_t shared, const Visit& visit) {
  for (std::uint32_t at = 0; at < box.bytes(); at += 16) visit(swizzled(shared + at, box.shape().swizzle), at);
}

}  // namespace

void Machine::start_copy(Lane& lane, std::uint32_t target, const TensorBox& box, std::uint32_t barrier,
                         const char* name, const Site& site) {
  const Mbarrier& signalled = barrier_at(lane, own(lane, barrier), name, site);
  launch_copy(lane, {box, own(lane, target), signalled.number, lane.agent}, signalled, name, site);
}

void Machine::launch_copy(Lane& lane, TensorCopy copy, const Mbarrier& signalled, const char* name, const Site& site) {
  if (!signalled.fenced) {
    raise(FaultKind::unfenced, lane, name, signalled.address, site,
          "no fence.mbarrier_init has shown this mbarrier to the copy engine");
  }
  SharedMemory& shared = copy.target.block->shared;
  const Observer observer = async_observer(lane, *copy.target.block);
  const Stamp writer{tick_, static_cast<std::uint16_t>(lane.agent), Stamp::tensor_copy};
  for_each_chunk(copy.box, copy.target.address, [&](std::uint32_t address, std::uint32_t) {
    if (const Conflict conflict = shared.write(address, 16, observer, writer)) {
      raise(conflict, lane, shared, name, address, site);
    }
    std::memset(shared.at(address), 0xff, 16);
  });
  copies_.push_back(std::move(copy));
  step(lane);
}

/// Of what is in flight a copy or a store may arrive between two instructions.
void Machine::land_some(std::uint64_t dice) {
  if (!copies_.empty() && (dice >> 20 & kLandMask) == 0) land((dice >> 53) % copies_.size());
  if (!writes_.empty() && (dice >> 24 & kLandMask) == 0) finish_write((dice >> 53) % writes_.size());
}

void Machine::land(std::size_t index) {
  const TensorCopy copy = std::move(copies_[index]);
  copies_[index] = std::move(copies_.back());
  copies_.pop_back();
  Mbarrier& barrier = barriers_[copy.barrier];
  SharedMemory& shared = copy.target.block->shared;
  const Stamp writer{barrier.phase + 1, static_cast<std::uint16_t>(barrier.number), Stamp::landed};
  std::vector<std::byte> bytes(copy.box.bytes());
  for (std::size_t i = 0; i < copy.box.rows().size(); ++i) {
    const TensorBox::Row& row = copy.box.rows()[i];
    if (row.bytes != 0) std::memcpy(bytes.data() + i * copy.box.row_bytes() + row.skip, row.source, row.bytes);
  }
  for_each_chunk(copy.box, copy.target.address, [&](std::uint32_t address, std::uint32_t at) {
    std::memcpy(shared.at(address), bytes.data() + at, 16);
    shared.arrived(address, 16, writer);
  });
  if (copy.source.block != nullptr) finish_source(copy, barrier.phase + 1);
  barrier.bytes -= copy.box.bytes();
  finish_phase_if_complete(barrier);
}

// Between the blocks of a cluster.

std::uint32_t Machine::map(const Lane& lane, std::uint32_t address, int rank, const Site& site) const {
  constexpr const char* kName = "mapa.shared::cluster";
  if (address >> kMappedShift != 0) raise({Conflict::out_of_bounds, {}, {}}, lane, kName, address, site);
  if (rank < 0 || rank >= cluster()) {
    raise(FaultKind::shared_out_of_bounds, lane, kName, address, site,
          fmt::format("block {} of a cluster of {}", rank, cluster()));
  }
  const std::uint32_t there = without_rank(address) | cluster_[static_cast<std::size_t>(rank)]->shared.window();
  return there | (static_cast<std::uint32_t>(rank) + 1) << kMappedShift;
}

/// An address that was not mapped is one of the thread's own block.
Place Machine::resolve(const Lane& lane, std::uint32_t address, const char* name, const Site& site) const {
  const std::uint32_t mapped = address >> kMappedShift;
  if (mapped == 0) return own(lane, address);
  if (mapped > cluster_.size()) raise(FaultKind::shared_out_of_bounds, lane, name, address, site, "no address");
  Block& block = *cluster_[mapped - 1];
  if (block.exited()) {
    raise(FaultKind::exited_block, lane, name, address, site,
          fmt::format("shared memory of a block that has exited: block {}", block.index));
  }
  return {&block, address & ((1u << kMappedShift) - 1)};
}

void Machine::arrive_remote(Lane& lane, std::uint32_t address, int bytes, const char* name, const Site& site) {
  arrive(lane, barrier_at(lane, resolve(lane, address, name, site), name, site), bytes, name, site);
}

/// The copy engine reads the source when the copy lands. Until the barrier's phase tells so, it may still read.
void Machine::start_cluster_copy(Lane& lane, std::uint32_t target, std::uint32_t source, const TensorBox& box,
                                 std::uint32_t barrier, const char* name, const Site& site) {
  const Place to = resolve(lane, target, name, site);
  const Mbarrier& signalled = barrier_at(lane, resolve(lane, barrier, name, site), name, site);
  if (signalled.block != to.block) {
    raise(FaultKind::barrier_misuse, lane, name, barrier, site,
          fmt::format("an mbarrier of block {} for a copy to block {}", signalled.block->index, to.block->index));
  }
  const Observer observer = async_observer(lane);
  const Reader reader{Reader::kInFlight, 1, static_cast<std::uint16_t>(signalled.number), Reader::cluster_copy};
  for_each_chunk(box, source, [&](std::uint32_t address, std::uint32_t) {
    if (const Conflict conflict = shared(lane).read(address, 16, observer, reader)) {
      raise(conflict, lane, name, address, site);
    }
  });
  launch_copy(lane, {box, to, signalled.number, lane.agent, own(lane, source)}, signalled, name, site);
}

void Machine::start_remote_copy(Lane& lane, std::uint32_t target, const TensorBox& box, std::uint32_t barrier,
                                const char* name, const Site& site) {
  const Place to = resolve(lane, target, name, site);
  const Mbarrier& signalled = barrier_at(lane, resolve(lane, barrier, name, site), name, site);
  launch_copy(lane, {box, to, signalled.number, lane.agent}, signalled, name, site);
}

void Machine::reach(const Lane& lane, Block& block) const {
  if (&block != lane.warp->block) block.reached.raise(static_cast<std::size_t>(lane.agent), tick_);
}

void Machine::finish_source(const TensorCopy& copy, std::uint32_t phase) {
  const Reader reader{phase, 1, static_cast<std::uint16_t>(copy.barrier), Reader::cluster_copy};
  for_each_chunk(copy.box, copy.source.address,
                 [&](std::uint32_t address, std::uint32_t) { copy.source.block->shared.finish_read(address, reader); });
  if (copy.source.block == copy.target.block) return;
  copy.source.block->reached.raise(first_barrier_ + copy.barrier, phase);
  copy.target.block->reached.raise(first_barrier_ + copy.barrier, phase);
}

/// The copy engine reads the source at some moment up to the wait.
void Machine::start_store(Lane& lane, std::uint32_t source, const TensorBox& box, TensorStore::Effect effect,
                          const char* name, const Site& site) {
  const Observer observer = async_observer(lane);
  Reader reader = this->reader(lane);
  reader.tick = Reader::kInFlight;
  for_each_chunk(box, source, [&](std::uint32_t address, std::uint32_t) {
    if (const Conflict conflict = shared(lane).read(address, 16, observer, reader)) {
      raise(conflict, lane, name, address, site);
    }
  });
  stores_.push_back({box, effect, source, &lane, lane.bulk_groups, false});
  if (random() >> 63 != 0) read_source(stores_.back());
  step(lane);
}

void Machine::read_source(TensorStore& store) {
  if (store.read) return;
  store.read = true;
  std::vector<std::byte> bytes(store.box.bytes());
  for_each_chunk(store.box, store.source, [&](std::uint32_t address, std::uint32_t at) {
    std::memcpy(bytes.data() + at, shared(*store.lane).at(address), 16);
  });
  writes_.push_back({store, std::move(bytes)});
  if (random() >> 63 != 0) finish_write(writes_.size() - 1);
}

namespace {

/// Each element at once whatever other blocks do.
void add_floats(const std::byte* target, const std::byte* from, std::uint32_t bytes) {
  auto* sums = reinterpret_cast<float*>(const_cast<std::byte*>(target));
  for (std::uint32_t i = 0; i < bytes / sizeof(float); ++i) {
    float value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    std::atomic_ref<float>(sums[i]).fetch_add(value);
  }
}

}  // namespace

void Machine::finish_write(std::size_t index) {
  const PendingWrite write = std::move(writes_[index]);
  writes_[index] = std::move(writes_.back());
  writes_.pop_back();
  const TensorBox& box = write.store.box;
  for (std::size_t i = 0; i < box.rows().size(); ++i) {
    const TensorBox::Row& row = box.rows()[i];
    if (row.bytes == 0) continue;
    const std::byte* from = write.bytes.data() + i * box.row_bytes() + row.skip;
    if (write.store.effect == TensorStore::add_f32) {
      add_floats(row.source, from, row.bytes);
    } else {
      memory_.write(row.source, from, row.bytes);
    }
  }
}

void Machine::commit_stores(Lane& lane) {
  ++lane.bulk_groups;
}

void Machine::wait_stores(const Lane& lane, bool read) {
  const auto waited_for = [&](const TensorStore& store) {
    return store.lane == &lane && store.group < lane.bulk_groups;
  };
  for (TensorStore& store : stores_) {
    if (!waited_for(store)) continue;
    read_source(store);
    for_each_chunk(store.box, store.source,
                   [&](std::uint32_t address, std::uint32_t) { shared(lane).finish_read(address, reader(lane)); });
  }
  std::erase_if(stores_, waited_for);
  for (std::size_t i = writes_.size(); !read && i-- > 0;) {
    if (waited_for(writes_[i].store)) finish_write(i);
  }
}

bool Machine::has_stores(const Lane& lane) const {
  const auto counts = [&](const TensorStore& store) { return store.lane == &lane; };
  return std::any_of(stores_.begin(), stores_.end(), counts) ||
         std::any_of(writes_.begin(), writes_.end(), [&](const PendingWrite& write) { return counts(write.store); });
}

void Machine::check_others() const {
  if (failed_ != nullptr && *failed_) throw OtherBlockFailed();
}

bool Machine::land_any() {
  if (copies_.empty()) return false;
  land(static_cast<std::size_t>(random() >> 33) % copies_.size());
  return true;
}

int Machine::copying_from(const void* address, std::size_t bytes) const {
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  for (const auto& warp : warps_) {
    for (const Lane& lane : warp->lanes) {
      for (const AsyncCopy& copy : lane.async.copies) {
        const auto source = reinterpret_cast<std::uintptr_t>(copy.source);
        if (copy.source != nullptr && first < source + 16 && source < first + bytes) return lane.agent;
      }
    }
  }
  for (const TensorCopy& copy : copies_) {
    for (const TensorBox::Row& row : copy.box.rows()) {
      const auto source = reinterpret_cast<std::uintptr_t>(row.source);
      if (row.bytes != 0 && first < source + row.bytes && source < first + bytes) return copy.agent;
    }
  }
  return -1;
}

std::string Machine::block_text(const Block& block) const {
  return cluster() == 1 ? std::string() : fmt::format(" of block {}", block.index);
}

std::string Machine::name(int agent) const {
  const Warp& warp = *warps_[static_cast<std::size_t>(agent / kWarpSize)];
  const Lane& lane = warp.lanes[static_cast<std::size_t>(agent % kWarpSize)];
  return fmt::format("thread {}{}", lane.thread, block_text(*warp.block));
}

std::string Machine::who(const Reader& reader) const {
  if (reader.kind == Reader::cluster_copy) return "a copy for the " + barriers_[reader.who].describe();
  const bool product = reader.kind == Reader::product;
  const Warp& warp = *warps_[static_cast<std::size_t>(product ? 4 * reader.who : reader.who)];
  if (product) return fmt::format("a product of warpgroup {}{}", warp.number / 4, block_text(*warp.block));
  if (std::has_single_bit(reader.lanes)) return name(kWarpSize * reader.who + std::countr_zero(reader.lanes));
  return fmt::format("warp {}{}", warp.number, block_text(*warp.block));
}

/// xorshift64*
std::uint64_t Machine::random() {
  random_ ^= random_ >> 12;
  random_ ^= random_ << 25;
  random_ ^= random_ >> 27;
  return random_ * 0x2545f4914f6cdd1du;
}

void Machine::raise(FaultKind kind, const Lane& lane, const char* instruction, std::uint64_t address, const Site& site,
                    const std::string& detail) const {
  throw Fault(kind, lane.warp->block->index, lane.thread, instruction, address, site, detail);
}

void Machine::raise(const Conflict& conflict, const Lane& lane, const SharedMemory& shared, const char* instruction,
                    std::uint32_t address, const Site& site) const {
  const int writer = conflict.writer.who;
  const auto race = [&](const std::string& detail) {
    raise(FaultKind::shared_race, lane, instruction, address, site, detail);
  };
  switch (conflict.kind) {
    case Conflict::out_of_bounds:
      if (address >> kMappedShift != 0) {
        raise(FaultKind::shared_out_of_bounds, lane, instruction, address, site,
              "a shared::cluster address, and this instruction takes those of its own block");
      }
      raise(FaultKind::shared_out_of_bounds, lane, instruction, address, site,
            fmt::format("dynamic shared memory is [{:#x}, {:#x})", shared.base(), shared.base() + shared.bytes()));
    case Conflict::uninitialised:
      raise(FaultKind::shared_uninitialised, lane, instruction, address, site, "nobody has written here");
    case Conflict::in_flight:
      if (conflict.writer.kind == Stamp::landed) {
        const Mbarrier& barrier = barriers_[static_cast<std::size_t>(writer)];
        raise(FaultKind::shared_in_flight, lane, instruction, address, site,
              fmt::format("a box came here that counts for phase {} of the mbarrier at {:#x}, which this thread has "
                          "not waited for",
                          conflict.writer.tick - 1, barrier.address));
      }
      raise(FaultKind::shared_in_flight, lane, instruction, address, site,
            conflict.writer.kind == Stamp::tensor_copy
                ? fmt::format("a box that {} asked for is still to land here", name(writer))
                : name(writer) + " has not waited for its asynchronous copy to here");
    case Conflict::unfenced:
      raise(FaultKind::unfenced, lane, instruction, address, site,
            name(writer) + " stored here, and no fence.proxy.async is in between");
    case Conflict::barrier_object:
      raise(FaultKind::barrier_misuse, lane, instruction, address, site, "these bytes are an mbarrier");
    case Conflict::write_then_read:
      race(name(writer) + " wrote here, and no barrier is in between");
      break;
    case Conflict::write_then_write:
      race(name(writer) + " wrote here too, and no barrier is in between");
      break;
    case Conflict::read_then_write:
    case Conflict::none:
      break;
  }
  const Reader& reader = conflict.reader;
  if (reader.kind == Reader::cluster_copy) {
    raise(FaultKind::source_overwritten, lane, instruction, address, site,
          who(reader) + " may still read here: this thread does not know that its phase is complete");
  }
  if (reader.kind == Reader::lanes_of_warp && reader.tick == Reader::kInFlight) {
    raise(FaultKind::source_overwritten, lane, instruction, address, site,
          fmt::format("the copy engine may still read here for {}, which has not waited for that", who(reader)));
  }
  if (reader.kind == Reader::product) {
    const auto first = warps_.begin() + 4 * reader.who;
    const bool waited = std::all_of(
        first, first + 4, [&](const std::unique_ptr<Warp>& warp) { return warp->products.done >= reader.tick; });
    if (!waited) {
      raise(FaultKind::source_overwritten, lane, instruction, address, site,
            fmt::format("{} that not all of its warps have waited for reads here", who(reader)));
    }
  }
  race(fmt::format("{} may still read here: no barrier is in between", who(reader)));
  std::abort();
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
  const Warp& warp = *lane.warp;
  if ((warp.blocked >> lane.index() & 1) != 0) {
    raise(FaultKind::deadlock, lane, "mbarrier.try_wait.parity", lane.awaited_barrier, lane.awaited_site,
          waiting_lanes());
  }
  const bool left = (warp.exited >> lane.index() & 1) != 0;
  raise(FaultKind::deadlock, lane, left ? "exit" : warp.instruction->name, 0, left ? Site() : warp.site,
        waiting_lanes());
}

std::string Machine::waiting_lanes() const {
  std::string text;
  for (const auto& warp : warps_) {
    if (!text.empty()) text += ", ";
    text += fmt::format("warp {}{} {}", warp->number, block_text(*warp->block), waiting_text(*warp));
  }
  for (const Mbarrier& barrier : barriers_) {
    if (!barrier.waiting.empty()) text += "; " + barrier.describe();
  }
  for (const auto& block : cluster_) {
    for (std::size_t id = 0; id < block->named.size(); ++id) {
      const NamedBarrier& barrier = block->named[id];
      if (barrier.waiting.empty()) continue;
      text += fmt::format("; barrier {}{} of {} threads: warps {:#x} have come", id, block_text(*block),
                          barrier.threads, barrier.arrived);
    }
  }
  return text;
}

namespace {

/// What the text there says is waited for, " k_full()": the first argument of a wait; empty where it is not found.
std::string awaited_name(const Site& site) {
  std::ifstream file(site.file_name());
  std::string line;
  for (unsigned n = 0; n < site.line(); ++n) {
    if (!std::getline(file, line)) return {};
  }
  constexpr std::string_view kWait = "mbarrier_wait";
  const std::size_t call = line.find(kWait);
  const std::size_t begin = call == std::string::npos ? call : line.find('(', call);
  if (begin == std::string::npos) return {};
  int depth = 0;
  for (std::size_t end = begin + 1; end < line.size(); ++end) {
    if (line[end] == '(') ++depth;
    if (line[end] == ')' && depth-- == 0) return {};
    if (line[end] == ',' && depth == 0) return " " + line.substr(begin + 1, end - begin - 1);
  }
  return {};
}

}  // namespace

std::string Machine::waiting_text(const Warp& warp) const {
  if (warp.state == Warp::State::finished) return "has exited";
  if (warp.blocked != 0) {
    const Lane& lane = warp.lanes[static_cast<std::size_t>(std::countr_zero(warp.blocked))];
    return fmt::format("waits ({}) for parity {} of the mbarrier{} at {:#x} [{}]", lanes_text(warp.blocked),
                       lane.awaited_parity, awaited_name(lane.awaited_site), lane.awaited_barrier,
                       to_string(lane.awaited_site));
  }
  std::string text = fmt::format("waits at {} [{}]", warp.instruction->name, to_string(warp.site));
  if (warp.wanted_registers > warp.registers) {
    text += fmt::format(" for {} registers a thread, {} are free", warp.wanted_registers, warp.block->free_registers);
  }
  return text;
}

}  // namespace emulator
