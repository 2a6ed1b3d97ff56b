#ifndef FA_SRC_TUNE_BUCKET_HPP_
#define FA_SRC_TUNE_BUCKET_HPP_

#include <cstdint>
#include <string>

#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"
#include "plan/problem.hpp"

namespace fa::tune {

/// Problems that share a tuned kernel. Head dims, element type, mask, alignment and everything else that specialises
/// the planner's own kernel are exact; so is the number of query heads of a KV head. Lengths are put into half octaves
/// (384 < s <= 512, 512 < s <= 768, 768 < s <= 1024, ...), heads times batch into octaves; beyond 65536 rows, or 4096
/// heads, all are alike.
struct Bucket {
  int s_q = 0;
  int s_kv = 0;
  int heads = 0;           ///< b * h_q
  std::int64_t group = 1;  ///< query heads of a KV head

  friend bool operator==(const Bucket&, const Bucket&) = default;
};
Bucket bucket_of(const plan::Problem& problem) noexcept;

/// What a slot is below. A code has room for it.
inline constexpr int kSlots = plan::Choice::kSlots;

/// Facts of a call that kernels are made for and no slot holds, as bits: its place, that place's steps, its bound.
unsigned call_facts(const plan::Problem& problem) noexcept;

/// The bucket and the planner's choice in one number, never 0: what a call is looked up by. `slot` is one of a
/// plan::Choice or a plan::BackwardChoice. Equal codes mean equal slots and equal buckets.
std::uint64_t bucket_code(const plan::Problem& problem, int slot) noexcept;

/// In words, as records have it. `planned` is the planner's first choice for the problem, which says everything that
/// specialises it: a planner that chooses otherwise finds no record.
std::string bucket_text(const plan::Problem& problem, const plan::KernelSpec& planned);

/// The greatest length of a class.
std::int64_t length_limit(int length_class) noexcept;

/// Whether a kernel runs long enough for a choice to matter: not when a launch takes about as long as the work.
bool worth_tuning(const plan::Problem& problem, bool backward) noexcept;

/// A smaller problem of the same bucket's kind, if `problem` takes longer or needs more memory than a measurement
/// should: fewer batches or heads, and still many times as many tiles as any GPU runs at once.
plan::Problem representative(const plan::Problem& problem, bool backward) noexcept;

/// Bytes of the tensors of a call.
std::int64_t tensor_bytes(const plan::Problem& problem, bool backward) noexcept;

}  // namespace fa::tune

#endif  // FA_SRC_TUNE_BUCKET_HPP_
