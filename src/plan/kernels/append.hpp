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

/// The same into a cache of 8 bits, with a scale a row.
struct AppendStored {
  int rotary_dims = 0;
  bool interleaved = false;
  int table = 0;
  int k_storage = 0;  ///< storage_of what the cache's K is stored as
  int v_storage = 0;
  bool scales_given = false;  ///< scales are read, else written

  static const Kernel& kernel() noexcept;
  friend bool operator==(const AppendStored&, const AppendStored&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_APPEND_HPP_
