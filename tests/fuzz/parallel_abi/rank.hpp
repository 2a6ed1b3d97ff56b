#ifndef FA_TESTS_FUZZ_PARALLEL_ABI_RANK_HPP_
#define FA_TESTS_FUZZ_PARALLEL_ABI_RANK_HPP_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <fa/parallel.h>

#include "fuzz/c_abi/structs.hpp"
#include "fuzz/parallel_abi/whole.hpp"

namespace fa::fuzz {

/// What a call of a rank came to.
struct Outcome {
  int status = 0;
  std::string message;  ///< of what broke its contract; empty for none
  std::string error;    ///< the library's words
};

/// Holds a status to the contract of errors, on the thread that has it.
Outcome observed(int status);

/// Runs `body(rank)` on a thread for each rank, and throws what one of them has thrown.
void on_ranks(int ranks, const std::function<void(int)>& body);

/// A tensor of a call, and the memory around its elements.
struct Part {
  fa_tensor tensor{};
  std::byte* block = nullptr;
  std::size_t size = 0;
  int name = 0;
  bool output = false;
  std::vector<std::byte> before;
};

struct RankState {
  Random random;  ///< the same on all ranks that make the same call
  Random own;     ///< how a rank's tensors lie in memory
  Memory memory{own};
};

/// Arguments of one call of a rank. Ranks of one `shared` make the same choices, right or wrong. Outputs come before
/// inputs, and tensors before how they are copied: the latter make sure that a tensor without memory is refused.
class RankCall : private RankState, public Structs {
 public:
  RankCall(const Random& shared, std::uint64_t own_seed, int rank, std::uint64_t mischief)
      // What is wild is to be the same on all ranks, strides too.
      : RankState{shared, Random(own_seed, mischief == 0 ? static_cast<std::uint64_t>(rank) : 0)},
        Structs(RankState::random, RankState::memory, mischief),
        rank_(rank) {}

  const fa_parallel_config* config(const Setup& setup);
  const fa_parallel_shape* shape(const Setup& setup);
  const std::int64_t* lengths(const Setup& setup, std::uint64_t* count);
  const fa_forward_inputs* forward_inputs(const Setup& setup, Whole& whole);
  const fa_forward_outputs* forward_outputs(const Setup& setup, Whole& whole);
  const fa_backward_inputs* backward_inputs(const Setup& setup, Whole& whole);
  const fa_backward_outputs* backward_outputs(const Setup& setup, Whole& whole);
  const fa_shard_copy* shard_copy(const Setup& setup);
  const fa_tensor* whole_tensor(Whole& whole, int name, bool output);
  const fa_tensor* part_tensor(const Setup& setup, Whole& whole, int name, bool output);
  const fa_nccl_options* nccl_options();

  /// Whether something was made wild: what comes out then is not looked at.
  bool spoilt() const { return spoilt_; }
  /// Whether success would be wrong, since an argument has no memory.
  bool must_fail() const { return must_fail_; }

  /// What the call has written that it must not, or nothing.
  std::string damage(int status) const;

  /// Puts the results where they belong in the whole.
  void take(const Setup& setup, Whole* results) const;

  /// Of a copy: whether its output has the rows of `name` that it is to have.
  bool is_copied(const Setup& setup, Whole& whole, int name, bool to_part) const;

  /// Gives all memory back, as a caller may once the call has returned.
  void release() {
    parts_.clear();
    memory_.clear();
  }

 private:
  bool wild() {
    const bool result = bad();
    spoilt_ = spoilt_ || result;
    return result;
  }
  template <class Number>
  void change(Number* number) {
    if (!wild()) return;
    *number = static_cast<Number>(random_.wild());
  }
  template <class Struct>
  const Struct* pass(const Struct& value) {
    const std::uint32_t size = must_fail_ ? static_cast<std::uint32_t>(sizeof value) : struct_size(sizeof value);
    spoilt_ = spoilt_ || size != sizeof value;
    return wild() && random_.one_in(3) && !must_fail_ ? nullptr : write(value, size);
  }
  void lay_out(fa_tensor* tensor);
  const fa_tensor* tensor(const Data& data, const std::vector<std::int64_t>& rows, int name, bool output, Whole* whole);
  const fa_dropout_state* dropout(const Setup& setup);
  template <class Inputs>
  void add_strangers(const Setup& setup, Inputs* inputs);

  int rank_;
  bool spoilt_ = false, must_fail_ = false;
  std::vector<Part> parts_;
};

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_PARALLEL_ABI_RANK_HPP_
