#ifndef FA_SRC_PARALLEL_GRADIENT_SUM_HPP_
#define FA_SRC_PARALLEL_GRADIENT_SUM_HPP_

#include <string>
#include <vector>

#include "parallel/builder.hpp"

namespace fa::parallel {

/// A gradient to which calls add parts. A part stays where its call has written it until the sum is asked for, or until
/// its place is needed: then what a place holds is summed into f32.
class GradientSum {
 public:
  /// The tensors that parts are kept in, all of one shape. Those that are -1 are made when they are needed.
  struct Places {
    int first = -1;   ///< of the dtype of parts: of the caller, or scratch
    int second = -1;  ///< likewise, scratch
    int sum = -1;     ///< of `sums`
    Element sums = Element::wide;
  };

  GradientSum(Builder& builder, std::string name, Places places)
      : builder_(builder), name_(std::move(name)), places_(places) {}

  /// Where a call leaves its part of these heads and rows: in the first place that is free, or the second if that is
  /// preferred. What was there has been summed by then.
  Region part(const Region& of, bool prefers_second = false);
  /// The call has written there.
  void add(const Region& part) { add_term(part, part.tensor); }
  /// All rows of these heads have a part in a tensor of the same shape.
  void add(int tensor, std::int64_t head, std::int64_t heads);

  /// Writes the sum of some heads to a tensor of the same shape, zeros where there is no part. These parts are gone.
  void write(int to, std::int64_t head, std::int64_t heads);
  const Places& places() const noexcept { return places_; }

 private:
  /// Heads and rows with the same parts.
  struct Area {
    std::int64_t head = 0, heads = 0, row = 0, rows = 0;
    std::vector<int> terms;  ///< tensors, in the order of their calls
    Region in(int tensor) const { return {tensor, head, heads, row, rows, 1}; }
  };

  static Area area_of(const Region& region) { return {region.head, region.heads, region.row, region.rows, {}}; }
  static Area common(const Area& a, const Area& b);
  static std::vector<Area> without(const Area& area, const Area& hole);
  bool holds(int tensor, const Area& where) const;
  void add_term(const Region& where, int tensor);
  void settle(int tensor, const Area& where);
  void join_neighbours();
  int made(int& place, Element element, const char* what);

  Builder& builder_;
  std::string name_;
  Places places_;
  std::vector<Area> areas_;  ///< that have no row of a head in common
};

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_GRADIENT_SUM_HPP_
