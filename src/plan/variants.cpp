#include "plan/variants.hpp"

#include <fmt/format.h>

namespace fa::plan {

std::string canonical(const Variants& variants) {
  std::string text;
  if (variants.left_window) text += " left_window=1";
  if (variants.chunked) text += " chunked=1";
  if (variants.sink) text += " sink=1";
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
