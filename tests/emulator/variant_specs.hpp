#ifndef FA_TESTS_EMULATOR_VARIANT_SPECS_HPP_
#define FA_TESTS_EMULATOR_VARIANT_SPECS_HPP_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"
#include "support/random_variant.hpp"
#include "support/variant_case.hpp"

namespace emulator {

/// Kernels with functions, windows, chunks or sinks: a choice of these, and a small kernel for it.
struct VariantKernels {
  std::string choice;  ///< of fa::test::variant_choices()
  fa::test::AttentionCase attention;
  bool pack_gqa = false;
  int splits = 1;  ///< of keys in forward, of queries in backward
  int loop_bodies = 1;
  bool deterministic = false;
  bool varlen = false;  ///< of packed batches
  bool dropout = false;
  std::optional<fa::test::VariantChoice> own = {};  ///< instead of `choice`
  int tile_n = 32;
  bool pairs = false;  ///< of warps, in an sm80 forward
  std::optional<bool> affine_product = {};
  bool affine_reach = false;
  bool turing = false;   ///< for compute capability 7.5
  int split_blocks = 1;  ///< of a cluster, which merge as many splits of an sm90 forward
  bool dynamic = false;  ///< its query tiles come from a counter
};
const std::vector<VariantKernels>& variant_kernels();

/// Those with packed batches, dropout or both besides.
const std::vector<VariantKernels>& packed_variant_kernels();

/// Those of the random combinations whose head dims are small, in the order of `emulated_random_kernels`.
constexpr std::size_t kRandomEmulated = 20;
const std::vector<VariantKernels>& random_variant_kernels();
const std::vector<std::size_t>& emulated_random_kernels();

/// Those whose forward kernel is of the sm90 family; loop_bodies counts its Q buffers. They have no backward.
const std::vector<VariantKernels>& hopper_variant_kernels();
const std::vector<VariantKernels>& hopper_packed_variant_kernels();

/// The configuration of an entry for a case, which its kernels serve whatever the lengths are.
fa::test::VariantCase variant_case(const VariantKernels& kernels, const fa::test::AttentionCase& attention);

/// Kernels of a forward and a backward call: the attention kernel, combine when split; the main kernel, the pass for dQ
/// when deterministic, the kernel for sinks where there are any.
struct VariantSpecs {
  fa::plan::KernelSpec forward, combine, backward, dq, sink;
};
VariantSpecs variant_specs(const VariantKernels& kernels);
VariantSpecs hopper_variant_specs(const VariantKernels& kernels);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_VARIANT_SPECS_HPP_
