#include "emulator/fault.hpp"

#include <ostream>
#include <string_view>

#include <fmt/format.h>

namespace emulator {
namespace {

std::string template_name(std::string_view path) {
  for (const std::string_view folder : {"/templates/", "/mutants/"}) {
    const std::size_t at = path.rfind(folder);
    if (at != std::string_view::npos) return std::string(path.substr(at + folder.size()));
  }
  const std::size_t slash = path.rfind('/');
  return std::string(slash == std::string_view::npos ? path : path.substr(slash + 1));
}

std::string describe(FaultKind kind, int block, int thread, const std::string& instruction, std::uint64_t address,
                     const Site& site, const std::string& detail) {
  std::string text = fmt::format("{}: block {}, thread {} (warp {}, lane {}): {}", to_string(kind), block, thread,
                                 thread / 32, thread % 32, instruction);
  if (address != 0) text += fmt::format(" at {:#x}", address);
  text += ": " + detail;
  return site.line() == 0 ? text : text + fmt::format(" [{}]", to_string(site));
}

}  // namespace

const char* to_string(FaultKind kind) noexcept {
  switch (kind) {
    case FaultKind::global_out_of_bounds:
      return "global_out_of_bounds";
    case FaultKind::global_not_writable:
      return "global_not_writable";
    case FaultKind::global_uninitialised:
      return "global_uninitialised";
    case FaultKind::misaligned:
      return "misaligned";
    case FaultKind::shared_out_of_bounds:
      return "shared_out_of_bounds";
    case FaultKind::shared_uninitialised:
      return "shared_uninitialised";
    case FaultKind::shared_in_flight:
      return "shared_in_flight";
    case FaultKind::shared_race:
      return "shared_race";
    case FaultKind::divergence:
      return "divergence";
    case FaultKind::deadlock:
      return "deadlock";
    case FaultKind::source_overwritten:
      return "source_overwritten";
    case FaultKind::copies_at_exit:
      return "copies_at_exit";
    case FaultKind::exited_block:
      return "exited_block";
    case FaultKind::barrier_misuse:
      return "barrier_misuse";
    case FaultKind::unfenced:
      return "unfenced";
    case FaultKind::register_in_flight:
      return "register_in_flight";
    case FaultKind::bad_descriptor:
      return "bad_descriptor";
    case FaultKind::register_pool:
      return "register_pool";
    case FaultKind::out_of_turn:
      return "out_of_turn";
    case FaultKind::too_early:
      return "too_early";
  }
  return "unknown";
}

std::ostream& operator<<(std::ostream& out, FaultKind kind) {
  return out << to_string(kind);
}

std::string to_string(const Site& site) {
  return fmt::format("{}:{}", template_name(site.file_name()), site.line());
}

Fault::Fault(FaultKind fault_kind, int fault_block, int fault_thread, std::string fault_instruction,
             std::uint64_t fault_address, const Site& fault_site, const std::string& detail)
    : std::runtime_error(
          describe(fault_kind, fault_block, fault_thread, fault_instruction, fault_address, fault_site, detail)),
      kind(fault_kind),
      block(fault_block),
      thread(fault_thread),
      instruction(std::move(fault_instruction)),
      address(fault_address),
      file(template_name(fault_site.file_name())),
      line(fault_site.line()) {}

}  // namespace emulator
