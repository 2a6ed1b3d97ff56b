#include "support/shared_case.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <ostream>
#include <random>

#include "api/variants.hpp"
#include "reference/paged.hpp"
#include "support/paged_case.hpp"

namespace fa::test {
namespace {

constexpr std::int32_t kNowhere = 1 << 28;  // beyond every pool
constexpr std::int32_t kRowsInFront = 1;
constexpr std::int64_t kRowsBehind = 1;
constexpr int kDistance = 20;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// From -1 to 1, by what a number is of.
double value_of(std::uint64_t seed, std::uint64_t owner, std::int64_t position, std::int64_t h, std::int64_t d) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + owner * 0xd6e8feb86659fd93u +
                    static_cast<std::uint64_t>(position) * 131071u + static_cast<std::uint64_t>(h) * 8191u +
                    static_cast<std::uint64_t>(d);
  for (int i = 0; i < 3; ++i) x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9u;
  return static_cast<double>(x >> 11) * 0x1p-52 - 1;
}

/// Who positions are of, from `begin` on; those in front are of `parent`.
struct Owner {
  int parent = -1;
  std::int32_t begin = 0, end = 0;
  std::vector<std::int32_t> pages;  // from that of `begin` on
};

class Builder {
 public:
  explicit Builder(const SharedCase& c) : c_(c) {}

  SharedData build() {
    make_owners();
    fill_pool();
    make_rows();
    for (std::size_t level = 0; level < c_.levels.size(); ++level) make_level(level);
    make_tables();
    make_captured();
    return std::move(data_);
  }

 private:
  std::int64_t page_of(std::int64_t position) const { return position / c_.page_size; }

  int add(int parent, std::int32_t keys) {
    Owner owner{parent, parent < 0 ? 0 : owners_[static_cast<std::size_t>(parent)].end, 0, {}};
    owner.end = owner.begin + keys;
    for (std::int64_t page = page_of(owner.begin); page * c_.page_size < owner.end; ++page)
      owner.pages.push_back(pages_++);
    owners_.push_back(owner);
    return static_cast<int>(owners_.size()) - 1;
  }

  void make_owners() {
    std::vector<int> of(c_.keys.size(), -1);  // of the level in front
    for (const auto& groups : c_.levels) {
      std::size_t request = 0;
      owners_of_levels_.emplace_back();
      for (const SharedCase::Group& group : groups) {
        const int owner = add(request < of.size() ? of[request] : -1, group.keys);
        owners_of_levels_.back().push_back(owner);
        for (std::int64_t i = 0; i < group.requests; ++i) of[request++] = owner;
      }
    }
    for (std::size_t i = 0; i < of.size(); ++i) requests_.push_back(add(of[i], c_.keys[i]));
  }

  int owner_of(int owner, std::int64_t position) const {
    while (position < owners_[static_cast<std::size_t>(owner)].begin)
      owner = owners_[static_cast<std::size_t>(owner)].parent;
    return owner;
  }

  /// A page that two owners have keys in holds those of both. Pages lie in another order than they were made.
  void fill_pool() {
    std::vector<std::int32_t> order(static_cast<std::size_t>(pages_) + 2);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 engine(c_.attention.seed);
    std::shuffle(order.begin(), order.end(), engine);
    const auto count = static_cast<std::int64_t>(order.size());
    const AttentionCase& a = c_.attention;
    data_.k = HostTensor(a.dtype, count, a.h_kv, c_.page_size, a.d_qk, a.layout);
    data_.v = HostTensor(a.dtype, count, a.h_kv, c_.page_size, a.d_v, a.layout);
    const bool stored = c_.k_dtype || c_.v_dtype;
    if (!stored) {
      data_.k.fill_with_nan();
      data_.v.fill_with_nan();
    }
    std::vector<bool> needed(static_cast<std::size_t>(count * c_.page_size), false);
    for (std::size_t o = 0; o < owners_.size(); ++o) {
      Owner& owner = owners_[o];
      for (std::int32_t& page : owner.pages) page = order[static_cast<std::size_t>(page)];
      for (std::int64_t j = page_of(owner.begin) * c_.page_size; j < owner.end; ++j) {
        const std::int32_t page = owner.pages[static_cast<std::size_t>(page_of(j) - page_of(owner.begin))];
        const auto of = static_cast<std::uint64_t>(owner_of(static_cast<int>(o), j));
        needed[static_cast<std::size_t>(page * c_.page_size + j % c_.page_size)] = true;
        for (std::int64_t h = 0; h < a.h_kv; ++h) {
          for (std::int64_t d = 0; d < a.d_qk; ++d)
            data_.k.set(page, h, j % c_.page_size, d, value_of(2 * a.seed, of, j, h, d));
          for (std::int64_t d = 0; d < a.d_v; ++d)
            data_.v.set(page, h, j % c_.page_size, d, value_of(2 * a.seed + 1, of, j, h, d));
        }
      }
    }
    if (stored) store_pool(needed);
  }

  void store_pool(const std::vector<bool>& needed) {
    const Layout layout = c_.attention.layout;
    if (c_.latent()) {
      data_.wide_k = store_latent(data_.k, layout);
    } else if (c_.k_dtype) {
      data_.k_scale = store_as(data_.k, *c_.k_dtype, c_.group_size, layout);
    }
    if (c_.v_dtype) data_.v_scale = store_as(data_.v, *c_.v_dtype, c_.group_size, layout);
    for (std::size_t i = 0; i < needed.size(); ++i) {
      if (needed[i]) continue;
      const auto page = static_cast<std::int64_t>(i) / c_.page_size, row = static_cast<std::int64_t>(i) % c_.page_size;
      for (HostTensor* const tensor : {&data_.k, &data_.v}) set_nan(*tensor, page, row);
      for (HostTensor* const scale : {&data_.k_scale, &data_.v_scale}) {
        if (!scale->bytes().empty()) set_nan(*scale, page, row);
      }
    }
  }

  void make_rows() {
    const AttentionCase& a = c_.attention;
    const auto longest = *std::ranges::max_element(c_.rows);
    first_.push_back(c_.packed ? kRowsInFront : 0);
    for (const std::int32_t rows : c_.rows) first_.push_back(first_.back() + rows);
    if (c_.packed) data_.cu_q = first_;
    const std::int64_t b = c_.packed ? 1 : c_.b(), s = c_.packed ? first_.back() + kRowsBehind : longest;
    data_.q = HostTensor(a.dtype, b, a.h_q, s, a.d_qk, Layout::bshd);
    for (std::int64_t i = 0; i < b; ++i) {
      for (std::int64_t h = 0; h < a.h_q; ++h) {
        for (std::int64_t r = 0; r < s; ++r) {
          for (std::int64_t d = 0; d < a.d_qk; ++d)
            data_.q.set(i, h, r, d, 2 * value_of(a.seed, 1000 + static_cast<std::uint64_t>(i), r, h, d));
        }
      }
    }
    data_.sink = HostTensor(DType::f32, 1, 1, a.h_q);
    for (std::int64_t h = 0; h < a.h_q; ++h) data_.sink.set(0, 0, h, 0, 2 + value_of(a.seed, 7, 0, h, 0));
    for (const int request : requests_) {
      data_.used_kv.push_back(owners_[static_cast<std::size_t>(request)].end);
      data_.begin.push_back(owners_[static_cast<std::size_t>(request)].begin);
    }
    if (c_.bounded) {
      data_.max_s_q = c_.packed ? longest : 0;
      data_.max_s_kv = *std::ranges::max_element(data_.used_kv);
    }
  }

  void make_level(std::size_t level) {
    SharedData::Level result;
    result.groups = static_cast<std::int64_t>(c_.levels[level].size());
    result.cu_rows.push_back(first_.front());
    std::size_t request = 0;
    std::int64_t longest = 0, most = 0;
    for (std::size_t g = 0; g < c_.levels[level].size(); ++g) {
      request += static_cast<std::size_t>(c_.levels[level][g].requests);
      result.cu_rows.push_back(first_[request]);
      const Owner& owner = owners_[static_cast<std::size_t>(owners_of_levels_[level][g])];
      result.lengths.push_back(owner.end);
      if (level > 0) result.begin.push_back(owner.begin);
      longest = std::max<std::int64_t>(longest, owner.end);
      most = std::max<std::int64_t>(most, result.cu_rows[g + 1] - result.cu_rows[g]);
    }
    result.max_rows = c_.bounded ? most : 0;
    result.max_length = c_.bounded ? longest : 0;
    const std::int64_t width = c_.bounded ? most : (c_.packed ? first_.back() + kRowsBehind : first_.back());
    result.positions.assign(static_cast<std::size_t>(result.groups * width), -1);
    for (std::size_t i = 0, g = 0; i < c_.rows.size(); ++i) {
      while (result.cu_rows[g + 1] <= first_[i] && g + 1 < result.lengths.size()) ++g;
      for (std::int32_t r = 0; r < c_.rows[i]; ++r) {
        result.positions[g * static_cast<std::size_t>(width) +
                         static_cast<std::size_t>(first_[i] + r - result.cu_rows[g])] =
            data_.used_kv[i] - c_.rows[i] + r;
      }
    }
    data_.levels.push_back(std::move(result));
  }

  void make_captured() {
    const AttentionCase& a = c_.attention;
    std::mt19937_64 engine(a.seed + 5);
    const auto number = [&] { return static_cast<float>(engine() % 1000) / 1000; };
    for (std::int64_t h = 0; h < a.h_q; ++h) data_.slope.push_back(0.05f * number());
    for (std::int64_t i = 0; i < a.h_q * (2 * kDistance + 1); ++i) data_.table_of_distances.push_back(number() - 0.5f);
    const std::int64_t rows = data_.q.view().shape[2], words = ceil_div(rows, 32);
    data_.tree.assign(static_cast<std::size_t>(c_.b() * rows * words), 0);
    for (std::size_t i = 0; i < c_.rows.size(); ++i) {
      std::vector<std::int32_t> parents;
      for (std::int32_t r = 0; r < c_.rows[i]; ++r) {
        parents.push_back(static_cast<std::int32_t>(engine() % static_cast<std::uint64_t>(r + 1)) - 1);
      }
      const std::vector<std::int32_t> of = functions::tree_words(parents, static_cast<int>(words));
      std::ranges::copy(of, data_.tree.begin() + static_cast<std::ptrdiff_t>(i) * rows * words);
      data_.prefix.push_back(static_cast<std::int32_t>(engine() % 500));
    }
  }

  /// The pages of an owner, or of those in front too.
  void write(std::vector<std::int32_t>& table, std::size_t row, int owner, bool whole) const {
    for (; owner >= 0; owner = whole ? owners_[static_cast<std::size_t>(owner)].parent : -1) {
      const Owner& of = owners_[static_cast<std::size_t>(owner)];
      for (std::size_t i = 0; i < of.pages.size(); ++i) {
        std::int32_t& entry =
            table[row * static_cast<std::size_t>(data_.max_pages) + static_cast<std::size_t>(page_of(of.begin)) + i];
        if (entry == kNowhere) entry = of.pages[i];  // the last owner's has the keys of all
      }
    }
  }

  void make_tables() {
    data_.max_pages = std::max(ceil_div(*std::ranges::max_element(data_.used_kv), c_.page_size) + 1, c_.least_pages);
    const auto make = [&](std::size_t rows) {
      return std::vector<std::int32_t>(rows * static_cast<std::size_t>(data_.max_pages), kNowhere);
    };
    data_.table = data_.whole_table = make(requests_.size());
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      write(data_.table, i, requests_[i], false);
      write(data_.whole_table, i, requests_[i], true);
    }
    for (std::size_t level = 0; level < data_.levels.size(); ++level) {
      data_.levels[level].table = make(owners_of_levels_[level].size());
      for (std::size_t g = 0; g < owners_of_levels_[level].size(); ++g) {
        write(data_.levels[level].table, g, owners_of_levels_[level][g], false);
      }
    }
  }

  const SharedCase& c_;
  SharedData data_;
  std::vector<Owner> owners_;
  std::vector<std::vector<int>> owners_of_levels_;
  std::vector<int> requests_;
  std::vector<std::int32_t> first_;  // rows of the requests
  std::int32_t pages_ = 0;
};

AttentionOutputs outputs_of(const SharedCase& c, const SharedData& data, DType dtype) {
  const TensorView q = data.q.view();
  AttentionOutputs outputs{
      HostTensor(dtype, q.shape[0], q.shape[1], q.shape[2], c.attention.d_v, Layout::bshd),
      HostTensor(dtype == DType::f64 ? DType::f64 : DType::f32, q.shape[0], q.shape[1], q.shape[2])};
  outputs.o.fill_with_nan();
  outputs.lse.fill_with_nan();
  return outputs;
}

}  // namespace

AttentionConfig SharedCase::config() const {
  AttentionConfig config;
  config.head_dim = static_cast<int>(attention.d_qk);
  config.head_dim_v = static_cast<int>(attention.d_v);
  config.dtype = attention.dtype;
  config.scale = attention.scale;
  config.causal = attention.causal;
  config.page_size = page_size;
  if (value_in_key) {
    config.head_dim_v = 0;
    config.value_in_key = static_cast<int>(attention.d_v);
  }
  config.k_dtype = k_dtype;
  config.v_dtype = v_dtype;
  config.group_size = group_size;
  config.varlen = packed;
  config.zero_padding = zero_padding;
  config.sink = sink;
  config.window_left = window_left;
  config.chunk = chunk;
  config.tune = TunePolicy::off;
  config.score = softcap ? functions::compose(functions::softcap(2), score) : score;
  config.mask = mask;
  return config;
}

void PrintTo(const SharedCase& c, std::ostream* out) {
  *out << to_string(c.attention) << " page " << c.page_size << (c.packed ? " packed" : "")
       << (c.zero_padding ? " zero padding" : "") << (c.bounded ? " bounded" : "") << (c.softcap ? " softcap" : "")
       << (c.score.expression.empty() ? "" : " score ") << c.score.expression
       << (c.mask.expression.empty() ? "" : " mask ") << c.mask.expression << (c.sink ? " sink" : "")
       << (c.k_dtype ? " k_" : "") << (c.k_dtype ? to_string(*c.k_dtype) : "") << (c.v_dtype ? " v_" : "")
       << (c.v_dtype ? to_string(*c.v_dtype) : "") << " window " << c.window_left << " chunk " << c.chunk << " levels";
  for (const auto& groups : c.levels) {
    *out << " [";
    for (const SharedCase::Group& group : groups) *out << ' ' << group.requests << 'x' << group.keys;
    *out << " ]";
  }
  *out << " requests";
  for (std::size_t i = 0; i < c.keys.size(); ++i) *out << ' ' << c.rows[i] << '/' << c.keys[i];
}

SharedCase random_shared_case(std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto pick = [&](const auto& values) { return values[random() % values.size()]; };
  const auto below = [&](std::uint32_t most) { return static_cast<std::int32_t>(random() % (most + 1)); };
  SharedCase c;
  AttentionCase& a = c.attention;
  a.seed = seed;
  a.dtype = pick(std::array{DType::bf16, DType::f16, DType::f32});
  a.d_qk = pick(std::array<std::int64_t, 4>{16, 64, 128, 40});
  a.d_v = random() % 3 == 0 ? 64 : a.d_qk;
  a.h_kv = pick(std::array<std::int64_t, 2>{1, 2});
  a.h_q = a.h_kv * pick(std::array<std::int64_t, 3>{1, 2, 4});
  a.causal = random() % 4 != 0;
  a.layout = pick(std::array{Layout::bshd, Layout::bhsd});
  c.page_size = pick(std::array<std::int64_t, 6>{1, 3, 8, 16, 64, 40});
  c.packed = random() % 2 == 0;
  c.bounded = random() % 2 == 0;
  c.softcap = random() % 4 == 0;
  c.sink = random() % 3 == 0;
  if (random() % 3 == 0) c.window_left = pick(std::array<std::int64_t, 3>{0, 60, 400});
  if (random() % 5 == 0) c.chunk = 96;
  const std::int64_t count = pick(std::array<std::int64_t, 4>{1, 5, 12, 70});
  const std::int32_t rows = pick(std::array<std::int32_t, 4>{1, 1, 3, 9});
  for (std::int64_t i = 0; i < count; ++i) {
    c.rows.push_back(!c.packed ? rows : random() % 3 != 0 ? 1 : below(20));
    c.keys.push_back(c.rows.back() + below(90));
  }
  // A later level parts the groups of the one in front.
  std::vector<std::int64_t> groups{count};
  for (std::uint32_t level = 0; level <= random() % 3; ++level) {
    std::vector<std::int64_t> parts;
    for (const std::int64_t requests : groups) {
      std::int64_t left = requests;
      while (left > 0) {
        const std::int64_t part = std::min<std::int64_t>(left, 1 + below(static_cast<std::uint32_t>(requests)));
        parts.push_back(part);
        left -= part;
      }
    }
    groups = parts;
    auto& made = c.levels.emplace_back();
    for (const std::int64_t requests : groups) made.push_back({requests, random() % 5 == 0 ? 0 : below(700)});
  }
  c.zero_padding = c.packed && random() % 2 == 0;
  return c;
}

SharedCase random_stored_case(std::uint32_t seed) {
  SharedCase c = random_shared_case(seed);
  std::mt19937 random(seed + 1000);
  const auto pick = [&](const auto& values) { return values[random() % values.size()]; };
  AttentionCase& a = c.attention;
  a.dtype = pick(std::array{DType::bf16, DType::f16});
  if (random() % 6 == 0) {  // latent rows
    a.d_qk = 576;
    a.d_v = 512;
    a.h_q /= a.h_kv;
    a.h_kv = 1;
    c.value_in_key = true;
    c.k_dtype = DType::e4m3;
    return c;
  }
  c.group_size = pick(std::array{32, 64, 128});
  a.d_qk = a.d_v = 128;
  constexpr std::array kTypes{DType::e4m3, DType::i8, DType::u4x2};
  const std::uint32_t which = random() % 4;
  if (which != 0) c.k_dtype = pick(kTypes);
  if (which != 1) c.v_dtype = pick(kTypes);
  if (c.k_dtype != DType::u4x2 && c.v_dtype != DType::u4x2) {
    c.group_size = 0;
    a.d_qk = pick(std::array<std::int64_t, 3>{48, 64, 192});
  }
  return c;
}

SharedCase random_function_case(std::uint32_t seed) {
  SharedCase c = random_shared_case(seed);
  std::mt19937 random(seed + 2000);
  const std::array<ScoreFunction, 4> scores{
      ScoreFunction{}, functions::alibi(), functions::relative_table(kDistance),
      ScoreFunction{"2 * (s_kv - s_q - kv) + 2 * q < 128 ? score : 0.5 * score - float(h)"}};
  const std::array<MaskFunction, 6> masks{MaskFunction{},
                                          functions::tree(),
                                          functions::prefix_lm(),
                                          {"kv < 7 || q + s_kv - s_q - kv < 90"},
                                          {"kv % 7 != 3 || h == 0"},
                                          {"!(q + s_kv - s_q < kv) && (kv - s_kv + s_q <= q || kv > 5)"}};
  c.score = scores[random() % scores.size()];
  c.mask = masks[random() % masks.size()];
  if (c.mask.expression == masks[1].expression) c.attention.causal = false;
  return c;
}

Captures SharedData::captures(const SharedCase& c) const {
  const std::int64_t h_q = c.attention.h_q, b = c.b(), rows = q.view().shape[2];
  const auto view = [](const auto& values, DType dtype, std::initializer_list<std::int64_t> shape) {
    return TensorView(static_cast<const void*>(values.data()), dtype, shape);
  };
  Captures result;
  for (const std::vector<Capture>& declared : {c.score.captures, c.mask.captures}) {
    for (const Capture& capture : declared) {
      if (capture.name == "slope") result.add({"slope", view(slope, DType::f32, {h_q})});
      if (capture.name == "table")
        result.add({"table", view(table_of_distances, DType::f32, {h_q, 2 * kDistance + 1})});
      if (capture.name == "tree") result.add({"tree", view(tree, DType::i32, {b, rows, ceil_div(rows, 32)})});
      if (capture.name == "prefix") result.add({"prefix", view(prefix, DType::i32, {b})});
    }
  }
  return result;
}

TensorView SharedData::k_scales() const {
  return k_scale.bytes().empty() ? TensorView() : k_scale.view();
}

TensorView SharedData::v_scales() const {
  return v_scale.bytes().empty() ? TensorView() : v_scale.view();
}

SharedData make_data(const SharedCase& c) {
  return Builder(c).build();
}

AttentionOutputs make_outputs(const SharedCase& c, const SharedData& data) {
  return outputs_of(c, data, c.attention.dtype);
}

AttentionOutputs reference_f64(const SharedCase& c, const SharedData& data) {
  AttentionOutputs outputs = outputs_of(c, data, DType::f64);
  const api::Functions functions = api::read_functions(c.config(), true);
  reference::ForwardArgs args;
  args.q = data.q.view();
  args.k = c.latent() ? data.wide_k.view() : data.k.view();
  args.v = c.value_in_key ? args.k : data.v.view();
  args.k_scale = data.k_scales();
  args.v_scale = data.v_scales();
  if (c.value_in_key) args.v.shape[3] = c.attention.d_v;
  args.o = outputs.o.view();
  args.lse = outputs.lse.view();
  args.scale = static_cast<double>(c.attention.softmax_scale());
  args.causal = c.attention.causal;
  args.f64 = true;
  std::vector<expression::CapturedView> views;
  const Captures given = data.captures(c);
  for (const expression::Capture& capture : functions.program.captures) {
    const auto* const found = std::ranges::find(given, capture.name, &Captured::name);
    views.push_back({found->tensor, 0, {}});
  }
  args.variant.captures = views;
  if (functions.any()) args.variant.program = &functions.program;
  if (c.sink)
    args.variant.sink = TensorView(const_cast<std::byte*>(data.sink.bytes().data()), DType::f32, {c.attention.h_q});
  args.variant.window_left = c.window_left;
  args.variant.chunk = c.chunk;
  PackedSequences sequences;
  sequences.b = c.b();
  if (c.packed) sequences.cu_seqlens_q = data.cu_q.data();
  sequences.seqused_kv = data.used_kv.data();
  PagedCache cache;
  cache.block_table =
      TensorView(static_cast<const void*>(data.whole_table.data()), DType::i32, {c.b(), data.max_pages});
  reference::forward(args, sequences, cache, c.packed);
  return outputs;
}

double worst_of(const SharedCase& c, const SharedData& data, const HostTensor& actual, const HostTensor& expected) {
  const TensorView view = expected.view();
  const std::int64_t columns = view.rank == 4 ? view.shape[3] : 1;
  double worst = 0;
  for (std::int64_t b = 0; b < view.shape[0]; ++b) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t s = 0; s < view.shape[2]; ++s) {
        if (c.packed && !c.zero_padding && (s < data.cu_q.front() || s >= data.cu_q.back())) continue;
        for (std::int64_t d = 0; d < columns; ++d) {
          const double got = actual.at(b, h, s, d), wanted = expected.at(b, h, s, d);
          if (got == wanted) continue;
          worst = std::isnan(got - wanted) ? HUGE_VAL : std::max(worst, std::abs(got - wanted));
        }
      }
    }
  }
  return worst;
}

}  // namespace fa::test
