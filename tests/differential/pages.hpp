#ifndef FA_TESTS_DIFFERENTIAL_PAGES_HPP_
#define FA_TESTS_DIFFERENTIAL_PAGES_HPP_

#include <cstdint>
#include <vector>

#include "differential/configuration.hpp"
#include "differential/dense.hpp"
#include "differential/tensor.hpp"

namespace fa::differential {

/// k and v of a call in pages, in any order among others, and the table that finds them; or in rows of a contiguous
/// cache, in the place of pages. Where nothing is, it is NaN.
class Pages {
 public:
  Pages(const Configuration& configuration, const Call& call, const Inputs& inputs);

  Tensor k, v;
  Tensor k_scale, v_scale;                          ///< of what is stored in 8 or 4 bits
  std::vector<std::int32_t> table, lengths, index;  ///< index: empty unless the call is `indexed`
  std::int64_t rows = 0;                            ///< of the table
  std::int64_t max_pages = 0;
  std::int64_t longest = 0;

 private:
  Tensor pool(const Tensor& like, Layout layout, std::int64_t count) const;
  void fill(const Inputs& inputs, const Segment& segment, std::int64_t row);
  void copy(const Tensor& from, Tensor& to, const Segment& segment, std::int64_t key, std::int64_t page) const;

  std::int64_t page_size_;
  std::vector<std::int32_t> free_;
};

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_PAGES_HPP_
