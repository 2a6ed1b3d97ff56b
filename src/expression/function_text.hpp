#ifndef FA_SRC_EXPRESSION_FUNCTION_TEXT_HPP_
#define FA_SRC_EXPRESSION_FUNCTION_TEXT_HPP_

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "expression/program.hpp"

namespace fa::expression {

/// The element type of a capture in CUDA C++.
const char* element_name(DType dtype);

/// A float in CUDA C++.
std::string literal(double value);

/// What an integer adds as the steps of query and key go on: constants.
struct Steps {
  std::int64_t query = 0;
  std::int64_t key = 0;
};

/// One function: statements for what is used more than once, and expressions. `given` and `fixed`: loads that its
/// caller has the values of. `name`: what names begin with.
class FunctionText {
 public:
  FunctionText(const Program& program, bool approximate, std::span<const NodeId> roots,
               std::span<const NodeId> given = {}, std::span<const NodeId> fixed = {}, char name = 't');

  std::string value(NodeId id) { return print(id, Mode::value); }

  /// The indices of a load, each behind a comma.
  std::string indices(NodeId load);

  /// Where a load's element for the base of a Place is, and how far steps of query and key go from there, in terms of
  /// `capture`. Empty unless each index is affine in q and kv.
  std::string steps_in_memory(NodeId load, const char* data, const char* strides);

  /// Whether a load reads the same element for all rows and keys of a head: its indices are held to their axes before
  /// a launch, so that the element exists where the head does.
  bool of_head(const Node& load) const;

  /// A captured element.
  std::string load(NodeId id, bool of_head);

  const std::string& statements() const { return statements_; }

  /// Of `added`, what stays the same over the steps, times an integer that is affine in the key, or its magnitude.
  struct Affine {
    std::string factor;
    std::string base;
    std::int64_t step = 0;
    bool magnitude = false;
  };
  std::optional<Affine> affine(NodeId added);

 private:
  /// The integer that a real is the value, or the magnitude of.
  std::optional<std::pair<NodeId, bool>> affine_number(NodeId id) const;

  static constexpr std::int64_t kMostAffineStep = 1024;  // steps of a tile are exact in float

  /// What q and kv stand for: the element's place; the same, kept inside of the tensors; the base of the step; the
  /// same, kept inside.
  enum class Mode : std::uint8_t { value, index, base, start };

  /// A node as it is asked for.
  using Asked = std::pair<NodeId, Mode>;

  /// What stands for a node, and how many operations deep that is.
  struct Text {
    std::string text;
    int depth = 0;
  };
  static constexpr int kMostDepth = 64;  // compilers have limits

  /// Operands are printed before what uses them, from a list: chains of operators are as long as texts allow.
  std::string print(NodeId id, Mode mode);

  /// Constants, inputs, and what the caller has the values of.
  bool is_leaf(NodeId id) const;

  /// The text of an operand; the first that has none is noted.
  std::string printed(const Asked& asked);

  /// A name for what is used more than once, or is deep.
  void keep(const Asked& asked, std::string text);

  static std::string constant(const Node& node);

  static std::string input(Input which, Mode mode);

  bool moves(NodeId id) const;

  const std::optional<Steps>& steps(NodeId id) const { return steps_[static_cast<std::size_t>(id)]; }

  /// None where a step itself leaves 32 bits.
  static std::optional<Steps> within_range(std::int64_t query, std::int64_t key);

  /// Steps of an integer that is affine in q and kv, from those of its operands.
  std::optional<Steps> find_steps(NodeId id) const;

  /// A real made of an affine integer: the conversion of its base, and of its step, which is a constant.
  struct Split {
    std::string base;
    std::string step;
  };
  std::optional<Split> split(NodeId id);

  std::string expression(NodeId id, Mode mode);

  /// x of 1 - tanh(x)^2, which nothing is left of where the tanh that it is made from is 1.
  std::optional<NodeId> argument_of_slope(const Node& node) const;

  /// A constant times the score is one factor of the raw score.
  std::string product(const Node& node);

  std::string integer_function(const Node& node, Mode mode);

  std::string real_function(const Node& node, Mode mode);

  const Program& program_;
  const Graph& graph_;
  const bool approximate_;
  const std::span<const NodeId> given_;
  const std::span<const NodeId> fixed_;
  const char name_;
  const std::vector<bool> on_query_;
  const std::vector<bool> on_key_;
  const std::vector<bool> on_score_;
  std::vector<int> uses_;
  std::vector<std::optional<Steps>> steps_;
  std::map<Asked, Text> texts_;
  int names_ = 0;
  std::string statements_;
  // While a node is printed:
  bool printing_ = false;
  std::optional<Asked> missing_;  ///< the first operand without a text
  int deepest_ = 0;               ///< of the operands
};

}  // namespace fa::expression

#endif  // FA_SRC_EXPRESSION_FUNCTION_TEXT_HPP_
