#ifndef FA_TESTS_FAKE_DRIVER_RANDOM_CALLS_HPP_
#define FA_TESTS_FAKE_DRIVER_RANDOM_CALLS_HPP_

#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>

#include <fa/attention.hpp>

namespace fa {

/// Makes up configurations, and calls of them whose tensors lie in memory in every way that is accepted. Nothing is
/// behind the addresses. Equal seeds make equal calls.
class RandomCalls {
 public:
  /// `usual`: 16-bit tensors of their own, which every kernel can serve.
  explicit RandomCalls(unsigned seed, bool usual = false) : random_(seed), usual_(usual) {}

  AttentionConfig config();

  /// One of calls over pages. It has no backward.
  AttentionConfig paged_config();

  /// Sizes of a call of `config`; what is said of alignment is nothing yet.
  AttentionShape shape(const AttentionConfig& config);

  /// Tensors of such a call. Tells `shape` whether their rows are aligned, as a caller finds it out: by all tensors of
  /// the forward, and with those of the backward.
  struct Call {
    ForwardInputs inputs;
    ForwardOutputs outputs;
    BackwardInputs backward_inputs;
    BackwardOutputs backward_outputs;
    AttentionShape forward_shape;
    AttentionShape backward_shape;
  };
  Call call(const AttentionConfig& config, const AttentionShape& shape);

  std::int64_t up_to(std::int64_t n) { return 1 + static_cast<std::int64_t>(random_()) % n; }
  bool one_in(unsigned n) { return random_() % n == 0; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[random_() % values.size()];
  }

 private:
  std::uintptr_t memory();
  TensorView tensor(const AttentionConfig& config, std::int64_t b, std::int64_t h, std::int64_t s, int d, bool written);
  TensorView statistic(std::int64_t b, std::int64_t h, std::int64_t s);
  PackedSequences sequences(const AttentionConfig& config, const AttentionShape& shape);
  PagedCache cache(const AttentionConfig& config, const AttentionShape& shape);
  void add_statistics(const AttentionConfig& config, const AttentionShape& shape, std::int64_t s_kv, Call& call);
  Captures captures(const AttentionConfig& config, const AttentionShape& shape);

  std::mt19937 random_;
  bool usual_;
  std::uintptr_t next_ = std::uintptr_t{1} << 40;
};

/// Draws what a configuration may have besides: states, bits that depend on less, and 8-bit elements.
void add_to(AttentionConfig& config, RandomCalls& random);

/// Draws what is wider still: head dims beyond 256, statistics and their gradients, values in keys, and caches of 4
/// bits.
void widen(AttentionConfig& config, RandomCalls& random);

/// Draws a place in a larger attention and a bound of multiprocessors, and says so in the shape.
void place(ForwardInputs& inputs, AttentionShape& shape, const AttentionConfig& config, RandomCalls& random);
void place(BackwardInputs& inputs, AttentionShape& shape, const AttentionConfig& config, RandomCalls& random);

/// K and V in 8 bits, with a scale a row, or in 4, with a scale and an offset of each group.
void store_in_few_bits(ForwardInputs& inputs, AttentionShape& shape, const AttentionConfig& config);

/// For messages.
std::string text_of(const AttentionConfig& config, const AttentionShape& shape);

}  // namespace fa

#endif  // FA_TESTS_FAKE_DRIVER_RANDOM_CALLS_HPP_
