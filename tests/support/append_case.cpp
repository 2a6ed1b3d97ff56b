#include "support/append_case.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <numeric>
#include <ostream>
#include <random>

#include "reference/geometry.hpp"

namespace fa::test {
namespace {

using At = std::array<std::int64_t, 4>;

using Random = std::mt19937;

template <class T, std::size_t kCount>
T pick(Random& random, const std::array<T, kCount>& values) {
  return values[random() % kCount];
}

}  // namespace

std::int64_t AppendCase::new_rows() const {
  return std::accumulate(rows.begin(), rows.end(), 2 * padding);
}

AttentionConfig AppendCase::config() const {
  AttentionConfig config;
  config.head_dim = static_cast<int>(d_qk);
  config.head_dim_v = static_cast<int>(d_v);
  config.dtype = dtype;
  config.page_size = page_size;
  config.k_dtype = k_dtype;
  config.v_dtype = v_dtype;
  config.group_size = group_size;
  if (latent) {
    config.head_dim_v = 0;
    config.value_in_key = static_cast<int>(d_v);
    if (page_size == 0) config.page_size = kContiguous;
  }
  return config;
}

AppendShape AppendCase::shape() const {
  return {rotary_dims, interleaved, table, aligned, scales_given};
}

std::string to_string(const AppendCase& c) {
  return fmt::format(
      "{} h {}/{} d {}/{} page {} rows {} before {} {}{}{} slots {} positions {} + {} rotary {}{} base {} table {}{}{} "
      "layout {} cache {}/{} group {}{}{}{}{} seed {}",
      to_string(c.dtype), c.h_q, c.h_kv, c.d_qk, c.d_v, c.page_size, fmt::join(c.rows, ","), fmt::join(c.before, ","),
      c.packed ? "packed" : "dense", c.padding != 0 ? " padded" : "", c.batch_index ? " indexed" : "",
      static_cast<int>(c.slots), static_cast<int>(c.positions), c.far, c.rotary_dims,
      c.interleaved ? " interleaved" : "", c.base, c.table ? to_string(*c.table) : "none",
      c.aligned ? "" : " unaligned", c.in_place ? " in place" : "", static_cast<int>(c.layout),
      to_string(c.k_dtype.value_or(c.dtype)), to_string(c.v_dtype.value_or(c.dtype)), c.group_size,
      c.scales_given ? " by given scales" : "", c.latent ? " latent" : "", c.extreme ? " extreme" : "",
      c.hostile ? " hostile" : "", c.seed);
}

void PrintTo(const AppendCase& c, std::ostream* out) {
  *out << to_string(c);
}

void draw_requests(AppendCase& c, std::uint32_t seed) {
  Random random(seed);
  c.seed = seed;
  c.h_kv = pick(random, std::array<std::int64_t, 5>{1, 2, 3, 5, 8});
  const bool queries = c.rotary_dims > 0 && random() % 3 != 0;
  c.h_q = queries ? c.h_kv * pick(random, std::array<std::int64_t, 3>{1, 2, 5}) : 0;
  c.packed = random() % 3 != 0;
  c.padding = c.packed ? pick(random, std::array<std::int64_t, 3>{0, 0, 2}) : 0;
  const std::size_t count = pick(random, std::array<std::size_t, 5>{1, 2, 3, 7, 40});
  const auto equal = static_cast<std::int64_t>(random() % 4 + 1);
  const bool even = !c.packed || random() % 3 == 0;
  c.rows.clear();
  c.before.clear();
  for (std::size_t i = 0; i < count; ++i) {
    const auto ragged = static_cast<std::int64_t>(random() % 3 == 0 ? 0 : random() % (count > 7 ? 4 : 21));
    c.rows.push_back(even ? equal : ragged);
    c.before.push_back(static_cast<std::int64_t>(random() % 50));
  }
  // As many rows as if all had the same number.
  while (!even && random() % 8 != 0 && c.new_rows() % static_cast<std::int64_t>(count) != 0) ++c.rows.back();
  c.batch_index = random() % 3 == 0;
  c.slots = random() % 3 == 0 ? pick(random, std::array{RowNumbers::i32, RowNumbers::i64}) : RowNumbers::none;
  c.positions = c.rotary_dims > 0 && random() % 2 == 0 ? pick(random, std::array{RowNumbers::i32, RowNumbers::i64})
                                                       : RowNumbers::none;
  c.far = c.table ? 0 : pick(random, std::array<std::int64_t, 4>{0, 1 << 10, 1 << 20, 1 << 27});
  c.in_place = random() % 2 == 0;
  c.layout = pick(random, std::array{PoolLayout::hnd, PoolLayout::nhd, PoolLayout::interleaved});
  c.base = pick(random, std::array{10000.0, 500000.0, 1e6, 37.5, 1.0});
}

AppendCase random_append_case(std::uint32_t seed, bool hostile) {
  Random random(seed * 2654435761u + 1);
  AppendCase c;
  c.hostile = hostile;
  c.dtype = pick(random, std::array{DType::f16, DType::bf16, DType::f32});
  c.d_qk = pick(random, std::array<std::int64_t, 7>{8, 24, 40, 64, 80, 128, 256});
  c.d_v = random() % 3 == 0 ? pick(random, std::array<std::int64_t, 4>{8, 64, 72, 128}) : c.d_qk;
  c.page_size = pick(random, std::array<std::int64_t, 9>{0, 1, 3, 8, 12, 16, 40, 64, 256});
  c.rotary_dims = pick(random, std::array{0, 2, 6, 8, 20, 24, 32, 64, 128, 256});
  if (c.rotary_dims > c.d_qk) c.rotary_dims = static_cast<int>(c.d_qk);
  c.interleaved = c.rotary_dims > 0 && random() % 2 == 0;
  if (c.rotary_dims > 0 && random() % 3 == 0) c.table = random() % 2 == 0 ? DType::f32 : c.dtype;
  c.aligned = random() % 4 != 0;
  if (c.dtype != DType::f32 && random() % 3 == 0) {
    constexpr std::array<std::optional<DType>, 4> kStored{DType::e4m3, DType::i8, std::nullopt, DType::u4x2};
    c.k_dtype = pick(random, kStored);
    c.v_dtype = c.k_dtype ? pick(random, kStored) : std::optional(DType::e4m3);
    const bool u4 = c.k_dtype == DType::u4x2 || c.v_dtype == DType::u4x2;
    if (u4) c.group_size = pick(random, std::array{32, 32, 64, 128});
    const std::int64_t granule = std::max(c.group_size, 16);
    c.d_qk = (c.d_qk + granule - 1) / granule * granule;
    c.d_v = (c.d_v + granule - 1) / granule * granule;
    c.scales_given = random() % 3 == 0;
    c.extreme = u4 && c.rotary_dims == 0 && random() % 2 == 0;
  }
  if (c.dtype != DType::f32 && random() % 6 == 0) {
    c.latent = true;
    c.d_qk = 576;
    c.d_v = 512;
    c.k_dtype = DType::e4m3;
    c.v_dtype = std::nullopt;
    c.group_size = 0;
    c.extreme = false;
    c.scales_given = random() % 3 == 0;
    c.rotary_dims = std::min(c.rotary_dims, 64);
  }
  draw_requests(c, seed + 1);
  return c;
}

/// Memory of a tensor whose axes lie in `order`, the outermost first. Unaligned rows start one element behind a
/// multiple of 16 bytes.
void AppendData::add_tensor(AppendPart part, const char* name, At shape, std::array<int, 4> order, bool fill,
                            std::optional<DType> stored) {
  TensorView view;
  view.rank = 4;
  view.dtype = stored.value_or(c_.dtype);
  view.shape = shape;
  const bool aligned = c_.aligned || stored;
  const std::int64_t gap = aligned ? 16 / static_cast<std::int64_t>(size_of(view.dtype)) : 1;
  std::int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    const auto axis = static_cast<std::size_t>(order[static_cast<std::size_t>(i)]);
    view.strides[axis] = stride;
    stride *= shape[axis];
    if (i == 3) stride += gap;
  }
  const std::size_t start = aligned ? 0 : size_of(view.dtype);
  AppendBuffer& buffer = at(part);
  buffer.name = name;
  buffer.bytes.assign(static_cast<std::size_t>(stride) * size_of(view.dtype) + start, std::byte{0xff});
  starts_[static_cast<std::size_t>(part)] = start;
  views_[static_cast<std::size_t>(part)] = view;
  if (!fill) return;
  Random random(c_.seed * 31 + static_cast<std::uint32_t>(part));
  const double greatest = c_.dtype == DType::f16 ? 65504 : 0x1.fep127;
  for_each_row(part, [&](std::size_t at_byte, std::size_t bytes) {
    TensorView row(buffer.bytes.data() + at_byte, view.dtype, {static_cast<std::int64_t>(bytes / size_of(view.dtype))});
    for (std::int64_t i = 0; i < row.shape[0]; ++i) {
      const double usual = static_cast<double>(random() % 4096) / 1024.0 - 2.0;
      reference::store_element(row, i, c_.extreme && i % 2 == 0 ? std::copysign(greatest, usual) : usual);
    }
  });
}

template <class Number>
void AppendData::add_numbers(AppendPart part, const char* name, const std::vector<Number>& numbers) {
  AppendBuffer& buffer = at(part);
  buffer.name = name;
  buffer.bytes.resize(numbers.size() * sizeof(Number));
  if (!numbers.empty()) std::memcpy(buffer.bytes.data(), numbers.data(), buffer.bytes.size());
}

AppendData::AppendData(const AppendCase& c) : c_(c) {
  const std::int64_t b = c_.packed ? 1 : static_cast<std::int64_t>(c_.rows.size());
  const std::int64_t rows = c_.packed ? c_.new_rows() : c_.rows.front();
  constexpr std::array<int, 4> kBshd{0, 2, 1, 3};
  add_tensor(AppendPart::k, "k", {b, c_.h_kv, rows, c_.d_qk}, kBshd, true);
  if (!c_.latent) add_tensor(AppendPart::v, "v", {b, c_.h_kv, rows, c_.d_v}, kBshd, true);
  if (c_.h_q > 0) {
    add_tensor(AppendPart::q, "q", {b, c_.h_q, rows, c_.d_qk}, kBshd, true);
    if (!c_.in_place) add_tensor(AppendPart::q_out, "q_out", {b, c_.h_q, rows, c_.d_qk}, {0, 1, 2, 3}, false);
    at(c_.in_place ? AppendPart::q : AppendPart::q_out).written = true;
  }
  add_requests();
  add_cache();
  if (c_.slots != RowNumbers::none) add_slots();
  if (c_.rotary_dims > 0) add_rotary();
}

void AppendData::add_requests() {
  Random random(c_.seed * 17 + 3);
  const auto count = static_cast<std::int64_t>(c_.rows.size());
  std::int64_t longest = 1;
  for (std::size_t i = 0; i < c_.rows.size(); ++i) longest = std::max(longest, c_.before[i] + c_.rows[i]);
  const std::int64_t page = page_rows_ = c_.page_size > 0 ? c_.page_size : longest + 3;
  max_pages_ = c_.page_size > 0 ? (longest + page - 1) / page + 1 : 1;
  table_rows_ = count + (c_.batch_index ? 3 : 0);
  pages_ = c_.page_size > 0 ? count * max_pages_ + 5 : table_rows_;
  std::vector<std::int32_t> cu{static_cast<std::int32_t>(c_.padding)}, used, index;
  std::vector<std::int32_t> places(static_cast<std::size_t>(std::max(table_rows_, pages_)));
  std::iota(places.begin(), places.end(), 0);
  std::vector<std::int32_t> requests(places.begin(), places.begin() + table_rows_);
  std::shuffle(requests.begin(), requests.end(), random);
  std::vector<std::int32_t> pages(places.begin(), places.begin() + pages_);
  std::shuffle(pages.begin(), pages.end(), random);
  std::vector<std::int32_t> table(static_cast<std::size_t>(table_rows_ * max_pages_), -1);
  std::size_t next = 0;
  rows_.assign(static_cast<std::size_t>(c_.new_rows()), Row{});
  for (std::int64_t i = 0; i < count; ++i) {
    const auto n = static_cast<std::size_t>(i);
    std::int64_t request = c_.batch_index ? requests[n] : i;
    std::int64_t before = c_.before[n];
    if (c_.hostile && random() % 4 == 0)
      before = std::array<std::int64_t, 3>{-7, max_pages_ * page - 1, 1 << 30}[random() % 3];
    if (c_.hostile && c_.batch_index && random() % 4 == 0) request = random() % 2 == 0 ? -1 : table_rows_ + 9;
    used.push_back(static_cast<std::int32_t>(before + c_.rows[n]));
    index.push_back(static_cast<std::int32_t>(request));
    for (std::int64_t j = 0; j < c_.rows[n]; ++j) {
      Row& row = rows_[static_cast<std::size_t>(cu.back() + j)];
      row = {.known = true, .position = before + j};
      if (request < 0 || request >= table_rows_ || row.position < 0 || row.position >= max_pages_ * page) continue;
      std::int32_t& entry = table[static_cast<std::size_t>(request * max_pages_ + row.position / page)];
      if (c_.page_size == 0) {
        entry = static_cast<std::int32_t>(request);
      } else if (entry == -1) {
        entry = pages[next++];
        if (c_.hostile && random() % 4 == 0) entry = random() % 2 == 0 ? -3 : static_cast<std::int32_t>(pages_ + 2);
      }
      if (entry >= 0 && entry < pages_) row.page = entry, row.row = row.position % page;
    }
    cu.push_back(static_cast<std::int32_t>(cu.back() + c_.rows[n]));
  }
  if (c_.packed) add_numbers(AppendPart::cu, "cu_seqlens_k_new", cu);
  add_numbers(AppendPart::used, "seqused_kv", used);
  if (c_.batch_index) add_numbers(AppendPart::index, "batch_index", index);
  if (c_.page_size > 0) add_numbers(AppendPart::table, "block_table", table);
}

void AppendData::add_cache() {
  const bool nhd = c_.layout != PoolLayout::hnd;
  const auto columns = [](const std::optional<DType>& stored, std::int64_t d) {
    return stored == DType::u4x2 ? d / 2 : d;
  };
  const std::array<int, 4> order = nhd ? std::array<int, 4>{0, 2, 1, 3} : std::array<int, 4>{0, 1, 2, 3};
  if (c_.latent) return add_latent_cache(order);
  add_tensor(AppendPart::k_cache, "k_cache", {pages_, c_.h_kv, page_rows_, columns(c_.k_dtype, c_.d_qk)}, order, true,
             c_.k_dtype);
  add_tensor(AppendPart::v_cache, "v_cache", {pages_, c_.h_kv, page_rows_, columns(c_.v_dtype, c_.d_v)}, order, true,
             c_.v_dtype);
  at(AppendPart::k_cache).written = at(AppendPart::v_cache).written = true;
  const auto scales = [&](AppendPart part, const char* name, const std::optional<DType>& stored, std::int64_t d) {
    if (!stored) return;
    if (*stored == DType::u4x2) return add_pairs(part, name, d, order);
    add_scales(part, name, order);
  };
  scales(AppendPart::k_scale, "k_scale", c_.k_dtype, c_.d_qk);
  scales(AppendPart::v_scale, "v_scale", c_.v_dtype, c_.d_v);
  if (c_.layout != PoolLayout::interleaved || c_.d_qk != c_.d_v || c_.k_dtype != c_.v_dtype) return;
  // One tensor [pages, 2, rows, h, d]: V's page is the other half of K's.
  TensorView& k = views_[static_cast<std::size_t>(AppendPart::k_cache)];
  TensorView& v = views_[static_cast<std::size_t>(AppendPart::v_cache)];
  const auto half = static_cast<std::size_t>(k.strides[0]) * size_of(k.dtype);
  k.strides[0] *= 2;
  v.strides[0] = k.strides[0];
  AppendBuffer& both = at(AppendPart::k_cache);
  both.bytes.resize(2 * both.bytes.size(), std::byte{0x2a});
  starts_[static_cast<std::size_t>(AppendPart::v_cache)] = start_of(AppendPart::k_cache) + half;
  at(AppendPart::v_cache) = {};
}

/// Rows of codes, of which four words are scales.
void AppendData::add_latent_cache(std::array<int, 4> order) {
  add_tensor(AppendPart::k_cache, "k_cache", {pages_, c_.h_kv, page_rows_, kLatentBytes}, order, true, DType::e4m3);
  at(AppendPart::k_cache).written = true;
  Random random(c_.seed * 47);
  for_each_row(AppendPart::k_cache, [&](std::size_t at_byte, std::size_t) {
    for (std::int64_t group = 0; group < kLatentCodes / kLatentGroup; ++group) {
      const float scale = static_cast<float>(random() % 1000 + 1) / 16384.0F;
      std::memcpy(at(AppendPart::k_cache).bytes.data() + at_byte + kLatentCodes + 4 * group, &scale, sizeof scale);
    }
  });
}

void AppendData::add_scales(AppendPart part, const char* name, std::array<int, 4> order) {
  add_tensor(part, name, {pages_, c_.h_kv, page_rows_, 1}, order, false, DType::f32);
  at(part).written = !c_.scales_given;
  Random random(c_.seed * 41 + static_cast<std::uint32_t>(part));
  for_each_row(part, [&](std::size_t at_byte, std::size_t) {
    const float scale = static_cast<float>(random() % 1000 + 1) / 16384.0F;
    std::memcpy(at(part).bytes.data() + at_byte, &scale, sizeof scale);
  });
}

/// Scales and offsets, whose words are always aligned.
void AppendData::add_pairs(AppendPart part, const char* name, std::int64_t columns, std::array<int, 4> order) {
  const DType dtype = c_.dtype;
  add_tensor(part, name, {pages_, c_.h_kv, page_rows_, 2 * columns / c_.group_size}, order, false, dtype);
  at(part).written = !c_.scales_given;
  Random random(c_.seed * 43 + static_cast<std::uint32_t>(part));
  for_each_row(part, [&](std::size_t at_byte, std::size_t bytes) {
    TensorView row(at(part).bytes.data() + at_byte, dtype, {static_cast<std::int64_t>(bytes / size_of(dtype))});
    for (std::int64_t i = 0; i < row.shape[0]; i += 2) {
      reference::store_element(row, i, static_cast<double>(random() % 1000 + 1) / 4096.0);
      reference::store_element(row, i + 1, -static_cast<double>(random() % 1000) / 512.0);
    }
  });
}

/// Slots that say what the block table says, some of them negative; hostile ones beyond the cache.
void AppendData::add_slots() {
  Random random(c_.seed * 13 + 5);
  std::vector<std::int64_t> slots;
  for (Row& row : rows_) {
    std::int64_t slot = row.page < 0 ? -1 : row.page * page_rows_ + row.row;
    if (random() % 5 == 0) slot = -static_cast<std::int64_t>(random() % 3) - 1;
    if (c_.hostile && random() % 5 == 0) {
      slot = pages_ * page_rows_ + static_cast<std::int64_t>(random() % 2);
      if (c_.slots == RowNumbers::i64 && random() % 2 == 0) slot = (std::int64_t{1} << 40) + 1;
    }
    slots.push_back(slot);
    if (slot < 0 || slot >= pages_ * page_rows_) row.page = -1;
    // Nothing else says which rows there are.
    if (c_.rotary_dims == 0 || c_.positions != RowNumbers::none) row.known = true;
  }
  if (c_.slots == RowNumbers::i64) return add_numbers(AppendPart::slots, "slots_64", slots);
  add_numbers(AppendPart::slots, "slots", std::vector<std::int32_t>(slots.begin(), slots.end()));
}

void AppendData::add_rotary() {
  Random random(c_.seed * 11 + 7);
  std::int64_t last = 0;
  std::vector<std::int64_t> positions;
  for (Row& row : rows_) {
    if (c_.positions != RowNumbers::none) row.position = c_.far + static_cast<std::int64_t>(random() % 100);
    positions.push_back(row.position);
    if (row.position < 1000) last = std::max(last, row.position);
  }
  if (c_.positions == RowNumbers::i64) add_numbers(AppendPart::positions, "positions_64", positions);
  if (c_.positions == RowNumbers::i32) {
    add_numbers(AppendPart::positions, "positions", std::vector<std::int32_t>(positions.begin(), positions.end()));
  }
  if (!c_.table) return;
  const std::int64_t pairs = c_.rotary_dims / 2;
  const std::int64_t pitch = c_.aligned ? (pairs + 7) / 8 * 8 : pairs + 1;
  for (const auto part : {AppendPart::cos, AppendPart::sin}) {
    TensorView& view = views_[static_cast<std::size_t>(part)];
    view.rank = 2;
    view.dtype = *c_.table;
    view.shape = {last + 1, pairs};
    view.strides = {pitch, 1};
    AppendBuffer& buffer = at(part);
    buffer.name = part == AppendPart::cos ? "cos" : "sin";
    buffer.bytes.assign(static_cast<std::size_t>((last + 1) * pitch) * size_of(view.dtype), std::byte{0xff});
    TensorView filled = view;
    filled.data = buffer.bytes.data();
    for (std::int64_t i = 0; i <= last; ++i) {
      for (std::int64_t j = 0; j < pairs; ++j) {
        const double angle = 0.37 * static_cast<double>(i) / static_cast<double>(j + 1);
        reference::store_element(filled, i * pitch + j, part == AppendPart::cos ? std::cos(angle) : std::sin(angle));
      }
    }
  }
}

AppendInputs AppendData::inputs(const std::array<void*, kAppendParts>& memory) const {
  const auto address = [&](AppendPart part) { return memory[static_cast<std::size_t>(part)]; };
  const auto tensor = [&](AppendPart part) {
    TensorView view = views_[static_cast<std::size_t>(part)];
    const bool shared = part == AppendPart::v_cache && at(part).bytes.empty();
    void* const base = address(shared ? AppendPart::k_cache : part);
    if (view.defined()) view.data = static_cast<std::byte*>(base) + start_of(part);
    return view;
  };
  const auto rows = [&](AppendPart part) {
    const TensorView view = tensor(part);
    if (!c_.packed || !view.defined()) return view;
    const std::array<std::int64_t, 3> shape{view.shape[2], view.shape[1], view.shape[3]};
    const std::array<std::int64_t, 3> strides{view.strides[2], view.strides[1], view.strides[3]};
    return TensorView(view.data, view.dtype, shape, strides);
  };
  AppendInputs inputs{rows(AppendPart::k), rows(AppendPart::v), tensor(AppendPart::k_cache),
                      tensor(AppendPart::v_cache)};
  const auto scales = [&](AppendPart part) {
    TensorView view = tensor(part);
    if (!view.defined() || size_of(view.dtype) == 2) return view;
    view.rank = 3;
    view.shape[3] = view.strides[3] = 0;
    return view;
  };
  inputs.k_scale = scales(AppendPart::k_scale);
  inputs.v_scale = scales(AppendPart::v_scale);
  inputs.scales_given = c_.scales_given;
  inputs.b = static_cast<std::int64_t>(c_.rows.size());
  inputs.cu_seqlens_k_new = static_cast<const std::int32_t*>(address(AppendPart::cu));
  inputs.seqused_kv = static_cast<const std::int32_t*>(address(AppendPart::used));
  inputs.cache.batch_index = static_cast<const std::int32_t*>(address(AppendPart::index));
  if (c_.page_size > 0) {
    inputs.cache.block_table = TensorView(address(AppendPart::table), DType::i32, {table_rows_, max_pages_});
  }
  if (c_.slots == RowNumbers::i32) inputs.slots = static_cast<const std::int32_t*>(address(AppendPart::slots));
  if (c_.slots == RowNumbers::i64) inputs.slots_64 = static_cast<const std::int64_t*>(address(AppendPart::slots));
  inputs.q = rows(AppendPart::q);
  inputs.q_out = rows(c_.in_place ? AppendPart::q : AppendPart::q_out);
  RotaryEmbedding& rotary = inputs.rotary;
  rotary.dims = c_.rotary_dims;
  rotary.interleaved = c_.interleaved;
  rotary.base = c_.base;
  rotary.cos = tensor(AppendPart::cos);
  rotary.sin = tensor(AppendPart::sin);
  void* const positions = address(AppendPart::positions);
  if (c_.positions == RowNumbers::i32) rotary.positions = static_cast<const std::int32_t*>(positions);
  if (c_.positions == RowNumbers::i64) rotary.positions_64 = static_cast<const std::int64_t*>(positions);
  return inputs;
}

AppendInputs AppendData::inputs() {
  std::array<void*, kAppendParts> memory{};
  for (std::size_t i = 0; i < kAppendParts; ++i)
    memory[i] = buffers_[i].bytes.empty() ? nullptr : buffers_[i].bytes.data();
  return inputs(memory);
}

std::size_t AppendData::offset(AppendPart part, At place) const {
  const TensorView& view = views_[static_cast<std::size_t>(part)];
  std::int64_t elements = 0;
  for (std::size_t axis = 0; axis < 4; ++axis) elements += place[axis] * view.strides[axis];
  return start_of(part) + static_cast<std::size_t>(elements) * size_of(view.dtype);
}

}  // namespace fa::test
