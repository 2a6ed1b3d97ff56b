#include "support/paged_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <ostream>
#include <random>

#include "reference/geometry.hpp"
#include "reference/paged.hpp"
#include "support/packed_codes.hpp"

namespace fa::test {
namespace {

constexpr std::int64_t kSparePages = 3;
constexpr std::int32_t kRowsInFront = 2;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::int64_t total_rows(const PagedCase& c) {
  return std::accumulate(c.rows.begin(), c.rows.end(), std::int64_t{0}) + kRowsInFront + 1;
}

/// The first position that the first row of request `i` sees.
std::int64_t first_needed(const PagedCase& c, std::size_t i) {
  const AttentionConfig& config = c.variant.config;
  reference::Geometry geometry;
  geometry.s_q = c.rows[i];
  geometry.s_kv = c.keys[i];
  geometry.window_left = config.window_left;
  geometry.chunk = config.chunk;
  geometry.begin = c.begin.empty() ? 0 : c.begin[i];
  return geometry.first_key(0);
}

/// Entries that nothing may follow.
std::int32_t wild_entry(std::mt19937_64& engine) {
  constexpr std::int32_t kWild[] = {-1, -1, std::numeric_limits<std::int32_t>::max(),
                                    std::numeric_limits<std::int32_t>::min(), 1 << 20};
  return kWild[engine() % std::size(kWild)];
}

/// Stores a pool in 8 bits, each row by a scale of its own; the scales.
HostTensor store(HostTensor& pool, DType dtype, Layout layout) {
  const TensorView view = pool.view();
  HostTensor stored(dtype, view.shape[0], view.shape[1], view.shape[2], view.shape[3], layout);
  HostTensor scales(DType::f32, view.shape[0], view.shape[1], view.shape[2]);
  for (std::int64_t page = 0; page < view.shape[0]; ++page) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t row = 0; row < view.shape[2]; ++row) {
        double greatest = 0;
        for (std::int64_t d = 0; d < view.shape[3]; ++d) {
          greatest = std::max(greatest, std::abs(pool.at(page, h, row, d)));
        }
        scales.set(page, h, row, 0, greatest / (dtype == DType::e4m3 ? 448 : 127));
        const double scale = scales.at(page, h, row);
        for (std::int64_t d = 0; d < view.shape[3]; ++d) {
          stored.set(page, h, row, d, scale == 0 ? 0 : pool.at(page, h, row, d) / scale);
        }
      }
    }
  }
  pool = std::move(stored);
  return scales;
}

/// Stores a pool in 4 bits; scales and offsets of groups of columns, by their least and greatest numbers.
HostTensor store_u4(HostTensor& pool, int group, Layout layout) {
  const TensorView view = pool.view();
  const std::int64_t d = view.shape[3];
  HostTensor stored(DType::u4x2, view.shape[0], view.shape[1], view.shape[2], d / 2, layout);
  HostTensor scales(view.dtype, view.shape[0], view.shape[1], view.shape[2], 2 * d / group, layout);
  const TensorView codes = stored.view();
  for (std::int64_t page = 0; page < view.shape[0]; ++page) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t row = 0; row < view.shape[2]; ++row) {
        auto* const bytes = static_cast<std::byte*>(codes.data) + reference::row_offset(codes, page, h, row);
        for (std::int64_t first = 0; first < d; first += group) {
          double low = HUGE_VAL, high = -HUGE_VAL;
          for (std::int64_t i = first; i < first + group; ++i) {
            low = std::min(low, pool.at(page, h, row, i));
            high = std::max(high, pool.at(page, h, row, i));
          }
          const std::int64_t at = 2 * (first / group);
          scales.set(page, h, row, at, (high - low) / 15);
          scales.set(page, h, row, at + 1, low);
          const double scale = scales.at(page, h, row, at);
          for (std::int64_t i = first; i < first + group; ++i) {
            const double steps = scale == 0 ? 0 : (pool.at(page, h, row, i) - low) / scale;
            set_packed_code(bytes, i, static_cast<int>(std::clamp(std::nearbyint(steps), 0.0, 15.0)));
          }
        }
      }
    }
  }
  pool = std::move(stored);
  return scales;
}

/// Of a row of the table.
std::int64_t most_pages(const PagedCase& c) {
  return ceil_div(attention_of(c).s_kv, c.page_size) + 1;
}

/// Rows of a page, or of a row of a contiguous cache.
std::int64_t page_rows(const PagedCase& c) {
  constexpr std::int64_t kSpareRows = 5;
  return c.page_size == kContiguous ? attention_of(c).s_kv + kSpareRows : c.page_size;
}

/// The same of a contiguous cache, whose rows are those of the table, with an entry each.
std::int64_t fill_rows(const PagedCase& c, PagedData& data) {
  data.needed.assign(static_cast<std::size_t>(data.table_rows * data.page_rows), false);
  data.table.resize(static_cast<std::size_t>(data.table_rows));
  std::iota(data.table.begin(), data.table.end(), 0);
  for (std::size_t i = 0; i < c.keys.size(); ++i) {
    const std::int64_t row = data.batch_index.empty() ? static_cast<std::int64_t>(i) : data.batch_index[i];
    if (c.rows[i] == 0) continue;
    for (std::int64_t key = first_needed(c, i); key < c.keys[i]; ++key) {
      data.needed[static_cast<std::size_t>(row * data.page_rows + key)] = true;
    }
  }
  return data.table_rows;
}

/// Fills in the table, and which rows of the pool it leads to. Returns how many pages there are.
std::int64_t fill_table(const PagedCase& c, std::mt19937_64& engine, PagedData& data) {
  std::int64_t pages = kSparePages;
  for (const std::int32_t keys : c.keys) pages += ceil_div(keys, c.page_size);
  std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), engine);
  data.needed.assign(static_cast<std::size_t>(pages * c.page_size), false);
  data.table.resize(static_cast<std::size_t>(data.table_rows * data.max_pages));
  for (std::int32_t& entry : data.table) entry = wild_entry(engine);
  std::size_t next = 0;
  for (std::size_t i = 0; i < c.keys.size(); ++i) {
    const std::int64_t row = data.batch_index.empty() ? static_cast<std::int64_t>(i) : data.batch_index[i];
    std::int32_t* const entries = data.table.data() + row * data.max_pages;
    const std::int64_t first = first_needed(c, i);
    if (c.rows[i] == 0) continue;
    for (std::int64_t key = first; key < c.keys[i]; ++key) {
      const std::int64_t page = key / c.page_size;
      if (key == first || key % c.page_size == 0) {
        const bool shared = page == 0 && next > 0 && i % 2 == 1;
        entries[page] = shared ? order[0] : order[next++];
      }
      data.needed[static_cast<std::size_t>(entries[page] * c.page_size + key % c.page_size)] = true;
    }
  }
  return pages;
}

}  // namespace

void set_nan(HostTensor& pool, std::int64_t page, std::int64_t row) {
  const TensorView view = pool.view();
  for (std::int64_t h = 0; h < view.shape[1]; ++h) {
    for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
      pool.set(page, h, row, d, std::numeric_limits<double>::quiet_NaN());
    }
  }
}

HostTensor store_as(HostTensor& pool, DType dtype, int group, Layout layout) {
  return dtype == DType::u4x2 ? store_u4(pool, group, layout) : store(pool, dtype, layout);
}

HostTensor store_latent(HostTensor& pool, Layout layout) {
  constexpr std::int64_t kCodes = 512, kGroup = 128, kRotary = 64, kBytes = 656;
  const TensorView view = pool.view();
  HostTensor stored(DType::e4m3, view.shape[0], view.shape[1], view.shape[2], kBytes, layout);
  HostTensor wide(view.dtype, view.shape[0], view.shape[1], view.shape[2], view.shape[3], layout);
  HostTensor rotary(DType::bf16, 1, 1, 1, kRotary, Layout::bhsd);
  for (std::int64_t page = 0; page < view.shape[0]; ++page) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t row = 0; row < view.shape[2]; ++row) {
        const TensorView rows = stored.view();
        auto* const bytes = static_cast<std::byte*>(rows.data) + reference::row_offset(rows, page, h, row);
        for (std::int64_t first = 0; first < kCodes; first += kGroup) {
          double greatest = 0;
          for (std::int64_t d = first; d < first + kGroup; ++d) {
            greatest = std::max(greatest, std::abs(pool.at(page, h, row, d)));
          }
          const auto scale = static_cast<float>(greatest / 448);
          std::memcpy(bytes + kCodes + first / kGroup * 4, &scale, sizeof scale);
          for (std::int64_t d = first; d < first + kGroup; ++d) {
            stored.set(page, h, row, d, scale == 0 ? 0 : pool.at(page, h, row, d) / double{scale});
            wide.set(page, h, row, d, stored.at(page, h, row, d) * double{scale});
          }
        }
        for (std::int64_t i = 0; i < kRotary; ++i) {
          rotary.set(0, 0, 0, i, pool.at(page, h, row, kCodes + i));
          wide.set(page, h, row, kCodes + i, rotary.at(0, 0, 0, i));
        }
        std::memcpy(bytes + kCodes + kCodes / kGroup * 4, rotary.bytes().data(), rotary.bytes().size());
      }
    }
  }
  pool = std::move(stored);
  return wide;
}

void PrintTo(const PagedCase& c, std::ostream* out) {
  PrintTo(c.attention, out);
  *out << " " << c.variant.name << (c.page_size == kContiguous ? " contiguous" : " pages of ");
  if (c.page_size != kContiguous) *out << c.page_size;
  *out << (c.packed ? " packed" : "") << (c.k_dtype ? " k_" : "") << (c.k_dtype ? to_string(*c.k_dtype) : "")
       << (c.v_dtype ? " v_" : "") << (c.v_dtype ? to_string(*c.v_dtype) : "") << (c.indexed ? " indexed" : "")
       << (c.bounded ? " bounded" : "") << (c.value_in_key ? " value_in_key" : "");
  for (const auto& [name, values] :
       {std::pair{"rows", &c.rows}, std::pair{"keys", &c.keys}, std::pair{"begin", &c.begin}}) {
    *out << ", " << name;
    for (const std::int32_t value : *values) *out << ' ' << value;
  }
}

AttentionCase attention_of(const PagedCase& c) {
  AttentionCase result = c.attention;
  result.b = c.b();
  result.s_q = c.rows.empty() ? 0 : *std::max_element(c.rows.begin(), c.rows.end());
  result.s_kv = c.keys.empty() ? 0 : *std::max_element(c.keys.begin(), c.keys.end());
  return result;
}

VariantCase variant_of(const PagedCase& c) {
  // Of captures there is an element for all that a call may ask for.
  AttentionCase attention = attention_of(c);
  if (c.packed && !c.bounded) attention.s_q = total_rows(c);
  if (!c.bounded) attention.s_kv = page_rows(c) * (c.page_size == kContiguous ? 1 : most_pages(c));
  VariantCase variant(attention, c.variant);
  variant.config.page_size = c.page_size;
  variant.config.varlen = c.packed;
  if (c.value_in_key) variant.config.value_in_key = variant.config.head_dim_v;
  variant.config.k_dtype = c.k_dtype;
  variant.config.v_dtype = c.v_dtype;
  variant.config.group_size = c.group_size;
  variant.config.key_scales = c.key_scales;
  variant.config.value_scales = c.value_scales;
  return variant;
}

TensorView PagedData::k_scales() const {
  return k_scale.bytes().empty() ? TensorView() : k_scale.view();
}

TensorView PagedData::v_scales() const {
  return v_scale.bytes().empty() ? TensorView() : v_scale.view();
}

PackedSequences PagedData::sequences() const {
  PackedSequences result;
  result.b = static_cast<std::int64_t>(used_kv.size());
  if (!cu_q.empty()) result.cu_seqlens_q = cu_q.data();
  result.seqused_kv = used_kv.data();
  result.max_s_q = max_s_q;
  result.max_s_kv = max_s_kv;
  return result;
}

PagedCache PagedData::cache() const {
  PagedCache result;
  if (!contiguous)
    result.block_table = TensorView(static_cast<const void*>(table.data()), DType::i32, {table_rows, max_pages});
  if (!batch_index.empty()) result.batch_index = batch_index.data();
  if (!begin.empty()) result.seq_begin = begin.data();
  return result;
}

namespace {

/// The first columns of `from`, as many as `to` has.
void copy_columns(const HostTensor& from, HostTensor& to) {
  const TensorView view = to.view();
  for (std::int64_t page = 0; page < view.shape[0]; ++page) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t row = 0; row < view.shape[2]; ++row) {
        for (std::int64_t d = 0; d < view.shape[3]; ++d) to.set(page, h, row, d, from.at(page, h, row, d));
      }
    }
  }
}

}  // namespace

namespace {

/// Of 8-bit floats.
void add_scales_of(const PagedCase& c, const AttentionCase& of_q, const AttentionCase& of_pool, PagedData& data) {
  AttentionInputs queries, heads;
  add_scales(of_q, queries);
  data.q_scale = std::move(queries.q_scale);
  data.row_bias = std::move(queries.row_bias);
  add_scales(attention_of(c), heads);
  if (c.key_scales) add_key_scales(of_pool, heads);
  if (c.value_scales) add_value_scales(of_pool, heads);
  data.k_scale = std::move(heads.k_scale);
  data.v_scale = std::move(heads.v_scale);
}

}  // namespace

PagedData make_data(const PagedCase& c) {
  const AttentionCase attention = attention_of(c);
  std::mt19937_64 engine(attention.seed * 1000 + static_cast<std::uint64_t>(c.page_size));
  PagedData data;
  data.used_kv = c.keys;
  data.begin = c.begin;
  data.table_rows = attention.b;
  data.contiguous = c.page_size == kContiguous;
  data.page_rows = page_rows(c);
  data.max_pages = data.contiguous ? 1 : most_pages(c);
  if (c.indexed) {
    data.table_rows += 2;
    std::vector<std::int32_t> rows(static_cast<std::size_t>(data.table_rows));
    std::iota(rows.begin(), rows.end(), 0);
    std::shuffle(rows.begin(), rows.end(), engine);
    data.batch_index.assign(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(attention.b));
  }
  if (c.packed) {
    data.cu_q = {kRowsInFront};
    for (const std::int32_t rows : c.rows) data.cu_q.push_back(data.cu_q.back() + rows);
  }
  if (c.bounded) {
    data.max_s_q = c.packed ? attention.s_q : 0;
    data.max_s_kv = attention.s_kv;
  }
  AttentionCase of_q = attention;
  if (c.packed) {
    of_q.b = 1;
    of_q.s_q = total_rows(c);
  }
  data.q = make_inputs(of_q).q;
  AttentionCase of_pool = attention;
  of_pool.b = data.contiguous ? fill_rows(c, data) : fill_table(c, engine, data);
  of_pool.s_kv = data.page_rows;
  of_pool.s_q = 0;
  AttentionInputs pool = make_inputs(of_pool);
  data.k = std::move(pool.k);
  data.v = std::move(pool.v);
  if (c.latent()) {
    data.wide_k = store_latent(data.k, of_pool.layout);
  } else if (c.k_dtype) {
    data.k_scale = store_as(data.k, *c.k_dtype, c.group_size, of_pool.layout);
  }
  if (c.v_dtype) data.v_scale = store_as(data.v, *c.v_dtype, c.group_size, of_pool.layout);
  if (c.scaled) add_scales_of(c, of_q, of_pool, data);
  for (std::size_t i = 0; i < data.needed.size(); ++i) {
    if (data.needed[i]) continue;
    const auto row = static_cast<std::int64_t>(i);
    set_nan(data.k, row / data.page_rows, row % data.page_rows);
    set_nan(data.v, row / data.page_rows, row % data.page_rows);
    if ((c.k_dtype && !c.latent()) || c.key_scales) set_nan(data.k_scale, row / data.page_rows, row % data.page_rows);
    if (c.v_dtype || c.value_scales) set_nan(data.v_scale, row / data.page_rows, row % data.page_rows);
  }
  if (c.value_in_key) copy_columns(c.latent() ? data.wide_k : data.k, data.v);
  return data;
}

namespace {

AttentionOutputs outputs_of(const PagedCase& c, const PagedData& data, DType dtype) {
  AttentionCase like = attention_of(c);
  like.dtype = dtype;
  like.b = data.q.view().shape[0];
  like.s_q = data.q.view().shape[2];
  return make_outputs(like);
}

}  // namespace

AttentionOutputs make_outputs(const PagedCase& c, const PagedData& data) {
  return outputs_of(c, data, c.attention.dtype);
}

PagedSums::PagedSums(const PagedCase& c, const PagedData& data)
    : b(c.b()),
      heads(c.variant.config.statistics.summed_heads() == ColumnSums::kv_heads ? c.attention.h_kv : c.attention.h_q),
      s_kv(data.max_pages * data.page_rows) {
  if (data.max_s_kv != 0) s_kv = std::min(s_kv, data.max_s_kv);
  sums.resize(static_cast<std::size_t>(b * heads * s_kv), -1);
  top_keys.resize(static_cast<std::size_t>(b * heads * c.variant.config.statistics.top_keys), -2);
}

double error_of(const PagedCase& c, const PagedSums& actual, const PagedSums& expected, bool without_sums) {
  // Numbers of 4 bits are rounded to the queries' type.
  const double score = c.k_dtype == DType::u4x2 ? 4e-3 : 3e-6 * static_cast<double>(c.attention.d_qk);
  const auto distance = [score](double got, double wanted, double factor) {
    if (got == wanted) return 0.0;
    const double error = std::abs(got - wanted) / (factor * (2e-5 + 8 * score + (1e-4 + 8 * score) * std::abs(wanted)));
    return std::isnan(error) ? HUGE_VAL : error;
  };
  double worst = 0;
  for (std::size_t i = 0; !without_sums && i < expected.sums.size(); ++i) {
    worst = std::max(worst, distance(actual.sums[i], expected.sums[i], 1));
  }
  const auto count = static_cast<std::size_t>(c.variant.config.statistics.top_keys);
  for (std::size_t i = 0; i < expected.top_keys.size(); ++i) {
    const std::int32_t key = actual.top_keys[i], wanted = expected.top_keys[i];
    if (key == wanted) continue;
    const std::size_t row = i / count, request = row / static_cast<std::size_t>(expected.heads);
    const std::int32_t begin = c.begin.empty() ? 0 : c.begin[request];
    if (key < begin || key >= c.keys[request] || wanted < 0) return HUGE_VAL;
    const auto first = actual.top_keys.begin() + static_cast<std::ptrdiff_t>(row * count);
    if (std::count(first, first + static_cast<std::ptrdiff_t>(count), key) != 1) return HUGE_VAL;
    const double* const sums = expected.sums.data() + row * static_cast<std::size_t>(expected.s_kv);
    worst = std::max(worst, distance(sums[key], sums[wanted], 2));
  }
  return worst;
}

AttentionOutputs reference_f64(const PagedCase& c, const PagedData& data, PagedSums* sums) {
  AttentionOutputs outputs = outputs_of(c, data, DType::f64);
  const VariantCase variant = variant_of(c);
  std::vector<expression::CapturedView> views;
  reference::ForwardArgs args;
  args.q = data.q.view();
  args.k = c.latent() ? data.wide_k.view() : data.k.view();
  args.v = data.v.view();
  args.k_scale = data.k_scales();
  args.v_scale = data.v_scales();
  if (!data.q_scale.bytes().empty()) args.q_scale = data.q_scale.view();
  if (!data.row_bias.bytes().empty()) args.row_bias = data.row_bias.view();
  args.k_scale_of_requests = c.scaled && !c.key_scales;
  args.v_scale_of_requests = c.scaled && !c.value_scales;
  args.o = outputs.o.view();
  args.lse = outputs.lse.view();
  args.scale = static_cast<double>(c.attention.softmax_scale());
  args.causal = c.attention.causal;
  args.variant = variant_args(variant, views);
  args.f64 = true;
  if (sums != nullptr) {
    args.statistics.column_sums = TensorView(sums->sums.data(), DType::f64, {sums->b, sums->heads, sums->s_kv});
    const std::int64_t count = c.variant.config.statistics.top_keys;
    if (count > 0) {
      args.statistics.top_keys = TensorView(sums->top_keys.data(), DType::i32, {sums->b, sums->heads, count});
    }
    args.statistics.of_kv_heads = c.variant.config.statistics.summed_heads() == ColumnSums::kv_heads;
  }
  reference::forward(args, data.sequences(), data.cache(), c.packed);
  return outputs;
}

}  // namespace fa::test
