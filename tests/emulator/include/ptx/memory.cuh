#ifndef FA_TESTS_EMULATOR_PTX_MEMORY_CUH_
#define FA_TESTS_EMULATOR_PTX_MEMORY_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

using kernel::Chunk;

FA_DEVICE uint32_t dynamic_shared() {
  return emulator::dynamic_shared();
}

template <class T>
FA_DEVICE T ld_global(const T* address, const emulator::Site& site = emulator::Site::current()) {
  emulator::check_global_load(address, sizeof(T), "ld.global", site);
  return *address;
}
template <class T>
FA_DEVICE void st_global(T* address, T value, const emulator::Site& site = emulator::Site::current()) {
  emulator::check_global_store(address, sizeof(T), "st.global", site);
  *address = value;
}

FA_DEVICE int32_t ld_ahead_global(const int32_t* address, const emulator::Site& site = emulator::Site::current()) {
  return emulator::load_ahead(address, site);
}

FA_DEVICE int32_t ld_guessed_global(const int32_t* address, const emulator::Site& site = emulator::Site::current()) {
  return emulator::load_guessed(address, site);
}

template <class T>
FA_DEVICE T ld_global_nc(const T* address, const emulator::Site& site = emulator::Site::current()) {
  emulator::check_global_load(address, sizeof(T), "ld.global.nc", site);
  return *address;
}

FA_DEVICE Chunk ld_global_nc_chunk(const void* address, const emulator::Site& site = emulator::Site::current()) {
  emulator::check_global_load(address, sizeof(Chunk), "ld.global.nc.v4.b32", site);
  Chunk value;
  __builtin_memcpy(&value, address, sizeof(Chunk));
  return value;
}

template <class T>
FA_DEVICE T ld_global_nc_of(int which, const T* address, const T* other,
                            const emulator::Site& site = emulator::Site::current()) {
  return ld_global_nc(which >= 0 ? address : other, site);
}

template <class T>
FA_DEVICE T ld_global_or_param(const T* address, const uint32_t& parameter,
                               const emulator::Site& site = emulator::Site::current()) {
  if (address != nullptr) return ld_global(address, site);
  T value;
  __builtin_memcpy(&value, &parameter, sizeof value);
  return value;
}

FA_DEVICE void st_global_chunk(void* address, Chunk value, const emulator::Site& site = emulator::Site::current()) {
  emulator::check_global_store(address, sizeof(Chunk), "st.global.v4.b32", site);
  __builtin_memcpy(address, &value, sizeof(Chunk));
}

FA_DEVICE Chunk ld_global_chunk(const void* address, const emulator::Site& site = emulator::Site::current()) {
  emulator::check_global_load(address, sizeof(Chunk), "ld.global.v4.b32", site);
  Chunk value;
  __builtin_memcpy(&value, address, sizeof(Chunk));
  return value;
}

FA_DEVICE void red_add_f32(float* address, float value, const emulator::Site& site = emulator::Site::current()) {
  emulator::red_add_f32(address, &value, 1, "red.global.add.f32", site);
}
FA_DEVICE void red_add_f32x4(float* address, const float (&value)[4],
                             const emulator::Site& site = emulator::Site::current()) {
  emulator::red_add_f32(address, value, 4, "red.global.add.v4.f32", site);
}

FA_DEVICE void red_max_u32(uint32_t* address, uint32_t value, const emulator::Site& site = emulator::Site::current()) {
  emulator::red_max_u32(address, value, site);
}

FA_DEVICE void signal_global(int32_t* address, int32_t value, const emulator::Site& site = emulator::Site::current()) {
  emulator::signal_global(address, value, site);
}
FA_DEVICE bool test_global(const int32_t* address, int32_t value,
                           const emulator::Site& site = emulator::Site::current()) {
  return emulator::test_global(address, value, site);
}
FA_DEVICE void await_global(const int32_t* address, int32_t value,
                            const emulator::Site& site = emulator::Site::current()) {
  emulator::await_global(address, value, site);
}

FA_DEVICE int32_t atomic_add_global(int32_t* address, int32_t value,
                                    const emulator::Site& site = emulator::Site::current()) {
  return emulator::atomic_add_global(address, value, site);
}

FA_DEVICE uint32_t ld_shared_b32(uint32_t address, const emulator::Site& site = emulator::Site::current()) {
  uint32_t value;
  emulator::load_shared(address, &value, sizeof value, "ld.shared.b32", site);
  return value;
}
FA_DEVICE uint16_t ld_shared_b16(uint32_t address, const emulator::Site& site = emulator::Site::current()) {
  uint16_t value;
  emulator::load_shared(address, &value, sizeof value, "ld.shared.b16", site);
  return value;
}
FA_DEVICE void ld_shared_f32x2(float (&value)[2], uint32_t address,
                               const emulator::Site& site = emulator::Site::current()) {
  emulator::load_shared(address, value, sizeof value, "ld.shared.v2.f32", site);
}
FA_DEVICE void ld_shared_b64(uint32_t& low, uint32_t& high, uint32_t address,
                             const emulator::Site& site = emulator::Site::current()) {
  uint32_t value[2];
  emulator::load_shared(address, value, sizeof value, "ld.shared.v2.b32", site);
  low = value[0];
  high = value[1];
}
FA_DEVICE Chunk ld_shared_chunk(uint32_t address, const emulator::Site& site = emulator::Site::current()) {
  Chunk value;
  emulator::load_shared(address, &value, sizeof value, "ld.shared.v4.b32", site);
  return value;
}
FA_DEVICE void st_shared_b32(uint32_t address, uint32_t value, const emulator::Site& site = emulator::Site::current()) {
  emulator::store_shared(address, &value, sizeof value, "st.shared.b32", site);
}
FA_DEVICE void st_shared_chunk(uint32_t address, Chunk value, const emulator::Site& site = emulator::Site::current()) {
  emulator::store_shared(address, &value, sizeof value, "st.shared.v4.b32", site);
}
FA_DEVICE void st_shared_b16(uint32_t address, uint16_t value, const emulator::Site& site = emulator::Site::current()) {
  emulator::store_shared(address, &value, sizeof value, "st.shared.b16", site);
}
FA_DEVICE void st_shared_b64(uint32_t address, uint32_t low, uint32_t high,
                             const emulator::Site& site = emulator::Site::current()) {
  const uint32_t value[2] = {low, high};
  emulator::store_shared(address, value, sizeof value, "st.shared.v2.b32", site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_MEMORY_CUH_
