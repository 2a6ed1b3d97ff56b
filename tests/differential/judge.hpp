#ifndef FA_TESTS_DIFFERENTIAL_JUDGE_HPP_
#define FA_TESTS_DIFFERENTIAL_JUDGE_HPP_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>

#include "differential/dense.hpp"
#include "differential/random.hpp"
#include "differential/run.hpp"

namespace fa::differential {

/// A result beside what is expected.
class Judge {
 public:
  Judge(Verdict* verdict, double perturb, std::uint64_t seed) : verdict_(verdict), perturb_(perturb), random_(seed) {}

  /// `untouched(s)`: rows of axis 2 that must hold what they held; `exact(s)`: rows of a given value instead.
  template <class Untouched>
  void hold(const char* name, const Tensor& actual, const Expected& expected, const Untouched& untouched) {
    if (!actual.defined()) return;
    if (actual.touched_outside()) complain(name, "written outside of its elements");
    const auto& shape = actual.shape();
    const auto length = [&](std::size_t axis) { return axis < shape.size() ? shape[axis] : 1; };
    double largest = 0;
    for (const double x : expected.value) {
      if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
    }
    const auto moved = random_.below(static_cast<std::int64_t>(expected.value.size()));
    std::size_t n = 0;
    for (std::int64_t a = 0; a < length(0); ++a) {
      for (std::int64_t b = 0; b < length(1); ++b) {
        for (std::int64_t c = 0; c < length(2); ++c) {
          const bool alone = untouched(c);
          for (std::int64_t d = 0; d < length(3); ++d, ++n) {
            double got = actual.at(a, b, c, d);
            const double wanted = expected.value[n], bound = expected.bound[n];
            if (perturb_ != 0 && !alone && static_cast<std::int64_t>(n) == moved && std::isfinite(wanted + bound)) {
              got += perturb_ * (bound + 1e-30);
              ++verdict_->moved;
            }
            if (alone ? !std::isnan(got) : !near(got, wanted, bound, largest)) {
              std::ostringstream text;
              text << "[" << a << ", " << b << ", " << c << ", " << d << "] is " << got << ", ";
              if (alone)
                text << "and was not to be written";
              else
                text << "wanted " << wanted << " within " << bound;
              complain(name, text.str());
              return;
            }
            if (!alone && bound > 0) note(name, std::abs(got - wanted) / bound);
          }
        }
      }
    }
  }

 private:
  bool near(double got, double wanted, double bound, double largest) {
    ++verdict_->checked;
    if (std::isinf(bound) || bound > 0.1 * largest) ++verdict_->loose;
    return got == wanted || std::isinf(bound) || std::abs(got - wanted) <= bound;
  }
  void note(const char* name, double ratio) {
    if (!(ratio > verdict_->worst)) return;
    verdict_->worst = ratio;
    verdict_->worst_of = name;
  }
  void complain(const char* name, const std::string& what) {
    verdict_->kind = Verdict::Kind::failed;
    if (verdict_->message.size() < 400)
      verdict_->message += std::string(verdict_->message.empty() ? "" : "; ") + name + " " + what;
  }

  Verdict* verdict_;
  double perturb_;
  Random random_;
};

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_JUDGE_HPP_
