#ifndef FA_C_BRIDGE_HPP_
#define FA_C_BRIDGE_HPP_

#include <exception>
#include <span>
#include <string>
#include <string_view>

#include <fa/fa.h>

#include <fa/attention.hpp>

/// What a library beside fa, as fa_parallel is, needs for a C ABI of its own that takes the structs of fa.h. With it
/// such a library holds tensors to what fa asks of them. Changes with every minor version.
namespace fa::c_bridge {

/// What the structs stand for. Throw fa::Error(invalid_argument, unsupported) that names the field. Texts of captures
/// are those of the structs.
FA_API AttentionConfig to_config(const fa_config* source);
FA_API ForwardInputs to_inputs(const fa_forward_inputs* source);
FA_API ForwardOutputs to_outputs(const fa_forward_outputs* source);
FA_API BackwardInputs to_inputs(const fa_backward_inputs* source);
FA_API BackwardOutputs to_outputs(const fa_backward_outputs* source);
/// An undefined view for NULL.
FA_API TensorView to_view(const fa_tensor* source, const char* argument);

/// A tensor of a call, with its name in messages.
struct NamedTensor {
  std::string_view name;
  TensorView view;
};

/// Holds tensors to what every call does before it computes with their sizes and strides: ranks from 1 to 4, sizes from
/// 0, offsets below 2^60 bytes, aligned memory. One that is written shares none with itself or any other. Undefined
/// views are left out. Throws fa::Error(invalid_argument).
FA_API void check_tensors(std::span<const NamedTensor> read, std::span<const NamedTensor> written);

/// Keeps what is thrown for fa_last_error_* of this thread, and returns its code. Called inside of a catch.
FA_API int remember_exception() noexcept;

}  // namespace fa::c_bridge

#endif  // FA_C_BRIDGE_HPP_
