#ifndef FA_PYTHON_TORCH_OPS_LIBRARY_HPP_
#define FA_PYTHON_TORCH_OPS_LIBRARY_HPP_

#include <cstdint>
#include <span>
#include <string>

#include "attention.hpp"

namespace fa_torch {

/// libfa's functions, as the package has opened it.
struct Functions {
  decltype(&fa_create) create = nullptr;
  decltype(&fa_forward) forward = nullptr;
  decltype(&fa_backward) backward = nullptr;
  decltype(&fa_workspace_size) workspace_size = nullptr;
  decltype(&fa_backward_workspace_size) backward_workspace_size = nullptr;
  decltype(&fa_last_error_message) last_error_message = nullptr;
};
const Functions& library();

/// Throws std::invalid_argument, which Python has as a ValueError, or std::runtime_error.
void check_status(int status);

/// What an fa_attention is made of. requires_grad: of captures.
struct HandleOf {
  std::int64_t options;
  Place place;
  std::int32_t dtype;  ///< enum fa_dtype
  std::int64_t d_qk, d_v;
  bool sink;
  std::span<const Tensor> captures;
  std::span<const bool> requires_grad;  ///< none: of no capture
};

/// One for each different question, kept for the life of the process.
const fa_attention* attention_of(const HandleOf& question);

/// Bytes of scratch memory, kept likewise.
std::size_t scratch_size(const fa_attention* attention, const fa_shape& shape, bool backward);

/// PyTorch's current stream of a GPU, whose device is current while this lives.
class Stream {
 public:
  explicit Stream(Place place);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] void* get() const { return stream_; }

 private:
  void* stream_ = nullptr;
  DeviceGuardHandle guard_ = nullptr;
};

}  // namespace fa_torch

#endif  // FA_PYTHON_TORCH_OPS_LIBRARY_HPP_
