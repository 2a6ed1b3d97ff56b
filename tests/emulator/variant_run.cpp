#include "emulator/variant_run.hpp"

#include <cstring>
#include <span>

#include "api/problem.hpp"
#include "support/shard_place.hpp"

namespace emulator {

PlacedVariant::PlacedVariant(Memory& memory, const fa::test::VariantCase& c, bool gradients) {
  const auto cleared = [&memory](const std::string& name, std::int64_t floats) {
    const std::vector<std::byte> zeros(static_cast<std::size_t>(floats) * sizeof(float));
    std::byte* base = memory.add_input(name, zeros);
    memory.set_flags(base, zeros.size(), Memory::kReadable | Memory::kWritable);
    return base;
  };
  for (const fa::test::NamedTensor& tensor : c.captures) {
    fa::expression::CapturedView captured{tensor.view(), 0, {}};
    if (tensor.by_value) {
      views.push_back({{}, tensor.number(), {}});
      continue;
    }
    captured.view.data = memory.add_input(tensor.name, tensor.bytes);
    if (gradients && tensor.requires_grad) {
      captured.gradient = captured.view;
      captured.gradient.dtype = fa::DType::f32;
      captured.gradient.data = cleared("gradient of " + tensor.name, tensor.elements());
    }
    views.push_back(captured);
  }
  if (!c.config.sink) return;
  sink = c.sink.view();
  sink.data = memory.add_input("sink", c.sink.bytes);
  if (!gradients) return;
  dsink = sink;
  dsink.data = memory.add_output("dsink", c.sink.bytes.size());
}

std::vector<float> floats_of(const fa::TensorView& view) {
  std::vector<float> values(view.defined() ? static_cast<std::size_t>(view.elements()) : 0);
  if (!values.empty()) std::memcpy(values.data(), view.data, values.size() * sizeof(float));
  return values;
}

void add_variant(fa::plan::Problem& problem, const fa::test::VariantCase& c) {
  const fa::AttentionShape shape{.b = problem.b,
                                 .h_q = problem.h_q,
                                 .h_kv = problem.h_kv,
                                 .s_q = problem.s_q,
                                 .s_kv = problem.s_kv,
                                 .aligned = problem.aligned,
                                 .total_q = problem.total_q,
                                 .total_kv = problem.total_kv};
  if (c.place == fa::ShardPlace{}) {
    problem = fa::api::make_problem(c.config, shape, problem.arch, &c.functions.variants);
    return;
  }
  fa::AttentionShape placed = shape;
  placed.placed = true;
  placed.strided = c.place.q_step != 1 || c.place.kv_step != 1;
  problem = fa::api::make_problem(c.config, placed, problem.arch, &c.functions.of(placed));
  problem.place = fa::support::resolved(c.place, {shape.b, shape.h_q, shape.s_q, shape.s_kv});
}

void put_place_in_memory(Memory& memory, const std::vector<std::int64_t>& given, fa::plan::Problem& problem) {
  fa::ShardPlace& place = problem.place.value();
  const std::vector<std::int64_t> own{place.b, place.h_q, place.q, place.kv};
  const std::byte* const words = memory.add_input("place", std::as_bytes(std::span(given.empty() ? own : given)));
  place.begin = reinterpret_cast<const std::int64_t*>(words);
  place.b = place.h_q = place.q = place.kv = 0;
  problem.place_in_memory = true;
}

}  // namespace emulator
