#include "differential/self_test.hpp"

#include <cstdint>
#include <cstdio>

#include "differential/pool.hpp"

namespace fa::differential {
namespace {

constexpr std::uint64_t kSeed = 4711;
constexpr std::uint64_t kMostConfigs = 150;
constexpr int kEnough = 3;  // catches of each mistake
constexpr double kMoved = 2.01;

Verdict run(std::uint64_t number, Mistake mistake, double moved) {
  const Configuration c = random_configuration(kSeed, number, Where::host, Size::small);
  const Call call = random_call(c, kSeed, number, 0, Where::host, Size::small);
  return Runner(c, Where::host, {}).run(call, mistake, moved);
}

bool is_caught(Mistake mistake) {
  int caught = 0;
  for (std::uint64_t number = 0; number < kMostConfigs && caught < kEnough; ++number) {
    caught += run(number, mistake, 0).kind == Verdict::Kind::failed ? 1 : 0;
  }
  if (caught < kEnough) std::printf("mistake %s: caught %d times only\n", to_string(mistake), caught);
  return caught >= kEnough;
}

/// Caches of requests that have no keys are calls like others: captures cover what the call says of lengths.
int caches_without_keys() {
  int missed = 0;
  for (const std::int64_t page_size : {kContiguous, std::int64_t{16}}) {
    for (const bool packed : {false, true}) {
      Configuration c;
      c.config.dtype = DType::f32;
      c.config.head_dim = c.config.head_dim_v = 8;
      c.config.page_size = page_size;
      c.config.varlen = packed;
      c.captures = {{.name = "bias", .axes = {Axis::kv}}};
      c.score = make(Op::add, {leaf(Op::score), load(0, {leaf(Op::kv)})});
      c.settle();
      Call call;
      call.h_q = 2, call.s_q = 3, call.s_kv = 0;
      call.used_kv = {0};
      call.backward = false;
      if (packed) call.cu_q = {0, 3}, call.cu_kv = {0, 0};
      const Verdict verdict = Runner(c, Where::host, {}).run(call);
      if (verdict.kind == Verdict::Kind::passed && verdict.checked > 0) continue;
      std::printf("%s: %s\n", to_string(c, call).c_str(), verdict.message.c_str());
      ++missed;
    }
  }
  return missed;
}

}  // namespace

int self_test() {
  int missed = caches_without_keys();
  for (int mistake = 1; mistake < kMistakes; ++mistake) missed += is_caught(static_cast<Mistake>(mistake)) ? 0 : 1;
  int moved = 0;
  for (std::uint64_t number = 0; number < kMostConfigs; ++number) {
    const Verdict plain = run(number, Mistake::none, 0);
    if (plain.kind != Verdict::Kind::passed || plain.checked == 0) continue;
    const Verdict wrong = run(number, Mistake::none, kMoved);
    if (wrong.moved == 0) continue;
    ++moved;
    if (wrong.kind == Verdict::Kind::failed) continue;
    std::printf("config %llu: moved elements are not found\n", static_cast<unsigned long long>(number));
    ++missed;
  }
  std::printf("self-test: %d mistakes, %d moved results, %d not found\n", kMistakes - 1, moved, missed);
  return missed;
}

}  // namespace fa::differential
