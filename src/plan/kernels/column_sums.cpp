#include "plan/column_sums.hpp"

#include <algorithm>
#include <array>

#include <common/top_keys_params.cuh>

#include "plan/catalogue.hpp"
#include "plan/forward_launch.hpp"
#include "plan/sm90_forward.hpp"
#include "support/text.hpp"

namespace fa::plan {
namespace {

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::positive_scale>("positive_scale").as("kPositiveScale"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::tile_m>("tile_m").as("kTileM", "query rows of a step"),
    field<&SpecHead::tile_n>("tile_n").as("kTileN", "keys of a thread block"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::page_size>("page_size").when_not_0().as("kPageSize", "keys of a page"),
    field<&ColumnSumsPass::one_buffer>("one_buffer").when_set().as("kOneBuffer", "of query rows"),
    field<&ColumnSumsPass::k_storage>("k_storage")
        .when_above_0()
        .as("kKeyStorage", "1: e4m3, 2: i8, 3: latent rows, else: 4 bits, in groups of so many columns"),
    launched("row_buffers", "Buffers of query rows, 1 or 2"),
};
static_assert(is_complete<ColumnSumsPass>(kFields));

/// One or two buffers of query rows, and one of keys. Rows are an odd number of 16 bytes apart. Of stored K the forward
/// whose products these are has room for V of 8 columns besides, and for scales of both.
int bytes_of_tiles(const KernelSpec& spec) {
  const ColumnSumsPass& own = spec.as<ColumnSumsPass>();
  const int element = static_cast<int>(size_of(spec.dtype));
  const auto pitch = [](int bytes) { return (bytes / 16 | 1) * 16; };
  int key = pitch(stored_row_bytes(own.k_storage, spec.d_qk, element));
  if (own.stored()) {
    constexpr int kColumns = 8;
    key += pitch(kColumns * element) + stored_scale_bytes(own.k_storage, spec.d_qk) + stored_scale_bytes(0, kColumns);
  }
  return (own.one_buffer ? 1 : 2) * spec.tile_m * pitch(spec.d_qk * element) + spec.tile_n * key;
}

constexpr Kernel kKernel{
    .name = "column_sums",
    .op = Op::column_sums,
    .unit = {.header = "sm80/sm80_column_sums.cuh",
             .params = "ForwardParams",
             .variant_params = "ForwardVariantParams",
             .stored_params = "ForwardStoredParams",
             .function = "sm80::column_sums",
             .room = "sm80::ColumnSums",
             .asserts_threads = true},
    .fields = kFields,
    .shared_bytes = bytes_of_tiles,
};

struct Tile {
  int tile_m, tile_n, warps;
  bool one_buffer = false;
};
// In order of preference; the first that fits is taken. Two tiles of 16 rows a warp use every fragment of K twice.
// Blocks of more keys read fewer rows in all, where as many of them fit in a multiprocessor.
constexpr std::array kTiles{Tile{128, 128, 4}, Tile{128, 64, 4}, Tile{64, 64, 4},
                            Tile{64, 32, 4},   Tile{32, 32, 2},  Tile{16, 16, 1}};
constexpr std::size_t kFirst32Bit = 3;  // whose products take more registers
constexpr std::size_t kFewerKeys = 1;   // as do conversions, and score functions beside pages
// Where shared memory leaves room for one block of four warps: two for each scheduler.
constexpr Tile kEightWarps{256, 128, 8, true};

/// Up to the two that registers leave room for.
int blocks_of_multiprocessor(const KernelSpec& spec) {
  return std::min(limits(spec.arch).shared_per_block / bytes_of_tiles(spec), 2);
}

void take(KernelSpec& spec, const Tile& tile) {
  spec.tile_m = tile.tile_m;
  spec.tile_n = tile.tile_n;
  spec.warps = tile.warps;
  spec.as<ColumnSumsPass>().one_buffer = tile.one_buffer;
}

/// Whether a block of eight warps is taken; copies that wait in registers would not be hidden.
bool takes_eight_warps(const Problem& problem, KernelSpec& spec, int blocks) {
  const int wanted = problem.sum_buffers;
  take(spec, kEightWarps);
  const bool stored = spec.as<ColumnSumsPass>().stored();
  const bool may = problem.dtype != DType::f32 && !stored && spec.arch.major >= 8 && blocks_of_multiprocessor(spec) > 0;
  if (wanted == 1 && !may) {
    support::throw_unsupported("kernel.text", "row_buffers=1", "row_buffers=2 for this dtype, head_dim and device");
  }
  return may && (wanted == 1 || (wanted != 2 && blocks == 1));
}

/// Whether a causal grid of the widest tiles has one round, and would wait for those of the first keys. Tiles of half
/// of the keys make twice as many blocks.
bool has_few_long_tiles(const Problem& problem) noexcept {
  constexpr std::int64_t kRound = 2 * kHopperMultiprocessors;
  if (!problem.causal || has_packed_keys(problem)) return false;
  return (problem.s_kv + kTiles[0].tile_n - 1) / kTiles[0].tile_n * summed_heads(problem) * problem.b <= kRound;
}

// Q of the heads that run together should fit the L2 cache, of 50 MB on Hopper, beside what else is read.
constexpr std::int64_t kRowsInL2 = std::int64_t{32} << 20;

constexpr int kTopKeysWarps = 16;
constexpr int kTopKeysBlocks = 2;  // one reads while the other sorts
static_assert(kMaxTopKeys == kernel::kMostTopKeys);

constexpr Field kTopKeysFields[] = {
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&SpecHead::min_blocks>("min_blocks"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&TopKeys::requests>("requests").when_set().as("kRequests", "over a KV cache"),
};
static_assert(is_complete<TopKeys>(kTopKeysFields));

/// Four counts for each value of a digit of 11 bits, a sum of each warp, and what a block decides.
int bytes_of_counts(const KernelSpec& spec) {
  return 4 * 4 * (1 << 11) + 4 * spec.warps + 16;
}

constexpr Kernel kTopKeys{
    .name = "top_keys",
    .op = Op::top_keys,
    .unit = {.header = "common/top_keys.cuh",
             .params = "TopKeysParams",
             .variant_params = "TopKeysParams",
             .function = "kernel::top_keys",
             .room = "kernel::TopKeys",
             .asserts_threads = true,
             .has_element = false},
    .fields = kTopKeysFields,
    .shared_bytes = bytes_of_counts,
};

}  // namespace

const Kernel& TopKeys::kernel() noexcept {
  return kTopKeys;
}

KernelSpec top_keys_spec(const Problem& problem) noexcept {
  KernelSpec spec;
  spec.own = TopKeys{.requests = problem.paged()};
  spec.arch = problem.arch;
  spec.warps = kTopKeysWarps;
  spec.min_blocks = kTopKeysBlocks;
  spec.varlen = problem.varlen;
  return spec;
}

bool has_packed_keys(const Problem& problem) noexcept {
  return problem.varlen && !problem.paged();
}

std::int64_t summed_heads(const Problem& problem) noexcept {
  return problem.statistics.summed_heads() == ColumnSums::kv_heads ? problem.h_kv : problem.h_q;
}

std::int64_t top_keys_params(const Problem& problem, const kernel::SequenceParams& sequences, const std::int32_t* begin,
                             const float* sums, const TensorView& keys, kernel::TopKeysParams& params) noexcept {
  const std::int64_t heads = summed_heads(problem);
  params = {.sums = sums,
            .keys = static_cast<std::int32_t*>(keys.data),
            .sequences = sequences,
            .b = static_cast<int>(problem.b),
            .heads = static_cast<int>(heads),
            .s_q = static_cast<int>(problem.s_q),
            .s_kv = static_cast<int>(problem.s_kv),
            .count = problem.statistics.top_keys,
            .begin = begin};
  return problem.b * heads;
}

bool ColumnSumsPass::stored() const noexcept {
  return k_storage != 0 && k_storage != kLatentRows;
}

const Kernel& ColumnSumsPass::kernel() noexcept {
  return kKernel;
}

KernelSpec column_sums_spec(const Problem& problem) {
  KernelSpec spec;
  spec.own = ColumnSumsPass{};
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.causal = problem.causal;
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  spec.positive_scale = problem.positive_scale || !spec.variants.score.empty();
  spec.aligned = problem.aligned;
  spec.varlen = problem.varlen;
  spec.page_size = problem.page_size;
  spec.as<ColumnSumsPass>().k_storage =
      problem.latent() ? kLatentRows : storage_of(problem.k_dtype, problem.group_size);
  take(spec, kTiles[1]);
  const int blocks = std::max(blocks_of_multiprocessor(spec), 1);
  if (takes_eight_warps(problem, spec, blocks)) return spec;
  const bool many_registers = spec.as<ColumnSumsPass>().stored() || (problem.paged() && !spec.variants.score.empty());
  const bool fewer = many_registers || has_few_long_tiles(problem);
  const std::size_t first = problem.dtype == DType::f32 ? kFirst32Bit : fewer ? kFewerKeys : 0;
  for (std::size_t i = first; i < kTiles.size(); ++i) {
    take(spec, kTiles[i]);
    if (blocks_of_multiprocessor(spec) >= (i == 0 ? blocks : 1)) return spec;
  }
  support::throw_unsupported("statistics.column_sums", problem.d_qk, "a head_dim whose tiles fit the shared memory");
}

std::int64_t column_sums_params(const Problem& problem, const KernelSpec& spec,
                                const kernel::ForwardVariantParams& forward, float* sums,
                                kernel::ForwardVariantParams& params) noexcept {
  params = forward;
  params.column_sums = sums;
  const bool of_kv_heads = problem.statistics.summed_heads() == ColumnSums::kv_heads;
  const std::int64_t group = problem.h_q / problem.h_kv;
  params.group = static_cast<int>(group);
  params.heads = static_cast<int>(summed_heads(problem));
  params.splits = static_cast<int>(of_kv_heads ? group : 1);
  const bool packed = has_packed_keys(problem);
  params.m_blocks = static_cast<int>(packed ? slots(problem.total_kv, spec.tile_n, problem.b)
                                            : (problem.s_kv + spec.tile_n - 1) / spec.tile_n);
  const std::int64_t heads = params.heads * (packed ? 1 : problem.b);
  const std::int64_t rows = packed ? problem.total_q : problem.s_q;
  const std::int64_t head_bytes = rows * params.splits * problem.d_qk * static_cast<std::int64_t>(size_of(spec.dtype));
  params.heads_in_flight =
      equal_sections(heads, std::max(kRowsInL2 / std::max(head_bytes, std::int64_t{1}), std::int64_t{1}));
  return params.m_blocks * heads;
}

}  // namespace fa::plan
