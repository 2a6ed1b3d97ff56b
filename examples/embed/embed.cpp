// A program that brings its kernels along: it runs where neither NVRTC nor a cache directory exists, and never
// compiles.
//
// Where the program is built (no GPU needed):
//
//   fa pack kernels.fapack --arch sm_80,sm_90a --head-dim 64 --dtype bf16 --causal yes
//
// Or of what the program asks for when it runs with a compiler; calls of any program are recorded likewise:
//
//   FA_RECORD=asked.jsonl fa_example_embed sm_90a -
//   fa pack kernels.fapack --record asked.jsonl
//
// The pack lies beside the program, which opens it read-only:
//
//   fa_example_embed                 prepares the kernel on this machine's GPU
//   fa_example_embed sm_90a [PACK]   only looks it up: what an installer or a CI job without a GPU wants to know
//   fa_example_embed sm_90a -        the same without a pack: from the cache directory, or compiled now

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include <fa/attention.hpp>

namespace {

fa::AttentionConfig config_with(const std::string& pack) {
  fa::AttentionConfig config;
  config.head_dim = 64;
  config.dtype = fa::DType::bf16;
  config.causal = true;
  if (pack == "-") return config;
  config.cache.mode = fa::CachePolicy::Mode::memory;  // nothing is written on the user's machine
  config.cache.packs = {pack};
  config.compile = fa::CompilePolicy::never;
  return config;
}

void print(const fa::KernelInfo& info) {
  std::printf("%s from the %s: %d registers, %d bytes of shared memory\n  %s\n", info.name.c_str(), info.origin.c_str(),
              info.registers, info.shared_bytes, info.spec.c_str());
}

void look_up(const fa::AttentionConfig& config, const fa::AttentionShape& shape, const std::string& arch) {
  for (const fa::KernelInfo& info : fa::find_kernels(config, shape, arch)) {
    print(info);
  }
  for (const fa::KernelInfo& info : fa::find_backward_kernels(config, shape, arch)) {
    print(info);
  }
}

/// After this, forward() and backward() of the shape launch at once and may be captured into a graph.
void prepare(const fa::AttentionConfig& config, const fa::AttentionShape& shape) {
  const auto attention = fa::Attention::create(config, fa::Device::cuda(0));
  attention.prepare(shape);
  attention.prepare_backward(shape);
  print(attention.kernel_info(shape));
  print(attention.backward_kernel_info(shape));
  std::printf("  compiled: %llu\n", static_cast<unsigned long long>(attention.cache_counters().compiles));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::filesystem::path beside = std::filesystem::canonical("/proc/self/exe").parent_path() / "kernels.fapack";
    const fa::AttentionConfig config = config_with(argc > 2 ? argv[2] : beside.string());
    const fa::AttentionShape shape{.b = 4, .h_q = 16, .h_kv = 16, .s_q = 1000, .s_kv = 1000};
    if (argc > 1) {
      look_up(config, shape, argv[1]);
    } else {
      prepare(config, shape);
    }
    return 0;
  } catch (const std::exception& exception) {  // a miss names the kernel, and the command that builds it
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
