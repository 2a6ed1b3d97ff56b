#ifndef FA_TESTS_EMULATOR_MEMORY_HPP_
#define FA_TESTS_EMULATOR_MEMORY_HPP_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace emulator {

/// The global memory that a launch may touch: named regions in which every byte is readable (somebody wrote it),
/// writable, both or neither. Everything else is out of bounds.
class Memory {
 public:
  static constexpr std::uint8_t kReadable = 1;
  static constexpr std::uint8_t kWritable = 2;

  /// Which block of a launch has written a byte, and how many atomics in order it had executed before.
  struct Stamp {
    std::int32_t block = -1;  ///< -1: it was there before the launch
    std::int32_t epoch = 0;
  };

  struct Region {
    std::string name;
    std::byte* base;
    std::size_t bytes;
    std::unique_ptr<std::uint8_t[]> flags;  ///< one a byte
    std::unique_ptr<Stamp[]> stamps = {};   ///< likewise, where blocks tell each other what they have written
  };

  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  /// An input: a copy of `contents`, far from every other region, so that no overrun of one lands in another.
  std::byte* add_input(const std::string& name, std::span<const std::byte> contents);

  /// An output (or workspace) of `bytes` bytes, which become readable as they are written.
  std::byte* add_output(const std::string& name, std::size_t bytes);

  /// Memory of the caller's, with the same flags for every byte.
  void add(const std::string& name, void* base, std::size_t bytes, std::uint8_t flags);

  /// Changes the flags of part of a region: gaps between rows, rows already written.
  void set_flags(const void* address, std::size_t bytes, std::uint8_t flags);

  /// Stores to bytes of a region that are writable, and are readable from then on.
  void write(const void* address, const std::byte* from, std::size_t bytes);

  /// Every byte of [address, address + bytes) has been written, or was readable from the start.
  bool written(const void* address, std::size_t bytes) const;

  /// From now on what a block writes to the region at `base` may be read by others behind atomics in order alone.
  void track(const void* base);
  /// A kernel ends: everything may be read.
  void end_launch();
  Stamp stamp_of(int block);
  bool may_read(int block, const Stamp& stamp);
  /// Does `change` to a number at `address`, by which blocks tell each other what they have written.
  template <class Change>
  std::int32_t in_order(int block, const void* address, const Change& change) {
    const std::lock_guard lock(mutex_);
    tell(block, address);
    return change();
  }

  /// The region that holds [address, address + bytes), else null.
  const Region* find(const void* address, std::size_t bytes) const noexcept {
    const std::byte* at = static_cast<const std::byte*>(address);
    for (const Region& region : regions_) {
      if (at >= region.base && at + bytes <= region.base + region.bytes) return &region;
    }
    return nullptr;
  }

  /// "12 bytes past the end of `k`", for messages.
  std::string describe(const void* address) const;

 private:
  void tell(int block, const void* address);
  std::byte* allocate(const std::string& name, std::size_t bytes, std::uint8_t flags);

  std::vector<Region> regions_;
  std::vector<std::unique_ptr<std::byte[]>> storage_;

  /// Of each block, by number, the epochs before which all that it has written is known.
  using Known = std::map<int, std::int32_t>;
  std::mutex mutex_;                    ///< guards what follows
  std::map<int, std::int32_t> epochs_;  ///< of blocks
  std::map<int, Known> known_;          ///< to blocks
  std::map<const void*, Known> told_;   ///< by numbers
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_MEMORY_HPP_
