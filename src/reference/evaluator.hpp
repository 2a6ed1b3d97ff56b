#ifndef FA_SRC_REFERENCE_EVALUATOR_HPP_
#define FA_SRC_REFERENCE_EVALUATOR_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "expression/program.hpp"
#include "expression/ranges.hpp"
#include "reference/variant.hpp"

namespace fa::reference {

/// Copies memory that the host cannot read.
using Fetch = std::function<void(void* to, const void* from, std::size_t bytes)>;

/// `t` with memory of the host, in `buffer`, where `count` elements from `offset` on are, `stride` apart.
TensorView fetched(const TensorView& t, std::int64_t offset, std::int64_t stride, std::int64_t count,
                   const Fetch& fetch, std::vector<std::byte>& buffer);

/// Where a function is evaluated.
struct Point {
  std::int64_t b = 0, h = 0, q = 0, kv = 0;
  double score = 0;  ///< scaled
};

/// An element of a captured tensor that a function has read.
struct ReadElement {
  int capture = 0;
  double value = 0;
  std::vector<std::int64_t> index = {};  ///< none of a number that is given by value
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

  /// Has captured tensors read by `fetch`, which outlives the evaluator.
  void read_by(const Fetch* fetch) { fetch_ = fetch; }
  /// The first NaN or infinity that the last run has read.
  std::optional<ReadElement> broken_read() const;

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
  const Fetch* fetch_ = nullptr;
};

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_EVALUATOR_HPP_
