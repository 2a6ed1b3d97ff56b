#ifndef FA_SRC_API_OPERATIONS_HPP_
#define FA_SRC_API_OPERATIONS_HPP_

#include <cstddef>
#include <vector>

#include <fa/attention.hpp>

#include "api/problem.hpp"
#include "api/tune_subject.hpp"
#include "plan/call_plan.hpp"

/// What the two operations of an Attention differ by, for DeviceOperation: how they are planned.
namespace fa::api {

struct ForwardOperation {
  using Choice = plan::Choice;
  using Tensors = plan::ForwardTensors;
  using Inputs = ForwardInputs;
  using Outputs = ForwardOutputs;
  static constexpr Operation kOperation = Operation::forward;

  /// Throws fa::Error for an override that can never fit.
  static void check_override(const AttentionConfig& config, const plan::Fixed& fixed, const plan::Variants& variants,
                             plan::Arch arch);
  static bool runs_nothing(const AttentionShape& shape) noexcept;
  static bool describable(const Tensors& tensors, bool varlen, bool paged) noexcept;
  static Choice choose(const plan::Problem& problem, const plan::Fixed& fixed) noexcept;
  static plan::KernelChoices kernels(const plan::Problem& problem, const plan::Fixed& fixed, bool deterministic);
  static std::vector<plan::KernelSpec> candidates(const plan::Problem& problem, const plan::Fixed& fixed,
                                                  const plan::KernelSpec& first, std::size_t most);
  static plan::WorkspaceSize workspace_size(const plan::Problem& problem, const plan::Fixed& fixed, bool deterministic,
                                            int multiprocessors);
  static plan::WorkspaceLayout workspace(const plan::Problem& problem, const Choice& choice,
                                         const plan::KernelSet& kernels, int multiprocessors) noexcept;
  /// Why the family that serves the configuration's usual calls does not serve this one (plan::forward_detour).
  static const char* detour(const plan::Problem& problem, const plan::Fixed& fixed) noexcept;
  static Tensors tensors(const TuneTensors& of) noexcept;
};

struct BackwardOperation {
  using Choice = plan::BackwardChoice;
  using Tensors = plan::BackwardTensors;
  using Inputs = BackwardInputs;
  using Outputs = BackwardOutputs;
  static constexpr Operation kOperation = Operation::backward;

  static void check_override(const AttentionConfig& config, const plan::Fixed& fixed, const plan::Variants& variants,
                             plan::Arch arch);
  static bool runs_nothing(const AttentionShape& shape) noexcept;
  static bool describable(const Tensors& tensors, bool varlen, bool paged) noexcept;
  static Choice choose(const plan::Problem& problem, const plan::Fixed& fixed) noexcept;
  static plan::KernelChoices kernels(const plan::Problem& problem, const plan::Fixed& fixed, bool deterministic);
  static std::vector<plan::KernelSpec> candidates(const plan::Problem& problem, const plan::Fixed& fixed,
                                                  const plan::KernelSpec& first, std::size_t most);
  static plan::WorkspaceSize workspace_size(const plan::Problem& problem, const plan::Fixed& fixed, bool deterministic,
                                            int multiprocessors);
  static plan::WorkspaceLayout workspace(const plan::Problem& problem, const Choice& choice,
                                         const plan::KernelSet& kernels, int multiprocessors) noexcept;
  static const char* detour(const plan::Problem& problem, const plan::Fixed& fixed) noexcept;
  static Tensors tensors(const TuneTensors& of) noexcept;
};

}  // namespace fa::api

#endif  // FA_SRC_API_OPERATIONS_HPP_
