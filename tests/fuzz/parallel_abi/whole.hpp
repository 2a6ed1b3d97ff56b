#ifndef FA_TESTS_FUZZ_PARALLEL_ABI_WHOLE_HPP_
#define FA_TESTS_FUZZ_PARALLEL_ABI_WHOLE_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <fa/parallel.h>

#include "fuzz/random.hpp"

namespace fa::fuzz {

/// An attention that ranks share, and its sizes.
struct Setup {
  int ranks = 1;
  fa_config attention{};
  fa_function score{}, mask{};
  fa_parallel_config config{};
  std::int64_t b = 1, h_q = 1, h_kv = 1, s_q = 1, s_kv = 1, d_qk = 8, d_v = 8;
  std::vector<std::int64_t> lengths;  ///< of a packed batch
  fa_dropout_state dropout{};
  bool has_dlse = false, has_dsink = false;
  bool valid = true;  ///< served, and not merely refused without harm

  bool packed() const { return attention.varlen != 0; }
  fa_parallel_shape shape() const { return {sizeof(fa_parallel_shape), 0, b, h_q, h_kv, s_q, s_kv}; }
};
Setup random_setup(Random& random, int ranks);

/// Rows of the whole that a rank has, in the order of its shard, by the definition of the layouts.
std::vector<std::int64_t> rows_of_rank(int layout, int ranks, int rank, const std::vector<std::int64_t>& lengths);

enum Name : std::uint8_t { kQ, kK, kV, kO, kLse, kDout, kDlse, kSink, kDq, kDk, kDv, kDsink, kNames };

/// A whole tensor, row-major.
struct Data {
  std::int32_t dtype = FA_F32;
  std::vector<std::int64_t> shape;
  int row_axis = -1;  ///< that ranks share; -1: none
  bool of_q = true;
  std::vector<std::byte> bytes;

  std::size_t elements() const;
  fa_tensor tensor();
};
void fill(std::int32_t dtype, std::byte* bytes, std::size_t elements, Random& random);

/// Copies a shard's rows, element by element. `part` is in memory, with any strides.
void move_rows(Data& whole, const fa_tensor& part, const std::vector<std::int64_t>& rows, bool to_part);

/// Offsets in bytes of all elements of a tensor.
std::vector<std::int64_t> offsets_of(const fa_tensor& tensor);

/// The inputs of a setup, and what one device computes of them.
class Whole {
 public:
  Whole(const Setup& setup, Random& random);

  /// By fa_forward and fa_backward; false where fa refuses the attention.
  bool compute(const Setup& setup, bool backward);
  Data& operator[](int name) { return data_[static_cast<std::size_t>(name)]; }

 private:
  std::array<Data, kNames> data_;
};

/// What is wrong with a result, or nothing.
std::string difference(const char* name, const Data& result, const Data& expected);

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_PARALLEL_ABI_WHOLE_HPP_
