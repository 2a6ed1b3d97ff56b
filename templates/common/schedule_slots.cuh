#ifndef FA_TEMPLATES_COMMON_SCHEDULE_SLOTS_CUH_
#define FA_TEMPLATES_COMMON_SCHEDULE_SLOTS_CUH_

#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/mask.cuh>
#include <common/paged.cuh>
#include <common/schedule_params.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// A sum over the lanes up to and with this one.
FA_DEVICE int64_t inclusive_sum(int64_t value) {
  const int lane = ptx::thread_index() % kWarpSize;
  FA_UNROLL
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int from = lane < step ? lane : lane - step;
    const uint32_t low = ptx::shfl(static_cast<uint32_t>(value), from);
    const uint32_t high = ptx::shfl(static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32), from);
    if (lane >= step) value += static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
  }
  return value;
}
FA_DEVICE int inclusive_sum(int value) {
  const int lane = ptx::thread_index() % kWarpSize;
  FA_UNROLL
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int from = ptx::shfl(value, lane < step ? lane : lane - step);
    if (lane >= step) value += from;
  }
  return value;
}
FA_DEVICE int shuffled(int value, int lane) {
  return ptx::shfl(value, lane);
}
FA_DEVICE int64_t shuffled(int64_t value, int lane) {
  const uint32_t low = ptx::shfl(static_cast<uint32_t>(value), lane);
  const uint32_t high = ptx::shfl(static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32), lane);
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}

/// The query tiles of a batch of requests, found by their slots (sequences.cuh), and what they cost.
///
/// Config: kTileM, kTileN, kCausal, kPackGqa, optionally kVarlen and a Variant; kPageSize counts with kOwnParts alone.
template <class Config, class Params>
struct ScheduleSlots {
  using Variant = VariantOf<Config>;
  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr bool kPaged = !kOwnParts<Config> || kPageSize<Config> != 0;
  static constexpr int kCost = kWholeItems<Config> != 0 ? kWholeItems<Config> : kItemCost;

  const Params& params;
  const int lane = ptx::thread_index() % kWarpSize;
  const int rows_each = Config::kPackGqa ? params.group : 1;

  /// A slot's query tile; no rows: there is none.
  struct Slot {
    int batch;
    int m_block;
    bool exists;
    int cost;
  };

  /// The slot of this lane among 32 from `first` on. Called by whole warps.
  FA_DEVICE Slot slot_of(int first) const {
    const int slot = first + lane;
    Slot found;
    if constexpr (kVarlen) {
      // Each sequence has a slot at least, so that the 32 after the first one's hold all that start here.
      const SequenceParams& from = params.sequences;
      const int before = sequence_of_slot<kTileM>(from.cu_q, params.b, from.total_q, rows_each, first);
      const int next = before + 1 + lane;
      uint32_t starts = 0;  // a bit for each slot that a sequence starts with
      if (next < params.b) {
        const int at = first_slot<kTileM>(from.cu_q, next, from.total_q, rows_each) - first;
        if (at >= 0 && at < kWarpSize) starts = 1u << at;
      }
      FA_UNROLL
      for (int mask = 1; mask < kWarpSize; mask *= 2) starts |= ptx::shfl_xor(starts, mask);
      found.batch = before + ptx::popc(starts & (0xffffffffu >> (kWarpSize - 1 - lane)));
      found.m_block = slot - first_slot<kTileM>(from.cu_q, found.batch, from.total_q, rows_each);
    } else {
      found.batch = slot / params.m_blocks;
      found.m_block = slot - found.batch * params.m_blocks;
    }
    found.exists = false;
    found.cost = 0;
    if (slot >= params.paged.slots || found.batch >= params.b || found.m_block < 0) return found;
    if constexpr (kPaged) {
      set_cost(found, request_of<kVarlen>(params, found.batch));
    } else {
      set_cost(found, params);
    }
    return found;
  }

 private:
  template <class Entry>
  FA_DEVICE void set_cost(Slot& found, const Entry& request) const {
    const int rows = request.s_q * rows_each;
    found.exists = found.m_block < ceil_div(rows, kTileM);
    if (found.exists) found.cost = kCost + tiles_of(request, rows, found.m_block);
  }

  /// KV tiles that a query tile's rows see, as the forward has them (variant_range).
  template <class Entry>
  FA_DEVICE int tiles_of(const Entry& request, int rows, int m_block) const {
    const int first_row = m_block * kTileM;
    const int last_row = (first_row + kTileM < rows ? first_row + kTileM : rows) - 1;
    const RowMap<Config::kPackGqa> map{rows_each, 0};
    const int first = first_row == 0 ? 0 : map.position(first_row);
    const int last = last_row == rows - 1 ? request.s_q - 1 : map.position(last_row);
    const int begin = keys_begin<Variant>(params, request, first);
    const int end = keys_end<Config::kCausal, Variant>(params, request, last);
    return end > begin ? ceil_div(end, kTileN) - begin / kTileN : 0;
  }
};

/// A part starts with KV tile `wanted` of an item of `tiles`, which starts at `item_start`, or where the item starts
/// or ends if that is near.
template <int kCost>
FA_DEVICE void cut_item(PartStart& start, int64_t tiles, int64_t wanted, int64_t item_start, int64_t length) {
  if (wanted < kFewestTiles) return;
  if (tiles - wanted < kFewestTiles) {
    start.item += 1;
    return;
  }
  start.tile = static_cast<int>(wanted);
  start.first_part = static_cast<int>((item_start + kCost + kFewestTiles - 1) / length);
  start.last_part = static_cast<int>((item_start + kCost + tiles - kFewestTiles) / length);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SCHEDULE_SLOTS_CUH_
