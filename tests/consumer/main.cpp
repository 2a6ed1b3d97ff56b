// The example of docs/api.md on the host device, from an installed package.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <fa/attention.hpp>
#include <fa/dlpack.hpp>

namespace {

constexpr std::uint16_t kOne = 0x3f80;  // 1.0 in bf16

/// Attention over rows of ones is one.
bool run_example() {
  const std::int64_t b = 2, h_q = 4, h_kv = 2, s_q = 5, s_kv = 7;
  std::vector<std::uint16_t> q_memory(b * h_q * s_q * 128), k_memory(b * h_kv * s_kv * 128),
      v_memory(b * h_kv * s_kv * 128, kOne), o_memory(b * h_q * s_q * 128);
  std::uint16_t* const q_data = q_memory.data();
  std::uint16_t* const k_data = k_memory.data();
  std::uint16_t* const v_data = v_memory.data();
  std::uint16_t* const o_data = o_memory.data();
  const fa::Device device = fa::Device::host();
  const fa::Stream stream = nullptr;

#include "api_example.inc"

  return o_memory == std::vector<std::uint16_t>(o_memory.size(), kOne);
}

bool bad_input_is_refused() {
  fa::AttentionConfig config;
  config.head_dim = 7;
  try {
    fa::Attention::create(config, fa::Device::host());
  } catch (const fa::Error& error) {
    std::printf("fa %s: %s\n", fa::version(), error.what());
    return error.code() == fa::ErrorCode::invalid_argument;
  }
  return false;
}

}  // namespace

int main() {
  static_assert(FA_VERSION_NUMBER >= 100, "the headers say which version they are");
  const bool same_version = std::strcmp(fa::version(), FA_VERSION_STRING) == 0;
  const bool passed = same_version && run_example() && bad_input_is_refused();
  std::puts(passed ? "consumer: passed" : "consumer: FAILED");
  return passed ? 0 : 1;
}
