#ifndef FA_TESTS_FUZZ_C_ABI_ARGUMENTS_HPP_
#define FA_TESTS_FUZZ_C_ABI_ARGUMENTS_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <fa/fa.h>

#include "fuzz/c_abi/expressions.hpp"
#include "fuzz/c_abi/memory.hpp"
#include "fuzz/random.hpp"

namespace fa::fuzz {

/// A configuration as it was passed, and what a library can know of it.
struct GivenConfig {
  const fa_config* config = nullptr;
  fa_config seen{};
  std::vector<NamedCapture> captures;  ///< of both functions
};

/// What the tensors of a call agree on, unless one of them is spoilt.
struct Sizes {
  std::int64_t b = 1, h_q = 1, h_kv = 1, s_q = 1, s_kv = 1, d_qk = 8, d_v = 8;
  std::vector<std::int32_t> cu_q, cu_kv;  ///< of a packed batch
  bool heads = true;                      ///< false: tensors leave the axis of their one head out
};

/// What rows of K or V are in memory.
struct Rows {
  std::int32_t dtype;
  std::int64_t d;
};
bool is_fp8(const fa_config& config);
Rows stored_rows(const fa_config& config, const Sizes& sizes, bool of_v);

struct ForwardArguments {
  const fa_forward_inputs* inputs = nullptr;
  const fa_forward_outputs* outputs = nullptr;
};
struct BackwardArguments {
  const fa_backward_inputs* inputs = nullptr;
  const fa_backward_outputs* outputs = nullptr;
};

struct MergeArguments {
  const fa_merge_inputs* inputs = nullptr;
  const fa_forward_outputs* outputs = nullptr;
};

/// Makes arguments that are valid but for one choice in `mischief` (0: none). Whatever a valid argument names is in
/// memory. What cannot be spoils its call: `must_fail` then says so.
class Arguments {
 public:
  Arguments(Random& random, Memory& memory, std::uint64_t mischief)
      : random_(random), memory_(memory), mischief_(mischief) {}

  GivenConfig config(bool host);
  fa_device device(bool host);
  ForwardArguments forward(const GivenConfig& config);
  BackwardArguments backward(const GivenConfig& config);
  const fa_append_inputs* append(const GivenConfig& config);
  const fa_append_shape* append_shape(const GivenConfig& config);
  const fa_schedule_memory* schedule();
  const fa_schedule_inputs* schedule_inputs(const GivenConfig& config);
  MergeArguments merge(const GivenConfig& config);
  const fa_merge_shape* merge_shape(const GivenConfig& config);
  const fa_shape* shape(const GivenConfig& config);
  const fa_shared_prefix_shape* prefix_shapes(std::uint64_t* count);
  const fa_workspace* workspace();
  const fa_dropout_state* dropout();
  void* stream() { return reinterpret_cast<void*>(random_.one_in(4) ? random_.next() : 0); }
  const char* arch();
  const char* text(const std::string& text);

  /// A struct that the library fills, of exactly the bytes that its size says.
  template <class Struct>
  Struct* filled() {
    return bad() ? nullptr : const_cast<Struct*>(give(Struct{}));
  }

  /// Whether the call that the arguments are for may not succeed.
  bool must_fail() const { return must_fail_; }
  void forget() { must_fail_ = false; }

  /// Whether the next choice is to be a wild one.
  bool bad() { return mischief_ != 0 && random_.one_in(mischief_); }

 private:
  enum class Use : std::uint8_t { input, output };

  std::uint32_t struct_size(std::size_t size);

  /// The bytes that a caller which believes in `size` passes; the rest are zero.
  template <class Struct>
  static Struct cut(const Struct& value, std::uint32_t size) {
    Struct seen{};
    std::memcpy(&seen, &value, std::min<std::size_t>(size, sizeof value));
    return seen;
  }

  template <class Struct>
  const Struct* write(Struct value, std::uint32_t size) {
    // Of a size that is refused for itself, nothing but the size is looked at.
    const std::size_t bytes = size > kLargestStruct ? sizeof value : std::max<std::size_t>(size, sizeof size);
    value.struct_size = size;
    std::byte* const block = memory_.block(bytes);
    std::memcpy(block, &value, std::min(bytes, sizeof value));
    if (bytes > sizeof value && random_.one_in(2))
      block[bytes - 1 - random_.index(bytes - sizeof value)] = std::byte{1};
    return reinterpret_cast<const Struct*>(block);
  }

  template <class Struct>
  const Struct* give(const Struct& value) {
    return write(value, struct_size(sizeof value));
  }

  template <class Item>
  const Item* array(const std::vector<Item>& items) {
    std::byte* const block = memory_.block(items.size() * sizeof(Item));
    if (!items.empty()) std::memcpy(block, items.data(), items.size() * sizeof(Item));
    return reinterpret_cast<const Item*>(block);
  }

  void spoil(std::int32_t* field) {
    if (bad()) *field = random_.wild32();
  }
  void spoil(std::int64_t* field) {
    if (bad()) *field = random_.wild();
  }
  float number();

  const fa_kernel_override* kernel_override();
  const fa_function* function(bool mask, bool host, std::vector<NamedCapture>* captures);
  void set_fp8(fa_config* value);
  void set_stored(fa_config* value);
  void set_scales(const GivenConfig& config, const Sizes& sizes, fa_forward_inputs* inputs);
  const fa_tensor* stored_scale(const fa_config& config, const Sizes& sizes, bool of_v, std::int64_t blocks,
                                std::int64_t rows, Use use);
  void set_cache(fa_config* config);

  Sizes sizes(const GivenConfig& config);
  void lay_out(fa_tensor* tensor, Use use, bool contiguous_rows);
  const fa_tensor* tensor(std::int32_t dtype, std::initializer_list<std::int64_t> shape, Use use, bool contiguous_rows,
                          fa_tensor* seen = nullptr);
  const fa_tensor* heads_tensor(const GivenConfig& config, const Sizes& sizes, bool keys, bool of_v, Use use,
                                fa_tensor* seen = nullptr);
  const fa_tensor* statistic(const GivenConfig& config, const Sizes& sizes, Use use);
  const fa_tensor* sink(const GivenConfig& config, const Sizes& sizes, Use use);
  const fa_shard_place* place(const Sizes& sizes);
  std::int32_t multiprocessors();
  const fa_sequences* sequences(const GivenConfig& config, const Sizes& sizes, const fa_tensor& q);
  const fa_paged_cache* cache(const GivenConfig& config, const Sizes& sizes);
  const std::int32_t* lengths(std::vector<std::int32_t> values, std::int64_t count);
  const std::int64_t* long_numbers(std::int64_t most, std::int64_t count);
  const fa_rotary_embedding* rotary(const GivenConfig& config, std::int64_t rows, std::int32_t* dims);
  const fa_paged_cache* paged_cache(const GivenConfig& config, std::int64_t requests, std::int64_t pages);
  const fa_shared_prefix* prefixes(const GivenConfig& config, const Sizes& sizes, std::uint64_t* count);
  const fa_mask_tiles* tiles();
  const fa_captured* captured(const GivenConfig& config, const Sizes& sizes, bool gradients, std::uint64_t* count);
  const fa_tensor* captured_tensor(const NamedCapture& capture, const GivenConfig& config, const Sizes& sizes,
                                   bool gradient);
  void hold_back(const fa_tensor& q, const fa_tensor& k);

  /// Makes sure of a refusal where `must_fail`.
  template <class Inputs>
  void refuse(const GivenConfig& config, Inputs* inputs);

  static constexpr std::uint32_t kLargestStruct = 4096;

  Random& random_;
  Memory& memory_;
  std::uint64_t mischief_;
  bool must_fail_ = false;
  std::int64_t requests_ = 0;                                // that the sequences say they are, right or wrong
  std::map<std::string, std::vector<std::int64_t>> shapes_;  ///< of the last captures
};

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_C_ABI_ARGUMENTS_HPP_
