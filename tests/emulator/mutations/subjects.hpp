#ifndef FA_TESTS_EMULATOR_MUTATIONS_SUBJECTS_HPP_
#define FA_TESTS_EMULATOR_MUTATIONS_SUBJECTS_HPP_

#include <string>

#include "emulator/mutations.hpp"

/// The kernels, and what they are given, in which mutations are made.
namespace emulator {

using fa::DType;
using fa::plan::Family;
using fa::plan::KernelSpec;
using fa::plan::Op;

template <class Change>
KernelSpec changed(KernelSpec spec, const Change& change) {
  change(spec);
  return spec;
}

/// Two warps, 16 rows each; ragged sequences take three key tiles.
KernelSpec sm80(int stages);
KernelSpec sm80_q_in_registers();
KernelSpec sm80_unaligned();
KernelSpec sm80_split();
KernelSpec sm90_split();
KernelSpec sm80_packed_gqa();
KernelSpec sm80_pair(int stages);   ///< of warps
KernelSpec sm80_group(int stages);  ///< of four warps
KernelSpec sm80_fp32();
KernelSpec sm80_dropout();

/// The same for compute capability 7.5, which has no bf16.
KernelSpec on_turing(KernelSpec spec);

/// Two steps of queries, four warps: two groups of keys by two of queries.
KernelSpec sm80_backward();
KernelSpec sm80_backward_dq();

/// Two consumer warpgroups with ping-pong scheduling, two stages; V has two slabs.
KernelSpec sm90();
KernelSpec sm90_causal();
KernelSpec sm90_skipping();
KernelSpec sm90_exact_max();
KernelSpec sm90_own_ends();
KernelSpec sm90_exchanging();
KernelSpec sm90_rotating();
KernelSpec sm90_dropout();
KernelSpec sm90_varlen();
KernelSpec sm90_varlen_dynamic();

/// Two consumer warpgroups that share the columns of dQ, two stages.
KernelSpec sm90_backward();

/// The Hopper kernel of a choice of fa::test::variant_choices().
Subject sm90_variant(const std::string& choice);

/// The kernel over pages of a choice and a family.
Subject over_pages(const std::string& choice, Family family);

/// Scores differ little: each key that a row sees counts.
Subject flat(Subject subject);
/// Maxima of rows grow so much that P is lost.
Subject steep(Subject subject);
/// Scores are so great that no float is near enough to them times the scale.
Subject far(Subject subject);
Subject two_entries(Subject subject);
Subject spoilt_row(Subject subject);
Subject spoilt_key(Subject subject);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_MUTATIONS_SUBJECTS_HPP_
