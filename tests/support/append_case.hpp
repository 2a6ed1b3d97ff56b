#ifndef FA_TESTS_SUPPORT_APPEND_CASE_HPP_
#define FA_TESTS_SUPPORT_APPEND_CASE_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

/// Appends to KV caches that the tests of several rooms share, and what has to be in memory afterwards.
namespace fa::test {

/// How the pools of a cache lie in memory.
enum class PoolLayout : std::uint8_t { hnd, nhd, interleaved };
/// How numbers of the rows are given.
enum class RowNumbers : std::uint8_t { none, i32, i64 };

struct AppendCase {
  DType dtype = DType::bf16;
  std::int64_t h_kv = 2;
  std::int64_t h_q = 0;  ///< 0: no q
  std::int64_t d_qk = 64;
  std::int64_t d_v = 64;
  std::int64_t page_size = 16;          ///< 0: a contiguous cache
  std::vector<std::int64_t> rows{1};    ///< new ones of each request
  std::vector<std::int64_t> before{0};  ///< positions of each request that were there
  bool packed = true;                   ///< else all have as many rows
  std::int64_t padding = 0;             ///< rows of no request, packed: in front of and behind all
  bool batch_index = false;
  RowNumbers slots = RowNumbers::none;
  RowNumbers positions = RowNumbers::none;
  std::int64_t far = 0;  ///< added to given positions
  int rotary_dims = 0;
  bool interleaved = false;
  double base = 10000;
  std::optional<DType> table = std::nullopt;  ///< of cosines and sines
  bool aligned = true;
  bool in_place = false;
  PoolLayout layout = PoolLayout::nhd;
  std::optional<DType> k_dtype = std::nullopt;  ///< what the cache's K is stored as
  std::optional<DType> v_dtype = std::nullopt;
  int group_size = 0;  ///< of u4x2
  bool scales_given = false;
  bool latent = false;   ///< into latent rows: d_qk is 576, there is no V
  bool extreme = false;  ///< every other number of k and v is the greatest of the dtype, or the least
  bool hostile = false;  ///< some lengths, table entries, rows and slots do not fit
  std::uint32_t seed = 1;

  std::int64_t new_rows() const;
  AttentionConfig config() const;
  AppendShape shape() const;
};
std::string to_string(const AppendCase& c);
void PrintTo(const AppendCase& c, std::ostream* out);

/// Of any kind; `hostile` ones are for kernels alone.
AppendCase random_append_case(std::uint32_t seed, bool hostile);
/// What is not a fact of the kernel, drawn anew.
void draw_requests(AppendCase& c, std::uint32_t seed);

/// A piece of memory of a call.
struct AppendBuffer {
  const char* name;
  std::vector<std::byte> bytes;
  bool written = false;
};
enum class AppendPart : std::uint8_t {
  k,
  v,
  q,
  q_out,
  k_cache,
  v_cache,
  cos,
  sin,
  cu,
  used,
  table,
  index,
  slots,
  positions,
  k_scale,
  v_scale,
};
inline constexpr std::size_t kAppendParts = 16;

/// The memory of a call, filled, and the call itself.
class AppendData {
 public:
  explicit AppendData(const AppendCase& c);

  /// Those that the case does not have are empty. An interleaved cache is all in k_cache.
  std::array<AppendBuffer, kAppendParts>& buffers() { return buffers_; }
  const std::array<AppendBuffer, kAppendParts>& buffers() const { return buffers_; }

  /// The call with each buffer at an address of its own.
  AppendInputs inputs(const std::array<void*, kAppendParts>& at) const;
  /// In this memory.
  AppendInputs inputs();

  /// Rows of tensors that belong to the call: not the gaps between them.
  template <class Visit>
  void for_each_row(AppendPart part, const Visit& visit) const {
    const TensorView view = views_[static_cast<std::size_t>(part)];
    if (!view.defined()) return;
    for (std::int64_t i = 0; i < view.shape[0]; ++i) {
      for (std::int64_t j = 0; j < view.shape[1]; ++j) {
        for (std::int64_t k = 0; k < view.shape[2]; ++k) {
          visit(start_of(part) +
                    static_cast<std::size_t>(i * view.strides[0] + j * view.strides[1] + k * view.strides[2]) *
                        size_of(view.dtype),
                static_cast<std::size_t>(view.shape[3]) * size_of(view.dtype));
        }
      }
    }
  }

  /// The first thing that is wrong with memory of the buffers that are written, by float64; empty: none.
  std::string judge(const std::array<std::vector<std::byte>, kAppendParts>& after) const;

 private:
  struct Row {
    bool known = false;  ///< of a request
    std::int64_t page = -1;
    std::int64_t row = 0;
    std::int64_t position = 0;
  };

  AppendBuffer& at(AppendPart part) { return buffers_[static_cast<std::size_t>(part)]; }
  const AppendBuffer& at(AppendPart part) const { return buffers_[static_cast<std::size_t>(part)]; }
  std::size_t start_of(AppendPart part) const { return starts_[static_cast<std::size_t>(part)]; }
  void add_tensor(AppendPart part, const char* name, std::array<std::int64_t, 4> shape, std::array<int, 4> order,
                  bool fill, std::optional<DType> stored = std::nullopt);
  void add_cache();
  void add_latent_cache(std::array<int, 4> order);
  void add_scales(AppendPart part, const char* name, std::array<int, 4> order);
  void add_pairs(AppendPart part, const char* name, std::int64_t columns, std::array<int, 4> order);
  DType dtype_of(AppendPart part) const { return views_[static_cast<std::size_t>(part)].dtype; }

  /// What a column of a row is in float64, and by how much a kernel's may differ before it is rounded.
  struct Wanted {
    double value;
    double computed;
  };
  Wanted wanted(AppendPart from, std::array<std::int64_t, 4> source, const Row& row, std::int64_t column) const;
  std::string compare_stored_row(AppendPart from, std::array<std::int64_t, 4> source, AppendPart to,
                                 std::array<std::int64_t, 4> target, const Row& row,
                                 const std::array<std::vector<std::byte>, kAppendParts>& after,
                                 std::array<std::vector<std::byte>, kAppendParts>& expected) const;
  /// Columns [first, first + count) of a row of 8 bits, by their scale, and whether the scale is that of their
  /// greatest.
  std::string compare_codes(AppendPart from, std::array<std::int64_t, 4> source, AppendPart to,
                            std::array<std::int64_t, 4> target, const Row& row, std::int64_t first, std::int64_t count,
                            double scale, const std::array<std::vector<std::byte>, kAppendParts>& after,
                            std::array<std::vector<std::byte>, kAppendParts>& expected) const;
  std::string compare_latent_row(std::array<std::int64_t, 4> source, std::array<std::int64_t, 4> target, const Row& row,
                                 const std::array<std::vector<std::byte>, kAppendParts>& after,
                                 std::array<std::vector<std::byte>, kAppendParts>& expected) const;
  std::string compare_u4_row(AppendPart from, std::array<std::int64_t, 4> source, AppendPart to,
                             std::array<std::int64_t, 4> target, const Row& row,
                             const std::array<std::vector<std::byte>, kAppendParts>& after,
                             std::array<std::vector<std::byte>, kAppendParts>& expected) const;
  void add_requests();
  void add_slots();
  void add_rotary();
  template <class Number>
  void add_numbers(AppendPart part, const char* name, const std::vector<Number>& numbers);
  double number(AppendPart part, const std::vector<std::byte>& bytes, std::array<std::int64_t, 4> at) const;
  std::size_t offset(AppendPart part, std::array<std::int64_t, 4> at) const;
  std::array<double, 2> turn(std::int64_t position, std::int64_t pair) const;
  std::string compare_row(AppendPart from, std::array<std::int64_t, 4> source, AppendPart to,
                          std::array<std::int64_t, 4> target, const Row& row,
                          const std::array<std::vector<std::byte>, kAppendParts>& after,
                          std::array<std::vector<std::byte>, kAppendParts>& expected) const;

  /// The first column that may turn.
  std::int64_t first_turned(AppendPart from) const { return c_.latent && from != AppendPart::v ? kLatentCodes : 0; }
  static constexpr std::int64_t kLatentCodes = 512, kLatentGroup = 128, kLatentBytes = 656;

  AppendCase c_;
  std::array<AppendBuffer, kAppendParts> buffers_{};
  std::array<TensorView, kAppendParts> views_{};  ///< of tensors, without an address
  std::array<std::size_t, kAppendParts> starts_{};
  std::vector<Row> rows_;  ///< where each new row belongs
  std::int64_t pages_ = 0, page_rows_ = 0, max_pages_ = 0, table_rows_ = 0;
};

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_APPEND_CASE_HPP_
