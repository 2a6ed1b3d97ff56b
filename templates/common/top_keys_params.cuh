#ifndef FA_TEMPLATES_COMMON_TOP_KEYS_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_TOP_KEYS_PARAMS_CUH_

#include <common/packed_params.cuh>
#include <common/types.cuh>

namespace fa::kernel {

/// Keys that a row may ask for: those that it may hold besides come from one more digit's bin at most.
inline constexpr int kMostTopKeys = 1024;

/// Launch parameters of top_keys.
struct TopKeysParams {
  const float* sums;         // [b, heads, s_kv], or [heads, total_kv] of packed keys
  int32_t* keys;             // [b, heads, count]
  SequenceParams sequences;  // of packed batches
  int32_t b, heads;
  int32_t s_q, s_kv;     // of packed batches they bound the lengths
  int32_t count;         // up to kMostTopKeys
  const int32_t* begin;  // [b], of requests over a KV cache: the first position that counts; null: 0
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_TOP_KEYS_PARAMS_CUH_
