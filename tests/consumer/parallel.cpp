// fa_parallel from an installed package: two ranks, each with its rows of two heads.

#include <cstdio>
#include <thread>
#include <vector>

#include <fa/parallel.hpp>

namespace {

/// Attention over rows of ones is one.
bool run_rank(std::shared_ptr<fa::Communicator> communicator) {
  try {
    fa::ContextParallelConfig config;
    config.attention.head_dim = 8;
    config.attention.dtype = fa::DType::f32;
    config.attention.causal = true;
    auto parallel = fa::ContextParallel::create(config, std::move(communicator));
    parallel.check_agreement();
    std::vector<float> ones(2 * 16 * 8, 1.0F), o(ones.size());
    const fa::TensorView x(ones.data(), fa::DType::f32, {1, 2, 16, 8});
    parallel.forward({x, x, x}, {fa::TensorView(o.data(), fa::DType::f32, {1, 2, 16, 8})});
    return o == ones;
  } catch (const fa::Error& error) {
    std::printf("%s\n", error.what());
    return false;
  }
}

}  // namespace

int main() {
  const auto group = fa::make_local_group(2);
  bool right[2] = {};
  std::thread other([&] { right[1] = run_rank(group[1]); });
  right[0] = run_rank(group[0]);
  other.join();
  std::puts(right[0] && right[1] ? "consumer: passed" : "consumer: FAILED");
  return right[0] && right[1] ? 0 : 1;
}
