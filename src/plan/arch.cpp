#include "plan/arch.hpp"

#include <fa/error.hpp>

#include "support/text.hpp"

namespace fa::plan {
namespace {

constexpr std::string_view kAccepted =
    "sm_ and a compute capability from 7.5, like sm_75, sm_80, sm_86, sm_89, sm_90a, sm_100a or sm_120a";

constexpr int kLeast = 75;  // Turing; Volta has no ldmatrix

bool all_digits(std::string_view text) noexcept {
  return text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// Shared memory in kilobytes: what a block may opt in to, and what a multiprocessor has.
struct SharedMemory {
  int per_block;
  int per_sm;
};

SharedMemory shared_memory(Arch arch) noexcept {
  switch (arch.sm()) {
    case 75:
      return {64, 64};
    case 80:
    case 87:
      return {163, 164};
    case 90:
    case 100:
    case 101:
    case 103:
    case 110:
      return {227, 228};
    default:
      return {99, 100};  // 8.6, 8.8, 8.9, 12.x, and the least of all for what is not known yet
  }
}

}  // namespace

Arch parse_arch(std::string_view text) {
  std::string_view digits = text;
  if (digits.starts_with("sm_")) digits.remove_prefix(3);
  Arch arch;
  if (!digits.empty() && (digits.back() == 'a' || digits.back() == 'f')) {
    arch.suffix = digits.back();
    digits.remove_suffix(1);
  }
  if (digits.size() < 2 || digits.size() > 3 || !all_digits(digits)) support::throw_invalid("arch", text, kAccepted);
  const int sm = std::stoi(std::string(digits));
  arch.major = sm / 10;
  arch.minor = sm % 10;
  if (arch.sm() < kLeast) support::throw_invalid("arch", text, kAccepted);
  return arch;
}

Arch parse_target(std::string_view text) {
  const Arch arch = parse_arch(text);
  const Arch target = support::device_target(arch.major, arch.minor);
  if (arch != target) {
    support::throw_invalid("arch", text,
                           fmt::format("{}, the target that GPUs of compute capability {}.{} look up",
                                       to_string(target), arch.major, arch.minor));
  }
  return arch;
}

std::vector<Arch> substitute_targets(Arch target) {
  if (target.major != 8 || target.suffix != '\0' || target.minor == 7 || target.minor == 8) return {};
  std::vector<Arch> lower;
  for (const int minor : {9, 6, 0}) {
    if (minor < target.minor) lower.push_back({8, minor});
  }
  return lower;
}

ArchLimits limits(Arch arch) {
  if (arch.sm() < kLeast) {
    support::throw_unsupported("compute capability", fmt::format("{}.{}", arch.major, arch.minor), "7.5 or higher");
  }
  const SharedMemory shared = shared_memory(arch);
  return {shared.per_block * 1024, shared.per_sm * 1024, 65536};
}

void check_dtype(Arch arch, DType dtype) {
  if (arch.major >= 8 || dtype == DType::f16 || dtype == DType::f32) return;
  support::throw_unsupported("dtype", to_string(dtype), "f16 or f32 on compute capability 7.5");
}

}  // namespace fa::plan
