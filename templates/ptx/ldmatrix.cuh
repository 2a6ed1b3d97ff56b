#ifndef FA_TEMPLATES_PTX_LDMATRIX_CUH_
#define FA_TEMPLATES_PTX_LDMATRIX_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

// PTX ISA, "ldmatrix": lane 8i+r of a warp gives the address of row r of 8x8 matrix i (16 bytes, 16-byte aligned); each
// lane receives elements (lane/4, 2*(lane%4)) and its right neighbour, or with .trans those of the transpose.
namespace fa::ptx {

FA_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

FA_DEVICE void ldmatrix_x2(uint32_t (&r)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

FA_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

FA_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

/// PTX ISA, "stmatrix": the reverse of ldmatrix without .trans.
FA_DEVICE void stmatrix_x4(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}

FA_DEVICE void stmatrix_x2(uint32_t row, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(r0), "r"(r1) : "memory");
}

/// The reverse of ldmatrix with .trans: lane 8i+r gives the address of column r of matrix i.
FA_DEVICE void stmatrix_x4_trans(uint32_t column, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_LDMATRIX_CUH_
