#ifndef FA_TESTS_EMULATOR_MACHINE_HPP_
#define FA_TESTS_EMULATOR_MACHINE_HPP_

#include <array>
#include <boost/context/fiber.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "emulator/fault.hpp"
#include "emulator/memory.hpp"
#include "emulator/shared_memory.hpp"

namespace emulator {

inline constexpr int kWarpSize = 32;

class Machine;
struct Warp;

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
  int thread = 0;
  const void* operands = nullptr;  // of the warp-wide instruction it waits at
  AsyncCopies async;

  int index() const { return thread % kWarpSize; }
};

struct Warp {
  enum class State : std::uint8_t { runnable, at_barrier, finished };

  std::array<Lane, kWarpSize> lanes;
  int index = 0;
  State state = State::runnable;
  std::uint32_t waiting = 0;  // lanes that have arrived at `instruction`
  std::uint32_t exited = 0;
  const Instruction* instruction = nullptr;
  Site site;
  int first_arrived = 0;
  int step = 1;             // order of the lanes in this round: odd, so that all are visited
  Lane* resume = nullptr;   // the lane that goes on when the warp is scheduled
  std::uint64_t epoch = 0;  // warp barriers since the last block barrier
};

/// Runs thread blocks one after another on the calling OS thread. Every CUDA thread is a fiber; the lanes of a warp run
/// one by one up to a warp-wide instruction, and warps take turns, in an order that the seed decides.
class Machine {
 public:
  using Kernel = void (*)(const void* context);

  Machine(int threads, int shared_bytes, Memory& memory);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// Runs one block to its end. Throws the first Fault; the machine is of no use after that.
  void run_block(Kernel kernel, const void* context, int block, std::uint64_t seed);

  std::uint64_t instructions() const { return instructions_; }

  // What the instructions of instructions.cpp are made of.

  static Lane& current();
  static Machine& of(const Lane& lane);

  int block() const { return block_; }
  SharedMemory& shared() { return shared_; }
  Memory& memory() { return memory_; }

  /// Waits until all lanes of the warp have called this for the same instruction and site; the last one executes it.
  void converge(Lane& lane, const Instruction& instruction, const void* operands, const Site& site);

  void block_barrier(Warp& warp);
  void warp_barrier(Warp& warp) { ++warp.epoch; }

  Stamp stamp(const Lane& lane) const {
    return Stamp::make(block_epoch_, lane.warp->epoch, static_cast<std::uint64_t>(lane.thread));
  }
  Stamp stamp(const Warp& warp) const {
    return Stamp::make(block_epoch_, warp.epoch, Stamp::whole_warp(static_cast<std::uint64_t>(warp.index)));
  }

  /// A lane of the block with a copy in flight that reads some of these global bytes, or nullptr.
  const Lane* copying_from(const void* address, std::size_t bytes) const;

  std::uint64_t random();

  [[noreturn]] void raise(FaultKind kind, const Lane& lane, const char* instruction, std::uint64_t address,
                          const Site& site, const std::string& detail) const;
  [[noreturn]] void raise(const Conflict& conflict, const Lane& lane, const char* instruction, std::uint32_t address,
                          const Site& site) const;

 private:
  void start_fibers();
  void prepare(int block, std::uint64_t seed);
  boost::context::fiber lane_main(Lane& lane, boost::context::fiber from);
  void run_lane(Lane& lane);
  void finish_lane(Lane& lane);
  void go_on_after(Lane& lane);
  void next_lane(Lane& lane);
  void switch_warp(Lane& lane);
  Warp* pick_warp();
  void transfer(boost::context::fiber& from, boost::context::fiber& to);
  void fail(Lane& lane);
  [[noreturn]] void raise_divergence(const Lane& lane, const char* instruction, const Site& site) const;
  [[noreturn]] void raise_deadlock(const Lane& lane) const;
  std::string waiting_lanes() const;

  Memory& memory_;
  SharedMemory shared_;
  std::vector<std::unique_ptr<Warp>> warps_;
  boost::context::fiber scheduler_;            // run_block
  boost::context::fiber* previous_ = nullptr;  // where the fiber that was left just now belongs
  Kernel kernel_ = nullptr;
  const void* context_ = nullptr;
  int block_ = 0;
  int at_barrier_ = 0;
  int finished_ = 0;
  std::uint64_t block_epoch_ = 1;
  std::uint64_t random_ = 1;
  std::uint64_t instructions_ = 0;
  bool quit_ = false;
  std::exception_ptr fault_;
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_MACHINE_HPP_
