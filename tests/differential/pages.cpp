#include "differential/pages.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

namespace fa::differential {

Pages::Pages(const Configuration& c, const Call& call, const Inputs& in) : page_size_(c.config.page_size) {
  const std::vector<Segment> segments = segments_of(c, call);
  longest = call.longest_kv(c.config);
  rows = static_cast<std::int64_t>(segments.size()) + (call.indexed ? 2 : 0);
  const bool contiguous = page_size_ == kContiguous;
  if (contiguous) page_size_ = longest + 3;  // a row of the cache is a page
  max_pages = contiguous ? 1 : (longest + page_size_ - 1) / page_size_;
  std::int64_t count = contiguous ? rows : 2;
  for (const Segment& s : segments) count += contiguous ? 0 : (s.s_kv + page_size_ - 1) / page_size_;
  free_.resize(static_cast<std::size_t>(count));
  std::iota(free_.begin(), free_.end(), 0);
  std::shuffle(free_.begin(), free_.end(), std::minstd_rand(static_cast<unsigned>(call.values % 65521 + 1)));
  const auto make = [&](const Tensor& of_dtype, const Stored& stored, const Layout& layout, Tensor& to,
                        Tensor& scales) {
    if (!stored.codes.defined()) {
      to = pool(of_dtype, layout, count);
      return;
    }
    to = pool(stored.codes, with_aligned_rows(layout), count);
    if (!has_bytes(c.config)) scales = pool(stored.scales, with_aligned_rows(layout), count);
  };
  make(in.k, in.stored_k, call.k, k, k_scale);
  make(in.v, in.stored_v, call.v, v, v_scale);
  // Of 8-bit elements scales may be of heads, which do not lie in pages.
  if (c.config.key_scales && in.stored_k.scales.defined()) k_scale = pool(in.stored_k.scales, {}, count);
  if (c.config.value_scales && in.stored_v.scales.defined()) v_scale = pool(in.stored_v.scales, {}, count);
  table.assign(static_cast<std::size_t>(rows * max_pages), -1);
  if (contiguous) std::iota(table.begin(), table.end(), 0);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    lengths.push_back(static_cast<std::int32_t>(segments[i].s_kv));
    const auto n = static_cast<std::int64_t>(i);
    const std::int64_t row = call.indexed ? rows - 1 - n : n;
    if (call.indexed) index.push_back(static_cast<std::int32_t>(row));
    fill(in, segments[i], row);
  }
}

Tensor Pages::pool(const Tensor& like, Layout layout, std::int64_t count) const {
  layout.expanded = 0;
  std::vector<std::int64_t> shape = like.shape();
  shape[0] = count;
  shape[2] = page_size_;
  Tensor t(like.dtype(), shape, layout);
  t.poison();
  return t;
}

void Pages::fill(const Inputs& in, const Segment& s, std::int64_t row) {
  for (std::int64_t j = s.begin; j < s.s_kv; ++j) {
    std::int32_t& page = table[static_cast<std::size_t>(row * max_pages + j / page_size_)];
    if (page < 0) {
      page = free_.back();
      free_.pop_back();
    }
    for (const auto& [from, stored, to, scales] :
         {std::tuple{&in.k, &in.stored_k, &k, &k_scale}, std::tuple{&in.v, &in.stored_v, &v, &v_scale}}) {
      copy(stored->codes.defined() ? stored->codes : *from, *to, s, j, page);
      if (scales->defined()) copy(stored->scales, *scales, s, j, page);
    }
  }
}

void Pages::copy(const Tensor& from, Tensor& to, const Segment& s, std::int64_t key, std::int64_t page) const {
  for (std::int64_t h = 0; h < from.shape()[1]; ++h) {
    for (std::int64_t d = 0; d < (from.shape().size() == 4 ? from.shape()[3] : 1); ++d) {
      to.set(from.at(s.tensor_b, h, s.first_kv + key, d), page, h, key % page_size_, d);
    }
  }
}

}  // namespace fa::differential
