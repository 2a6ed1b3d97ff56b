// Arguments of appends to KV caches.

#include <algorithm>

#include "fuzz/c_abi/arguments.hpp"

namespace fa::fuzz {
namespace {

/// New rows of a tensor [b, h, s, d] or [total, h, d].
std::int64_t rows_of(const fa_tensor& tensor) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  const auto size = [&](int axis) { return std::clamp<std::int64_t>(tensor.shape[axis], 0, kMost); };
  return tensor.rank == 3 ? size(0) : std::min(size(0) * size(2), kMost);
}

}  // namespace

/// `count` numbers of 64 bits.
const std::int64_t* Arguments::long_numbers(std::int64_t most, std::int64_t count) {
  constexpr std::int64_t kMost = 65536;
  if (count > kMost) must_fail_ = true;
  std::vector<std::int64_t> values(static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, kMost)));
  for (std::int64_t& value : values) value = random_.between(-2, most);
  if (!values.empty() && bad()) values[random_.index(values.size())] = random_.wild();
  if (bad() && random_.one_in(3)) return nullptr;
  if (!bad() || random_.one_in(2)) return array(values);
  return reinterpret_cast<const std::int64_t*>(memory_.block(values.size() * sizeof(std::int64_t) + 1) + 1);
}

const fa_rotary_embedding* Arguments::rotary(const GivenConfig& config, std::int64_t rows, std::int32_t* dims) {
  *dims = 0;
  if (random_.one_in(3)) return nullptr;
  fa_rotary_embedding value{};
  const std::int64_t pairs = random_.between(0, std::clamp<std::int64_t>(config.seen.head_dim, 0, 512) / 2);
  value.dims = static_cast<std::int32_t>(2 * pairs);
  value.interleaved = random_.one_in(2);
  value.base = random_.one_in(2) ? 0 : 500000;
  if (bad()) value.base = static_cast<double>(number());
  spoil(&value.dims);
  if (value.dims != 0 && random_.one_in(3)) {
    constexpr std::int64_t kPositions = 200;
    const std::int32_t dtype = random_.one_in(2) && config.seen.dtype != FA_F64 ? FA_F32 : config.seen.dtype;
    value.cos = tensor(dtype, {kPositions, pairs}, Use::input, true);
    value.sin = bad() ? nullptr : tensor(dtype, {kPositions, pairs}, Use::input, true);
  }
  if (value.dims != 0 && random_.one_in(3)) {
    if (random_.one_in(2)) value.positions = lengths({5}, rows);
    if (value.positions == nullptr || bad()) value.positions_64 = long_numbers(100, rows);
  }
  const std::uint32_t size = struct_size(sizeof value);
  *dims = cut(value, size).dims;
  return write(value, size);
}

const fa_paged_cache* Arguments::paged_cache(const GivenConfig& config, std::int64_t requests, std::int64_t pages) {
  if (config.seen.page_size == 0 && !random_.one_in(4)) return nullptr;
  fa_paged_cache value{};
  if ((config.seen.page_size > 0) != bad())
    value.block_table = tensor(FA_I32, {requests + 1, pages}, Use::input, false);
  if (random_.one_in(3)) value.batch_index = lengths({0}, requests);
  if (random_.one_in(4)) value.seq_begin = lengths({0}, requests);
  return give(value);
}

const fa_append_inputs* Arguments::append(const GivenConfig& config) {
  const Sizes given = sizes(config);
  const std::int64_t s_new = std::min<std::int64_t>(given.s_q, 20);
  const bool packed = random_.one_in(2);
  const std::int32_t dtype = config.seen.dtype;
  const auto rows = [&](std::int64_t h, std::int64_t d, Use use, fa_tensor* seen = nullptr) {
    return packed ? tensor(dtype, {given.b * s_new + 1, h, d}, use, true, seen)
                  : tensor(dtype, {given.b, h, s_new, d}, use, true, seen);
  };
  fa_tensor k{};
  fa_append_inputs inputs{};
  inputs.k = rows(given.h_kv, given.d_qk, Use::input, &k);
  const bool latent = is_latent(config.seen);
  if (latent == bad()) inputs.v = rows(given.h_kv, given.d_v, Use::input);
  const std::int64_t new_rows = rows_of(k);
  inputs.b = given.b;
  spoil(&inputs.b);
  const std::int64_t b = packed ? std::clamp<std::int64_t>(inputs.b, -1, std::int64_t{1} << 40)
                                : std::clamp<std::int64_t>(k.shape[0], -1, std::int64_t{1} << 40);
  constexpr std::int64_t kPositions = 64;
  const std::int64_t page = std::clamp<std::int64_t>(config.seen.page_size, 0, 256);
  const std::int64_t pages = page > 0 ? random_.between(4, 6) : given.b + 1;
  const std::int64_t page_rows = page > 0 ? page : kPositions;
  const auto cache = [&](bool of_v) {
    const Rows stored = stored_rows(config.seen, given, of_v);
    return tensor(stored.dtype, {pages, given.h_kv, page_rows, stored.d}, Use::output, true);
  };
  inputs.k_cache = cache(false);
  if (latent == bad()) inputs.v_cache = cache(true);
  const bool has_scales = config.seen.has_k_dtype != 0 || config.seen.has_v_dtype != 0;
  inputs.scales_given = (has_scales && random_.one_in(3)) || bad();
  const Use use = inputs.scales_given != 0 ? Use::input : Use::output;
  inputs.k_scale = stored_scale(config.seen, given, false, pages, page_rows, use);
  inputs.v_scale = stored_scale(config.seen, given, true, pages, page_rows, use);
  inputs.cache = paged_cache(config, b, page > 0 ? (kPositions + page - 1) / page : 1);
  if (packed != bad()) {
    std::vector<std::int32_t> cu{0};
    for (std::int64_t i = 0; i < given.b; ++i)
      cu.push_back(cu.back() + static_cast<std::int32_t>(random_.below(static_cast<std::uint64_t>(s_new) + 1)));
    inputs.cu_seqlens_k_new = lengths(cu, b + 1);
  }
  inputs.seqused_kv = lengths({static_cast<std::int32_t>(s_new + random_.between(0, 20))}, b);
  if (random_.one_in(4)) inputs.slots_64 = long_numbers(pages * page_rows - 1, new_rows);
  if (random_.one_in(8)) inputs.slots = lengths({3}, new_rows);
  std::int32_t dims = 0;
  inputs.rotary = rotary(config, new_rows, &dims);
  if (dims != 0 && random_.one_in(2)) {
    const bool in_place = random_.one_in(2);
    inputs.q = rows(given.h_q, given.d_qk, in_place ? Use::output : Use::input);
    inputs.q_out = in_place ? inputs.q : rows(given.h_q, given.d_qk, Use::output);
  }
  if (!must_fail_) return bad() && random_.one_in(3) ? nullptr : give(inputs);
  fa_rotary_embedding odd{};  // behind the checks of tensors
  odd.dims = 3;
  inputs.rotary = write(odd, sizeof odd);
  return write(inputs, sizeof inputs);
}

const fa_append_shape* Arguments::append_shape(const GivenConfig& config) {
  if (bad() && random_.one_in(4)) return nullptr;
  fa_append_shape value{};
  value.rotary_dims = static_cast<std::int32_t>(2 * random_.between(0, std::clamp(config.seen.head_dim, 0, 512) / 2));
  value.interleaved = random_.one_in(2);
  value.has_table = value.rotary_dims != 0 && random_.one_in(3);
  value.table_dtype = config.seen.dtype;
  value.unaligned = random_.one_in(3);
  for (std::int32_t* const field : {&value.rotary_dims, &value.interleaved, &value.has_table, &value.table_dtype}) {
    spoil(field);
  }
  return give(value);
}

}  // namespace fa::fuzz
