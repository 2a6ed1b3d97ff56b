#ifndef FA_TESTS_SUPPORT_ATTENTION_CASE_HPP_
#define FA_TESTS_SUPPORT_ATTENTION_CASE_HPP_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

/// What the tests of every room share: problems, their inputs, the float64 answer, and the distance from it.
namespace fa::reference {
struct ForwardArgs;
}

namespace fa::test {

/// Order of the axes in memory; views are [b, h, s, d] by meaning in both.
enum class Layout : std::uint8_t { bhsd, bshd };

struct AttentionCase {
  std::int64_t b = 1;
  std::int64_t h_q = 1;
  std::int64_t h_kv = 1;
  std::int64_t s_q = 1;
  std::int64_t s_kv = 1;
  std::int64_t d_qk = 64;
  std::int64_t d_v = 64;
  DType dtype = DType::bf16;
  DType o_dtype = DType::bf16;  ///< of 8-bit floats
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  std::optional<float> scale = std::nullopt;
  Layout layout = Layout::bhsd;
  std::uint64_t seed = 1;
  /// The later half of the keys is short: with a scale to it, exponentials of the first half overflow beside the other.
  bool early_keys = false;

  /// The given scale, else 1/sqrt(d_qk) as a float.
  float softmax_scale() const;
};

/// "bf16_b2_h6kv2_s63x500_d64x128_causal_top_left_bshd": fit for the name of a GoogleTest parameter.
std::string to_string(const AttentionCase& c);

/// For GoogleTest's messages.
void PrintTo(const AttentionCase& c, std::ostream* out);

/// A tensor in host memory of its own.
class HostTensor {
 public:
  HostTensor() = default;
  /// [b, h, s, d], zero-filled.
  HostTensor(DType dtype, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d, Layout layout);
  /// [b, h, s], row-major, zero-filled.
  HostTensor(DType dtype, std::int64_t b, std::int64_t h, std::int64_t s);

  /// Valid as long as this tensor lives, moves included.
  TensorView view();
  TensorView view() const;

  std::vector<std::byte>& bytes() { return bytes_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  /// Sets every byte to 0xff, which is a NaN in every dtype: what a kernel does not write cannot pass.
  void fill_with_nan();

  double at(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d = 0) const;
  void set(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d, double value);

 private:
  std::vector<std::byte> bytes_;
  TensorView layout_;  // dtype, shape and strides; its pointer stays null
};

/// Rows of the axis s, of all batch entries and heads.
struct Rows {
  std::int64_t first = 0;
  std::int64_t count = 0;

  bool contain(std::int64_t s) const { return s >= first && s < first + count; }
};
void fill(HostTensor& tensor, const Rows& rows, double value);

/// Whether two tensors of one shape have equal numbers, or NaN, in all other rows.
bool equal_outside(const HostTensor& a, const HostTensor& b, const Rows& rows);

struct AttentionInputs {
  HostTensor q;  ///< [b, h_q, s_q, d_qk]
  HostTensor k;  ///< [b, h_kv, s_kv, d_qk]
  HostTensor v;  ///< [b, h_kv, s_kv, d_v]
  /// Of 8-bit floats, f32: [b, h_q, s_q], [b, h_kv, 1] and [b, h_kv, 1]; empty: none.
  HostTensor q_scale = {};
  HostTensor k_scale = {};
  HostTensor v_scale = {};
  HostTensor row_bias = {};  ///< of i8, f32 [b, h_q, s_q]; empty: none
};

/// What v is of: e4m3 beside q and k of i8.
DType value_dtype(DType dtype);

/// A scale of each head as one of each row; scales of rows as they are; undefined where there are none.
TensorView scale_of_heads(const HostTensor& scale, std::int64_t rows);

/// Tells a reference of the scales and biases that there are.
void add_scale_views(const AttentionCase& c, const AttentionInputs& inputs, reference::ForwardArgs& args);

/// Adds scales of rows of q, and of heads of k and v, some of them negative; of i8 biases of rows, too.
void add_scales(const AttentionCase& c, AttentionInputs& inputs);
/// Gives each key a scale of its own, for its row of k or of v, some of them negative or 0.
void add_key_scales(const AttentionCase& c, AttentionInputs& inputs);
void add_value_scales(const AttentionCase& c, AttentionInputs& inputs);

struct AttentionOutputs {
  HostTensor o;    ///< [b, h_q, s_q, d_v]
  HostTensor lse;  ///< [b, h_q, s_q]
};

struct AttentionGradients {
  HostTensor dq;  ///< [b, h_q, s_q, d_qk]
  HostTensor dk;  ///< [b, h_kv, s_kv, d_qk]
  HostTensor dv;  ///< [b, h_kv, s_kv, d_v]
};

/// Nearly normal values of variance 1, rounded to the case's dtype. The same on every platform and for both layouts.
AttentionInputs make_inputs(const AttentionCase& c);

/// NaN-filled outputs of the case's dtype and layout; lse is f32, or f64 for f64.
AttentionOutputs make_outputs(const AttentionCase& c);

/// The float64 O and LSE of `inputs` as they are stored, by the CPU reference in double.
AttentionOutputs reference_f64(const AttentionCase& c, const AttentionInputs& inputs);
AttentionOutputs reference_f64(const AttentionCase& c);

/// Gradients of o and lse, as make_inputs makes inputs: dout [b, h_q, s_q, d_v] of the case's dtype and layout, dlse
/// [b, h_q, s_q] of lse's dtype.
HostTensor make_dout(const AttentionCase& c);
HostTensor make_dlse(const AttentionCase& c);

/// NaN-filled gradients of the case's dtype and layout.
AttentionGradients make_gradients(const AttentionCase& c);

/// The float64 gradients of `inputs`, `dout` and, if defined, `dlse` as they are stored, by the CPU reference in double
/// from its own O and LSE in float64.
AttentionGradients reference_gradients_f64(const AttentionCase& c, const AttentionInputs& inputs,
                                           const TensorView& dout, const TensorView& dlse = {});

/// Distance of a tensor from the expected one. Infinite as soon as either holds a NaN, or an infinity that the other
/// has not: a NaN never passes.
struct ErrorMetrics {
  double mean_abs = 0;
  double max_abs = 0;
  double max_abs_over_max_ref = 0;  ///< max_abs / the largest |expected|; 0 when both are 0
};
ErrorMetrics compare(const TensorView& actual, const TensorView& expected);

/// The greatest |x|; infinite where one is NaN.
double largest(const HostTensor& tensor);

/// Largest |actual - expected| of two [b, h_q, s_q] tensors; equal infinities differ by 0, NaN by infinity.
double lse_max_abs_error(const TensorView& actual, const TensorView& expected);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_ATTENTION_CASE_HPP_
