#ifndef FA_TESTS_EMULATOR_FAULT_HPP_
#define FA_TESTS_EMULATOR_FAULT_HPP_

#include <cstdint>
#include <iosfwd>
#include <source_location>
#include <stdexcept>
#include <string>

namespace emulator {

/// Where an instruction stands in the kernel text.
using Site = std::source_location;

enum class FaultKind : std::uint8_t {
  global_out_of_bounds,  ///< global address outside every registered region
  global_not_writable,   ///< store to an input, or to bytes of an output that belong to no element
  global_uninitialised,  ///< load of global bytes that nobody has written
  misaligned,            ///< address not a multiple of what the instruction requires
  shared_out_of_bounds,  ///< shared address outside the launch's dynamic shared memory
  shared_uninitialised,  ///< load of shared bytes that nobody has written
  shared_in_flight,      ///< access to the destination of an asynchronous copy that its thread has not waited for
  shared_race,           ///< two threads, one of them writing, and no barrier in between
  divergence,            ///< lanes of a warp at different warp-wide instructions
  deadlock,              ///< threads wait at a barrier that others can no longer reach
  source_overwritten,    ///< store to bytes that an asynchronous copy or product in flight still reads
  copies_at_exit,        ///< a thread ended before it waited for its asynchronous copies or products
  exited_block,          ///< shared memory or mbarrier of a block of the cluster that has exited, or may have
  barrier_misuse,        ///< mbarrier or named barrier: counts that do not match, not initialised, initialised twice
  unfenced,              ///< no fence of the proxy, of the initialisation of a barrier, or of a product's registers
  register_in_flight,    ///< accumulators or operands of a product that has not been waited for
  bad_descriptor,        ///< matrix descriptor or tensor map that does not describe what the instruction can read
  register_pool,         ///< setmaxnreg: not a legal count, or not the same in the whole warpgroup
  out_of_turn,           ///< a signal to other blocks below the one that was there: somebody has not waited
  too_early,             ///< memory that the kernel before this one may still use, before griddepcontrol.wait
};

/// "shared_race".
const char* to_string(FaultKind kind) noexcept;
std::ostream& operator<<(std::ostream& out, FaultKind kind);

/// What a kernel did wrong. what() is one line with everything below.
struct Fault : std::runtime_error {
  Fault(FaultKind fault_kind, int fault_block, int fault_thread, std::string fault_instruction,
        std::uint64_t fault_address, const Site& fault_site, const std::string& detail);

  FaultKind kind;
  int block;
  int thread;
  std::string instruction;  ///< PTX name
  std::uint64_t address;    ///< global pointer, or 32-bit shared address; 0 where no address is involved
  std::string file;         ///< of the kernel text, relative to templates/
  unsigned line;
};

/// "sm80/sm80_forward.cuh:174"
std::string to_string(const Site& site);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_FAULT_HPP_
