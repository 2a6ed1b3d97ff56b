#ifndef FA_TEMPLATES_COMMON_BOUNDED_ITEMS_CUH_
#define FA_TEMPLATES_COMMON_BOUNDED_ITEMS_CUH_

#include <ptx/language.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

// A bounded grid has no more blocks than its call may take multiprocessors. In a round they take as many items, which
// a grid without a bound has a block each for.

/// The item of this block in a round. Every other round goes backwards, which evens out what blocks get where lengths
/// fall from item to item, as they do under causality. Derived whenever it is asked for: over an item a block keeps
/// the round alone.
FA_DEVICE int item_of_round(int round) {
  const int blocks = ptx::block_count();
  const int block = ptx::block_index();
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

/// Calls `take(round)` for this block's rounds of `items`, which are less than 2^31 by a round or more.
template <class Take>
FA_DEVICE void take_items(int items, Take take) {
  const int rounds = (items - 1) / ptx::block_count() + 1;
  for (int round = 0; round < rounds && item_of_round(round) < items; ++round) {
    if (round > 0) ptx::sync_threads();  // all have left what the item before had in shared memory
    take(round);
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BOUNDED_ITEMS_CUH_
