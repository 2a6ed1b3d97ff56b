#ifndef FA_TEMPLATES_SM90_SM90_RING_CUH_
#define FA_TEMPLATES_SM90_SM90_RING_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::sm90 {

inline constexpr int kWarpgroup = 128;

/// Position in a ring of shared memory buffers, and the parity of the round.
template <int kCount>
struct RingSlot {
  int index = 0;
  uint32_t parity = 0;

  FA_DEVICE void advance() {
    if (++index == kCount) {
      index = 0;
      parity ^= 1;
    }
  }
};

/// Of a persistent grid's thread block: the tile of a round, which is one of tiles round * blocks ... (round + 1) *
/// blocks - 1, every other round backwards, which evens out what blocks get when lengths fall from tile to tile. Past
/// the last one: the number of tiles or more.
FA_DEVICE int tile_of_round(int round, int block, int blocks) {
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_RING_CUH_
