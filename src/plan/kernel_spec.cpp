#include "plan/kernel_spec.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "plan/catalogue.hpp"
#include "plan/sm90_backward_pair.hpp"
#include "support/text.hpp"

namespace fa::plan {

const char* to_string(Family family) noexcept {
  constexpr const char* kNames[] = {"automatic", "sm80", "sm90", "sm90_wide", "sm90_fp8", "sm80_fp8"};
  return kNames[static_cast<std::size_t>(family)];
}

const Kernel& KernelSpec::kernel() const noexcept {
  return std::visit([](const auto& which) -> const Kernel& { return which.kernel(); }, own);
}

Op KernelSpec::op() const noexcept {
  return kernel().op;
}

Family KernelSpec::family() const noexcept {
  return kernel().family;
}

int KernelSpec::cluster() const noexcept {
  if (is<Sm90BackwardPair>()) return std::max(blocks_of_tile(d_qk, d_v), kernel().cluster);
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.split_blocks; }) {
          return which.split_blocks;
        } else if constexpr (requires { which.multicast; }) {
          return which.multicast ? 2 : 1;
        } else {
          return which.kernel().cluster;
        }
      },
      own);
}

bool KernelSpec::dynamic() const noexcept {
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.dynamic; }) return which.dynamic;
        return false;
      },
      own);
}

bool KernelSpec::affine_reach() const noexcept {
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.affine_reach; }) return which.affine_reach;
        return false;
      },
      own);
}

int KernelSpec::split_keys() const noexcept {
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.split_keys; }) return which.split_keys;
        return 0;
      },
      own);
}

int KernelSpec::length_keys() const noexcept {
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.length_keys; }) return which.length_keys;
        return 0;
      },
      own);
}

bool KernelSpec::whole_tiles() const noexcept {
  return is<Sm90Forward>() && as<Sm90Forward>().whole_tiles;
}

bool KernelSpec::scheduled() const noexcept {
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.scheduled; }) return which.scheduled;
        return false;
      },
      own);
}

bool KernelSpec::own_parts() const noexcept {
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.own_parts; }) return which.own_parts;
        return false;
      },
      own);
}

bool KernelSpec::stored() const noexcept {
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.stored(); }) return which.stored();
        return false;
      },
      own);
}

bool KernelSpec::ordered_dq() const noexcept {
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.ordered_dq; }) return which.ordered_dq;
        return false;
      },
      own);
}

bool KernelSpec::in_turns() const noexcept {
  return std::visit(
      [](const auto& which) {
        if constexpr (requires { which.in_turns; }) return which.in_turns;
        return false;
      },
      own);
}

std::string kernel_name(const KernelSpec& spec) {
  return "fa_" + std::string(spec.kernel().entry);
}

std::string canonical(const KernelSpec& spec) {
  const Kernel& kernel = spec.kernel();
  std::string text = fmt::format("{} arch={} dtype={}", kernel.name, to_string(spec.arch), to_string(spec.dtype));
  for (const Field& field : kernel.fields) {
    const bool shown =
        field.shown == Field::Shown::always || (field.shown == Field::Shown::when_set && field.is_set(spec));
    if (shown) support::append_format(text, " {}={}", field.name, field.get(spec));
  }
  if (spec.debug) text += " debug=1";
  return text + canonical(spec.variants);
}

}  // namespace fa::plan
