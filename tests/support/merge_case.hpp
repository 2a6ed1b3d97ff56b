#ifndef FA_TESTS_SUPPORT_MERGE_CASE_HPP_
#define FA_TESTS_SUPPORT_MERGE_CASE_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include <fa/attention.hpp>

/// Merges of partial results that the tests of several rooms share, and what has to be in memory afterwards.
namespace fa::test {

struct MergeCase {
  /// What o of the states is of: the dtype, f32, or by turns.
  enum class Kinds : std::uint8_t { own, floats, mixed };
  /// What some rows of some states hold.
  enum class Rows : std::uint8_t {
    usual,
    without_keys,  ///< some have lse = -inf or +inf, and NaN in o
    nans,          ///< in lse, or in o
  };

  DType dtype = DType::bf16;
  std::int64_t b = 2;
  std::int64_t h_q = 3;
  std::int64_t s_q = 5;
  std::int64_t d_v = 64;
  std::int64_t states = 2;
  bool stacked = false;
  bool packed = false;  ///< [b * s_q, h_q, d_v]
  Kinds kinds = Kinds::own;
  bool float_result = false;
  bool aligned = true;
  bool sink = false;
  bool sum = false;       ///< MergeInputs::sum: neither logarithms nor a sink
  bool lse = true;        ///< of the result
  int in_place = -1;      ///< the state whose o is the result's
  int lse_in_place = -1;  ///< and whose lse
  Rows rows = Rows::usual;
  double spread = 4;  ///< of the logarithms
  double level = 0;   ///< and their mean
  std::uint32_t seed = 1;

  AttentionConfig config() const;
  MergeShape shape() const;
};
std::string to_string(const MergeCase& c);
void PrintTo(const MergeCase& c, std::ostream* out);

MergeCase random_merge_case(std::uint32_t seed);
/// What is not a fact of the kernel, drawn anew.
void draw_rows(MergeCase& c, std::uint32_t seed);

/// The memory of a call, filled, and the call itself.
class MergeData {
 public:
  struct Buffer {
    std::string name;
    std::vector<std::byte> bytes;
    bool read = false;
    bool written = false;
  };

  explicit MergeData(const MergeCase& c);

  std::vector<Buffer>& buffers() { return buffers_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }

  /// A call; it holds the states that its inputs name.
  struct Call {
    std::vector<AttentionState> states;
    MergeInputs inputs;
    ForwardOutputs outputs;
  };
  /// With each buffer at an address of its own.
  Call call(const std::vector<void*>& at) const;
  /// In this memory.
  Call call();

  /// Rows of tensors that belong to the call, by buffer: not the gaps between them.
  template <class Visit>
  void for_each_row(const Visit& visit) const {
    for (const Tensor& tensor : tensors_) {
      const TensorView& view = tensor.view;
      const std::int64_t columns = view.rank == 4 ? view.shape[3] : 1;
      for (std::int64_t i = 0; i < view.shape[0]; ++i) {
        for (std::int64_t j = 0; j < view.shape[1]; ++j) {
          for (std::int64_t k = 0; k < view.shape[2]; ++k) {
            visit(tensor.buffer, offset(tensor, {i, j, k, 0}), static_cast<std::size_t>(columns) * size_of(view.dtype));
          }
        }
      }
    }
  }

  /// The first thing that is wrong with the result, or was written beside it, by float64; empty: none.
  std::string judge(const std::vector<std::vector<std::byte>>& after) const;

 private:
  /// A tensor [b, h_q, s_q, d_v], [b, h_q, s_q] or [1, 1, h_q] of a buffer.
  struct Tensor {
    std::size_t buffer = 0;
    std::size_t start = 0;  ///< bytes
    TensorView view;        ///< without an address
  };
  using At = std::array<std::int64_t, 4>;

  std::size_t add_buffer(const std::string& name, std::size_t bytes);
  Tensor layout(DType dtype, bool is_row, std::uint32_t order, std::size_t* bytes) const;
  Tensor add_tensor(const std::string& name, DType dtype, bool is_row, std::uint32_t order);
  void add_states();
  void fill();
  void fill_row(std::size_t state, std::int64_t b, std::int64_t h, std::int64_t s, std::uint32_t random);
  static std::size_t offset(const Tensor& tensor, At at);
  double number(const Tensor& tensor, const std::vector<std::byte>& bytes, At at) const;
  void set(const Tensor& tensor, At at, double value);
  TensorView view_at(const Tensor& tensor, const std::vector<void*>& at) const;
  std::string judge_row(At at, const std::vector<std::vector<std::byte>>& after) const;

  MergeCase c_;
  std::vector<Buffer> buffers_;
  std::vector<Tensor> tensors_;  ///< all of them
  std::vector<Tensor> o_, lse_;  ///< of the states
  Tensor merged_o_, merged_lse_, sink_;
  std::int64_t stride_o_ = 0, stride_lse_ = 0;
};

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_MERGE_CASE_HPP_
