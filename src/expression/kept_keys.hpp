#ifndef FA_SRC_EXPRESSION_KEPT_KEYS_HPP_
#define FA_SRC_EXPRESSION_KEPT_KEYS_HPP_

#include <optional>

#include "expression/graph.hpp"

namespace fa::expression {

/// An integer that depends neither on q, on kv nor on h, so that boolean `mask` is true for every key before it. It
/// comes of comparisons `kv < e` and `kv <= e` by ||, &&, ! and ?:. None where no key is known to be kept. Adds nodes.
std::optional<NodeId> find_kept_keys(Graph* graph, NodeId mask);

}  // namespace fa::expression

#endif  // FA_SRC_EXPRESSION_KEPT_KEYS_HPP_
