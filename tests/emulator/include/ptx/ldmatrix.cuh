#ifndef FA_TESTS_EMULATOR_PTX_LDMATRIX_CUH_
#define FA_TESTS_EMULATOR_PTX_LDMATRIX_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

FA_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t row, const emulator::Site& site = emulator::Site::current()) {
  emulator::ldmatrix_x4(r, row, site);
}

FA_DEVICE void ldmatrix_x2(uint32_t (&r)[2], uint32_t row, const emulator::Site& site = emulator::Site::current()) {
  emulator::ldmatrix_x2(r, row, site);
}

FA_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row,
                                 const emulator::Site& site = emulator::Site::current()) {
  emulator::ldmatrix_x4_trans(r, row, site);
}

FA_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t row,
                                 const emulator::Site& site = emulator::Site::current()) {
  emulator::ldmatrix_x2_trans(r, row, site);
}

FA_DEVICE void stmatrix_x4(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3,
                           const emulator::Site& site = emulator::Site::current()) {
  const uint32_t r[4] = {r0, r1, r2, r3};
  emulator::stmatrix_x4(row, r, site);
}

FA_DEVICE void stmatrix_x2(uint32_t row, uint32_t r0, uint32_t r1,
                           const emulator::Site& site = emulator::Site::current()) {
  const uint32_t r[2] = {r0, r1};
  emulator::stmatrix_x2(row, r, site);
}

FA_DEVICE void stmatrix_x4_trans(uint32_t column, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3,
                                 const emulator::Site& site = emulator::Site::current()) {
  const uint32_t r[4] = {r0, r1, r2, r3};
  emulator::stmatrix_x4_trans(column, r, site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_LDMATRIX_CUH_
