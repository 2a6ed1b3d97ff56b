#ifndef FA_TESTS_DIFFERENTIAL_POOL_HPP_
#define FA_TESTS_DIFFERENTIAL_POOL_HPP_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "differential/run.hpp"

namespace fa::differential {

struct Options {
  Where where = Where::host;
  Size size = Size::usual;
  std::uint64_t seed = 1, configs = 100, shapes = 5, first = 0, step = 1;
  int jobs = 1;
  double limit = 120;          ///< seconds a call, compilations included
  double shrink_seconds = 90;  ///< of each failure
  int shrink = 4;              ///< how many failures
  bool in_process = false;     ///< no children: what a memory checker wants
  bool verbose = false;
  bool formula_only = false;  ///< nothing is run
  bool calls_only = false;    ///< no result is judged
  std::string cache;          ///< directory; empty: one that is removed at the end
};

/// One call: which, and what was made simpler in it.
struct CaseId {
  std::uint64_t config = 0, shape = 0;
  std::vector<std::string> edits = {};
};

struct Case {
  Configuration configuration;
  Call call;
};
/// Throws std::invalid_argument for an edit that is not known or changes nothing.
Case make_case(const Options& options, const CaseId& id);

/// The arguments that replay it.
std::string replay_line(const Options& options, const CaseId& id);

/// Runs it in this process.
Verdict run_case(const Options& options, const CaseId& id);

/// Whether a driver sees a GPU. Asked in a child, since a driver that was opened is of no use to later ones.
bool has_gpu();

/// Runs everything; returns the number of failures.
std::uint64_t run_all(const Options& options);

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_POOL_HPP_
