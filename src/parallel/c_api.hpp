#ifndef FA_SRC_PARALLEL_C_API_HPP_
#define FA_SRC_PARALLEL_C_API_HPP_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <fa/parallel.h>

#include <fa/c_bridge.hpp>
#include <fa/parallel.hpp>

#include "parallel/errors.hpp"

/// What the files of the C ABI share.
struct fa_communicator {
  std::shared_ptr<fa::Communicator> communicator;
};

struct fa_parallel {
  fa::ContextParallel parallel;
};

namespace fa::parallel::c {

/// Runs `body`; no exception passes.
template <class Body>
int guarded(const Body& body) noexcept {
  try {
    body();
    return FA_OK;
  } catch (...) {
    return c_bridge::remember_exception();
  }
}

template <class Pointer>
void require(const Pointer* pointer, const char* argument) {
  if (pointer == nullptr) throw_invalid(argument, "NULL", "a pointer");
}

template <class Struct>
std::uint32_t checked_size(const Struct* given, const std::string& argument) {
  require(given, argument.c_str());
  constexpr std::uint32_t kLargest = 4096;
  const std::uint32_t size = given->struct_size;
  if (size < 2 * sizeof(std::uint32_t) || size > kLargest || size % alignof(Struct) != 0) {
    throw_invalid(argument + ".struct_size", size, "the sizeof of the struct");
  }
  return size;
}

/// A copy of a caller's struct in this library's version of it, as fa.h says.
template <class Struct>
Struct read_struct(const Struct* source, const std::string& argument) {
  const std::uint32_t size = checked_size(source, argument);
  Struct copy{};
  std::memcpy(&copy, source, std::min<std::size_t>(size, sizeof copy));
  const auto* const bytes = reinterpret_cast<const char*>(source);
  for (std::size_t i = sizeof copy; i < size; ++i) {
    if (bytes[i] == 0) continue;
    throw Error(ErrorCode::unsupported, argument + " sets a field that this version of fa_parallel does not know",
                {{"argument", argument}, {"value", std::to_string(size)}});
  }
  return copy;
}

/// What of a result a caller's struct, whose size has been checked, has room for.
template <class Struct>
void write_struct(Struct* target, Struct result) {
  result.struct_size = target->struct_size;
  std::memcpy(target, &result, std::min<std::size_t>(result.struct_size, sizeof result));
}

template <class Enum>
Enum to_enum(std::int32_t value, Enum last, const std::string& argument) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    throw_invalid(argument, value, "0 to " + std::to_string(static_cast<std::int32_t>(last)));
  }
  return static_cast<Enum>(value);
}

inline std::span<const std::int64_t> to_lengths(const std::int64_t* lengths, std::uint64_t count) {
  if (count > 0) require(lengths, "lengths");
  return {lengths, static_cast<std::size_t>(count)};
}

inline ContextShape to_shape(const fa_parallel_shape* source) {
  const fa_parallel_shape in = read_struct(source, "shape");
  return {in.b, in.h_q, in.h_kv, in.s_q, in.s_kv};
}

inline Device to_device(const fa_device& device, const std::string& argument) {
  switch (to_enum(device.kind, FA_DEVICE_HOST, argument + ".kind")) {
    case FA_DEVICE_CUDA:
      return Device::cuda(device.ordinal);
    case FA_DEVICE_HOST:
      return Device::host();
    default:
      return Device::current();
  }
}

std::pair<ContextParallelConfig, ShardLayout> to_config(const fa_parallel_config* source);

}  // namespace fa::parallel::c

#endif  // FA_SRC_PARALLEL_C_API_HPP_
