#ifndef FA_TEMPLATES_COMMON_PACKED_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_PACKED_PARAMS_CUH_

#include <common/types.cuh>

namespace fa::kernel {

/// The sequences of a packed batch: sequence i has the rows [cu_q[i], cu_q[i + 1]) of q and the keys
/// [cu_kv[i], cu_kv[i + 1]) of k and v. Read when the kernel runs, and clamped to the tensors.
struct SequenceParams {
  const int32_t* cu_q;     // [b + 1]
  const int32_t* cu_kv;    // [b + 1]
  const int32_t* used_q;   // [b], how many of a sequence's rows count; null: all
  const int32_t* used_kv;  // [b]
  int32_t total_q;         // rows of the packed q
  int32_t total_kv;        // rows of the packed k and v
  int32_t bottom_right;    // the diagonal of causal masks and windows ends in the last row and key of a sequence
  int32_t wave;            // persistent grids of these and of listed tiles: blocks of a wave. Of kernels with a fixed
                           // split size: blocks that share the splits of a query tile
};

/// Pages that k and v are in. Of a request the position j is row j % kPageSize of page table[row][j / kPageSize].
struct PagedParams {
  const int32_t* table;        // [rows, max_pages]
  const int32_t* batch_index;  // [b], the table row of each request; null: its number
  const int32_t* begin;        // [b], the first position that counts; null: 0
  int64_t stride_row;          // in elements
  int64_t stride_page;
  int32_t rows;
  int32_t pages;  // of k and v
  // Scheduled kernels only (schedule_params.cuh).
  void* schedule;         // the memory of the schedule
  int32_t parts;          // thread blocks of the attention kernel
  int32_t slots;          // that query tiles are found by
  int32_t segment_slots;  // a multiple of the threads of the kernel that writes the schedule
  int32_t heads_a_page;   // of the copy engine's maps only: from page to page, of K and of V
};

/// Dropout of probabilities. The mask is a pure function of seed, offset, batch, query head, query row and key.
struct DropoutParams {
  const uint64_t* state;  // {seed, offset} on the device; null: the two values below
  uint64_t seed;
  uint64_t offset;
  uint32_t threshold[8];   // all bits of word i are bit 8 + i of p * 2^16
  uint32_t low_threshold;  // bits 0 to 7, as the highest ones
  float keep;              // 1 - p
  float inverse_keep;      // 1 / keep
  int32_t heads;  // placed kernels: query heads of a batch entry of the whole; with `state` `offset` is what is
                  // added to that one
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_PACKED_PARAMS_CUH_
