#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "parallel/c_api.hpp"

namespace fa::parallel::c {
namespace {

ClusterSpeeds to_speeds(const fa_cluster_speeds* source) {
  ClusterSpeeds speeds;
  if (source == nullptr) return speeds;
  const fa_cluster_speeds in = read_struct(source, "speeds");
  const auto take = [](double given, double& speed, const char* name) {
    if (given == 0) return;
    if (!(given > 0)) throw_invalid(std::string("speeds.") + name, std::to_string(given), "above 0, or 0: the default");
    speed = given;
  };
  take(in.flops, speeds.flops, "flops");
  take(in.backward_flops, speeds.backward_flops, "backward_flops");
  take(in.link, speeds.link, "link");
  take(in.network, speeds.network, "network");
  take(in.latency, speeds.latency, "latency");
  take(in.launch, speeds.launch, "launch");
  take(in.memory, speeds.memory, "memory");
  if (in.ranks_of_node < 0) throw_invalid("speeds.ranks_of_node", in.ranks_of_node, "1 and more, or 0: the default");
  if (in.ranks_of_node > 0) speeds.ranks_of_node = in.ranks_of_node;
  return speeds;
}

fa_scheme_time to_c(const SchemeTime& time) {
  fa_scheme_time out{};
  out.scheme = static_cast<std::int32_t>(time.scheme);
  out.ulysses = time.ulysses;
  out.forward = time.forward;
  out.backward = time.backward;
  out.single = time.single;
  return out;
}

}  // namespace
}  // namespace fa::parallel::c

namespace c = fa::parallel::c;

extern "C" {

int fa_parallel_set_speeds(fa_parallel* parallel, const fa_cluster_speeds* speeds) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    parallel->parallel.set_speeds(c::to_speeds(speeds));
  });
}

int fa_parallel_scheme_time(const fa_parallel* parallel, const fa_parallel_shape* shape, const int64_t* lengths,
                            uint64_t length_count, fa_scheme_time* time) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    c::checked_size(time, "time");
    c::write_struct(time, c::to_c(parallel->parallel.scheme(c::to_shape(shape), c::to_lengths(lengths, length_count))));
  });
}

int fa_compare_schemes(const fa_parallel_config* config, const fa_parallel_shape* shape, int32_t ranks,
                       const fa_cluster_speeds* speeds, fa_scheme_time* times, uint64_t capacity, uint64_t* count) {
  return c::guarded([&] {
    c::require(count, "count");
    if (capacity > 0) c::require(times, "times");
    const auto [given, layout] = c::to_config(config);
    const auto all = fa::compare_schemes(given, layout, c::to_shape(shape), ranks, c::to_speeds(speeds));
    const auto kept = std::min<std::uint64_t>(capacity, all.size());
    for (std::uint64_t i = 0; i < kept; ++i) {
      times[i] = c::to_c(all[i]);
      times[i].struct_size = sizeof *times;
    }
    *count = all.size();
  });
}

int fa_parallel_memory(const fa_parallel* parallel, const fa_parallel_shape* shape, int32_t with_backward,
                       const int64_t* lengths, uint64_t length_count, fa_context_memory* memory) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    c::checked_size(memory, "memory");
    const fa::ContextMemory of =
        parallel->parallel.memory(c::to_shape(shape), with_backward != 0, c::to_lengths(lengths, length_count));
    fa_context_memory out{};
    out.shard_kv = of.shard_kv;
    out.kv_in_flight = of.kv_in_flight;
    out.scratch = of.scratch;
    c::write_struct(memory, out);
  });
}

int fa_parallel_describe(const fa_parallel* parallel, const fa_parallel_shape* shape, int32_t backward,
                         const int64_t* lengths, uint64_t length_count, char* text, uint64_t capacity,
                         uint64_t* length) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    c::require(length, "length");
    if (capacity > 0) c::require(text, "text");
    const std::string all =
        parallel->parallel.describe(c::to_shape(shape), backward != 0, c::to_lengths(lengths, length_count));
    *length = all.size();
    if (capacity == 0) return;
    const auto kept = static_cast<std::size_t>(std::min<std::uint64_t>(capacity - 1, all.size()));
    std::memcpy(text, all.data(), kept);
    text[kept] = '\0';
  });
}

int fa_parallel_hash(const fa_parallel* parallel, uint64_t* hash) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    c::require(hash, "hash");
    *hash = parallel->parallel.hash();
  });
}

int fa_parallel_layout(const fa_parallel* parallel, int32_t* layout) {
  return c::guarded([&] {
    c::require(parallel, "parallel");
    c::require(layout, "layout");
    *layout = static_cast<std::int32_t>(parallel->parallel.layout());
  });
}

int fa_shard_rows(int32_t layout, int32_t ranks, int32_t rank, const int64_t* lengths, uint64_t length_count,
                  int64_t* rows, uint64_t capacity, uint64_t* count) {
  return c::guarded([&] {
    c::require(count, "count");
    if (capacity > 0) c::require(rows, "rows");
    const auto all = fa::shard_rows(c::to_enum(layout, fa::ShardLayout::striped, "layout"), ranks, rank,
                                    c::to_lengths(lengths, length_count));
    const auto kept = static_cast<std::size_t>(std::min<std::uint64_t>(capacity, all.size()));
    std::copy_n(all.begin(), kept, rows);
    *count = all.size();
  });
}

const char* fa_layout_name(int32_t layout) {
  if (layout < 0 || layout > FA_LAYOUT_STRIPED) return "unknown";
  return fa::to_string(static_cast<fa::ShardLayout>(layout));
}

const char* fa_scheme_name(int32_t scheme) {
  if (scheme < 0 || scheme > FA_SCHEME_ULYSSES) return "unknown";
  return fa::to_string(static_cast<fa::Scheme>(scheme));
}

}  // extern "C"
