#ifndef FA_TESTS_DIFFERENTIAL_RUN_HPP_
#define FA_TESTS_DIFFERENTIAL_RUN_HPP_

#include <memory>
#include <string>

#include "differential/configuration.hpp"
#include "differential/dense.hpp"

namespace fa::differential {

struct Verdict {
  enum class Kind : std::uint8_t { passed, failed, skipped } kind = Kind::passed;
  std::string message = {};              ///< what is wrong, or why nothing could be run
  bool context_lost = false;             ///< the process can compute nothing more
  double worst = 0;                      ///< greatest error, in units of its bound
  std::uint64_t checked = 0, loose = 0;  ///< elements; those whose bound exceeds a tenth of the largest value
  std::string worst_of = {};
  int moved = 0;  ///< elements that `perturb` moved
};

/// The formula alone, for its time and the sizes of its bounds.
Verdict evaluate_only(const Configuration& configuration, const Call& call, Where where);

/// One configuration on one device.
class Runner {
 public:
  /// Throws fa::Error as Attention::create does.
  Runner(Configuration configuration, Where where, const std::string& cache_directory);

  /// `mistake` is one of the formula; `perturb` moves one element of each result by so many bounds.
  Verdict run(const Call& call, Mistake mistake = Mistake::none, double perturb = 0);
  /// Judges no results: a driver that computes none will do.
  Verdict call_only(const Call& call);
  std::uint64_t compilations() const { return *compilations_; }

 private:
  Configuration c_;
  Where where_;
  std::shared_ptr<std::uint64_t> compilations_ = std::make_shared<std::uint64_t>(0);
  std::unique_ptr<Attention> attention_;
};

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_RUN_HPP_
