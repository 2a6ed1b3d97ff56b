#ifndef FA_TESTS_EMULATOR_INSTRUCTIONS_HPP_
#define FA_TESTS_EMULATOR_INSTRUCTIONS_HPP_

#include <cstddef>
#include <cstdint>

#include "emulator/fault.hpp"

/// The instructions behind tests/emulator/include/ptx, as the running CUDA thread executes them. Kernel text compiles
/// against this header alone; everything happens out of line.
namespace emulator {

int thread_index();
int block_index();
std::uint32_t dynamic_shared();

void bar_sync(const Site& site);
void bar_warp_sync(const Site& site);
float shfl_bfly(float value, int lane_mask, const Site& site);
bool vote_any(bool predicate, const Site& site);

/// Checks an access to global memory; the caller then does it.
void check_global_load(const void* address, std::size_t bytes, const char* name, const Site& site);
void check_global_store(const void* address, std::size_t bytes, const char* name, const Site& site);
/// Adds to `count` floats of global memory that somebody has written, each at once whatever other blocks do.
void red_add_f32(float* address, const float* values, int count, const char* name, const Site& site);

void load_shared(std::uint32_t address, void* value, std::uint32_t bytes, const char* name, const Site& site);
void store_shared(std::uint32_t address, const void* value, std::uint32_t bytes, const char* name, const Site& site);

void cp_async_16(std::uint32_t shared, const void* global, bool valid, const Site& site);
void cp_async_commit();
void cp_async_wait(int pending);

void ldmatrix_x4(std::uint32_t* r, std::uint32_t row, const Site& site);
void ldmatrix_x2(std::uint32_t* r, std::uint32_t row, const Site& site);
void ldmatrix_x4_trans(std::uint32_t* r, std::uint32_t row, const Site& site);
void ldmatrix_x2_trans(std::uint32_t* r, std::uint32_t row, const Site& site);

enum class Half { f16, bf16 };
template <Half kHalf>
void mma_m16n8k16(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, const Site& site);
template <Half kHalf>
void mma_m16n8k8(float* d, std::uint32_t a0, std::uint32_t a1, std::uint32_t b0, const Site& site);
void mma_m16n8k8_tf32(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, const Site& site);

float ex2(float x);
float lg2(float x);
std::uint16_t convert_f16(float x);
std::uint16_t convert_bf16(float x);
float convert_from_f16(std::uint16_t bits);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_INSTRUCTIONS_HPP_
