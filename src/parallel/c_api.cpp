#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <fa/parallel.h>

#include <fa/c_bridge.hpp>
#include <fa/parallel.hpp>

#include "parallel/errors.hpp"

struct fa_communicator {
  std::shared_ptr<fa::Communicator> communicator;
};

struct fa_parallel {
  fa::ContextParallel parallel;
};

namespace fa {
namespace {

using parallel::throw_invalid;

static_assert(FA_LAYOUT_STRIPED == static_cast<int>(ShardLayout::striped));
static_assert(FA_SCHEME_ULYSSES == static_cast<int>(Scheme::ulysses));
static_assert(FA_GRADIENTS_NATIVE == static_cast<int>(GradientTransfer::native));

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

/// A copy of a caller's struct in this library's version of it, as fa.h says.
template <class Struct>
Struct read_struct(const Struct* source, const std::string& argument) {
  require(source, argument.c_str());
  constexpr std::uint32_t kLargest = 4096;
  const std::uint32_t size = source->struct_size;
  if (size < 2 * sizeof(std::uint32_t) || size > kLargest || size % alignof(Struct) != 0) {
    throw_invalid(argument + ".struct_size", size, "the sizeof of the struct");
  }
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

template <class Enum>
Enum to_enum(std::int32_t value, Enum last, const std::string& argument) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    throw_invalid(argument, value, "0 to " + std::to_string(static_cast<std::int32_t>(last)));
  }
  return static_cast<Enum>(value);
}

std::span<const std::int64_t> to_lengths(const std::int64_t* lengths, std::uint64_t count) {
  if (count > 0) require(lengths, "lengths");
  return {lengths, static_cast<std::size_t>(count)};
}

ContextShape to_shape(const fa_parallel_shape* source) {
  const fa_parallel_shape in = read_struct(source, "shape");
  return {in.b, in.h_q, in.h_kv, in.s_q, in.s_kv};
}

ShardCopy to_copy(const fa_shard_copy* source) {
  const fa_shard_copy in = read_struct(source, "how");
  ShardCopy out;
  out.layout = to_enum(in.layout, ShardLayout::striped, "how.layout");
  out.ranks = in.ranks;
  out.rank = in.rank;
  out.lengths = to_lengths(in.lengths, in.length_count);
  out.statistics = in.statistics != 0;
  switch (to_enum(in.device.kind, FA_DEVICE_HOST, "how.device.kind")) {
    case FA_DEVICE_CUDA:
      out.device = Device::cuda(in.device.ordinal);
      break;
    case FA_DEVICE_HOST:
      out.device = Device::host();
      break;
    default:
      out.device = Device::current();
  }
  return out;
}

std::pair<ContextParallelConfig, ShardLayout> to_config(const fa_parallel_config* source) {
  const fa_parallel_config in = read_struct(source, "config");
  ContextParallelConfig out;
  out.attention = c_bridge::to_config(in.attention);
  out.scheme = to_enum(in.scheme, Scheme::ulysses, "config.scheme");
  out.ulysses = in.ulysses;
  out.head_groups = in.head_groups;
  out.gradients = to_enum(in.gradients, GradientTransfer::native, "config.gradients");
  if (in.has_reserved_multiprocessors != 0) out.reserved_multiprocessors = in.reserved_multiprocessors;
  return {out, to_enum(in.layout, ShardLayout::striped, "config.layout")};
}

}  // namespace
}  // namespace fa

extern "C" {

int fa_communicator_of_nccl(void* comm, const fa_nccl_options* options, fa_communicator** out) {
  return fa::guarded([&] {
    fa::require(out, "out");
    *out = nullptr;
    fa::NcclOptions given;
    if (options != nullptr) {
      const fa_nccl_options in = fa::read_struct(options, "options");
      if (in.timeout_ms != 0) given.timeout = std::chrono::milliseconds(in.timeout_ms);
      given.watch = in.without_watch == 0;
    }
    *out = new fa_communicator{fa::use_nccl(static_cast<ncclComm*>(comm), given)};
  });
}

int fa_communicator_local_group(int32_t size, int64_t timeout_ms, fa_communicator** out) {
  return fa::guarded([&] {
    fa::require(out, "out");
    fa::LocalGroupOptions options;
    if (timeout_ms != 0) options.timeout = std::chrono::milliseconds(timeout_ms);
    const auto group = fa::make_local_group(size, options);
    for (std::size_t i = 0; i < group.size(); ++i) out[i] = new fa_communicator{group[i]};
  });
}

void fa_communicator_destroy(fa_communicator* communicator) {
  delete communicator;
}

int fa_communicator_rank(const fa_communicator* communicator, int32_t* rank, int32_t* size) {
  return fa::guarded([&] {
    fa::require(communicator, "communicator");
    if (rank != nullptr) *rank = communicator->communicator->rank();
    if (size != nullptr) *size = communicator->communicator->size();
  });
}

int fa_communicator_synchronize(fa_communicator* communicator, void* stream) {
  return fa::guarded([&] {
    fa::require(communicator, "communicator");
    communicator->communicator->synchronize(static_cast<fa::Stream>(stream));
  });
}

int fa_communicator_check(fa_communicator* communicator) {
  return fa::guarded([&] {
    fa::require(communicator, "communicator");
    communicator->communicator->check();
  });
}

int fa_communicator_abort(fa_communicator* communicator, const char* problem) {
  return fa::guarded([&] {
    fa::require(communicator, "communicator");
    communicator->communicator->abort(problem == nullptr ? "unknown" : problem);
  });
}

int fa_parallel_create(const fa_parallel_config* config, const fa_communicator* communicator, fa_parallel** out) {
  return fa::guarded([&] {
    fa::require(out, "out");
    *out = nullptr;
    fa::require(communicator, "communicator");
    const auto [given, layout] = fa::to_config(config);
    *out = new fa_parallel{fa::ContextParallel::create(given, communicator->communicator, layout)};
  });
}

void fa_parallel_destroy(fa_parallel* parallel) {
  delete parallel;
}

int fa_parallel_forward(fa_parallel* parallel, const fa_forward_inputs* inputs, const fa_forward_outputs* outputs,
                        void* stream, const int64_t* lengths, uint64_t length_count) {
  return fa::guarded([&] {
    fa::require(parallel, "parallel");
    if (fa::read_struct(inputs, "inputs").prefix_count > 0) {
      fa::parallel::throw_unsupported("prefixes", "given", "nothing with context parallelism");
    }
    parallel->parallel.forward(fa::c_bridge::to_inputs(inputs), fa::c_bridge::to_outputs(outputs),
                               static_cast<fa::Stream>(stream), fa::to_lengths(lengths, length_count));
  });
}

int fa_parallel_backward(fa_parallel* parallel, const fa_backward_inputs* inputs, const fa_backward_outputs* outputs,
                         void* stream, const int64_t* lengths, uint64_t length_count) {
  return fa::guarded([&] {
    fa::require(parallel, "parallel");
    parallel->parallel.backward(fa::c_bridge::to_inputs(inputs), fa::c_bridge::to_outputs(outputs),
                                static_cast<fa::Stream>(stream), fa::to_lengths(lengths, length_count));
  });
}

int fa_parallel_prepare(fa_parallel* parallel, const fa_parallel_shape* shape, int32_t with_backward,
                        const int64_t* lengths, uint64_t length_count) {
  return fa::guarded([&] {
    fa::require(parallel, "parallel");
    parallel->parallel.prepare(fa::to_shape(shape), with_backward != 0, fa::to_lengths(lengths, length_count));
  });
}

int fa_parallel_check_agreement(fa_parallel* parallel, void* stream) {
  return fa::guarded([&] {
    fa::require(parallel, "parallel");
    parallel->parallel.check_agreement(static_cast<fa::Stream>(stream));
  });
}

int fa_parallel_scheme(const fa_parallel* parallel, const fa_parallel_shape* shape, const int64_t* lengths,
                       uint64_t length_count, int32_t* scheme, int32_t* ulysses) {
  return fa::guarded([&] {
    fa::require(parallel, "parallel");
    const fa::SchemeTime time = parallel->parallel.scheme(fa::to_shape(shape), fa::to_lengths(lengths, length_count));
    if (scheme != nullptr) *scheme = static_cast<int32_t>(time.scheme);
    if (ulysses != nullptr) *ulysses = time.ulysses;
  });
}

int fa_shard(const fa_shard_copy* how, const fa_tensor* whole, const fa_tensor* part, void* stream) {
  return fa::guarded([&] {
    fa::shard(fa::to_copy(how), fa::c_bridge::to_view(whole, "whole"), fa::c_bridge::to_view(part, "part"),
              static_cast<fa::Stream>(stream));
  });
}

int fa_unshard(const fa_shard_copy* how, const fa_tensor* part, const fa_tensor* whole, void* stream) {
  return fa::guarded([&] {
    fa::unshard(fa::to_copy(how), fa::c_bridge::to_view(part, "part"), fa::c_bridge::to_view(whole, "whole"),
                static_cast<fa::Stream>(stream));
  });
}

}  // extern "C"
