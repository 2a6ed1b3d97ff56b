#ifndef FA_TEMPLATES_SM80_SM80_COLUMN_SUMS_CUH_
#define FA_TEMPLATES_SM80_SM80_COLUMN_SUMS_CUH_

#include <common/constants.cuh>
#include <common/copies.cuh>
#include <common/forward_schedule.cuh>
#include <common/online_softmax.cuh>
#include <common/paged.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_forward_scores.cuh>
#include <sm80/sm80_stored.cuh>
#include <sm80/sm80_u4.cuh>

namespace fa::sm80 {

/// The forward whose scores these are: a buffer of K for each part of a thread block's keys, and no V. Parts are its KV
/// tiles, so that the scores of one fit in the registers.
template <class Config>
struct ForwardOfSums : Config {
  static constexpr int kTileN = Config::kTileN < 64 ? Config::kTileN : 64;
  static constexpr int kHeadDimV = 8;
  static constexpr int kStages = Config::kTileN / kTileN;
  static constexpr int kLoopBodies = 1;
  static constexpr bool kQInRegisters = false;
  static constexpr bool kConditionalRescale = true;
  static constexpr bool kPackGqa = false;
  static constexpr bool kSplit = false;
};

template <class Config>
FA_DEVICE constexpr bool one_buffer_of_rows() {
  if constexpr (requires { Config::kOneBuffer; }) return Config::kOneBuffer;
  return false;
}

/// P summed over rows, by the log-sum-exp that a forward has left. A thread block has a tile of keys, which stays in
/// shared memory, and walks over the query tiles that see it: of one query head, or of all of a KV head. Each warp has
/// its own rows of Q in two buffers, copies them itself, and waits for no other warp. What the warps have summed is
/// added in their order.
///
/// Each block reads all rows that see its keys, so that the L2 cache gives as many bytes as there are key tiles: of 128
/// keys it is half of 64. A step multiplies the rows with one part of 64 keys after the other.
///
/// With one buffer of rows twice as many warps find room, and each scheduler has two. A warp copies its next rows once
/// the products of the last part have read these: behind its exponentials, and behind the other warp.
///
/// With kPageSize the keys are those of requests over a KV cache. Sums of positions that a request does not have are 0.
/// With kKeyStorage K is as the forward has it (sm80_forward.cuh).
///
/// In shared memory: Q [tile_m, d_qk], K [tile_n, d_qk] by parts, of stored K what the parts' V would take and their
/// scales, and with two buffers Q of the next step.
///
/// Of the launch parameters `m_blocks` counts the key tiles of a head, of packed batches the slots; `heads` and
/// `heads_in_flight` are of the sums, each of which is over `splits` query heads.
template <class Config>
struct ColumnSums {
  using Scores = ForwardScores<ForwardOfSums<Config>>;
  using T = typename Scores::T;
  using Params = typename Scores::Params;
  using Variant = typename Scores::Variant;
  using Gemm = typename Scores::Gemm;
  using KTile = typename Scores::KTile;
  using QWarpTile = typename Scores::QWarpTile;
  using KElement = typename Scores::KElement;
  static constexpr int kTileM = Scores::kTileM;
  static constexpr int kPartKeys = Scores::kTileN;
  static constexpr int kParts = Config::kTileN / kPartKeys;
  static constexpr int kTileN = kParts * kPartKeys;
  static constexpr int kHeadDimQk = Scores::kHeadDimQk;
  static constexpr int kMTiles = Scores::kMTiles;
  static constexpr int kNTiles = Scores::kNTiles;
  static constexpr bool kVarlen = Scores::kVarlen;
  static constexpr bool kPaged = Scores::kPaged;
  static constexpr bool kPackedKeys = kVarlen && !kPaged;
  static constexpr bool kOneBuffer = one_buffer_of_rows<Config>();
  static constexpr int kNextQ = Scores::kStoredKeys ? Scores::kLoopBytes : Scores::kQBytes + kParts * KTile::kBytes;
  static constexpr int kSharedBytes = kNextQ + (kOneBuffer ? 0 : Scores::kQBytes);
  static constexpr int kThreads = Scores::kThreads;
  static_assert(kTileN == Config::kTileN, "a block's keys are whole parts");
  static_assert(Scores::kWarpsN == 1 && !Scores::kStatistics, "warps have their own rows");
  static_assert(Config::kWarps * kTileN * static_cast<int>(sizeof(float)) <= Scores::kQBytes, "sums fit where Q was");

  using Sums = float[kParts][kNTiles][2];  // of a thread's columns

  struct Tile {
    int block;
    int head;  // of the sums
    int batch;
  };

  const Params& params;
  const Tile tile;
  const typename Scores::Entry lengths;
  const int first_key = tile.block * kTileN;
  const int lane = ptx::thread_index() % kWarpSize;
  const int warp = ptx::thread_index() / kWarpSize;
  // Query tiles that see a key of the tile, of each query head.
  int first_block = 0;
  int blocks = 0;

  FA_DEVICE explicit ColumnSums(const Params& p)
      : params(p), tile(this_tile(p)), lengths(Scores::this_entry(p, tile.batch)) {}

  static FA_DEVICE Tile this_tile(const Params& p) {
    const Place at = this_place(p);
    if constexpr (kPackedKeys) {
      const SequenceParams& sequences = p.sequences;
      const int batch = sequence_of_slot<kTileN>(sequences.cu_kv, p.b, sequences.total_kv, 1, at.block);
      return {at.block - first_slot<kTileN>(sequences.cu_kv, batch, sequences.total_kv, 1), at.head, batch};
    } else {
      return {at.block, at.head % p.heads, at.head / p.heads};
    }
  }

  /// The n-th tile of keys, or slot, of a head, of those of all requests but of packed ones.
  struct Place {
    int block;
    int head;
  };

  /// Causal tiles of the first keys have the most rows. They start first, of all heads whose rows share the L2 cache.
  static FA_DEVICE Place this_place(const Params& p) {
    const int index = ptx::block_index();
    if constexpr (Config::kCausal) {
      const int section_size = p.heads_in_flight * p.m_blocks;
      const int section = index / section_size;
      const int first_head = section * p.heads_in_flight;
      const int rest = (kPackedKeys ? p.heads : p.heads * p.b) - first_head;
      const int heads = rest < p.heads_in_flight ? rest : p.heads_in_flight;
      const int place = index - section * section_size;
      const int block = place / heads;
      return {block, first_head + place - block * heads};
    } else {
      return {index % p.m_blocks, index / p.m_blocks};
    }
  }

  FA_DEVICE void run() {
    if constexpr (!kPaged) {
      if (tile.block < 0 || first_key >= lengths.s_kv) return;  // a slot without a tile
    }
    const int last_key = (first_key + kTileN < lengths.s_kv ? first_key + kTileN : lengths.s_kv) - 1;
    const int begin = rows_begin<Config::kCausal, Variant>(params, lengths, first_key);
    const int end = minimum(rows_end<Variant>(params, lengths, last_key), lengths.s_q);
    first_block = begin / kTileM;
    const bool there = !kPaged || (first_key < lengths.s_kv && first_key_of(lengths) <= last_key);
    if (there && end > begin) blocks = ceil_div(end, kTileM) - first_block;
    Sums sums = {};
    const int steps = blocks * params.splits;
    if (steps > 0) walk(steps, sums);
    ptx::sync_threads();  // all have left Q, whose place the sums take
    store(sums);
  }

  /// Rows of a query head, and where they lie: in the buffer behind Q where `odd` is 1.
  struct Step {
    int block = 0;
    int head = 0;
    int odd = 0;
  };
  FA_DEVICE Step behind(Step step) const {
    step.odd ^= 1;
    if (++step.block < blocks) return step;
    return {0, step.head + 1, step.odd};
  }

  FA_DEVICE void walk(int steps, Sums& sums) const {
    load_keys();
    Step now;
    load_rows(now);
    ptx::cp_async_commit();
    for (int i = 0; i < steps; ++i) {
      const Step next = behind(now);
      if constexpr (!kOneBuffer) {
        if (i + 1 < steps) load_rows(next);
        ptx::cp_async_commit();
      }
      ptx::cp_async_wait<kOneBuffer ? 0 : 1>();
      if (i == 0) {
        ptx::sync_threads();  // K has landed for all, and the first rows
        if constexpr (Scores::kLatentRows) widen_keys();
      } else {
        ptx::sync_warp();  // the other lanes' copies of this step's rows have landed
      }
      add(now, sums, [&] {
        if constexpr (kOneBuffer) {
          ptx::sync_warp();  // all lanes have read the rows before these copies overwrite them
          if (i + 1 < steps) load_rows(next);
          ptx::cp_async_commit();
        }
      });
      if constexpr (!kOneBuffer)
        ptx::sync_warp();  // all lanes have read the rows before the next copies overwrite them
      now = next;
    }
    ptx::cp_async_wait<0>();
  }

  /// The rows of a step.
  FA_DEVICE Scores rows_of(const Step& step) const {
    const int query_head = tile.head * params.splits + step.head;
    return Scores(params, Piece{}, ForwardTile{first_block + step.block, query_head, tile.batch, 0});
  }

  FA_DEVICE uint32_t q_shared(const Scores& rows, const Step& step) const {
    if constexpr (kOneBuffer) return rows.q_shared;
    return rows.q_shared + step.odd * kNextQ;
  }
  FA_DEVICE uint32_t k_shared(const Scores& rows, int part) const { return rows.k_shared(0) + part * KTile::kBytes; }

  FA_DEVICE void load_keys() const {
    Scores rows = rows_of({});
    if constexpr (kPaged) {
      rows.table_row = table_row_of(params.paged, tile.batch);
      rows.first_read = keys_begin<Variant>(params, lengths, 0);  // keys in front of it no row sees
    }
    FA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      if constexpr (kPaged) {
        rows.load_k(tile.block * kParts + part, part);
      } else {
        const int first = first_key + part * kPartKeys;
        Scores::KCopy::strided(k_shared(rows, part), rows.k_thread + first * params.stride_k_s, params.stride_k_s,
                               lengths.s_kv - first, rows.thread);
        if constexpr (Scores::kStoredKeys) {
          StoredScales<Scores>{rows}.load_k(part, first);
        }
      }
    }
  }

  FA_DEVICE void widen_keys() const {
    const Scores rows = rows_of({});
    FA_UNROLL
    for (int part = 0; part < kParts; ++part) Scores::Latent::widen(k_shared(rows, part), rows.thread);
    ptx::sync_threads();  // K is of the queries' type
  }

  FA_DEVICE void load_rows(const Step& step) const {
    using QCopy = typename Scores::QCopy;
    const Scores rows = rows_of(step);
    const T* const base = static_cast<const T*>(params.q) + rows.first_row(params.stride_q_b, params.stride_q_s) +
                          rows.tile.head * params.stride_q_h + rows.warp_row * params.stride_q_s;
    QCopy::strided(q_shared(rows, step), QCopy::thread_pointer(base, params.stride_q_s, rows.copier), params.stride_q_s,
                   rows.row_count - rows.warp_row, rows.copier);
  }

  /// P of a step's rows, to the sums of their columns. `after_products` is done once no product reads the rows.
  template <class AfterProducts>
  FA_DEVICE void add(const Step& step, Sums& sums, AfterProducts after_products) const {
    Scores rows = rows_of(step);
    rows.read_fixed();
    float offsets[kMTiles][2];  // read ahead of the products
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) offsets[m][r] = offset_of(rows, rows.fragment_row(m, r));
    }
    FA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      add_part(rows, step, part, offsets, sums[part], [&] {
        if (part + 1 == kParts) after_products();
      });
    }
  }

  template <class AfterProducts>
  FA_DEVICE void add_part(Scores& rows, const Step& step, int part, const float (&offsets)[kMTiles][2],
                          float (&sums)[kNTiles][2], AfterProducts after_products) const {
    const int block = tile.block * kParts + part;
    Fragment<kMTiles, kNTiles> s = {};
    multiply(s, rows, q_shared(rows, step), part);
    after_products();
    if constexpr (Variant::kScore) {
      rows.apply_score(s, block);
    } else if constexpr (!Config::kPositiveScale) {
      rows.scale_scores(s);
    }
    if constexpr (Variant::kMask) rows.apply_mask(s, block);
    if (hides_any(rows, block)) rows.mask(s, block);
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          FA_UNROLL
          for (int e = 0; e < 2; ++e) {
            sums[n][e] += ptx::ex2(ptx::fma(s[m][n][2 * r + e], rows.softmax_scale_log2(), -offsets[m][r]));
          }
        }
      }
    }
  }

  /// The products of a step's rows with a part of the keys.
  FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& s, const Scores& rows, uint32_t queries, int part) const {
    const uint32_t keys = k_shared(rows, part);
    if constexpr (Scores::kU4Keys) {
      using Products = U4Keys<T, KElement>;
      const StoredScales<Scores> scales{rows};
      Products::template scores<KTile, kHeadDimQk, scales.kPitch, 2>(
          s, keys, scales.own_k(part), lane,
          [&](uint32_t(&a)[4], int m, int k) { Products::template load_a<QWarpTile>(a, queries, 16 * m, k, lane); });
    } else if constexpr (Scores::kStoredKeys) {
      using Products = StoredKeys<T, KElement>;
      Products::template scores<KTile, kHeadDimQk>(s, keys, lane, [&](uint32_t(&a)[4], int m, int k) {
        Products::template load_a<QWarpTile>(a, queries, 16 * m, k, lane);
      });
      StoredScales<Scores>{rows}.multiply_k(s, part);
    } else {
      Gemm::template scores<KTile, kHeadDimQk>(s, keys, lane, [&](uint32_t(&a)[4], int m, int k) {
        Gemm::template load_a<QWarpTile, kHeadDimQk>(a, queries, 16 * m, k, lane);
      });
    }
  }

  /// Whether a mask in closed form, or the first or the last of the keys, hides a key of a part from one of the rows.
  FA_DEVICE bool hides_any(const Scores& rows, int block) const {
    if constexpr (Variant::kLeftWindow || Variant::kChunked) return true;
    if (first_key_of(lengths) > block * kPartKeys) return true;
    return key_limit<Config::kCausal>(lengths, rows.block_row) < (block + 1) * kPartKeys;
  }

  /// What is subtracted from a row's scores, in log2 units; of a row without keys, or that is not there, infinity.
  FA_DEVICE float offset_of(const Scores& rows, int row) const {
    if (row >= rows.row_count) return kInfinity;
    const float lse = ptx::ld_global(params.lse + rows.first_row(params.stride_lse_b, params.stride_lse_s) +
                                     rows.tile.head * params.stride_lse_h + row * params.stride_lse_s);
    return lse == -kInfinity ? float{kInfinity} : lse * kLog2e;
  }

  FA_DEVICE void store(Sums& sums) const {
    const uint32_t shared = ptx::dynamic_shared();  // [warps, tile_n]
    FA_UNROLL
    for (int n = 0; n < kParts * kNTiles; ++n) {
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& sum = sums[n / kNTiles][n % kNTiles][e];
        FA_UNROLL
        for (int lanes = 4; lanes < kWarpSize; lanes *= 2) sum += ptx::shfl_xor(sum, lanes);
        const int column = warp * kTileN + 8 * n + 2 * lane + e;
        if (lane < 4) ptx::st_shared_b32(shared + column * static_cast<int>(sizeof(float)), ptx::bits(sum));
      }
    }
    ptx::sync_threads();  // the sums of all warps are there
    for (int column = ptx::thread_index(); column < kTileN; column += kThreads) {
      if (first_key + column >= last_sum()) break;
      float total = 0.f;
      FA_UNROLL
      for (int from = 0; from < Config::kWarps; ++from) {
        const int at = (from * kTileN + column) * static_cast<int>(sizeof(float));
        total += ptx::from_bits(ptx::ld_shared_b32(shared + at));
      }
      ptx::st_global(params.column_sums + place() + column, total);
    }
  }

  /// Behind the last key that has a sum: over pages all that requests may have do.
  FA_DEVICE int last_sum() const { return kPaged ? params.s_kv : lengths.s_kv; }

  /// Of the tile's first key, in [b, heads, s_kv], or [heads, total_kv].
  FA_DEVICE int64_t place() const {
    if constexpr (kPackedKeys) {
      return static_cast<int64_t>(tile.head) * params.sequences.total_kv + lengths.first_key + first_key;
    } else {
      return (static_cast<int64_t>(tile.batch) * params.heads + tile.head) * params.s_kv + first_key;
    }
  }
};

template <class Config>
FA_DEVICE void column_sums(const kernel::StoredForwardParamsOf<Config>& params) {
  ColumnSums<Config>(params).run();
}

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_COLUMN_SUMS_CUH_
