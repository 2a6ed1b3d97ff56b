#include "plan/variants.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "expression/emit.hpp"

namespace fa::plan {

void describe_functions(const expression::Program& program, Variants* variants) {
  variants->loads_ahead = expression::loads_ahead(program);
  variants->affine = expression::is_affine(program) && !variants->strided;
  if (program.score) {
    const expression::Graph& graph = program.graph;
    variants->constant_slopes =
        graph.is_constant(program.score_derivative) &&
        std::ranges::all_of(program.gradients, [&](const auto& g) { return graph.is_constant(g.derivative); });
  }
  if (program.mask) {
    const auto root = static_cast<std::size_t>(*program.mask);
    variants->mask_on_batch = program.dependent(expression::Input::b)[root];
    variants->mask_on_head = program.dependent(expression::Input::h)[root];
  }
}

std::string canonical(const Variants& variants) {
  std::string text;
  if (variants.left_window) text += " left_window=1";
  if (variants.chunked) text += " chunked=1";
  if (variants.sink) text += " sink=1";
  if (variants.placed) text += " placed=1";
  if (variants.strided) text += " strided=1";
  if (!variants.score.empty()) text += " score=" + variants.score;
  if (!variants.mask.empty()) text += " mask=" + variants.mask;
  std::string captures;
  for (const expression::Capture& capture : variants.captures) {
    captures += fmt::format("{}{}:{}:{}{}", captures.empty() ? "" : ",", capture.name, to_string(capture.dtype),
                            capture.rank, capture.requires_grad ? ":grad" : "");
  }
  if (!captures.empty()) text += " captures=" + captures;
  return text;
}

}  // namespace fa::plan
