#ifndef FA_TESTS_EMULATOR_PTX_TMA_CUH_
#define FA_TESTS_EMULATOR_PTX_TMA_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

using kernel::TensorMap;

enum class L2Policy : uint64_t {
  evict_first = 0x12F0000000000000,
  evict_last = 0x14F0000000000000,
};

FA_DEVICE void prefetch_tensor_map(const TensorMap& map, const emulator::Site& site = emulator::Site::current()) {
  emulator::prefetch_tensor_map(&map, site);
}

FA_DEVICE void tma_load_4d(uint32_t shared, const TensorMap& map, uint32_t barrier, L2Policy, int c0, int c1, int c2,
                           int c3, const emulator::Site& site = emulator::Site::current()) {
  const int at[4] = {c0, c1, c2, c3};
  emulator::tma_load(shared, &map, barrier, 4, at, site);
}

FA_DEVICE void tma_load_5d(uint32_t shared, const TensorMap& map, uint32_t barrier, L2Policy, int c0, int c1, int c2,
                           int c3, int c4, const emulator::Site& site = emulator::Site::current()) {
  const int at[5] = {c0, c1, c2, c3, c4};
  emulator::tma_load(shared, &map, barrier, 5, at, site);
}

FA_DEVICE void tma_store_5d(const TensorMap& map, uint32_t shared, int c0, int c1, int c2, int c3, int c4,
                            const emulator::Site& site = emulator::Site::current()) {
  const int at[5] = {c0, c1, c2, c3, c4};
  emulator::tma_store(&map, shared, 5, at, site);
}

FA_DEVICE void bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier,
                         const emulator::Site& site = emulator::Site::current()) {
  emulator::bulk_load(shared, global, bytes, barrier, site);
}

FA_DEVICE void bulk_add_f32(float* global, uint32_t shared, int bytes,
                            const emulator::Site& site = emulator::Site::current()) {
  emulator::bulk_add_f32(global, shared, bytes, site);
}

FA_DEVICE void tma_commit() {
  emulator::tma_commit();
}

FA_DEVICE void tma_wait_read() {
  emulator::tma_wait(true);
}

FA_DEVICE void tma_wait() {
  emulator::tma_wait(false);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_TMA_CUH_
