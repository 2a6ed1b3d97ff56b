#ifndef FA_TESTS_EMULATOR_MBARRIER_HPP_
#define FA_TESTS_EMULATOR_MBARRIER_HPP_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator/knowledge.hpp"
#include "emulator/shared_memory.hpp"

namespace emulator {

struct Block;
struct Lane;

/// An mbarrier object: a phase is complete when `count` arrivals and all announced bytes have come.
struct Mbarrier {
  static constexpr int kMaxCount = (1 << 20) - 1;

  std::uint32_t address = 0;
  Block* block = nullptr;  // whose shared memory it lies in
  std::size_t number = 0;
  int count = 0;
  int pending = 0;         // arrivals
  std::int64_t bytes = 0;  // announced and not arrived; negative: arrived and not announced
  std::uint32_t phase = 0;
  bool fenced = false;
  bool in_cluster = false;  // of several blocks
  Stamp initialised;
  Gathered gathered;
  Gathered gathered_remotely;   // from arrivals of other blocks
  Knowledge completed;          // of the last phase
  Knowledge completed_cluster;  // the same with what other blocks handed on
  std::vector<Lane*> waiting;

  /// "mbarrier at 0x8400: phase 3 lacks 2 of 8 arrivals and 512 bytes"
  std::string describe() const;
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_MBARRIER_HPP_
