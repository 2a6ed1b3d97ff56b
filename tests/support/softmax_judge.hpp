#ifndef FA_TESTS_SUPPORT_SOFTMAX_JUDGE_HPP_
#define FA_TESTS_SUPPORT_SOFTMAX_JUDGE_HPP_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "support/attention_case.hpp"

namespace fa::test {

/// A query row and a key, by logical indices; in a packed batch b counts the sequences.
struct ScorePlace {
  std::int64_t b, h, q, kv, s_q, s_kv;
};

/// What is to be judged: whole numbers in q and k, so that sums of their products are exact in float in any order, and
/// scales that are powers of two.
struct JudgedCase {
  AttentionCase attention;                          ///< of a packed batch b is 1, s_q and s_kv are rows of the tensors
  std::vector<std::int32_t> cu_q = {}, cu_kv = {};  ///< empty: dense
  std::int64_t window_left = -1, window_right = -1;
  float dropout = 0;
  DropoutState state = {.seed = 17, .offset = 40000000000};
  std::function<double(const ScorePlace&, double)> score = nullptr;  ///< the score function, in float64
  std::function<bool(const ScorePlace&)> keep = nullptr;             ///< the mask function
  std::vector<double> sink = {};                                     ///< of each query head
  /// The score function adds in float, so that scores are rounded; else they are exact, and a softmax in float with
  /// them is the measure.
  bool rounded_scores = false;
  std::function<bool(std::int64_t)> judged_row = nullptr;  ///< rows of the tensors; null: all
};

/// The greatest errors in units of what is allowed; infinite for a NaN.
struct Verdict {
  double o = 0, lse = 0;
  std::string where_o = {}, where_lse = {};
};

/// Holds O and LSE of any scores that are finite in float to float64. With u = 2^-24, n keys in a row, unit roundoff w
/// of the element type, and s the greatest score of a row (or its sink):
///
/// - A softmax in float that subtracts the exact maximum of the same scores is computed beside float64's. Its greatest
///   error over the tensor counts twice. In LSE errors are relative to u (|s| + 16), and one unit is the least.
/// - P and O are rounded to the element type: 2 w max|v|, and n 2^-25 max|v| where P is subnormal in f16. Dropout
///   multiplies both.
/// - Sums in float: terms of a row's sum are at most 64 + n / 16 additions deep (KV tiles of 16 to 256 keys), those of
/// O
///   n / 8 steps of a matrix unit, of two roundings of 2^-23 each. Approximations of exp2 and log2 add 2^-20.
/// - Where a score function rounds, a score of P above 2^-149 is off by h = u (|s| + 104) at most. LSE moves by h, O by
///   (exp(2 h) - 1) of the extent of v. Where that is more than the extent, O may be anywhere within v's hull.
///
/// A key whose P is below 2^-149 in float64 weighs nothing here, as one that is hidden by -infinity.
class SoftmaxJudge {
 public:
  SoftmaxJudge(JudgedCase c, const AttentionInputs& inputs);

  Verdict judge(double scale, const AttentionOutputs& actual) const;

 private:
  /// A dense batch entry, or a sequence.
  struct Part {
    std::int64_t index, b, q0, kv0, s_q, s_kv;
  };
  struct Row {
    bool judged = false, empty = false;
    double top = 0;  // the greatest score, or the sink
    double lse = 0;
    std::int64_t keys = 0;
    double slack = 0;  // h
    std::vector<double> o, o_f32, low, high;
  };

  std::vector<Part> parts() const;
  /// Sets a head's rows; the greatest errors of a softmax in float, of LSE in units and of O.
  std::pair<double, double> judge_head(const Part& part, std::int64_t h, double scale, std::vector<Row>& rows) const;
  Row row(const Part& part, std::int64_t h, std::int64_t i, double scale, double& lse_units) const;
  void weigh(Row& row, const std::vector<double>& scores, const std::vector<const double*>& values,
             const std::vector<double>& kept, double sink, double& lse_units) const;
  void find_hull(Row& row, const std::vector<double>& scores, const std::vector<const double*>& values,
                 double sink) const;
  double dropout_factor() const;
  double allowed_o(const Row& row, double worst_f32, std::int64_t d) const;
  double error_o(const Row& row, double actual, std::int64_t d) const;

  const double* key_column(std::int64_t b, std::int64_t h, std::int64_t d) const;

  JudgedCase case_;
  std::vector<double> q_, k_, v_;  // [b, h_q, s_q, d_qk], [b, h_kv, d_qk, s_kv], [b, h_kv, s_kv, d_v]
  double largest_v_ = 0;
};

/// Rounds q and k to whole numbers of at most `limit`, either sign.
void make_whole(HostTensor& tensor, double limit);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_SOFTMAX_JUDGE_HPP_
