#ifndef FA_TESTS_EMULATOR_WARPGROUP_HPP_
#define FA_TESTS_EMULATOR_WARPGROUP_HPP_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "emulator/fault.hpp"
#include "emulator/instructions.hpp"

namespace emulator {

inline constexpr int kWarpgroupThreads = 128;

/// The accumulators of consecutive products on the same registers, while they are in flight.
struct Accumulator {
  int columns = 0;
  std::uint32_t first = 0;                          // number of the first product
  std::vector<float> tile;                          // [64][columns]
  std::array<float*, kWarpgroupThreads> registers;  // of every thread
  std::array<std::uint32_t, 4> last{};              // product that each warp has issued
};

/// One wgmma of a warpgroup.
struct Product {
  std::uint32_t number = 0;
  WgmmaOperands operands;  // of its first thread
  Site site;
  std::uint32_t issued = 0;  // warps, a mask
  bool computed = false;
  std::shared_ptr<Accumulator> accumulator;
  std::array<const std::uint32_t*, kWarpgroupThreads> a_registers{};
  std::array<std::array<std::uint32_t, 4>, kWarpgroupThreads> a_values{};
};

struct Warpgroup {
  std::deque<Product> products;  // not yet waited for by all
  std::uint32_t issued = 0;      // by the warp that is ahead

  Product& product(std::uint32_t number) { return products[number - products.front().number]; }
};

/// A warp's part in the products of its warpgroup. Products count from 1.
struct WarpProducts {
  bool fenced = false;  // since its registers may last have been written
  std::uint32_t issued = 0;
  std::uint32_t done = 0;            // waited for
  std::uint32_t target = 0;          // of the wait it is in
  std::deque<std::uint32_t> groups;  // last products of committed groups
  std::uint32_t committed = 0;
  std::vector<std::shared_ptr<Accumulator>> in_flight;
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_WARPGROUP_HPP_
