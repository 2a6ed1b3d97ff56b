#ifndef FA_SRC_API_PROBLEM_HPP_
#define FA_SRC_API_PROBLEM_HPP_

#include <cstdint>
#include <string>

#include <fa/attention.hpp>

#include "plan/problem.hpp"

namespace fa::api {

/// What `config` asks for `shape` (checked before) on a GPU of `arch`. `variants` are those of the configuration, if it
/// has any, and outlive the problem.
plan::Problem make_problem(const AttentionConfig& config, const AttentionShape& shape, plan::Arch arch,
                           const plan::Variants* variants = nullptr) noexcept;

/// What a program calls: the kernels of the two are planned apart.
enum class Operation : std::uint8_t { forward, backward };

/// The `fa` command that compiles what `problem` needs into `directory`, or into the default one if it is empty.
/// `deterministic` counts for backward only.
std::string compile_command(const plan::Problem& problem, const KernelOverride& fixed, const std::string& directory,
                            Operation op = Operation::forward, bool deterministic = false);

/// The command that puts what `problem` needs where `config` looks: the directory, or the pack of a program that has no
/// directory.
std::string remedy(const plan::Problem& problem, const AttentionConfig& config, Operation op);

}  // namespace fa::api

#endif  // FA_SRC_API_PROBLEM_HPP_
