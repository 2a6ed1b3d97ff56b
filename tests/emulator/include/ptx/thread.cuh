#ifndef FA_TESTS_EMULATOR_PTX_THREAD_CUH_
#define FA_TESTS_EMULATOR_PTX_THREAD_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

FA_DEVICE int thread_index() {
  return emulator::thread_index();
}
FA_DEVICE int block_index() {
  return emulator::block_index();
}

FA_DEVICE void sync_threads(const emulator::Site& site = emulator::Site::current()) {
  emulator::bar_sync(site);
}

FA_DEVICE void sync_warp(const emulator::Site& site = emulator::Site::current()) {
  emulator::bar_warp_sync(site);
}

FA_DEVICE float shfl_xor(float value, int lane_mask, const emulator::Site& site = emulator::Site::current()) {
  return emulator::shfl_bfly(value, lane_mask, site);
}

FA_DEVICE bool vote_any(bool predicate, const emulator::Site& site = emulator::Site::current()) {
  return emulator::vote_any(predicate, site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_THREAD_CUH_
