#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include <fa/fa.h>

#include <fa/attention.hpp>
#include <fa/c_bridge.hpp>
#include <fa/compiler.hpp>

#include "api/c_structs.hpp"

struct fa_attention {
  fa::Attention attention;
};

namespace fa {
namespace {

using namespace api::c;  // NOLINT(google-build-using-namespace): what the functions below are made of

struct LastError {
  std::optional<Error> error;
  int code = FA_OK;  ///< of `error`, or of `plain` when there is no memory for an Error
  const char* plain = "";
};

LastError& last_error() noexcept {
  thread_local LastError last;
  return last;
}

int remember(const Error& error) noexcept {
  LastError& last = last_error();
  last.error.emplace(error);
  last.code = static_cast<int>(error.code());
  return last.code;
}

int remember(ErrorCode code, const char* plain) noexcept {
  LastError& last = last_error();
  last.error.reset();
  last.plain = plain;
  last.code = static_cast<int>(code);
  return last.code;
}

int remember_unexpected(const std::exception& exception) noexcept {
  try {
    return remember(Error(ErrorCode::internal, std::string("unexpected exception: ") + exception.what()));
  } catch (...) {
    return remember(ErrorCode::internal, "unexpected exception");
  }
}

/// Runs `body`; no exception passes.
template <typename Body>
int guarded(Body&& body) noexcept {
  try {
    body();
    return FA_OK;
  } catch (...) {
    return c_bridge::remember_exception();
  }
}

/// Looks kernels up and tells about the one that the others serve.
void find(decltype(find_kernels) look_up, const fa_config* config, const fa_shape* shape, const char* arch,
          fa_kernel_info* info) {
  require(arch, "arch");
  if (info != nullptr) {
    check_struct_size(*info, "info");
  }
  const std::vector<KernelInfo> found = look_up(to_config(config), to_shape(shape), arch);
  if (info == nullptr) {
    return;
  }
  const auto main = std::find_if(found.begin(), found.end(), [](const KernelInfo& kernel) {
    return kernel.name.ends_with("_forward") || kernel.name.ends_with("_backward");
  });
  write_struct(info, to_c(main == found.end() ? KernelInfo{} : *main));
}

}  // namespace

int c_bridge::remember_exception() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return remember(error);
  } catch (const std::bad_alloc&) {
    return remember(ErrorCode::out_of_memory, "out of host memory");
  } catch (const std::exception& exception) {
    return remember_unexpected(exception);
  } catch (...) {
    return remember(ErrorCode::internal, "unexpected exception");
  }
}

}  // namespace fa

extern "C" {

int fa_create(const fa_config* config, fa_device device, fa_attention** out) {
  return fa::guarded([&] {
    fa::api::c::require(out, "out");
    *out = nullptr;
    *out = new fa_attention{fa::Attention::create(fa::api::c::to_config(config), fa::api::c::to_device(device))};
  });
}

void fa_destroy(fa_attention* attention) {
  delete attention;
}

int fa_forward(const fa_attention* attention, const fa_forward_inputs* inputs, const fa_forward_outputs* outputs,
               void* stream, const fa_workspace* workspace) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::GivenPrefixes prefixes;
    fa::api::c::read_prefixes(inputs, &prefixes);
    fa::ForwardInputs given = fa::api::c::to_inputs(inputs);
    given.prefixes = prefixes.given();
    attention->attention.forward(given, fa::api::c::to_outputs(outputs), static_cast<fa::Stream>(stream),
                                 fa::api::c::to_workspace(workspace));
  });
}

int fa_append(const fa_attention* attention, const fa_append_inputs* inputs, void* stream) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.append(fa::api::c::to_inputs(inputs), static_cast<fa::Stream>(stream));
  });
}

int fa_prepare_append(const fa_attention* attention, const fa_append_shape* shape) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.prepare_append(fa::api::c::to_shape(shape));
  });
}

int fa_append_kernel_info_get(const fa_attention* attention, const fa_append_shape* shape, fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(info, "info");
    fa::api::c::check_struct_size(*info, "info");
    fa::api::c::write_struct(info,
                             fa::api::c::to_c(attention->attention.append_kernel_info(fa::api::c::to_shape(shape))));
  });
}

int fa_find_append_kernel(const fa_config* config, const fa_append_shape* shape, const char* arch,
                          fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::api::c::require(arch, "arch");
    if (info != nullptr) {
      fa::api::c::check_struct_size(*info, "info");
    }
    const fa::KernelInfo found =
        fa::find_append_kernel(fa::api::c::to_config(config), fa::api::c::to_shape(shape), arch);
    if (info != nullptr) {
      fa::api::c::write_struct(info, fa::api::c::to_c(found));
    }
  });
}

int fa_merge(const fa_attention* attention, const fa_merge_inputs* inputs, const fa_forward_outputs* outputs,
             void* stream) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::GivenMerge merge;
    fa::api::c::read_merge(inputs, &merge);
    attention->attention.merge(merge.inputs, fa::api::c::to_outputs(outputs), static_cast<fa::Stream>(stream));
  });
}

int fa_quantize(const fa_attention* attention, const fa_quantize_inputs* inputs, void* stream) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.quantize(fa::api::c::to_inputs(inputs), static_cast<fa::Stream>(stream));
  });
}

int fa_prepare_quantize(const fa_attention* attention, const fa_quantize_inputs* inputs) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.prepare_quantize(fa::api::c::to_inputs(inputs));
  });
}

int fa_prepare_merge(const fa_attention* attention, const fa_merge_shape* shape) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.prepare_merge(fa::api::c::to_shape(shape));
  });
}

int fa_merge_kernel_info_get(const fa_attention* attention, const fa_merge_shape* shape, fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(info, "info");
    fa::api::c::check_struct_size(*info, "info");
    fa::api::c::write_struct(info,
                             fa::api::c::to_c(attention->attention.merge_kernel_info(fa::api::c::to_shape(shape))));
  });
}

int fa_find_merge_kernel(const fa_config* config, const fa_merge_shape* shape, const char* arch, fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::api::c::require(arch, "arch");
    if (info != nullptr) {
      fa::api::c::check_struct_size(*info, "info");
    }
    const fa::KernelInfo found =
        fa::find_merge_kernel(fa::api::c::to_config(config), fa::api::c::to_shape(shape), arch);
    if (info != nullptr) {
      fa::api::c::write_struct(info, fa::api::c::to_c(found));
    }
  });
}

int fa_prepare(const fa_attention* attention, const fa_shape* shape) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.prepare(fa::api::c::to_shape(shape));
  });
}

int fa_prepare_async(const fa_attention* attention, const fa_shape* shape) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.prepare_async(fa::api::c::to_shape(shape));
  });
}

int fa_prepare_backward_async(const fa_attention* attention, const fa_shape* shape) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.prepare_backward_async(fa::api::c::to_shape(shape));
  });
}

int fa_is_ready(const fa_attention* attention, const fa_shape* shape, int32_t* ready) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(ready, "ready");
    *ready = attention->attention.is_ready(fa::api::c::to_shape(shape)) ? 1 : 0;
  });
}

int fa_backward_is_ready(const fa_attention* attention, const fa_shape* shape, int32_t* ready) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(ready, "ready");
    *ready = attention->attention.backward_is_ready(fa::api::c::to_shape(shape)) ? 1 : 0;
  });
}

int fa_prepare_shared(const fa_attention* attention, const fa_shape* shape, const fa_shared_prefix_shape* prefixes,
                      uint64_t prefix_count) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.prepare(fa::api::c::to_shape(shape), fa::api::c::to_shapes(prefixes, prefix_count));
  });
}

int fa_shared_workspace_size(const fa_attention* attention, const fa_shape* shape,
                             const fa_shared_prefix_shape* prefixes, uint64_t prefix_count, size_t* size) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(size, "size");
    *size =
        attention->attention.workspace_size(fa::api::c::to_shape(shape), fa::api::c::to_shapes(prefixes, prefix_count));
  });
}

int fa_workspace_size(const fa_attention* attention, const fa_shape* shape, size_t* size) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(size, "size");
    *size = attention->attention.workspace_size(fa::api::c::to_shape(shape));
  });
}

int fa_kernel_info_get(const fa_attention* attention, const fa_shape* shape, fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(info, "info");
    fa::api::c::check_struct_size(*info, "info");
    fa::api::c::write_struct(info, fa::api::c::to_c(attention->attention.kernel_info(fa::api::c::to_shape(shape))));
  });
}

int fa_cache_counters_get(const fa_attention* attention, fa_cache_counters* counters) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(counters, "counters");
    fa::api::c::check_struct_size(*counters, "counters");
    fa::api::c::write_struct(counters, fa::api::c::to_c(attention->attention.cache_counters()));
  });
}

int fa_find_kernel(const fa_config* config, const fa_shape* shape, const char* arch, fa_kernel_info* info) {
  return fa::guarded([&] { fa::find(fa::find_kernels, config, shape, arch, info); });
}

int fa_find_backward_kernel(const fa_config* config, const fa_shape* shape, const char* arch, fa_kernel_info* info) {
  return fa::guarded([&] { fa::find(fa::find_backward_kernels, config, shape, arch, info); });
}

int fa_backward(const fa_attention* attention, const fa_backward_inputs* inputs, const fa_backward_outputs* outputs,
                void* stream, const fa_workspace* workspace) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.backward(fa::api::c::to_inputs(inputs), fa::api::c::to_outputs(outputs),
                                  static_cast<fa::Stream>(stream), fa::api::c::to_workspace(workspace));
  });
}

int fa_prepare_backward(const fa_attention* attention, const fa_shape* shape) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.prepare_backward(fa::api::c::to_shape(shape));
  });
}

int fa_backward_workspace_size(const fa_attention* attention, const fa_shape* shape, size_t* size) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(size, "size");
    *size = attention->attention.backward_workspace_size(fa::api::c::to_shape(shape));
  });
}

int fa_schedule(const fa_attention* attention, const fa_schedule_inputs* inputs, const fa_schedule_memory* memory,
                void* stream) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    attention->attention.schedule(fa::api::c::to_inputs(inputs), fa::api::c::to_schedule(memory),
                                  static_cast<fa::Stream>(stream));
  });
}

int fa_schedule_size(const fa_attention* attention, const fa_shape* limits, size_t* size) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(size, "size");
    *size = attention->attention.schedule_size(fa::api::c::to_shape(limits));
  });
}

int fa_mask_tiles_size(const fa_attention* attention, const fa_shape* shape, size_t* size) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(size, "size");
    *size = attention->attention.mask_tiles_size(fa::api::c::to_shape(shape));
  });
}

int fa_backward_mask_tiles_size(const fa_attention* attention, const fa_shape* shape, size_t* size) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(size, "size");
    *size = attention->attention.backward_mask_tiles_size(fa::api::c::to_shape(shape));
  });
}

int fa_backward_kernel_info_get(const fa_attention* attention, const fa_shape* shape, fa_kernel_info* info) {
  return fa::guarded([&] {
    fa::api::c::require(attention, "attention");
    fa::api::c::require(info, "info");
    fa::api::c::check_struct_size(*info, "info");
    fa::api::c::write_struct(info,
                             fa::api::c::to_c(attention->attention.backward_kernel_info(fa::api::c::to_shape(shape))));
  });
}

int fa_dropout_mask(const fa_dropout_state* state, float probability, int64_t b, int64_t h_q, int64_t s_q, int64_t s_kv,
                    uint8_t* keep) {
  return fa::guarded([&] { fa::dropout_mask(fa::api::c::to_dropout(state), probability, b, h_q, s_q, s_kv, keep); });
}

int fa_last_error_code(void) {
  return fa::last_error().code;
}

const char* fa_last_error_message(void) {
  const fa::LastError& last = fa::last_error();
  return last.error ? last.error->what() : last.plain;
}

const char* fa_last_error_field(const char* name) {
  const fa::LastError& last = fa::last_error();
  if (!last.error || name == nullptr) {
    return "";
  }
  for (const fa::ErrorField& field : last.error->fields()) {
    if (field.name == name) {
      return field.value.c_str();
    }
  }
  return "";
}

int fa_last_error_location(fa_error_location* location) {
  const fa::LastError& last = fa::last_error();
  const fa::ErrorLocation* const from = last.error ? last.error->location() : nullptr;
  if (from == nullptr || location == nullptr || location->struct_size < offsetof(fa_error_location, tensor)) {
    return FA_INVALID_ARGUMENT;
  }
  fa_error_location values{};
  values.index_count = static_cast<std::int32_t>(from->index.size());
  values.tensor = from->tensor.c_str();
  values.result = from->result.c_str();
  values.value = from->value;
  values.b = from->b;
  values.h = from->h;
  values.q = from->q;
  values.kv = from->kv;
  values.d = from->d;
  std::copy(from->index.begin(), from->index.end(), values.index);
  fa::api::c::write_struct(location, values);
  return FA_OK;
}

const char* fa_status_name(int status) {
  if (status == FA_OK) {
    return "ok";
  }
  return status < FA_INVALID_ARGUMENT || status > FA_NOT_FINITE ? "unknown"
                                                                : fa::to_string(static_cast<fa::ErrorCode>(status));
}

const char* fa_version(void) {
  return fa::version();
}

int fa_set_log_callback(fa_log_callback callback, void* user) {
  return fa::guarded([&] {
    if (callback == nullptr) {
      fa::set_log_callback({});
      return;
    }
    fa::set_log_callback([callback, user](fa::LogLevel level, std::string_view message) {
      callback(user, static_cast<int>(level), std::string(message).c_str());
    });
  });
}

int fa_set_log_level(int level) {
  return fa::guarded([&] { fa::set_log_level(fa::api::c::to_enum(level, fa::LogLevel::off, "level")); });
}

int fa_set_nvrtc_path(const char* path) {
  return fa::guarded([&] { fa::set_nvrtc_path(path == nullptr ? "" : path); });
}

}  // extern "C"
