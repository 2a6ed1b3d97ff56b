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
FA_DEVICE int block_count() {
  return emulator::block_count();
}

FA_DEVICE void sync_threads(const emulator::Site& site = emulator::Site::current()) {
  emulator::bar_sync(site);
}

FA_DEVICE void sync_warp(const emulator::Site& site = emulator::Site::current()) {
  emulator::bar_warp_sync(site);
}

FA_DEVICE void barrier_sync(int id, int threads, const emulator::Site& site = emulator::Site::current()) {
  emulator::bar_sync(id, threads, site);
}

FA_DEVICE void barrier_arrive(int id, int threads, const emulator::Site& site = emulator::Site::current()) {
  emulator::bar_arrive(id, threads, site);
}

template <int kRegisters>
FA_DEVICE void decrease_registers(const emulator::Site& site = emulator::Site::current()) {
  emulator::set_max_registers(kRegisters, false, site);
}
template <int kRegisters>
FA_DEVICE void increase_registers(const emulator::Site& site = emulator::Site::current()) {
  emulator::set_max_registers(kRegisters, true, site);
}

FA_DEVICE void fence_proxy_async() {
  emulator::fence_proxy_async();
}

FA_DEVICE int shfl(int value, int lane, const emulator::Site& site = emulator::Site::current()) {
  return static_cast<int>(emulator::shfl_idx(static_cast<uint32_t>(value), lane, site));
}
FA_DEVICE uint32_t shfl(uint32_t value, int lane, const emulator::Site& site = emulator::Site::current()) {
  return emulator::shfl_idx(value, lane, site);
}

FA_DEVICE int lane_index() {
  return thread_index() % 32;
}

FA_DEVICE float shfl_quad(float value, int place, const emulator::Site& site = emulator::Site::current()) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  return __builtin_bit_cast(float, emulator::shfl_idx(bits, lane_index() / 4 * 4 + place, site));
}

FA_DEVICE float shfl_xor(float value, int lane_mask, const emulator::Site& site = emulator::Site::current()) {
  return emulator::shfl_bfly(value, lane_mask, site);
}

FA_DEVICE uint32_t shfl_xor(uint32_t value, int lane_mask, const emulator::Site& site = emulator::Site::current()) {
  return emulator::shfl_bfly_b32(value, lane_mask, site);
}

FA_DEVICE int shfl_xor(int value, int lane_mask, const emulator::Site& site = emulator::Site::current()) {
  return static_cast<int>(emulator::shfl_bfly_b32(static_cast<uint32_t>(value), lane_mask, site));
}

FA_DEVICE bool vote_any(bool predicate, const emulator::Site& site = emulator::Site::current()) {
  return emulator::vote_any(predicate, site);
}

FA_DEVICE uint32_t vote_ballot(bool predicate, const emulator::Site& site = emulator::Site::current()) {
  return emulator::vote_ballot(predicate, site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_THREAD_CUH_
