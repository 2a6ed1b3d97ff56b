#ifndef FA_TESTS_EMULATOR_INSTRUCTIONS_HPP_
#define FA_TESTS_EMULATOR_INSTRUCTIONS_HPP_

#include <cstddef>
#include <cstdint>

#include "emulator/fault.hpp"

/// The instructions behind tests/emulator/include/ptx, as the running CUDA thread executes them. Kernel text compiles
/// against this header alone; everything happens out of line.
namespace emulator {

/// Elements of products of 16 bits, and of 8.
enum class Half { f16, bf16, e4m3, e5m2, s8 };

int thread_index();
int block_index();
int block_count();
std::uint32_t dynamic_shared();

void bar_sync(const Site& site);
void bar_warp_sync(const Site& site);
void bar_sync(int id, int threads, const Site& site);
void bar_arrive(int id, int threads, const Site& site);
void set_max_registers(int registers, bool increase, const Site& site);
/// Of a launch with LaunchOptions::early, by each thread before it touches what a kernel writes.
void griddepcontrol_wait();
float shfl_bfly(float value, int lane_mask, const Site& site);
std::uint32_t shfl_bfly_b32(std::uint32_t value, int lane_mask, const Site& site);
std::uint32_t shfl_idx(std::uint32_t value, int source, const Site& site);
bool vote_any(bool predicate, const Site& site);
std::uint32_t vote_ballot(bool predicate, const Site& site);

/// Checks an access to global memory; the caller then does it.
void check_global_load(const void* address, std::size_t bytes, const char* name, const Site& site);
void check_global_store(const void* address, std::size_t bytes, const char* name, const Site& site);
/// A load that may come before griddepcontrol.wait: what it finds then may be anything.
std::int32_t load_ahead(const std::int32_t* address, const Site& site);
/// A load whose address may be wrong, though within a region: nobody need have written there.
std::int32_t load_guessed(const std::int32_t* address, const Site& site);
/// st.relaxed.gpu: the thread's own stores of shared memory have to be complete, or
/// nobody could tell when they are.
void signal_global(std::int32_t* address, std::int32_t value, const Site& site);
/// ld.relaxed.gpu: whether the value is there.
bool test_global(const std::int32_t* address, std::int32_t value, const Site& site);
/// The same until the value is there, which a block of another OS thread may store.
void await_global(const std::int32_t* address, std::int32_t value, const Site& site);
/// Raises a number of global memory that somebody has written to at least `value`.
void red_max_s32(std::int32_t* address, std::int32_t value, const Site& site);
void red_min_u32(std::uint32_t* address, std::uint32_t value, const Site& site);
void red_max_u64(std::uint64_t* address, std::uint64_t value, const Site& site);
void red_min_u64(std::uint64_t* address, std::uint64_t value, const Site& site);
void red_max_u32(std::uint32_t* address, std::uint32_t value, const Site& site);
/// Adds to a counter of global memory that somebody has written: what was there before.
std::int32_t atomic_add_global(std::int32_t* address, std::int32_t value, const Site& site);
/// The same in order: blocks that count later may read what the block has written before.
std::int32_t atomic_add_acq_rel_global(std::int32_t* address, std::int32_t value, const Site& site);
void raise_flag_global(std::uint64_t* address, std::uint64_t value, const Site& site);
void raise_flag_global(std::int32_t* address, std::int32_t value, const Site& site);
/// Whatever the memory held before, it may be read.
void await_flag_global(const std::uint64_t* address, std::uint64_t value, const Site& site);
void await_flag_global(const std::int32_t* address, std::int32_t value, const Site& site);
/// Adds to `count` floats of global memory that somebody has written, each at once whatever other blocks do.
void red_add_f32(float* address, const float* values, int count, const char* name, const Site& site);

/// Of any block of the cluster.
void load_shared_cluster(std::uint32_t cluster_address, void* value, std::uint32_t bytes, const char* name,
                         const Site& site);
void load_shared(std::uint32_t address, void* value, std::uint32_t bytes, const char* name, const Site& site);
std::uint32_t add_shared(std::uint32_t address, std::uint32_t value, const char* name, const Site& site);
void store_shared(std::uint32_t address, const void* value, std::uint32_t bytes, const char* name, const Site& site);

void cp_async_16(std::uint32_t shared, const void* global, bool valid, const Site& site);
void cp_async_4(std::uint32_t shared, const void* global, bool valid, const Site& site);
void cp_async_commit();
void cp_async_wait(int pending);

void ldmatrix_x4(std::uint32_t* r, std::uint32_t row, const Site& site);
void ldmatrix_x2(std::uint32_t* r, std::uint32_t row, const Site& site);
void ldmatrix_x4_trans(std::uint32_t* r, std::uint32_t row, const Site& site);
void ldmatrix_x2_trans(std::uint32_t* r, std::uint32_t row, const Site& site);

void stmatrix_x4(std::uint32_t row, const std::uint32_t* r, const Site& site);
void stmatrix_x2(std::uint32_t row, const std::uint32_t* r, const Site& site);
void stmatrix_x4_trans(std::uint32_t column, const std::uint32_t* r, const Site& site);

template <Half kHalf>
void mma_m16n8k16(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, const Site& site);
template <Half kHalf>
void mma_m16n8k8(float* d, std::uint32_t a0, std::uint32_t a1, std::uint32_t b0, const Site& site);
/// As multiply_bytes (byte_products.hpp).
template <Half kHalfA, Half kHalfB>
void mma_m16n8k32(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, const Site& site);
void mma_m16n8k8_tf32(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, const Site& site);

void fence_proxy_async();
void mbarrier_init(std::uint32_t barrier, int count, const Site& site);
void fence_mbarrier_init();
void mbarrier_arrive(std::uint32_t barrier, const Site& site);
void mbarrier_arrive_expect_tx(std::uint32_t barrier, int bytes, const Site& site);
void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity, const Site& site);
bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity, const Site& site);

// Of blocks in a cluster; `cluster_...` addresses are those that map_shared gives.
int cluster_rank();
std::uint32_t map_shared(std::uint32_t shared, int rank, const Site& site);
void cluster_sync(const Site& site);
void cluster_sync_relaxed(const Site& site);
void mbarrier_arrive_remote(std::uint32_t cluster_barrier, const Site& site);
void mbarrier_arrive_expect_tx_remote(std::uint32_t cluster_barrier, int bytes, const Site& site);
void mbarrier_wait_cluster(std::uint32_t barrier, std::uint32_t parity, const Site& site);
void bulk_copy_to_cluster(std::uint32_t cluster_target, std::uint32_t source, int bytes, std::uint32_t cluster_barrier,
                          const Site& site);

/// `map` points to the 128 bytes of a tensor map (tensor_map.hpp); `at` to `rank` coordinates, innermost first.
void prefetch_tensor_map(const void* map, const Site& site);
void tma_load(std::uint32_t shared, const void* map, std::uint32_t barrier, int rank, const int* at, const Site& site);
void tma_load_multicast(std::uint32_t shared, const void* map, std::uint32_t barrier, unsigned ranks, int rank,
                        const int* at, const Site& site);
void bulk_load(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier, const Site& site);

void tma_store(const void* map, std::uint32_t shared, int rank, const int* at, const Site& site);
/// Of global memory that somebody has written.
void bulk_add_f32(float* global, std::uint32_t shared, int bytes, const Site& site);
void tma_commit();
/// Of all committed stores and additions: until their sources are read, or until they are complete.
void tma_wait(bool read);

/// Rounds to the nearest E4M3 number, ties to even; beyond 448 to that. NaN stays NaN.
std::uint8_t convert_e4m3(float value);
float widen_e4m3(std::uint8_t bits);

/// D [64, columns] = A [64, 16] B [16, columns] + D; of 8-bit elements with a depth of 32.
struct WgmmaOperands {
  float* d = nullptr;                          // columns / 2 registers
  const std::uint32_t* a_registers = nullptr;  // four, or null: A is in shared memory
  std::uint64_t a = 0;                         // descriptors
  std::uint64_t b = 0;
  int columns = 0;
  Half half = Half::bf16;
  bool b_transposed = false;  // B is N-major
  bool accumulate = true;
  bool a_transposed = false;  // A in shared memory is M-major
  Half half_b = Half::e4m3;   // of B, where `half` has 8 bits
};
void wgmma(const WgmmaOperands& operands, const Site& site);
void wgmma_fence(const Site& site);
void wgmma_commit(const Site& site);
void wgmma_wait(int pending, const Site& site);
/// Ordinary code may read and write these registers from here on.
void wgmma_tie(const float* d, int count, const Site& site);

/// What accumulators hold while a product is in flight: at even places a NaN, which spreads to all that is computed
/// from it, at odd ones a number, which shows when it was multiplied with another.
inline constexpr std::uint32_t kPoison[2] = {0x7fe5a5a5, 0x7e5a5a5a};

[[noreturn]] void raise_register_in_flight(const char* name, const Site& site);
/// Faults on a value that was computed from an accumulator in flight.
inline void check_register(float x, const char* name, const Site& site) {
  if ((__builtin_bit_cast(std::uint32_t, x) & 0x7fffffff) == kPoison[0]) raise_register_in_flight(name, site);
}

/// As .ftz does to operands and results.
float flush(float x);

float ex2(float x);
float rcp(float x);
float lg2(float x);
float tanh(float x);
std::uint16_t convert_f16(float x);
std::uint16_t convert_bf16(float x);
float convert_from_f16(std::uint16_t bits);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_INSTRUCTIONS_HPP_
