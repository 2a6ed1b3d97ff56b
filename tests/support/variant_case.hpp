#ifndef FA_TESTS_SUPPORT_VARIANT_CASE_HPP_
#define FA_TESTS_SUPPORT_VARIANT_CASE_HPP_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/variants.hpp"
#include "reference/variant.hpp"
#include "support/attention_case.hpp"
#include "support/error_bounds.hpp"

namespace fa::test {

/// A tensor that a function names, or the sinks, in host memory.
struct NamedTensor {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  bool requires_grad = false;
  std::vector<std::byte> bytes = {};
  bool by_value = false;  ///< a call is given the number, no tensor

  double number() const;  ///< its first element
  TensorView view() const;
  std::int64_t elements() const;
};

/// A configuration by what it adds to plain attention.
struct VariantChoice {
  std::string name;
  AttentionConfig config;
};

/// Functions, windows, chunks and sinks of every kind and in company, `with_gradients` of captures or not.
std::vector<VariantChoice> variant_choices(bool with_gradients = true);

/// A case with functions, windows, chunks or sinks, and the tensors that these name, filled by the case's seed.
/// Captures are named slope [h_q], table [h_q, 11], doc [max(s_q, s_kv)], prefix [b], tree
/// [b, s_q, words], or indexed by bare b, h, q, kv;
/// one that is named number is given by value.
struct VariantCase {
  VariantCase(const AttentionCase& c, const VariantChoice& choice);

  AttentionCase attention;
  AttentionConfig config;  ///< complete
  api::Functions functions;
  std::vector<NamedTensor> captures;  ///< as `functions` has them
  NamedTensor sink;                   ///< without elements where there is none
  ShardPlace place = {};              ///< of `attention`, in the one that captures are of
  bool drops = false;                 ///< the reference has dropout, of seed and offset 0

  /// The call of `part` at a place in the attention that the case was made for.
  void move_to(const AttentionCase& part, const ShardPlace& at);
};
void PrintTo(const VariantCase& c, std::ostream* out);

/// What the reference needs of a case, which `views` keeps the captures of.
reference::VariantArgs variant_args(const VariantCase& c, std::vector<expression::CapturedView>& views);

/// Gives `views` places for the gradients that captures require, in `captures`.
void add_gradients(const VariantCase& c, std::vector<expression::CapturedView>& views,
                   std::vector<std::vector<double>>& captures);

/// O and LSE in float64.
AttentionOutputs reference_f64(const VariantCase& c, const AttentionInputs& inputs);

struct VariantGradients {
  AttentionGradients usual;
  std::vector<std::vector<double>> captures;  ///< row-major; empty where none is required
  std::vector<double> dsink;
  ErrorBounds bounds = {};  ///< of what kernels make of `captures` and `dsink`
};
VariantGradients reference_gradients_f64(const VariantCase& c, const AttentionInputs& inputs, const TensorView& dout,
                                         const TensorView& dlse = {});

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_VARIANT_CASE_HPP_
