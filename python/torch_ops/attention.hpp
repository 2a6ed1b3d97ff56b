#ifndef FA_PYTHON_TORCH_OPS_ATTENTION_HPP_
#define FA_PYTHON_TORCH_OPS_ATTENTION_HPP_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tensor.hpp"

namespace fa_torch {

/// The arguments of the operators that are no tensors and no sizes: those of Options in _options.py.
struct Options {
  bool causal = false;
  std::optional<double> scale;
  bool top_left = false;
  std::optional<std::int64_t> window_left, window_right;
  std::int64_t chunk = 0;
  double dropout = 0;
  bool deterministic = false;
  std::optional<std::string> score, mask;
  std::vector<std::string> tensor_names, number_names;
  bool varlen = false;
};

/// A number for each different Options; it stays what it is.
std::int64_t number_of(const Options& options);
const Options& options_of(std::int64_t number);

/// What a call has besides q, k, v and the number of its options. Tensors that are not given are empty.
struct Rest {
  Tensor sink;
  std::vector<Tensor> captures;
  Tensor cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, rng_state;
  std::int64_t max_s_q = 0, max_s_kv = 0, seed = 0, offset = 0;
  std::vector<double> numbers;
};

/// o, and the log-sum-exp where it is wanted.
struct Forward {
  Tensor o, lse;
};
Forward forward(Tensor q, Tensor k, Tensor v, std::int64_t options, const Rest& rest, bool want_lse);

struct Backward {
  Tensor dq, dk, dv, dsink;
  std::vector<Tensor> dcaptures;
};
/// needed: gradients of q, k, v, the sink and captures. Those that are not are empty. dout, dlse: empty for none.
Backward backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, std::int64_t options,
                  const Rest& rest, const std::vector<bool>& needed);

/// Finds libfa's functions in the library at `path`: now, or when the first call finds none opened.
void open(const std::string& path);
void open_later(const std::string& path);

}  // namespace fa_torch

#endif  // FA_PYTHON_TORCH_OPS_ATTENTION_HPP_
