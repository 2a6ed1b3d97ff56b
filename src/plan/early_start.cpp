#include "plan/early_start.hpp"

#include "plan/catalogue.hpp"

namespace fa::plan {

bool overlaps(const Arch& arch) noexcept {
  return arch.major >= 9;
}

bool may_start_early(const KernelSpec& spec) noexcept {
  const Kernel& kernel = spec.kernel();
  return overlaps(spec.arch) && kernel.starts_early != nullptr && kernel.starts_early(spec);
}

}  // namespace fa::plan
