#include "api/host_sequences.hpp"

namespace fa::api {
namespace {

/// A copy of `count` ints of the device; queued.
void fetch(const std::int32_t* from, std::vector<std::int32_t>* to, std::int64_t count, Stream stream) {
  if (from == nullptr || count == 0) return;
  to->resize(static_cast<std::size_t>(count));
  driver::check(driver::api().cuMemcpyDtoHAsync(to->data(), reinterpret_cast<CUdeviceptr>(from),
                                                to->size() * sizeof(std::int32_t), stream),
                "cuMemcpyDtoHAsync");
}

}  // namespace

HostSequences::HostSequences(const PackedSequences& from, Stream stream) : sequences(from) {
  fetch(from.cu_seqlens_q, &cu_q, from.b + 1, stream);
  fetch(from.cu_seqlens_kv, &cu_kv, from.b + 1, stream);
  fetch(from.seqused_q, &used_q, from.b, stream);
  fetch(from.seqused_kv, &used_kv, from.b, stream);
  sequences.cu_seqlens_q = cu_q.empty() ? nullptr : cu_q.data();
  sequences.cu_seqlens_kv = cu_kv.empty() ? nullptr : cu_kv.data();
  sequences.seqused_q = used_q.empty() ? nullptr : used_q.data();
  sequences.seqused_kv = used_kv.empty() ? nullptr : used_kv.data();
}

HostCache::HostCache(const PagedCache& from, std::int64_t b, Stream stream) : cache(from) {
  fetch(from.batch_index, &batch_index, b, stream);
  fetch(from.seq_begin, &seq_begin, b, stream);
  cache.batch_index = batch_index.empty() ? nullptr : batch_index.data();
  cache.seq_begin = seq_begin.empty() ? nullptr : seq_begin.data();
  const TensorView& given = from.block_table;
  if (given.elements() == 0) return;
  std::int64_t low = 0;
  std::int64_t high = 0;
  for (std::size_t axis = 0; axis < 2; ++axis) {
    const std::int64_t length = given.strides[axis] * (given.shape[axis] - 1);
    (length < 0 ? low : high) += length;
  }
  fetch(static_cast<const std::int32_t*>(given.data) + low, &table, high - low + 1, stream);
  cache.block_table.data = table.data() - low;
}

}  // namespace fa::api
