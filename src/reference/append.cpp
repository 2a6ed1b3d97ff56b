#include "reference/append.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "reference/geometry.hpp"
#include "reference/u4.hpp"

namespace fa::reference {
namespace {

/// Cosines and sines of the pairs of a row.
struct Turns {
  std::vector<double> cosine, sine;
};

Turns turns_at(const RotaryEmbedding& rotary, std::int64_t position) {
  const std::int64_t pairs = rotary.dims / 2;
  Turns turns{std::vector<double>(static_cast<std::size_t>(pairs)),
              std::vector<double>(static_cast<std::size_t>(pairs))};
  if (rotary.cos.defined()) {
    const std::int64_t row = std::clamp<std::int64_t>(position, 0, rotary.cos.shape[0] - 1);
    load(rotary.cos, row * rotary.cos.strides[0], 1, pairs, turns.cosine.data());
    load(rotary.sin, row * rotary.sin.strides[0], 1, pairs, turns.sine.data());
    return turns;
  }
  for (std::int64_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(position) *
                         std::pow(rotary.base, -2.0 * static_cast<double>(i) / static_cast<double>(rotary.dims));
    turns.cosine[static_cast<std::size_t>(i)] = std::cos(angle);
    turns.sine[static_cast<std::size_t>(i)] = std::sin(angle);
  }
  return turns;
}

constexpr std::int64_t kLatentCodes = 512, kLatentGroup = 128;

/// Whether k goes to latent rows (docs/mla.md): the columns behind the codes turn.
bool has_latent_rows(const AppendInputs& inputs) {
  return inputs.k_cache.dtype == DType::e4m3 && !inputs.k_scale.defined();
}

/// Row `to` of one tensor becomes row `from` of another, bit for bit where nothing turns: from column `first` on.
void write_row(const TensorView& source, std::int64_t from, const TensorView& target, std::int64_t to,
               const RotaryEmbedding& rotary, const Turns& turns, std::int64_t first_turned = 0) {
  const auto size = static_cast<std::int64_t>(size_of(source.dtype));
  const std::int64_t pairs = static_cast<std::int64_t>(turns.cosine.size());
  if (first_turned > 0) {
    std::memmove(static_cast<std::byte*>(target.data) + to * size,
                 static_cast<const std::byte*>(source.data) + from * size,
                 static_cast<std::size_t>(first_turned * size));
    from += first_turned;
    to += first_turned;
  }
  std::vector<double> row(static_cast<std::size_t>(2 * pairs));
  load(source, from, 1, 2 * pairs, row.data());
  const std::int64_t rest = source.shape[3] - first_turned - 2 * pairs;
  if (rest > 0) {
    std::memmove(static_cast<std::byte*>(target.data) + (to + 2 * pairs) * size,  // perhaps the same row
                 static_cast<const std::byte*>(source.data) + (from + 2 * pairs) * size,
                 static_cast<std::size_t>(rest * size));
  }
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::int64_t first = rotary.interleaved ? 2 * i : i;
    const std::int64_t second = rotary.interleaved ? 2 * i + 1 : i + pairs;
    const auto [x, y] = std::pair(row[static_cast<std::size_t>(first)], row[static_cast<std::size_t>(second)]);
    const auto [cosine, sine] =
        std::pair(turns.cosine[static_cast<std::size_t>(i)], turns.sine[static_cast<std::size_t>(i)]);
    store_element(target, to + first, x * cosine - y * sine);
    store_element(target, to + second, y * cosine + x * sine);
  }
}

/// A row turned in f32.
std::vector<double> turned_row(const TensorView& source, std::int64_t from, const RotaryEmbedding& rotary,
                               const Turns& turns, std::size_t first_turned = 0) {
  const std::int64_t d = source.shape[3];
  std::vector<double> row(static_cast<std::size_t>(d));
  load(source, from, 1, d, row.data());
  for (std::size_t i = 0; i < turns.cosine.size(); ++i) {
    const std::size_t first = first_turned + (rotary.interleaved ? 2 * i : i);
    const std::size_t second = first_turned + (rotary.interleaved ? 2 * i + 1 : i + turns.cosine.size());
    const double x = row[first], y = row[second];
    row[first] = static_cast<float>(x * turns.cosine[i] - y * turns.sine[i]);
    row[second] = static_cast<float>(y * turns.cosine[i] + x * turns.sine[i]);
  }
  return row;
}

/// A latent row: codes, a scale of each group, and what has turned as bf16.
void store_latent(const std::vector<double>& row, const TensorView& target, std::int64_t to, bool given) {
  std::byte* const scales = static_cast<std::byte*>(target.data) + to + kLatentCodes;
  for (std::int64_t first = 0; first < kLatentCodes; first += kLatentGroup) {
    float scale = 0;
    std::byte* const at = scales + first / kLatentGroup * static_cast<std::int64_t>(sizeof scale);
    std::memcpy(&scale, at, sizeof scale);
    store_row({row.begin() + first, row.begin() + first + kLatentGroup}, target, to + first, scale, given);
    std::memcpy(at, &scale, sizeof scale);
  }
  const auto columns = static_cast<std::int64_t>(row.size()) - kLatentCodes;
  const TensorView rotary(scales + kLatentCodes / kLatentGroup * static_cast<std::int64_t>(sizeof(float)), DType::bf16,
                          {columns});
  for (std::int64_t i = 0; i < columns; ++i) {
    store_element(rotary, i, row[static_cast<std::size_t>(kLatentCodes + i)]);
  }
}

/// A scale and an offset of a group: from its least number to its greatest there are 15 steps.
std::array<double, 2> u4_range(std::span<const double> group, DType dtype) {
  const auto [low, high] = std::ranges::minmax(group);
  if (!std::ranges::all_of(group, [](double x) { return std::isfinite(x); })) {
    return {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::quiet_NaN()};
  }
  const double offset = round_to(dtype, low + 0.0);  // never -0
  const float half_range = static_cast<float>(high) * 0.5F - static_cast<float>(offset) * 0.5F;
  double scale = round_to(dtype, half_range / 7.5F);
  // Rounded up, it may have code 15 stand for infinity.
  if (std::isinf(round_to(dtype, std::fma(15.F, static_cast<float>(scale), static_cast<float>(offset))))) {
    scale = round_to(dtype, scale * (dtype == DType::f16 ? 1 - 0x1p-11 : 1 - 0x1p-8));
  }
  return {scale, offset};
}

/// Row `to` of a cache of 4 bits becomes `row`; its groups' scales and offsets are from `pairs_at` on.
void store_u4(const std::vector<double>& row, const TensorView& target, std::int64_t to, const TensorView& pairs,
              std::int64_t pairs_at, bool given) {
  std::byte* const codes = static_cast<std::byte*>(target.data) + to;
  const std::size_t columns = 2 * row.size() / static_cast<std::size_t>(pairs.shape[3]);
  for (std::size_t first = 0; first < row.size(); first += columns, pairs_at += 2) {
    const std::span group = std::span(row).subspan(first, columns);
    std::array<double, 2> pair{};
    if (given) {
      load(pairs, pairs_at, 1, 2, pair.data());
    } else {
      pair = u4_range(group, pairs.dtype);
      for (std::int64_t i = 0; i < 2; ++i) store_element(pairs, pairs_at + i, pair[static_cast<std::size_t>(i)]);
    }
    const float inverse = 2.F / static_cast<float>(pair[0]);
    const float factor = std::isfinite(inverse) ? inverse : 0.F;
    for (std::size_t i = 0; i < columns; ++i) {
      const float steps = (static_cast<float>(group[i]) * 0.5F - static_cast<float>(pair[1]) * 0.5F) * factor;
      const float inside = std::isnan(steps) ? 15.F : std::clamp(steps, 0.F, 15.F);  // as in kernels
      set_u4_code(codes, static_cast<std::int64_t>(first + i), static_cast<int>(std::nearbyint(inside)));
    }
  }
}

/// Puts a row of head `h` into its place, as the cache stores it.
void cache_row(const AppendInputs& inputs, const TensorView& source, std::int64_t from, const TensorView& cache,
               const TensorView& scales, const CacheRow& place, std::int64_t h, const RotaryEmbedding& rotary,
               const Turns& turns) {
  const std::int64_t to = row_offset(cache, place.page, h, place.row);
  if (has_latent_rows(inputs)) {
    return store_latent(turned_row(source, from, rotary, turns, kLatentCodes), cache, to, inputs.scales_given);
  }
  if (!scales.defined()) return write_row(source, from, cache, to, rotary, turns);
  const std::vector<double> row = turned_row(source, from, rotary, turns);
  const std::int64_t scale_at = row_offset(scales, place.page, h, place.row);
  if (cache.dtype == DType::u4x2) return store_u4(row, cache, to, scales, scale_at, inputs.scales_given);
  store_row(row, cache, to, static_cast<float*>(scales.data)[scale_at], inputs.scales_given);
}

/// The last sequence that starts at or before a row, if that is one of its rows.
std::int64_t sequence_of(const AppendInputs& inputs, std::int64_t token) {
  const std::int32_t* const cu = inputs.cu_seqlens_k_new;
  const std::int64_t after = std::upper_bound(cu, cu + inputs.b, static_cast<std::int32_t>(token)) - cu;
  return after == 0 || token >= cu[after] ? -1 : after - 1;
}

}  // namespace

void store_row(const std::vector<double>& row, const TensorView& target, std::int64_t to, float& scale, bool given) {
  constexpr float kLeastMagnitude = 0x1p-100F;
  if (!given) {
    const bool finite = std::ranges::all_of(row, [](double x) { return std::isfinite(x); });
    double most = 0;
    for (const double x : row) most = std::max(most, std::abs(x));
    const float greatest = target.dtype == DType::e4m3 ? 448.F : 127.F;
    scale = !finite                                      ? std::numeric_limits<float>::quiet_NaN()
            : static_cast<float>(most) < kLeastMagnitude ? 0.F
                                                         : static_cast<float>(most) / greatest;
  }
  const float factor = std::isfinite(1.F / scale) ? 1.F / scale : 0.F;
  for (std::size_t i = 0; i < row.size(); ++i) {
    store_element(target, to + static_cast<std::int64_t>(i), static_cast<float>(row[i]) * factor);
  }
}

AppendedRow appended_row(const AppendInputs& inputs, std::int64_t token) {
  if (inputs.seqused_kv == nullptr) return {0, 0};
  const std::int32_t* const cu = inputs.cu_seqlens_k_new;
  const std::int64_t s_new = inputs.k.shape[2];
  const std::int64_t request = cu != nullptr ? sequence_of(inputs, token) : token / s_new;
  if (request < 0) return {};
  const std::int64_t first = cu != nullptr ? cu[request] : request * s_new;
  const std::int64_t count = cu != nullptr ? cu[request + 1] - cu[request] : s_new;
  return {request, inputs.seqused_kv[request] - count + token - first};
}

std::optional<CacheRow> cache_row(const AppendInputs& inputs, const AppendedRow& row, std::int64_t token) {
  const TensorView& table = inputs.cache.block_table;
  const std::int64_t pages = inputs.k_cache.shape[0];
  const std::int64_t rows = inputs.k_cache.shape[2];
  if (inputs.slots != nullptr || inputs.slots_64 != nullptr) {
    const std::int64_t slot = inputs.slots != nullptr ? inputs.slots[token] : inputs.slots_64[token];
    if (slot < 0 || slot >= pages * rows) return std::nullopt;
    return CacheRow{slot / rows, slot % rows};
  }
  const std::int32_t* const batch_index = inputs.cache.batch_index;
  const std::int64_t index = batch_index != nullptr ? batch_index[row.request] : row.request;
  if (row.position < 0 || index < 0 || index >= (table.defined() ? table.shape[0] : pages)) return std::nullopt;
  if (!table.defined()) return row.position < rows ? std::optional(CacheRow{index, row.position}) : std::nullopt;
  if (row.position >= table.shape[1] * rows) return std::nullopt;
  const std::int64_t entry = index * table.strides[0] + row.position / rows * table.strides[1];
  const std::int64_t page = static_cast<const std::int32_t*>(table.data)[entry];
  if (page < 0 || page >= pages) return std::nullopt;
  return CacheRow{page, row.position % rows};
}

std::int64_t rotary_position(const AppendInputs& inputs, const AppendedRow& row, std::int64_t token) {
  if (inputs.rotary.positions != nullptr) return inputs.rotary.positions[token];
  if (inputs.rotary.positions_64 != nullptr) return inputs.rotary.positions_64[token];
  return row.position;
}

void append(const AppendInputs& inputs) {
  const std::int64_t s_new = inputs.k.shape[2];
  const std::int64_t tokens = inputs.k.shape[0] * s_new;
  const bool latent = has_latent_rows(inputs);
  for (std::int64_t token = 0; token < tokens; ++token) {
    const AppendedRow row = appended_row(inputs, token);
    if (row.request < 0) continue;
    const std::int64_t b = token / s_new;
    const std::int64_t s = token % s_new;
    const Turns turns = turns_at(inputs.rotary, rotary_position(inputs, row, token));
    for (std::int64_t h = 0; inputs.q.defined() && h < inputs.q.shape[1]; ++h) {
      write_row(inputs.q, row_offset(inputs.q, b, h, s), inputs.q_out, row_offset(inputs.q_out, b, h, s), inputs.rotary,
                turns, latent ? kLatentCodes : 0);
    }
    const std::optional<CacheRow> place = cache_row(inputs, row, token);
    for (std::int64_t h = 0; place && h < inputs.k.shape[1]; ++h) {
      cache_row(inputs, inputs.k, row_offset(inputs.k, b, h, s), inputs.k_cache, inputs.k_scale, *place, h,
                inputs.rotary, turns);
      if (latent) continue;
      cache_row(inputs, inputs.v, row_offset(inputs.v, b, h, s), inputs.v_cache, inputs.v_scale, *place, h, {}, {});
    }
  }
}

}  // namespace fa::reference
