#include "parallel/c_api.hpp"

namespace fa::parallel::c {
namespace {

static_assert(FA_LAYOUT_STRIPED == static_cast<int>(ShardLayout::striped));
static_assert(FA_SCHEME_ULYSSES == static_cast<int>(Scheme::ulysses));
static_assert(FA_GRADIENTS_NATIVE == static_cast<int>(GradientTransfer::native));

ShardCopy to_copy(const fa_shard_copy* source) {
  const fa_shard_copy in = read_struct(source, "how");
  ShardCopy out;
  out.layout = to_enum(in.layout, ShardLayout::striped, "how.layout");
  out.ranks = in.ranks;
  out.rank = in.rank;
  out.lengths = to_lengths(in.lengths, in.length_count);
  out.statistics = in.statistics != 0;
  out.device = to_device(in.device, "how.device");
  return out;
}

}  // namespace

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

}  // namespace fa::parallel::c

namespace c = fa::parallel::c;

extern "C" {

int fa_parallel_create(const fa_parallel_config* config, const fa_communicator* communicator, fa_parallel** out) {
  return c::guarded([&] {
    c::require(out, "out");
    *out = nullptr;
    c::require(communicator, "communicator");
    const auto [given, layout] = c::to_config(config);
    *out = new fa_parallel{fa::ContextParallel::create(given, communicator->communicator, layout)};
  });
}

void fa_parallel_destroy(fa_parallel* parallel) {
  delete parallel;
}

int fa_parallel_forward(fa_parallel* parallel, const fa_forward_inputs* inputs, const fa_forward_outputs* outputs,
                        void* stream, const int64_t* lengths, uint64_t length_count) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    if (c::read_struct(inputs, "inputs").prefix_count > 0) {
      fa::parallel::throw_unsupported("prefixes", "given", "nothing with context parallelism");
    }
    parallel->parallel.forward(fa::c_bridge::to_inputs(inputs), fa::c_bridge::to_outputs(outputs),
                               static_cast<fa::Stream>(stream), c::to_lengths(lengths, length_count));
  });
}

int fa_parallel_backward(fa_parallel* parallel, const fa_backward_inputs* inputs, const fa_backward_outputs* outputs,
                         void* stream, const int64_t* lengths, uint64_t length_count) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    parallel->parallel.backward(fa::c_bridge::to_inputs(inputs), fa::c_bridge::to_outputs(outputs),
                                static_cast<fa::Stream>(stream), c::to_lengths(lengths, length_count));
  });
}

int fa_parallel_prepare(fa_parallel* parallel, const fa_parallel_shape* shape, int32_t with_backward,
                        const int64_t* lengths, uint64_t length_count) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    parallel->parallel.prepare(c::to_shape(shape), with_backward != 0, c::to_lengths(lengths, length_count));
  });
}

int fa_parallel_check_agreement(fa_parallel* parallel, void* stream) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    parallel->parallel.check_agreement(static_cast<fa::Stream>(stream));
  });
}

int fa_parallel_scheme(const fa_parallel* parallel, const fa_parallel_shape* shape, const int64_t* lengths,
                       uint64_t length_count, int32_t* scheme, int32_t* ulysses) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    const fa::SchemeTime time = parallel->parallel.scheme(c::to_shape(shape), c::to_lengths(lengths, length_count));
    if (scheme != nullptr) *scheme = static_cast<int32_t>(time.scheme);
    if (ulysses != nullptr) *ulysses = time.ulysses;
  });
}

int fa_shard(const fa_shard_copy* how, const fa_tensor* whole, const fa_tensor* part, void* stream) {
  return c::guarded([&] {
    fa::shard(c::to_copy(how), fa::c_bridge::to_view(whole, "whole"), fa::c_bridge::to_view(part, "part"),
              static_cast<fa::Stream>(stream));
  });
}

int fa_unshard(const fa_shard_copy* how, const fa_tensor* part, const fa_tensor* whole, void* stream) {
  return c::guarded([&] {
    fa::unshard(c::to_copy(how), fa::c_bridge::to_view(part, "part"), fa::c_bridge::to_view(whole, "whole"),
                static_cast<fa::Stream>(stream));
  });
}

}  // extern "C"
