#ifndef FA_SRC_EXPRESSION_POSITIONS_HPP_
#define FA_SRC_EXPRESSION_POSITIONS_HPP_

#include <string>
#include <string_view>

#include "expression/program.hpp"

/// Functions of calls whose rows are the last keys of a request: row q stands at position q + s_kv - s_q.
namespace fa::expression {

/// Whether q, s_q and s_kv reach `root` as a row's position alone. Integers wrap, and so do their sums here.
bool sees_positions_alone(const Graph& graph, NodeId root);

/// `text`, which sees positions alone, of a row at `position`: an expression, which stands for q, with s_q and s_kv of
/// 0.
std::string at_position(std::string_view argument, std::string_view text, std::string_view position);

/// Whether a mask keeps every key in front of a request's rows, kv < s_kv - s_q, of every row. False where that cannot
/// be told from comparisons of sums of q, kv, s_q, s_kv and constants.
bool keeps_keys_in_front(const Graph& graph, NodeId mask);

}  // namespace fa::expression

#endif  // FA_SRC_EXPRESSION_POSITIONS_HPP_
