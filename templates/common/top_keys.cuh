#ifndef FA_TEMPLATES_COMMON_TOP_KEYS_CUH_
#define FA_TEMPLATES_COMMON_TOP_KEYS_CUH_

#include <common/constants.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/top_keys_params.cuh>
#include <ptx/atomic_shared.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

template <class Config>
FA_DEVICE constexpr bool of_requests() {
  if constexpr (requires { Config::kRequests; }) return Config::kRequests;
  return false;
}

/// The keys with the greatest sums, a thread block for each (b, h), in descending order. Ties go to the smaller index;
/// NaNs are the greatest of all, and equal.
///
/// An entry is 64 bits: a sum's bits in the order of numbers, and below them the key's index upside down. So no two are
/// equal, and their order is the one that is wanted. From the highest bits on, a pass over the row counts the entries
/// by a digit, among those that agree with the last one wanted so far, until what is left fits in shared memory. One
/// more pass takes that, and it is sorted.
///
/// In shared memory: counts [bins, kCopies], in their place later the entries [kRoom, 2]; a sum of each warp; and what
/// the block decides.
///
/// With kRequests the rows are of requests over a KV cache: keys from the first position that counts on.
///
/// Config: kWarps, kVarlen, kRequests.
template <class Config>
struct TopKeys {
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr bool kRequests = of_requests<Config>();
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kDigitBits = 11;
  static constexpr int kBins = 1 << kDigitBits;
  static constexpr int kCopies = 4;      // of a count, for lanes that add to the same one
  static constexpr int kMostDigits = 5;  // three of the sum, and of the index as many as leave 2^9 entries of 2^31
  static constexpr int kTogether = 4;    // loads of a thread under way
  static constexpr int kRoom = 2 * kMostTopKeys;  // entries that are sorted
  static constexpr int kWarpSums = kBins * kCopies * 4;
  static constexpr int kDecided = kWarpSums + Config::kWarps * 4;  // a bin, its count, and the entries above
  static constexpr int kSharedBytes = kDecided + 16;
  static constexpr int kBinsOfThread = kBins / kThreads;
  static_assert(kThreads * kBinsOfThread == kBins, "threads have whole bins");
  static_assert(kRoom * 8 <= kWarpSums, "entries fit where the counts were");

  /// Entries that agree with the last one wanted: in bits of the sum, and then in those of the index.
  struct Prefix {
    uint32_t sum = 0, sum_mask = 0;
    uint32_t index = 0, index_mask = 0;
  };

  const TopKeysParams& params;
  const int thread = ptx::thread_index();
  const uint32_t shared = ptx::dynamic_shared();
  const int batch;
  const int head;
  const float* row = nullptr;
  uint32_t keys = 0;  // of the row, 0 where no query asks
  uint32_t skew = 0;  // elements in front of the row in its first 16 bytes
  int first_key = 0;  // of the row

  FA_DEVICE explicit TopKeys(const TopKeysParams& p)
      : params(p), batch(ptx::block_index() / p.heads), head(ptx::block_index() - batch * p.heads) {
    int64_t first;
    int rows = p.s_q, count = p.s_kv;
    if constexpr (kRequests) {
      const SequenceParams& from = p.sequences;
      if constexpr (kVarlen) rows = span_of(from.cu_q, from.used_q, batch, from.total_q, p.s_q).count;
      count = clamp(ptx::ld_global(from.used_kv + batch), 0, p.s_kv);
      if (p.begin != nullptr) first_key = clamp(ptx::ld_global(p.begin + batch), 0, count);
      first = static_cast<int64_t>(ptx::block_index()) * p.s_kv + first_key;
      count -= first_key;
    } else if constexpr (kVarlen) {
      const SequenceParams& from = p.sequences;
      const Span span = span_of(from.cu_kv, from.used_kv, batch, from.total_kv, p.s_kv);
      rows = span_of(from.cu_q, from.used_q, batch, from.total_q, p.s_q).count;
      count = span.count;
      first = static_cast<int64_t>(head) * from.total_kv + span.first;
    } else {
      first = static_cast<int64_t>(ptx::block_index()) * p.s_kv;
    }
    row = p.sums + first;
    if (rows > 0) keys = static_cast<uint32_t>(count);
    skew = static_cast<uint32_t>(reinterpret_cast<uint64_t>(row) / sizeof(float)) % 4;
  }

  FA_DEVICE void run() const {
    uint32_t wanted = static_cast<uint32_t>(params.count);  // of those that agree
    uint32_t above = 0;                                     // entries greater than those
    uint32_t agree = keys;
    Prefix prefix;
    int shift = 32;  // bits of the sum, and then of the index, that are open
    bool by_index = false;
    for (int digit = 0; digit < kMostDigits && above + agree > kRoom; ++digit) {
      if (shift == 0 && !by_index) {
        by_index = true;
        for (; shift < 31 && (keys - 1) >> shift != 0; ++shift) continue;
        prefix.index = prefix.index_mask = ~0u << shift;  // the highest bits of indices are 0 in all
      }
      const int bits = shift < kDigitBits ? shift : kDigitBits;
      shift -= bits;
      const uint32_t most = (1u << bits) - 1;
      if (by_index) {
        count<true>(prefix, shift, most);
      } else {
        count<false>(prefix, shift, most);
      }
      const uint32_t bin = decide(wanted, above, agree);
      (by_index ? prefix.index : prefix.sum) |= bin << shift;
      (by_index ? prefix.index_mask : prefix.sum_mask) = ~0u << shift;
    }
    const int entries = static_cast<int>(above + agree < kRoom ? above + agree : kRoom);
    const int size = sorted_size(entries);
    take(prefix, size);
    sort(size);
    store(size);
  }

 private:
  /// Bits of a sum in the order of numbers as integers; 0 is less than those of every number.
  FA_DEVICE static uint32_t order_of(uint32_t bits) {
    constexpr uint32_t kSign = 0x80000000u, kInfinite = 0x7f800000u;
    if ((bits & ~kSign) > kInfinite) return ~0u;
    return bits <= kSign ? bits | kSign : ~bits;  // both zeros are one
  }

  /// Calls `use(orders, first)` for four elements from `first` on. Of one that is not there the order is 0.
  template <class Use>
  FA_DEVICE void walk(Use use) const {
    const uint32_t chunks = (keys + skew + 3) / 4;
    FA_UNROLL_BY(1)
    for (uint32_t begin = thread; begin < chunks; begin += kTogether * kThreads) {
      Chunk sums[kTogether] = {};
      FA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        if (begin + i * kThreads < chunks) load(sums[i], 4 * (begin + i * kThreads) - skew);
      }
      FA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        if (begin + i * kThreads >= chunks) break;
        const uint32_t first = 4 * (begin + i * kThreads) - skew;
        uint32_t orders[4];
        FA_UNROLL
        for (int e = 0; e < 4; ++e) orders[e] = order_of(sums[i].word[e]);
        if (!is_whole(first)) {
          FA_UNROLL
          for (int e = 0; e < 4; ++e) orders[e] = first + e < keys ? orders[e] : 0;
        }
        use(orders, first);
      }
    }
  }

  /// `first` may be "negative": then it is beyond the end, and those behind it are not.
  FA_DEVICE bool is_whole(uint32_t first) const { return first < keys && keys - first >= 4; }
  FA_DEVICE void load(Chunk& sums, uint32_t first) const {
    if (is_whole(first)) {
      sums = ptx::ld_global_nc_chunk(row + first);
      return;
    }
    FA_UNROLL
    for (int e = 0; e < 4; ++e) {
      if (first + e < keys) sums.word[e] = ptx::bits(ptx::ld_global_nc(row + (first + e)));
    }
  }

  FA_DEVICE uint32_t bin_at(int bin) const { return shared + bin * (kCopies * 4); }

  /// Counts a digit of the entries that agree with the prefix. A thread adds equal digits up before it writes them:
  /// rows in which a few digits are those of most sums would have lanes wait for each other.
  /// What is not there is in the lowest bin of the first digit, where no number is, and agrees with no prefix of one.
  template <bool kByIndex>
  FA_DEVICE void count(const Prefix& prefix, int shift, uint32_t most) const {
    for (int bin = thread; bin < kBins; bin += kThreads) ptx::st_shared_chunk(bin_at(bin), Chunk{});
    ptx::sync_threads();  // the counts are 0
    uint32_t last = 0, run = 0;
    const uint32_t copy = thread % kCopies * 4;
    walk([&](const uint32_t(&orders)[4], uint32_t first) {
      FA_UNROLL
      for (int e = 0; e < 4; ++e) {
        if ((orders[e] & prefix.sum_mask) != prefix.sum) continue;
        uint32_t digit = orders[e];
        if constexpr (kByIndex) {
          digit = ~(first + e);
          if ((digit & prefix.index_mask) != prefix.index) continue;
        }
        const uint32_t bin = (digit >> shift) & most;
        if (bin != last) {
          if (run != 0) ptx::red_add_shared(bin_at(last) + copy, run);
          last = bin;
          run = 0;
        }
        ++run;
      }
    });
    if (run != 0) ptx::red_add_shared(bin_at(last) + copy, run);
    ptx::sync_threads();  // all have counted
  }

  /// The bin of the last entry wanted, which makes one more digit of the prefix.
  FA_DEVICE uint32_t decide(uint32_t& wanted, uint32_t& above, uint32_t& agree) const {
    uint32_t counts[kBinsOfThread];  // from the highest bin down
    uint32_t own = 0;
    FA_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) {
      const Chunk copies = ptx::ld_shared_chunk(bin_at(kBins - 1 - (thread * kBinsOfThread + i)));
      counts[i] = copies.word[0] + copies.word[1] + copies.word[2] + copies.word[3];
      own += counts[i];
    }
    const int lane = thread % kWarpSize, warp = thread / kWarpSize;
    uint32_t upto = own;  // of the warp's threads up to this one
    FA_UNROLL
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const uint32_t before = ptx::shfl(upto, (lane - distance) & (kWarpSize - 1));
      if (lane >= distance) upto += before;
    }
    if (lane == kWarpSize - 1) ptx::st_shared_b32(shared + kWarpSums + warp * 4, upto);
    ptx::sync_threads();  // the sums of warps are there
    uint32_t before = upto - own;
    for (int other = 0; other < warp; ++other) before += ptx::ld_shared_b32(shared + kWarpSums + other * 4);
    FA_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) {
      if (before < wanted && wanted - before <= counts[i]) {
        const int bin = kBins - 1 - (thread * kBinsOfThread + i);
        ptx::st_shared_b64(shared + kDecided, bin, counts[i]);
        ptx::st_shared_b32(shared + kDecided + 8, before);
      }
      before += counts[i];
    }
    ptx::sync_threads();  // it is decided
    uint32_t bin;
    ptx::ld_shared_b64(bin, agree, shared + kDecided);
    const uint32_t greater = ptx::ld_shared_b32(shared + kDecided + 8);
    wanted -= greater;
    above += greater;
    return bin;
  }

  /// A power of two, so that every width of the sort divides it.
  FA_DEVICE static int sorted_size(int entries) { return entries < 2 ? 2 : ceil_power_of_two(entries); }

  /// Entries that agree with the prefix or are above it, in any order; 0 behind them.
  FA_DEVICE void take(const Prefix& prefix, int size) const {
    ptx::sync_threads();  // all have read what is decided
    for (int i = thread; i < size; i += kThreads) ptx::st_shared_b64(shared + 8 * i, 0, 0);
    if (thread == 0) ptx::st_shared_b32(shared + kDecided, 0);
    ptx::sync_threads();  // nothing is taken yet
    walk([&](const uint32_t(&orders)[4], uint32_t first) {
      uint32_t taken = 0;
      FA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const uint32_t order = orders[e] & prefix.sum_mask;
        const bool reaches =
            order == prefix.sum ? (~(first + e) & prefix.index_mask) >= prefix.index : order > prefix.sum;
        if (orders[e] != 0 && reaches) taken |= 1u << e;
      }
      if (taken == 0) return;
      uint32_t place = ptx::atomic_add_shared(shared + kDecided, ptx::popc(taken));
      FA_UNROLL
      for (int e = 0; e < 4; ++e) {
        if ((taken >> e & 1) == 0 || place >= kRoom) continue;
        ptx::st_shared_b64(shared + 8 * place++, ~(first + e), orders[e]);
      }
    });
    ptx::sync_threads();  // all is taken
  }

  /// A bitonic sort, the greatest first. Up to a distance of a warp's lanes a warp has entries of its own, and reads no
  /// others once it is done.
  FA_DEVICE void sort(int size) const {
    FA_UNROLL_BY(1)
    for (int width = 2; width <= size; width *= 2) {
      FA_UNROLL_BY(1)
      for (int distance = width / 2; distance > 0; distance /= 2) {
        for (int pair = thread; pair < size / 2; pair += kThreads) {
          const int low = pair & (distance - 1), i = 2 * (pair - low) + low;
          exchange(shared + 8 * i, shared + 8 * (i + distance), (i & width) == 0);
        }
        const int next = distance > 1 ? distance / 2 : width;
        if (distance > kWarpSize || next > kWarpSize) {
          ptx::sync_threads();  // other warps have what is next
        } else {
          ptx::sync_warp();  // other lanes have it
        }
      }
    }
  }

  FA_DEVICE static void exchange(uint32_t a, uint32_t b, bool descends) {
    uint32_t index_a, sum_a, index_b, sum_b;
    ptx::ld_shared_b64(index_a, sum_a, a);
    ptx::ld_shared_b64(index_b, sum_b, b);
    const bool less = sum_a == sum_b ? index_a < index_b : sum_a < sum_b;
    if (less != descends) return;
    ptx::st_shared_b64(a, index_b, sum_b);
    ptx::st_shared_b64(b, index_a, sum_a);
  }

  FA_DEVICE void store(int size) const {
    int32_t* const to = params.keys + static_cast<int64_t>(ptx::block_index()) * params.count;
    for (int i = thread; i < params.count; i += kThreads) {
      uint32_t index = 0;  // what is not there is 0, and -1 upside down
      if (i < size) index = ptx::ld_shared_b32(shared + 8 * i);
      const auto key = static_cast<int32_t>(~index);
      ptx::st_global(to + i, kRequests && key >= 0 ? key + first_key : key);
    }
  }
};

template <class Config>
FA_DEVICE void top_keys(const TopKeysParams& params) {
  TopKeys<Config>(params).run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_TOP_KEYS_CUH_
