#ifndef FA_SCHEDULE_HPP_
#define FA_SCHEDULE_HPP_

#include <cstddef>
#include <cstdint>

#include <fa/types.hpp>

/// How the keys of calls over pages are shared out among thread blocks (docs/inference.md#schedules). One kernel finds
/// that out from the lengths, on the GPU, once for all layers of a model that have these.
///
/// The design is FlashMLA's (DeepSeek, 2025): work lists of equal length for a fixed grid.
namespace fa {

/// Memory of a schedule. Calls that share one run one after the other, in one stream or in the order of events: they
/// count there. Whoever writes new lengths calls Attention::schedule anew. Nothing else that a call is given lies in
/// the memory.
struct Schedule {
  void* data = nullptr;  ///< on the Attention's device, 256-byte aligned; lives until the last such call has run
  std::size_t size = 0;  ///< bytes: at least `schedule_size(limits)`
};

/// What a schedule is made for. Arrays are int32 on the Attention's device, and are read when the kernel runs.
struct ScheduleInputs {
  /// Those of the calls: b, h_q and h_kv, and whether their rows are aligned. Dense queries have s_q, packed ones
  /// max_s_q (0: not given) and total_q. Of s_kv the limit is max_s_kv, or what a row of the block table has room for
  /// if that is less.
  AttentionShape limits = {};
  PackedSequences sequences = {};           ///< of the calls; maxima are not read
  const std::int32_t* seq_begin = nullptr;  ///< [b], PagedCache::seq_begin of the calls
};

}  // namespace fa

#endif  // FA_SCHEDULE_HPP_
