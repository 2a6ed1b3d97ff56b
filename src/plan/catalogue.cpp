#include "plan/catalogue.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <variant>

#include <fa/error.hpp>

#include "plan/sm80_backward.hpp"
#include "plan/sm80_forward.hpp"
#include "plan/sm80_fp8_forward.hpp"
#include "plan/sm90_backward.hpp"
#include "plan/sm90_forward.hpp"
#include "plan/sm90_fp8_forward.hpp"
#include "plan/sm90_wide_forward.hpp"

namespace fa::plan {
namespace {

template <std::size_t... I>
std::array<const Kernel*, sizeof...(I)> entries(std::index_sequence<I...>) noexcept {
  return {&std::variant_alternative_t<I, KernelSpec::Own>::kernel()...};
}

template <class Way>
const Way& find(std::span<const Way* const> families, Family wanted) noexcept {
  for (const Way* const way : families) {
    if (way->family == wanted) return *way;
  }
  return *families.back();
}

/// Of a problem that the first family serves but for what a call may bring.
template <class Way>
const char* detour(std::span<const Way* const> families, const Problem& problem, const Fixed& fixed) noexcept {
  for (const Way* const way : families) {
    if (way->misfit != nullptr && way->misfit(problem) != nullptr) continue;
    const bool wanted = fixed.family == Family::automatic || fixed.family == way->family;
    return wanted && way->obstacle != nullptr ? way->obstacle(problem) : nullptr;
  }
  return nullptr;
}

}  // namespace

std::span<const Kernel* const> catalogue() noexcept {
  static const auto all = entries(std::make_index_sequence<std::variant_size_v<KernelSpec::Own>>());
  return all;
}

const Kernel* find_kernel(std::string_view name) noexcept {
  for (const Kernel* const kernel : catalogue()) {
    if (kernel->name == name) return kernel;
  }
  return nullptr;
}

KernelSpec::Own own_of(Op op, Family family) {
  const auto search = [&]<std::size_t... I>(std::index_sequence<I...>) {
    std::optional<KernelSpec::Own> found;
    const auto look = [&]<class Which>(Which which) {
      const Kernel& kernel = Which::kernel();
      const bool of_family = kernel.family == Family::automatic || kernel.family == family;
      if (!found && kernel.op == op && of_family) found = which;
    };
    (look(std::variant_alternative_t<I, KernelSpec::Own>{}), ...);
    return found;
  };
  const auto found = search(std::make_index_sequence<std::variant_size_v<KernelSpec::Own>>());
  if (!found) throw Error(ErrorCode::internal, "a family has no kernel for an operation");
  return *found;
}

std::string refusal(const KernelSpec& spec) {
  const Kernel& kernel = spec.kernel();
  return kernel.refusal == nullptr ? std::string() : kernel.refusal(spec);
}

std::span<const ForwardFamily* const> forward_families() noexcept {
  static constexpr const ForwardFamily* kPreferred[] = {&kSm90ForwardFamily, &kSm90WideForwardFamily,
                                                        &kSm90Fp8ForwardFamily, &kSm80Fp8ForwardFamily,
                                                        &kSm80ForwardFamily};
  return kPreferred;
}

const ForwardFamily& forward_family(Family family) noexcept {
  return find(forward_families(), family);
}

const ForwardFamily& last_forward_family(const Problem& problem) noexcept {
  const std::span<const ForwardFamily* const> all = forward_families();
  if (!problem.fp8()) return *all.back();
  const auto serves = [&](const ForwardFamily* family) {
    return family->of_bytes && (family->misfit == nullptr || family->misfit(problem) == nullptr);
  };
  const auto last = std::find_if(all.rbegin(), all.rend(), serves);
  return last == all.rend() ? *all.back() : **last;
}

std::span<const BackwardFamily* const> backward_families() noexcept {
  static constexpr const BackwardFamily* kPreferred[] = {&kSm90BackwardFamily, &kSm80BackwardFamily};
  return kPreferred;
}

const BackwardFamily& backward_family(Family family) noexcept {
  return find(backward_families(), family);
}

const char* forward_detour(const Problem& problem, const Fixed& fixed) noexcept {
  return detour(forward_families(), problem, fixed);
}

const char* backward_detour(const Problem& problem, const Fixed& fixed) noexcept {
  return detour(backward_families(), problem, fixed);
}

}  // namespace fa::plan
