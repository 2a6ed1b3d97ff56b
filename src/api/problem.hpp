#ifndef FA_SRC_API_PROBLEM_HPP_
#define FA_SRC_API_PROBLEM_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <fa/attention.hpp>
#include <fa/error.hpp>

#include "plan/fixed.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::api {

/// What `config` asks for `shape` (checked before) on a GPU of `arch`. `variants` are those of the configuration, if it
/// has any, and outlive the problem.
plan::Problem make_problem(const AttentionConfig& config, const AttentionShape& shape, plan::Arch arch,
                           const plan::Variants* variants = nullptr) noexcept;

/// The greatest of `bytes_of(problem)` over what a call of the problem's shape may turn out to be. A shape tells
/// whether rows are aligned, but not strides: those of zero, say, the copy engine cannot describe, and another family
/// serves them. Throws what `bytes_of` throws for others; a call of strides that it refuses is refused too.
template <class BytesOf>
std::size_t most_bytes(plan::Problem problem, const BytesOf& bytes_of) {
  problem.tensor_maps = true;
  const std::size_t usual = bytes_of(std::as_const(problem));
  problem.tensor_maps = false;
  try {
    return std::max(usual, bytes_of(std::as_const(problem)));
  } catch (const Error&) {
    return usual;
  }
}

/// What a program calls: the kernels of the two are planned apart.
enum class Operation : std::uint8_t { forward, backward };

/// What a configuration fixes of the kernels for `op`. Throws fa::Error(invalid_argument).
plan::Fixed read_override(const AttentionConfig& config, Operation op);

/// The `fa` command that compiles what `problem` needs into `directory`, or into the default one if it is empty.
/// `deterministic` counts for backward only.
std::string compile_command(const plan::Problem& problem, const plan::Fixed& fixed, const std::string& directory,
                            Operation op = Operation::forward, bool deterministic = false);

/// The command that puts what `problem` needs where `config` looks: the directory, or the pack of a program that has no
/// directory.
std::string remedy(const plan::Problem& problem, const AttentionConfig& config, Operation op);

/// Likewise what puts one kernel there, of a call that is no forward and no backward.
std::string remedy(plan::KernelSpec spec, const AttentionConfig& config);

}  // namespace fa::api

#endif  // FA_SRC_API_PROBLEM_HPP_
