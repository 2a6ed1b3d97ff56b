#ifndef FA_TESTS_SUPPORT_STATISTICS_CASE_HPP_
#define FA_TESTS_SUPPORT_STATISTICS_CASE_HPP_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "support/variant_case.hpp"

namespace fa::test {

/// Axes of a case.
struct AttentionSizes {
  std::int64_t b, h_q, h_kv, s_q, s_kv, d_qk, d_v;
};
AttentionCase attention_of(DType dtype, const AttentionSizes& sizes, bool causal,
                           std::optional<float> scale = std::nullopt);

/// A forward with statistics: what it computes, and a kernel for it.
struct StatisticsCase {
  std::string name;
  /// Of a packed batch b is 1, and s_q and s_kv are the rows of the packed tensors; over pages s_kv is the longest.
  AttentionCase attention;
  AttentionConfig config;  ///< what is asked for besides
  KernelOverride kernel = {};
  std::vector<std::int32_t> cu_q = {}, cu_kv = {};  ///< of a packed batch
  std::vector<std::int32_t> used_kv = {};           ///< over pages
  int sum_heads_in_flight = 0;                      ///< of column sums, in a section of a causal grid; 0: as planned
  bool without_sums = false;                        ///< calls leave column_sums out, but for those of expected_of
  float common = 0;  ///< unless 0: column 0 of q and k, others being whole numbers. Scores are exact, and near another
  float steep = 1;   ///< what each eighth row of q is times of

  bool packed() const { return !cu_q.empty(); }
};

/// With the tensors that its functions name.
VariantCase variant_of(const StatisticsCase& c);

/// The case's tensors.
struct StatisticsData {
  explicit StatisticsData(const StatisticsCase& c);

  VariantCase variant;
  AttentionInputs inputs;           ///< k and v may be pages
  std::vector<std::int32_t> table;  ///< [b, pages of the longest]
  std::int64_t pages_each = 0;
};

/// What a forward leaves, in the order of its tensors; what is not asked for is empty. Rows of no sequence are 0.
struct StatisticsResults {
  explicit StatisticsResults(const StatisticsCase& c);

  std::vector<float> max_logit, entropy, column_sums, lse;
  std::vector<std::int32_t> top_keys;
  HostTensor o;
};

/// A call of the public interface. `read` and `written` give the places of bytes of the host, which stay as they are.
struct StatisticsMemory {
  std::function<void*(const void*, std::size_t)> read;
  std::function<void*(void*, std::size_t)> written;
};
ForwardInputs inputs_of(const StatisticsCase& c, const StatisticsData& data, const StatisticsMemory& memory);
ForwardOutputs outputs_of(const StatisticsCase& c, StatisticsResults& results, const StatisticsMemory& memory);

/// On the host device, which accumulates in double.
StatisticsResults expected_of(const StatisticsCase& c, const StatisticsData& data);

/// The greatest distance in parts of what is allowed: above 1 one is wrong. A key is as far from another as its sum.
double error_of(const StatisticsCase& c, const StatisticsResults& actual, const StatisticsResults& expected);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_STATISTICS_CASE_HPP_
