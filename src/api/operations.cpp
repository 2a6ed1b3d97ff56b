#include "api/operations.hpp"

#include "plan/candidates.hpp"
#include "plan/catalogue.hpp"
#include "tune/bucket.hpp"

namespace fa::api {

static_assert(plan::Choice::kSlots <= tune::kSlots && plan::BackwardChoice::kSlots <= tune::kSlots,
              "codes tell slots apart");

void ForwardOperation::check_override(const AttentionConfig& config, const plan::Fixed& fixed,
                                      const plan::Variants& variants, plan::Arch arch) {
  const plan::Problem problem = make_problem(config, {}, arch, &variants);
  plan::check_forward_override(problem, fixed);
  plan::check_invariant(problem, fixed);
}

bool ForwardOperation::runs_nothing(const AttentionShape& shape) noexcept {
  return shape.b == 0 || shape.h_q == 0 || shape.s_q == 0;
}

bool ForwardOperation::describable(const Tensors& tensors, bool varlen, bool paged) noexcept {
  return plan::sm90_forward_describable(tensors, varlen, paged);
}

plan::Choice ForwardOperation::choose(const plan::Problem& problem, const plan::Fixed& fixed) noexcept {
  return plan::choose(problem, fixed);
}

plan::KernelChoices ForwardOperation::kernels(const plan::Problem& problem, const plan::Fixed& fixed, bool) {
  return plan::kernel_choices(problem, fixed);
}

std::vector<plan::KernelSpec> ForwardOperation::candidates(const plan::Problem& problem, const plan::Fixed& fixed,
                                                           const plan::KernelSpec& first, std::size_t most) {
  return plan::forward_candidates(problem, fixed, first, most);
}

plan::WorkspaceSize ForwardOperation::workspace_size(const plan::Problem& problem, const plan::Fixed& fixed, bool,
                                                     int multiprocessors) {
  return plan::forward_workspace_size(problem, fixed, multiprocessors);
}

plan::WorkspaceLayout ForwardOperation::workspace(const plan::Problem& problem, const Choice& choice,
                                                  const plan::KernelSet& kernels, int multiprocessors) noexcept {
  const plan::KernelSpec& attention = kernels[plan::Role::attention];
  return plan::forward_workspace(problem, choice, plan::forward_needs(problem, attention, multiprocessors, false));
}

const char* ForwardOperation::detour(const plan::Problem& problem, const plan::Fixed& fixed) noexcept {
  return plan::forward_detour(problem, fixed);
}

plan::ForwardTensors ForwardOperation::tensors(const TuneTensors& of) noexcept {
  return {of.q, of.k, of.v, of.o, of.lse};
}

void BackwardOperation::check_override(const AttentionConfig& config, const plan::Fixed& fixed,
                                       const plan::Variants& variants, plan::Arch arch) {
  if (!config.kernel_backward) return;
  constexpr AttentionShape kUsual{
      .b = 1, .h_q = 1, .h_kv = 1, .s_q = 4096, .s_kv = 4096, .total_q = 4096, .total_kv = 4096};
  plan::plan_backward(make_problem(config, kUsual, arch, &variants), fixed, config.deterministic);
}

bool BackwardOperation::runs_nothing(const AttentionShape& shape) noexcept {
  return shape.b == 0 || (shape.h_q == 0 && shape.h_kv == 0);
}

bool BackwardOperation::describable(const Tensors& tensors, bool, bool) noexcept {
  return plan::sm90_backward_describable(tensors);
}

plan::BackwardChoice BackwardOperation::choose(const plan::Problem& problem, const plan::Fixed& fixed) noexcept {
  return plan::choose_backward(problem, fixed);
}

plan::KernelChoices BackwardOperation::kernels(const plan::Problem& problem, const plan::Fixed& fixed,
                                               bool deterministic) {
  return plan::backward_kernel_choices(problem, fixed, deterministic);
}

std::vector<plan::KernelSpec> BackwardOperation::candidates(const plan::Problem& problem, const plan::Fixed& fixed,
                                                            const plan::KernelSpec& first, std::size_t most) {
  return plan::backward_candidates(problem, fixed, first, most);
}

plan::WorkspaceSize BackwardOperation::workspace_size(const plan::Problem& problem, const plan::Fixed& fixed,
                                                      bool deterministic, int) {
  return plan::backward_workspace_size(problem, fixed, deterministic);
}

plan::WorkspaceLayout BackwardOperation::workspace(const plan::Problem& problem, const Choice& choice,
                                                   const plan::KernelSet& kernels, int) noexcept {
  return plan::backward_workspace(
      problem, choice, plan::backward_needs(problem, kernels[plan::Role::attention], kernels[plan::Role::dq]));
}

const char* BackwardOperation::detour(const plan::Problem& problem, const plan::Fixed& fixed) noexcept {
  return plan::backward_detour(problem, fixed);
}

plan::BackwardTensors BackwardOperation::tensors(const TuneTensors& of) noexcept {
  return {of.q, of.k, of.v, of.o, of.dout, of.lse, {}, of.dq, of.dk, of.dv};
}

}  // namespace fa::api
