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
#include "fuzz/c_abi/structs.hpp"
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
/// Latent rows of 656 bytes.
bool is_latent(const fa_config& config);

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
class Arguments : public Structs {
 public:
  Arguments(Random& random, Memory& memory, std::uint64_t mischief) : Structs(random, memory, mischief) {}

  GivenConfig config(bool host);
  fa_device device(bool host);
  ForwardArguments forward(const GivenConfig& config);
  BackwardArguments backward(const GivenConfig& config);
  const fa_append_inputs* append(const GivenConfig& config);
  const fa_append_shape* append_shape(const GivenConfig& config);
  const fa_schedule_memory* schedule();
  const fa_probability_dump* dump(const GivenConfig& config, const Sizes& given, const fa_tensor& k);
  const fa_schedule_inputs* schedule_inputs(const GivenConfig& config);
  MergeArguments merge(const GivenConfig& config);
  const fa_merge_shape* merge_shape(const GivenConfig& config);
  const fa_quantize_inputs* quantize(const GivenConfig& config);
  const fa_shape* shape(const GivenConfig& config);
  const fa_shared_prefix_shape* prefix_shapes(std::uint64_t* count);
  const fa_workspace* workspace();
  const fa_dropout_state* dropout();
  void* stream() { return reinterpret_cast<void*>(random_.one_in(4) ? random_.next() : 0); }
  const char* arch();

  /// A struct that the library fills, of exactly the bytes that its size says.
  template <class Struct>
  Struct* filled() {
    return bad() ? nullptr : const_cast<Struct*>(give(Struct{}));
  }

  /// Whether the call that the arguments are for may not succeed.
  bool must_fail() const { return must_fail_; }
  void forget() { must_fail_ = false; }

 private:
  void spoil_fields(fa_config& value);
  enum class Use : std::uint8_t { input, output };

  float number();

  const fa_kernel_override* kernel_override();
  const fa_function* function(bool mask, bool host, std::vector<NamedCapture>* captures);
  void set_fp8(fa_config* value);
  void set_stored(fa_config* value);
  void set_scales(const GivenConfig& config, const Sizes& sizes, fa_forward_inputs* inputs);
  void set_statistics(const GivenConfig& config, const Sizes& given, const fa_tensor& k, fa_forward_outputs* outputs);
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
  const fa_tensor* max_logit(const GivenConfig& config, const Sizes& given, Use use);
  const fa_tensor* column_sums(const GivenConfig& config, const Sizes& given, const fa_tensor& k, Use use);
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

  bool must_fail_ = false;
  std::int64_t requests_ = 0;                                // that the sequences say they are, right or wrong
  std::map<std::string, std::vector<std::int64_t>> shapes_;  ///< of the last captures
};

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_C_ABI_ARGUMENTS_HPP_
