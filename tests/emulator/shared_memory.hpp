#ifndef FA_TESTS_EMULATOR_SHARED_MEMORY_HPP_
#define FA_TESTS_EMULATOR_SHARED_MEMORY_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

/// Who touched shared memory, and when: block barriers passed (32 bits), warp barriers passed since (20), who (12). Who
/// is a thread, a warp as a whole, or several warps.
class Stamp {
 public:
  static constexpr std::uint64_t kEveryone = 0xfff;
  static constexpr std::uint64_t kWarpFlag = 0x400;
  static constexpr std::uint64_t kInFlight = std::uint64_t{1} << 63;  // copy not yet waited for; low bits say whose

  constexpr Stamp() = default;
  constexpr explicit Stamp(std::uint64_t bits) : bits_(bits) {}
  static constexpr Stamp make(std::uint64_t block_epoch, std::uint64_t warp_epoch, std::uint64_t who) {
    return Stamp(block_epoch << 32 | warp_epoch << 12 | who);
  }
  static constexpr std::uint64_t whole_warp(std::uint64_t warp) { return kWarpFlag | warp; }

  constexpr bool empty() const { return bits_ == 0; }
  constexpr bool in_flight() const { return (bits_ & kInFlight) != 0; }
  constexpr std::uint64_t block_epoch() const { return bits_ >> 32; }
  constexpr std::uint64_t warp_epoch() const { return bits_ >> 12 & 0xfffff; }
  constexpr std::uint64_t who() const { return bits_ & 0xfff; }
  constexpr bool everyone() const { return who() == kEveryone; }
  constexpr std::uint64_t warp() const { return (who() & kWarpFlag) != 0 ? who() & 31 : who() >> 5; }
  friend constexpr bool operator==(Stamp, Stamp) = default;

  /// What this stamp says has happened before what `later` does: the same thread, or a barrier of both in between.
  /// All threads of a block have passed the same number of block barriers at any time.
  constexpr bool before(Stamp later) const {
    if (block_epoch() < later.block_epoch()) return true;
    if (who() == later.who() && (who() & kWarpFlag) == 0) return true;
    return !everyone() && warp() == later.warp() && warp_epoch() < later.warp_epoch();
  }

 private:
  std::uint64_t bits_ = 0;
};

/// What stands against an access.
struct Conflict {
  enum Kind : std::uint8_t {
    none,
    out_of_bounds,
    uninitialised,
    in_flight,
    write_then_read,
    write_then_write,
    read_then_write
  };
  Kind kind = none;
  Stamp other;  // the earlier access

  explicit operator bool() const { return kind != none; }
};

/// A block's dynamic shared memory, and who last wrote and read each byte of it. 16-byte pieces that are touched as a
/// whole are tracked as a whole, which is what makes ldmatrix cheap.
class SharedMemory {
 public:
  /// Where the window starts: as on hardware, 1024 bytes belong to the system.
  static constexpr std::uint32_t kBase = 1024;

  explicit SharedMemory(int bytes);

  /// Everything is uninitialised again.
  void reset();

  std::byte* at(std::uint32_t address) { return data_.data() + (address - kBase); }
  std::uint32_t bytes() const { return bytes_; }

  /// Checks and notes an access to [address, address + bytes), which does not straddle a 16-byte boundary.
  Conflict read(std::uint32_t address, std::uint32_t bytes, Stamp reader);
  Conflict write(std::uint32_t address, std::uint32_t bytes, Stamp writer);

  /// 16 bytes that an asynchronous copy of `writer` will fill, and their arrival, `writer` being the waiting thread.
  Conflict begin_copy(std::uint32_t address, Stamp writer);
  void end_copy(std::uint32_t address, Stamp writer);

 private:
  static constexpr std::uint32_t kPiece = 16;

  struct Cell {
    Stamp write;
    Stamp read;
  };
  struct Piece {
    Cell cell;                    // of all bytes, unless split
    std::uint16_t read_mask = 0;  // bytes that cell.read speaks of
    bool split = false;
  };

  static Conflict check_read(const Cell& cell, Stamp reader);
  static Conflict check_write(const Cell& cell, Stamp writer);
  static Stamp merged(Stamp earlier, Stamp reader);

  bool inside(std::uint32_t address, std::uint32_t bytes) const {
    return address >= kBase && address - kBase <= bytes_ && bytes <= bytes_ - (address - kBase);
  }
  Cell* split(std::uint32_t piece);

  std::uint32_t bytes_;
  std::vector<std::byte> data_;
  std::vector<Piece> pieces_;
  std::vector<Cell> cells_;  // one a byte, for the pieces that are split
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_SHARED_MEMORY_HPP_
