// What goes wrong, and what a program makes of it: every failure is an fa::Error with a code, a message and named
// facts.
//
// Nothing was launched by a call that throws invalid_argument. Three failures are decisions rather than mistakes: no
// GPU (run on the host device), no compiler (say what is missing), and a kernel that is not stored (say what builds
// it).

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <fa/attention.hpp>

namespace {

int failures = 0;

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "unexpected: %s\n", what);
  ++failures;
}

/// A GPU if there is one that can be used.
fa::Device usable_device() {
  try {
    fa::AttentionConfig probe;
    probe.head_dim = 64;
    fa::Attention::create(probe, fa::Device::cuda(0));
    return fa::Device::cuda(0);
  } catch (const fa::Error& error) {
    if (error.code() != fa::ErrorCode::no_driver && error.code() != fa::ErrorCode::cuda &&
        error.code() != fa::ErrorCode::unsupported) {
      throw;  // anything else is a mistake of this program
    }
    std::printf("on the host device, because %s\n", error.what());
    return fa::Device::host();
  }
}

/// The message is for people; code and fields are for programs.
void show_a_mistake() {
  fa::AttentionConfig config;
  config.head_dim = 20;
  try {
    fa::Attention::create(config, fa::Device::host());
    expect(false, "head_dim = 20 is accepted");
  } catch (const fa::Error& error) {
    expect(error.code() == fa::ErrorCode::invalid_argument, "another code");
    expect(error.field("argument") == "head_dim" && error.field("value") == "20", "other fields");
    std::printf("%s\n", error.what());
  }
}

/// A tensor that does not fit is named, too, and outputs stay as they were.
void show_a_tensor_that_does_not_fit() {
  fa::AttentionConfig config;
  config.head_dim = 8;
  config.dtype = fa::DType::f32;
  const auto attention = fa::Attention::create(config, fa::Device::host());
  std::vector<float> memory(2 * 8), o(2 * 8, -1.0f);
  const fa::TensorView two(memory.data(), fa::DType::f32, {1, 1, 2, 8});
  const fa::TensorView three(memory.data(), fa::DType::f32, {1, 1, 3, 8});
  try {
    attention.forward({two, two, three}, {fa::TensorView(o.data(), fa::DType::f32, {1, 1, 2, 8}), {}});
    expect(false, "v with another length is accepted");
  } catch (const fa::Error& error) {
    expect(error.code() == fa::ErrorCode::invalid_argument, "another code");
    expect(o[0] == -1.0f, "o was written");
    std::printf("%s\n", error.what());
  }
}

/// A program that must not compile says which command builds what it misses.
void show_a_kernel_that_is_not_stored() {
  fa::AttentionConfig config;
  config.head_dim = 64;
  config.cache.mode = fa::CachePolicy::Mode::memory;
  config.compile = fa::CompilePolicy::never;
  try {
    fa::find_kernels(config, {.b = 1, .h_q = 8, .h_kv = 8, .s_q = 1024, .s_kv = 1024}, "sm_90a");
    expect(false, "a kernel is stored in an empty cache");
  } catch (const fa::Error& error) {
    expect(error.code() == fa::ErrorCode::cache_miss, "another code");
    expect(!error.field("command").empty(), "no command");
    std::printf("to be built by: %s\n", std::string(error.field("command")).c_str());
  }
}

}  // namespace

int main() {
  try {
    usable_device();
    show_a_mistake();
    show_a_tensor_that_does_not_fit();
    show_a_kernel_that_is_not_stored();
    return failures == 0 ? 0 : 1;
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
