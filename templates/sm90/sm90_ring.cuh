#ifndef FA_TEMPLATES_SM90_SM90_RING_CUH_
#define FA_TEMPLATES_SM90_SM90_RING_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>
#include <sm90/sm90_sizes.cuh>

namespace fa::sm90 {

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

struct Rounds {
  int begin;
  int end;
};

/// The rounds of wave `wave` of a grid whose tiles differ by more than such turns even out: each wave has half of the
/// rounds that the waves before it leave, so that a multiprocessor which is done early takes a block of a later wave.
/// rounds_of_wave(rounds, w) is empty from w = bits of `rounds` on. The host counts the same waves.
FA_DEVICE Rounds rounds_of_wave(int rounds, int wave) {
  int rest = rounds;
  for (int i = 0; i < wave; ++i) rest /= 2;
  return {rounds - rest, rounds - rest / 2};
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_RING_CUH_
