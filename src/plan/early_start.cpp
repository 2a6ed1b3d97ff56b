#include "plan/early_start.hpp"

namespace fa::plan {

bool overlaps(const Arch& arch) noexcept {
  return arch.major >= 9;
}

bool may_start_early(const KernelSpec& spec) noexcept {
  if (!overlaps(spec.arch)) return false;
  const bool lists = !spec.varlen && !spec.variants.mask.empty();
  const bool main = spec.op == Op::backward && spec.family == Family::sm90 && !lists;
  // The counter of dynamic kernels is cleared in front of them.
  const bool forward = spec.op == Op::forward && spec.family == Family::sm90 && !spec.dynamic;
  return main || forward || spec.op == Op::backward_convert || spec.op == Op::backward_reduce;
}

}  // namespace fa::plan
