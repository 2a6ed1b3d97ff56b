#ifndef FA_TESTS_SUPPORT_STATISTICS_GRADIENTS_HPP_
#define FA_TESTS_SUPPORT_STATISTICS_GRADIENTS_HPP_

#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "support/statistics_case.hpp"

namespace fa::test {

/// A backward that is given gradients of statistics, behind a forward of `of`, and a kernel for it.
struct StatisticsGradientCase {
  StatisticsCase of;
  KernelOverride kernel = {};
  bool dlse = false;
  bool infinite = false;  ///< the log-sum-exp of the last row is infinite: nothing has a weight in it
  bool ties = false;      ///< keys repeat, so that several have the greatest logit of a row
};

/// With and without functions, masks, sinks, dropout and packed batches.
std::vector<StatisticsGradientCase> statistics_gradient_cases();

/// What the case's calls are given, with the forward's results by the host device.
struct StatisticsGradientData {
  explicit StatisticsGradientData(const StatisticsGradientCase& c);

  StatisticsData forward;
  StatisticsResults results;
  HostTensor dout;
  std::vector<float> dlse, dentropy, dmax_logit, dcolumn_sums;  ///< like the statistics; empty where they are not given
};

/// What backward leaves. Rows of no sequence are 0.
struct StatisticsGradientResults {
  explicit StatisticsGradientResults(const StatisticsGradientCase& c, const StatisticsGradientData& data);

  HostTensor dq, dk, dv;
  std::vector<float> dsink;
  std::vector<std::vector<float>> captures;  ///< empty where none is required
};

/// A call of the public interface, as statistics_case.hpp has them.
BackwardInputs inputs_of(const StatisticsGradientCase& c, const StatisticsGradientData& data,
                         const StatisticsMemory& memory);
BackwardOutputs outputs_of(const StatisticsGradientCase& c, const StatisticsGradientData& data,
                           StatisticsGradientResults& results, const StatisticsMemory& memory);

/// On the host device, which accumulates in double.
StatisticsGradientResults expected_of(const StatisticsGradientCase& c, const StatisticsGradientData& data);

/// The greatest distance in parts of what is allowed, of the greatest element: above 1 one is wrong.
double error_of(const StatisticsGradientCase& c, const StatisticsGradientResults& actual,
                const StatisticsGradientResults& expected);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_STATISTICS_GRADIENTS_HPP_
