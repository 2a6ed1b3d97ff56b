#ifndef FA_SRC_PLAN_CANDIDATES_HPP_
#define FA_SRC_PLAN_CANDIDATES_HPP_

#include <cstddef>
#include <vector>

#include "plan/backward.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// A kernel that could serve a problem, and what its family's cost model makes of it: cycles of a multiprocessor for
/// one query row and one key, up to a factor that all kernels share. The model orders; it does not predict.
struct Candidate {
  KernelSpec spec;
  double cost = 0;
};
using Candidates = std::vector<Candidate>;

/// What the families can do for a problem whose choice is `choice`: every kernel fits its architecture, spills nothing
/// as far as that is known before compiling, and serves exactly the calls that the planner's own kernel serves: what
/// the choice fixes (packing, splitting, alignment) is the same in all. In no order.
Candidates sm80_forward_candidates(const Problem& problem, const Choice& choice);
Candidates sm90_forward_candidates(const Problem& problem, const Choice& choice);
Candidates sm80_backward_candidates(const Problem& problem, const BackwardChoice& choice, bool deterministic);
Candidates sm90_backward_candidates(const Problem& problem, const BackwardChoice& choice, bool deterministic);

/// What a tuner tries: `first` (the planner's kernel), then the candidates of every family that may serve, the most
/// promising first, `most` kernels in all. Only `fixed.family` of an override is respected: a problem with other fixed
/// fields is not tuned (Fixed::fixes_tile).
std::vector<KernelSpec> forward_candidates(const Problem& problem, const Fixed& fixed, const KernelSpec& first,
                                           std::size_t most);
std::vector<KernelSpec> backward_candidates(const Problem& problem, const Fixed& fixed, const KernelSpec& first,
                                            std::size_t most);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_CANDIDATES_HPP_
