#ifndef FA_TESTS_EMULATOR_SHARED_MEMORY_HPP_
#define FA_TESTS_EMULATOR_SHARED_MEMORY_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/knowledge.hpp"

namespace emulator {

/// Who wrote a byte of shared memory, and when.
struct Stamp {
  enum Kind : std::uint8_t {
    nobody,
    thread,       ///< `who` is a thread, `tick` the time
    copying,      ///< destination of a cp.async of thread `who` that it has not waited for
    tensor_copy,  ///< destination of a copy of the copy engine, issued by thread `who`, that is in flight
    landed,       ///< such a copy has landed and counts for phase `tick` - 1 of barrier number `who`
    atomic,       ///< some have added to it, `who` as the last one
  };

  std::uint32_t tick = 0;
  std::uint16_t who = 0;
  Kind kind = nobody;

  friend bool operator==(const Stamp&, const Stamp&) = default;
};

/// Who has read a byte since, and when: some lanes of a warp, a product of a warpgroup (wgmma), or a copy to a block of
/// the cluster.
struct Reader {
  enum Kind : std::uint8_t { lanes_of_warp, product, cluster_copy };
  static constexpr std::uint32_t kInFlight = 0xffffffff;  ///< the copy engine reads for it, and it has not waited

  std::uint32_t tick = 0;   ///< of a product its number; of a copy the phase (+ 1) that it counts for
  std::uint32_t lanes = 0;  ///< 0: nobody
  std::uint16_t who = 0;    ///< warp, warpgroup, or number of the barrier that the copy signals
  Kind kind = lanes_of_warp;

  bool empty() const { return lanes == 0; }
  friend bool operator==(const Reader&, const Reader&) = default;
};

/// Whoever accesses shared memory, as far as the order of accesses is concerned.
struct Observer {
  int thread = 0;  ///< -1: a warp as a whole
  int warp = 0;
  bool async = false;             ///< by the asynchronous proxy
  std::uint32_t floor = 0;        ///< tick of the last barrier with all threads of the memory's block
  std::uint32_t warp_floor = 0;   ///< and of the warp's last barrier
  std::uint32_t products = 0;     ///< what the warp has waited for
  std::size_t first_product = 0;  ///< agents of a Clock
  std::size_t first_barrier = 0;
  const Clock* known = nullptr;
  const Clock* fenced = nullptr;

  bool knows(const Stamp& write) const;
  bool knows(const Reader& read) const;
  /// An ordinary store is known, but no fence has made it visible to the asynchronous proxy.
  bool lacks_fence(const Stamp& write) const;

 private:
  bool knows_thread(int other, std::uint32_t tick) const;
};

/// What stands against an access.
struct Conflict {
  enum Kind : std::uint8_t {
    none,
    out_of_bounds,
    uninitialised,
    in_flight,
    unfenced,
    barrier_object,
    write_then_read,
    write_then_write,
    read_then_write
  };
  Kind kind = none;
  Stamp writer;  // the earlier access
  Reader reader;

  explicit operator bool() const { return kind != none; }
};

/// As on Hopper, the bits of a shared address from here on are the rank of its block in the cluster.
inline constexpr int kRankShift = 24;

/// What map_shared gives has 1 + the rank once more from here on, so that it is not taken for an address of the own
/// block.
inline constexpr int kMappedShift = 28;

/// What `address` is within the window of its block.
constexpr std::uint32_t without_rank(std::uint32_t address) {
  return address & ((1u << kRankShift) - 1);
}

/// A block's dynamic shared memory, and who last wrote and read each byte of it. 16-byte pieces that are touched as a
/// whole are tracked as a whole, which is what makes ldmatrix cheap.
class SharedMemory {
 public:
  /// Where dynamic shared memory begins in the window of a block: as on hardware, 1024 bytes belong to the system.
  static constexpr std::uint32_t kBase = 1024;

  explicit SharedMemory(int bytes, int rank = 0);

  /// Everything is uninitialised again.
  void reset();

  /// Where the window of the block begins.
  std::uint32_t window() const { return base_ - kBase; }
  std::uint32_t base() const { return base_; }

  std::byte* at(std::uint32_t address) { return data_.data() + (address - base_); }
  std::uint32_t bytes() const { return bytes_; }
  bool inside(std::uint32_t address, std::uint32_t bytes) const {
    return address >= base_ && address - base_ <= bytes_ && bytes <= bytes_ - (address - base_);
  }

  /// Checks and notes an access to [address, address + bytes), which does not straddle a 16-byte boundary.
  Conflict read(std::uint32_t address, std::uint32_t bytes, const Observer& observer, const Reader& reader);
  Conflict write(std::uint32_t address, std::uint32_t bytes, const Observer& observer, const Stamp& writer);

  /// Checks and notes an addition to 4 bytes. Atomics need not know of each other, and everybody else knows of them
  /// behind the next barrier of the block.
  Conflict add(std::uint32_t address, const Observer& observer, Stamp writer);

  /// Checks a read of the aligned 16 bytes at `address` that somebody else has noted. `last` is the last writer that
  /// was in order, to be passed from call to call.
  Conflict check(std::uint32_t address, const Observer& observer, Stamp& last);

  /// Bytes that a copy is about to fill are written by `writer`; `arrived` tells who wrote them once it is done.
  void arrived(std::uint32_t address, std::uint32_t bytes, const Stamp& writer);

  /// The copy engine has read the 16 bytes at `address` for whom `reader` names.
  void finish_read(std::uint32_t address, const Reader& reader);

  /// The 8 bytes of a barrier are for its instructions only.
  void make_barrier(std::uint32_t address);

 private:
  static constexpr std::uint32_t kPiece = 16;

  struct Cell {
    Stamp write;
    Reader read;
    std::uint32_t others = 0;  // of readers: 1 + an index into `sets_`, else 0

    friend bool operator==(const Cell&, const Cell&) = default;
  };
  struct Piece {
    Cell cell;                    // of all bytes, unless split
    std::uint16_t read_mask = 0;  // bytes that cell.read speaks of
    bool split = false;
  };

  static Conflict check_read(const Cell& cell, const Observer& observer);
  Conflict check_write(const Cell& cell, const Observer& observer) const;
  Conflict check_readers(const Cell& cell, const Observer& observer) const;
  void note_read(Cell& cell, const Observer& observer, const Reader& reader);
  bool alone(const Cell& cell, const Observer& observer) const;
  void forget_readers(Cell& cell);
  bool holds_barrier(std::uint32_t offset, std::uint32_t bytes) const;
  Cell* split(std::uint32_t piece);

  std::uint32_t base_;
  std::uint32_t bytes_;
  std::vector<std::byte> data_;
  std::vector<Piece> pieces_;
  std::vector<Cell> cells_;                // one a byte, for the pieces that are split
  std::vector<std::vector<Reader>> sets_;  // readers beyond the first of a cell
  std::vector<std::uint32_t> free_sets_;
  std::vector<std::uint32_t> barriers_;  // offsets
  std::uint32_t barriers_begin_ = 0;
  std::uint32_t barriers_end_ = 0;
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_SHARED_MEMORY_HPP_
