#include "reference/quantize.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reference/append.hpp"
#include "reference/elements.hpp"
#include "reference/geometry.hpp"

namespace fa::reference {
namespace {

void take_means(const QuantizeArgs& a, std::int64_t b, std::int64_t h) {
  const std::int64_t d = a.x.shape[3];
  std::vector<double> row(static_cast<std::size_t>(d)), sum(row.size());
  for (std::int64_t s = 0; s < a.x.shape[2]; ++s) {
    load(a.x, row_offset(a.x, b, h, s), 1, d, row.data());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += row[i];
  }
  for (std::size_t i = 0; i < sum.size(); ++i) {
    store_element(a.mean, row_offset(a.mean, b, h, 0) + static_cast<std::int64_t>(i),
                  a.x.shape[2] == 0 ? 0.0 : sum[i] / static_cast<double>(a.x.shape[2]));
  }
}

void take_rows(const QuantizeArgs& a, std::int64_t b, std::int64_t h) {
  const std::int64_t d = a.x.shape[3];
  std::vector<double> row(static_cast<std::size_t>(d)), mean(row.size());
  if (a.mean.defined()) {
    load(a.mean, row_offset(a.mean, b, h / (a.x.shape[1] / a.mean.shape[1]), 0), 1, d, mean.data());
  }
  for (std::int64_t s = 0; s < a.x.shape[2]; ++s) {
    load(a.x, row_offset(a.x, b, h, s), 1, d, row.data());
    double bias = 0;
    for (std::size_t i = 0; i < row.size(); ++i) {
      bias += row[i] * mean[i];
      if (!a.bias.defined()) row[i] = static_cast<float>(row[i]) - static_cast<float>(mean[i]);
    }
    if (a.bias.defined()) store_element(a.bias, row_offset(a.bias, b, h, s), bias);
    store_row(row, a.codes, row_offset(a.codes, b, h, s),
              static_cast<float*>(a.scale.data)[row_offset(a.scale, b, h, s)], a.scale_given);
  }
}

}  // namespace

void quantize(const QuantizeArgs& args) {
  for (std::int64_t b = 0; b < args.x.shape[0]; ++b) {
    for (std::int64_t h = 0; h < args.x.shape[1]; ++h) {
      if (args.means) {
        take_means(args, b, h);
      } else {
        take_rows(args, b, h);
      }
    }
  }
}

}  // namespace fa::reference
