#ifndef FA_SRC_PLAN_KERNELS_QUANTIZE_HPP_
#define FA_SRC_PLAN_KERNELS_QUANTIZE_HPP_

namespace fa::plan {

struct Kernel;

/// Rows of 16 or 32 bits as codes of 8 with a scale; the dtype is that of the rows.
struct Quantize {
  bool e4m3 = false;   ///< codes are e4m3, else i8
  bool means = false;  ///< takes the means of columns that others subtract

  static const Kernel& kernel() noexcept;
  friend bool operator==(const Quantize&, const Quantize&) = default;
};

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_KERNELS_QUANTIZE_HPP_
