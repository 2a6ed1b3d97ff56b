#ifndef FA_SRC_PLAN_KERNELS_APPEND_HPP_
#define FA_SRC_PLAN_KERNELS_APPEND_HPP_

namespace fa::plan {

struct Kernel;

/// New keys and values into a cache, with rotary embedding.
struct Append {
  int rotary_dims = 0;
  bool interleaved = false;  ///< pairs are neighbours, else half of rotary_dims apart
  int table = 0;             ///< of cosines and sines: 0: none, 1: floats, 2: of the dtype

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Append&, const Append&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_APPEND_HPP_
