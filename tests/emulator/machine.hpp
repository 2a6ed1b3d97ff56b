#ifndef FA_TESTS_EMULATOR_MACHINE_HPP_
#define FA_TESTS_EMULATOR_MACHINE_HPP_

#include <array>
#include <atomic>
#include <boost/context/fiber.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "emulator/fault.hpp"
#include "emulator/knowledge.hpp"
#include "emulator/mbarrier.hpp"
#include "emulator/memory.hpp"
#include "emulator/shared_memory.hpp"
#include "emulator/tensor_map.hpp"
#include "emulator/warpgroup.hpp"

namespace emulator {

inline constexpr int kWarpSize = 32;

class Machine;
struct Warp;
struct Block;

/// A warp-wide instruction. It executes once, when every lane has brought its operands.
struct Instruction {
  const char* name;
  void (*execute)(Machine& machine, Warp& warp);
};

/// One cp.async.
struct AsyncCopy {
  std::uint32_t target;
  const std::byte* source;  // null: zeros
  bool arrived;
  std::uint32_t bytes;
};

/// The cp.async state of a thread.
struct AsyncCopies {
  std::vector<AsyncCopy> copies;  // issued and not waited for, oldest first
  std::vector<int> groups;        // their committed groups' sizes, oldest first
  int uncommitted = 0;
};

/// A CUDA thread: a fiber of its own.
struct Lane {
  boost::context::fiber context;  // where it goes on; empty while it runs
  Warp* warp = nullptr;
  int thread = 0;                  // of its block
  int agent = 0;                   // of its cluster
  const void* operands = nullptr;  // of the warp-wide instruction it waits at
  AsyncCopies async;
  Knowledge knowledge;
  std::uint32_t awaited_barrier = 0;  // address of the mbarrier that it is blocked at
  std::uint32_t awaited_parity = 0;
  Site awaited_site;
  bool waited_for_grid = false;                         // griddepcontrol.wait
  int bulk_groups = 0;                                  // cp.async.bulk.commit_group
  std::chrono::steady_clock::time_point polls_since{};  // tests of mbarriers that were not complete

  int index() const { return thread % kWarpSize; }
};

/// How long a lane may poll for what other lanes do, or blocks that other OS threads run.
inline constexpr std::chrono::seconds kPatience{20};

struct Warp {
  /// In `waiting` the whole warp waits for other warps, in `blocked` all lanes that are left wait at mbarriers or for
  /// those that do.
  enum class State : std::uint8_t { runnable, waiting, blocked, finished };

  std::array<Lane, kWarpSize> lanes;
  Block* block = nullptr;
  int number = 0;  // in its block
  int index = 0;   // in its cluster
  State state = State::runnable;
  std::uint32_t waiting = 0;  // lanes that have arrived at `instruction`
  std::uint32_t exited = 0;
  std::uint32_t blocked = 0;  // lanes at mbarriers
  const Instruction* instruction = nullptr;
  Site site;
  int first_arrived = 0;
  int step = 1;             // order of the lanes in this round: odd, so that all are visited
  Lane* resume = nullptr;   // the lane that goes on when the warp is scheduled
  std::uint32_t floor = 0;  // tick of its last barrier
  WarpProducts products;
  int registers = 0;  // of a thread
  int wanted_registers = 0;
  bool wants_registers = false;  // waits for them
  bool at_cluster_barrier = false;
  bool relaxed = false;             // there
  std::vector<int> register_steps;  // operands of its setmaxnreg so far

  int warpgroup() const { return index / 4; }
};

/// bar.sync and bar.arrive with a number and a count.
struct NamedBarrier {
  int threads = 0;            // that the first one to come announced
  std::uint32_t arrived = 0;  // warps
  std::vector<Warp*> waiting;
  Gathered gathered;
};

/// What the threads of a block have in common. Everything else is of the cluster.
struct Block {
  Block(int shared_bytes, int rank_in_cluster) : shared(shared_bytes, rank_in_cluster), rank(rank_in_cluster) {}

  SharedMemory shared;
  int rank;  // in its cluster
  int index = 0;
  int at_barrier = 0;  // warps
  int finished = 0;
  int free_registers = 0;
  std::uint32_t floor = 0;  // tick of its last barrier of all threads
  std::array<NamedBarrier, 16> named;
  Clock reached;  // what other blocks have done to its memory and its barriers
  Clock over;     // what relaxed barriers of the cluster say is over, of that
  std::vector<Warp*> warps;

  bool exited() const { return finished == static_cast<int>(warps.size()); }
};

/// A place in the shared memory of a block.
struct Place {
  Block* block;
  std::uint32_t address;  // in that block's own window
};

/// One box on its way from shared to global memory.
struct TensorStore {
  enum Effect : std::uint8_t { overwrite, add_f32 };

  TensorBox box;
  Effect effect = overwrite;
  std::uint32_t source = 0;
  Lane* lane = nullptr;
  int group = 0;      // of its thread's
  bool read = false;  // its source
};

/// What has left shared memory and is still to be stored or added.
struct PendingWrite {
  TensorStore store;
  std::vector<std::byte> bytes;
};

/// One box on its way from global memory, or that of a block of the cluster, to shared memory.
struct TensorCopy {
  TensorBox box;
  Place target;
  std::size_t barrier = 0;  // number
  int agent = 0;
  Place source{nullptr, 0};  // where it is shared memory
};

/// Ends a block that waits for one with a fault.
struct OtherBlockFailed : std::exception {};

/// Runs clusters of thread blocks one after another on the calling OS thread. Every CUDA thread is a fiber; the lanes
/// of a warp run one by one up to a warp-wide instruction, and warps take turns, in an order that the seed decides.
class Machine {
 public:
  using Kernel = void (*)(const void* context);

  Machine(int threads, int shared_bytes, int blocks, int cluster, Memory& memory, int resident = 1);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// Runs the blocks of one cluster to their end. Throws the first Fault; the machine is of no use after that.
  void run_cluster(Kernel kernel, const void* context, int first_block, std::uint64_t seed);

  std::uint64_t instructions() const { return instructions_; }

  /// Set when a block elsewhere has failed; who waits for other blocks gives up then.
  void watch(const std::atomic<bool>* failed) { failed_ = failed; }
  void check_others() const;

  /// Called when a thread begins to wait for a block elsewhere.
  void on_wait(std::function<void()> tell) { on_wait_ = std::move(tell); }
  void tell_wait() const {
    if (on_wait_) on_wait_();
  }

  /// Whether what the lane reads may yet be written by the kernel before.
  bool may_guess(const Lane& lane) const { return early_ && !lane.waited_for_grid; }
  /// The kernel before this one may still run.
  void start_early(bool early, bool inputs) {
    early_ = early;
    early_inputs_ = inputs;
  }

  // What the instructions of instructions.cpp are made of.

  static Lane& current();
  static Machine& of(const Lane& lane);

  static SharedMemory& shared(const Warp& warp) { return warp.block->shared; }
  static SharedMemory& shared(const Lane& lane) { return shared(*lane.warp); }
  Memory& memory() { return memory_; }

  /// What any kernel can write, the one before this one may still use.
  void check_order(const Lane& lane, const void* address, std::size_t bytes, const char* name, const Site& site) const;

  int blocks() const { return blocks_; }
  int cluster() const { return static_cast<int>(cluster_.size()); }
  int threads() const { return static_cast<int>(cluster_.front()->warps.size()) * kWarpSize; }

  /// Waits until all lanes of the warp have called this for the same instruction and site; the last one executes it.
  void converge(Lane& lane, const Instruction& instruction, const void* operands, const Site& site);

  /// Between two instructions of one thread: copies may land, other warps may have their turn.
  void step(Lane& lane);

  void block_barrier(Warp& warp);
  /// Relaxed: accesses before it are ordered before the exit of other blocks alone.
  void cluster_barrier(Warp& warp, bool relaxed);
  void warp_barrier(Warp& warp);
  void named_barrier(Warp& warp, int id, int threads, bool waits);
  void set_registers(Warp& warp, int registers, bool increase);

  // The order of accesses.

  Observer observer(const Lane& lane) const { return observer(lane, *lane.warp->block); }
  Observer async_observer(const Lane& lane) const { return async_observer(lane, *lane.warp->block); }
  /// In the shared memory of some block of the cluster.
  Observer observer(const Lane& lane, const Block& block) const;
  Observer async_observer(const Lane& lane, const Block& block) const;
  /// Lanes of the warp that between them know no more than what every lane does.
  std::vector<const Lane*> witnesses(const Warp& warp) const;
  Stamp stamp(const Lane& lane) const { return {tick_, static_cast<std::uint16_t>(lane.agent), Stamp::thread}; }
  Reader reader(const Lane& lane) const {
    return {tick_, 1u << lane.index(), static_cast<std::uint16_t>(lane.warp->index), Reader::lanes_of_warp};
  }
  Reader reader(const Warp& warp) const {
    return {tick_, 0xffffffffu, static_cast<std::uint16_t>(warp.index), Reader::lanes_of_warp};
  }
  /// The thread has done something to another block's memory, before whose exit a barrier has to stand.
  void reach(const Lane& lane, Block& block) const;
  /// Where a shared::cluster address, or one of the thread's own block, lies.
  Place resolve(const Lane& lane, std::uint32_t address, const char* name, const Site& site) const;
  Conflict read_as_warp(const Warp& warp, std::uint32_t address, std::uint32_t bytes);

  /// Adds what the thread has done and knows.
  void release(const Lane& lane, Gathered& gathered);
  void release(const Warp& warp, Gathered& gathered);
  void acquire(Lane& lane, const Knowledge& knowledge);
  /// fence.proxy.async
  void fence_async(Lane& lane);

  // mbarriers and copies.

  void init_barrier(Lane& lane, std::uint32_t address, int count, const Site& site);
  void fence_barriers(const Lane& lane);
  void arrive(Lane& lane, std::uint32_t address, int bytes, const char* name, const Site& site);
  /// With `cluster` the thread also learns what other blocks' arrivals hand on.
  void wait(Lane& lane, std::uint32_t address, std::uint32_t parity, bool cluster, const Site& site);
  /// Whether the phase is complete.
  bool test(Lane& lane, std::uint32_t address, std::uint32_t parity, const Site& site);
  void start_copy(Lane& lane, std::uint32_t target, const TensorBox& box, std::uint32_t barrier, const char* name,
                  const Site& site);

  // Between the blocks of a cluster, by shared::cluster addresses.

  std::uint32_t map(const Lane& lane, std::uint32_t address, int rank, const Site& site) const;
  void arrive_remote(Lane& lane, std::uint32_t address, int bytes, const char* name, const Site& site);
  void start_cluster_copy(Lane& lane, std::uint32_t target, std::uint32_t source, const TensorBox& box,
                          std::uint32_t barrier, const char* name, const Site& site);

  void start_remote_copy(Lane& lane, std::uint32_t target, const TensorBox& box, std::uint32_t barrier,
                         const char* name, const Site& site);

  void start_store(Lane& lane, std::uint32_t source, const TensorBox& box, TensorStore::Effect effect, const char* name,
                   const Site& site);
  void commit_stores(Lane& lane);
  /// Whether stores of this thread may not have arrived.
  bool has_stores(const Lane& lane) const;
  /// Until the sources are read; without `read` until what they held has arrived.
  void wait_stores(const Lane& lane, bool read);

  Warpgroup& warpgroup(const Warp& warp) { return warpgroups_[static_cast<std::size_t>(warp.warpgroup())]; }
  Warp& warp(int index) { return *warps_[static_cast<std::size_t>(index)]; }
  void pause(Warp& warp) { warp.state = Warp::State::waiting; }
  void resume(Warp& warp) { warp.state = Warp::State::runnable; }

  /// A thread (agent) with a copy in flight that reads some of these global bytes, else -1.
  int copying_from(const void* address, std::size_t bytes) const;

  /// "thread 5", in a cluster "thread 5 of block 3"
  std::string name(int agent) const;

  std::uint64_t random();

  [[noreturn]] void raise(FaultKind kind, const Lane& lane, const char* instruction, std::uint64_t address,
                          const Site& site, const std::string& detail) const;
  [[noreturn]] void raise(const Conflict& conflict, const Lane& lane, const char* instruction, std::uint32_t address,
                          const Site& site) const {
    raise(conflict, lane, shared(lane), instruction, address, site);
  }
  /// In the shared memory of some block of the cluster.
  [[noreturn]] void raise(const Conflict& conflict, const Lane& lane, const SharedMemory& shared,
                          const char* instruction, std::uint32_t address, const Site& site) const;

 private:
  void start_fibers();
  void prepare(int first_block, std::uint64_t seed);
  void prepare(Warp& warp, int registers);
  boost::context::fiber lane_main(Lane& lane, boost::context::fiber from);
  void run_lane(Lane& lane);
  void finish_lane(Lane& lane);
  void go_on_after(Lane& lane);
  Lane* ready_lane(const Lane& lane);
  Lane* successor(Lane& lane);
  void yield(Lane& lane);
  void switch_warp(Lane& lane);
  Warp* pick_warp();
  void check_exit(const Lane& lane) const;
  void check_waited_for_grid() const;
  void check_block_exit(const Lane& lane);
  void check_register_steps(const Warp& warp, const Site& site) const;
  void grant_registers(Block& block);
  void finish_cluster_barrier_if_complete();
  void keep_own_block(const Lane& lane, Clock& clock) const;
  Place own(const Lane& lane, std::uint32_t address) const { return {lane.warp->block, address}; }
  Mbarrier& barrier_at(const Lane& lane, const Place& place, const char* name, const Site& site);
  void arrive(Lane& lane, Mbarrier& barrier, int bytes, const char* name, const Site& site);
  void launch_copy(Lane& lane, TensorCopy copy, const Mbarrier& signalled, const char* name, const Site& site);
  void finish_source(const TensorCopy& copy, std::uint32_t phase);
  void finish_phase_if_complete(Mbarrier& barrier);
  void land(std::size_t copy);
  void land_some(std::uint64_t dice);
  void read_source(TensorStore& store);
  void finish_write(std::size_t index);
  bool land_any();
  void transfer(boost::context::fiber& from, boost::context::fiber& to);
  void fail(Lane& lane);
  [[noreturn]] void raise_divergence(const Lane& lane, const char* instruction, const Site& site) const;
  [[noreturn]] void raise_deadlock(const Lane& lane) const;
  std::string block_text(const Block& block) const;
  std::string who(const Reader& reader) const;
  std::string waiting_lanes() const;
  std::string waiting_text(const Warp& warp) const;

  Memory& memory_;
  int blocks_;
  int resident_;               // blocks that share the registers of a multiprocessor
  std::size_t first_product_;  // agents of a Clock: threads, products of warps, barriers
  std::size_t first_barrier_;
  std::vector<std::unique_ptr<Block>> cluster_;
  std::vector<std::unique_ptr<Warp>> warps_;
  boost::context::fiber scheduler_;            // run_cluster
  boost::context::fiber* previous_ = nullptr;  // where the fiber that was left just now belongs
  Kernel kernel_ = nullptr;
  const void* context_ = nullptr;
  int at_cluster_barrier_ = 0;  // warps
  int finished_ = 0;
  std::uint32_t tick_ = 1;   // grows whenever somebody hands on what he knows
  std::uint32_t floor_ = 0;  // that of the last barrier of the whole cluster
  std::vector<Mbarrier> barriers_;
  std::vector<TensorCopy> copies_;   // in flight
  std::vector<TensorStore> stores_;  // not waited for
  std::vector<PendingWrite> writes_;
  std::vector<Warpgroup> warpgroups_;
  Knowledge joined_a_, joined_b_, joined_;  // the last join: all lanes of a warp ask for the same
  Lane* next_ = nullptr;                    // after a lane that ends
  std::uint64_t random_ = 1;
  std::uint64_t instructions_ = 0;
  bool early_ = false;
  bool early_inputs_ = false;
  const std::atomic<bool>* failed_ = nullptr;
  std::function<void()> on_wait_;
  bool quit_ = false;
  std::exception_ptr fault_;
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_MACHINE_HPP_
