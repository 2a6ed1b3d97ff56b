#include "differential/run.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "differential/calls.hpp"
#include "differential/inputs.hpp"
#include "differential/judge.hpp"
#include "driver/driver.hpp"
#include "plan/kernels/sm80_forward.hpp"

namespace fa::differential {
namespace {

/// What `judge(verdict)` finds, or why the library refused.
template <class Function>
Verdict verdict_of(const Function& judge) {
  Verdict verdict;
  try {
    judge(verdict);
  } catch (const Error& error) {
    verdict.kind = error.code() == ErrorCode::unsupported ? Verdict::Kind::skipped : Verdict::Kind::failed;
    verdict.message = std::string(fa::to_string(error.code())) + ": " + error.what();
    verdict.context_lost = error.code() == ErrorCode::cuda;
  }
  return verdict;
}

/// The device's, for as long as the process lives: what a runner leaves behind must stay usable.
const driver::ContextRef& device_context() {
  static const driver::ContextRef context = driver::ContextRef::acquire(Device::cuda(0));
  return context;
}

Arithmetic arithmetic_of(const Configuration& c, Where where, bool half_products) {
  const bool device = where == Where::cuda;
  return {c.config.dtype == DType::f64 || (!device && c.config.host_f64), device, device && half_products};
}

/// As the device does, which is there.
Arithmetic arithmetic_of(const Configuration& c, Where where) {
  return arithmetic_of(c, where, where == Where::cuda && device_context().info().arch.sm() >= plan::kHalfProductsFrom);
}

}  // namespace

Runner::Runner(Configuration configuration, Where where, const std::string& cache_directory)
    : c_(std::move(configuration)), where_(where) {
  if (where == Where::cuda) driver::check(driver::api().cuCtxSetCurrent(device_context().context()), "cuCtxSetCurrent");
  AttentionConfig config = c_.config;
  if (!cache_directory.empty()) config.cache.directory = cache_directory;
  config.on_compile = [counter = compilations_](const CompileEvent& event) {
    if (event.phase == CompileEvent::Phase::finished) ++*counter;
  };
  attention_ =
      std::make_unique<Attention>(Attention::create(config, where == Where::host ? Device::host() : Device::cuda(0)));
}

Verdict evaluate_only(const Configuration& c, const Call& call, Where where) {
  Verdict verdict;
  const Inputs inputs = make_inputs(c, call);
  const Results results = evaluate(c, call, inputs, arithmetic_of(c, where, true));
  std::vector<const Expected*> all{&results.o, &results.lse, &results.dq, &results.dk, &results.dv, &results.dsink};
  for (const Expected& capture : results.captures) all.push_back(&capture);
  for (const Expected* e : all) {
    double largest = 0;
    for (const double x : e->value) largest = std::isfinite(x) ? std::max(largest, std::abs(x)) : largest;
    for (const double bound : e->bound) verdict.loose += bound > 0.1 * largest ? 1 : 0;
    verdict.checked += e->value.size();
  }
  return verdict;
}

Verdict Runner::run(const Call& call, Mistake mistake, double perturb) {
  return verdict_of([&](Verdict& verdict) {
    Calls calls(c_, call, where_, *attention_);
    Results expected = evaluate(c_, call, calls.inputs(), arithmetic_of(c_, where_), mistake);
    Judge judge(&verdict, perturb, call.values);
    calls.forward();
    if (c_.config.accumulate) join_state(c_, calls.state(), expected, mistake);
    calls.judge_forward(expected, &judge);
    // What keys that no row sees hold may reach gradients through the tiles that they lie in.
    const bool forward_only = where_ == Where::cuda && call.hostile == Hostile::unseen_keys;
    if (call.backward && !forward_only) {
      calls.backward(expected);
      calls.judge_backward(expected, &judge);
    }
    if (calls.scratch_touched()) {
      verdict.kind = Verdict::Kind::failed;
      verdict.message += " workspace or tiles: written outside";
    }
    if (!calls.wrong_inside().empty()) {
      verdict.kind = Verdict::Kind::failed;
      verdict.message += " debug call: " + calls.wrong_inside();
    }
  });
}

Verdict Runner::call_only(const Call& call) {
  return verdict_of([&](Verdict&) {
    Calls calls(c_, call, where_, *attention_);
    calls.forward();
    Results none;
    none.empty_rows.assign(static_cast<std::size_t>(call.b * call.h_q * call.s_q), false);
    if (call.backward) calls.backward(none);
  });
}

}  // namespace fa::differential
