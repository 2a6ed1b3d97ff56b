#ifndef FA_SRC_EXPRESSION_PROGRAM_HPP_
#define FA_SRC_EXPRESSION_PROGRAM_HPP_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fa/tensor.hpp>

#include "expression/graph.hpp"
#include "expression/parse.hpp"

namespace fa::expression {

/// A place of a captured tensor that the score function reads, and the score's derivative by what stands there.
struct CapturedGradient {
  NodeId load = 0;
  NodeId derivative = 0;
};

/// The functions of a configuration over one list of captures, read and differentiated.
struct Program {
  Graph graph;
  std::vector<Capture> captures;            ///< ranks as the functions use them
  std::optional<NodeId> score;              ///< a real
  std::optional<NodeId> mask;               ///< a boolean: the scores to keep
  std::optional<NodeId> kept_keys;          ///< of the mask: it keeps all keys before this one, of every row and head
  NodeId score_derivative = 0;              ///< of the score function by the score
  std::vector<CapturedGradient> gradients;  ///< by captures that require it; derivatives that are 0 are left out

  /// An empty text is no function. Throws fa::Error(invalid_argument).
  static Program parse(const std::string& score, const std::string& mask, const std::vector<Capture>& captures);

  /// The nodes that `roots` need, operands first.
  std::vector<NodeId> needed(std::span<const NodeId> roots) const;
  /// For each node whether it depends on `which`.
  std::vector<bool> dependent(Input which) const;
};

/// The derivative of real node `of` by real node `by`. Branches are differentiated apart: what is not chosen has no
/// part in it, be it infinite.
NodeId differentiate(Graph* graph, NodeId of, NodeId by);

}  // namespace fa::expression

#endif  // FA_SRC_EXPRESSION_PROGRAM_HPP_
