#ifndef FA_SRC_REFERENCE_EVALUATOR_HPP_
#define FA_SRC_REFERENCE_EVALUATOR_HPP_

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "expression/program.hpp"
#include "expression/ranges.hpp"
#include "reference/variant.hpp"

namespace fa::reference {

/// Where a function is evaluated.
struct Point {
  std::int64_t b = 0, h = 0, q = 0, kv = 0;
  double score = 0;  ///< scaled
};

/// Computes some nodes of a program, in double. One for each thread.
class Evaluator {
 public:
  /// `program` and what `variant` views outlive the evaluator. `lengths` are those of the tensors.
  Evaluator(const expression::Program& program, std::span<const expression::NodeId> roots, const VariantArgs& variant,
            const expression::Lengths& lengths);

  void run(const Point& point);
  const expression::Value& operator[](expression::NodeId id) const { return values_[static_cast<std::size_t>(id)]; }
  /// Where the last run's load stands in the gradient of its capture, in elements.
  std::int64_t gradient_offset(expression::NodeId load) const;

 private:
  using Operands = std::array<expression::Value, expression::Node::kMaxOperands>;

  expression::Value evaluate(const expression::Node& node, const Point& point) const;
  expression::Value load(const expression::Node& node) const;
  Operands operands(const expression::Node& node) const;

  const expression::Program& program_;
  std::vector<expression::NodeId> order_;
  std::span<const expression::CapturedView> captures_;
  ShardPlace place_;
  std::vector<expression::Value> values_;
};

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_EVALUATOR_HPP_
