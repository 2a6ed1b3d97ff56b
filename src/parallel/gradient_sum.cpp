#include "parallel/gradient_sum.hpp"

#include <algorithm>
#include <utility>

namespace fa::parallel {

GradientSum::Area GradientSum::common(const Area& a, const Area& b) {
  Area result;
  result.head = std::max(a.head, b.head);
  result.row = std::max(a.row, b.row);
  result.heads = std::max<std::int64_t>(std::min(a.head + a.heads, b.head + b.heads) - result.head, 0);
  result.rows = std::max<std::int64_t>(std::min(a.row + a.rows, b.row + b.rows) - result.row, 0);
  return result;
}

/// The parts of an area around one that lies in it.
std::vector<GradientSum::Area> GradientSum::without(const Area& area, const Area& hole) {
  std::vector<Area> parts;
  const auto add = [&](std::int64_t head, std::int64_t heads, std::int64_t row, std::int64_t rows) {
    if (heads > 0 && rows > 0) parts.push_back({head, heads, row, rows, area.terms});
  };
  const std::int64_t head_end = hole.head + hole.heads, row_end = hole.row + hole.rows;
  add(area.head, hole.head - area.head, area.row, area.rows);
  add(head_end, area.head + area.heads - head_end, area.row, area.rows);
  add(hole.head, hole.heads, area.row, hole.row - area.row);
  add(hole.head, hole.heads, row_end, area.row + area.rows - row_end);
  return parts;
}

int GradientSum::made(int& place, Element element, const char* what) {
  if (place < 0) {
    const PlanTensor& like = builder_.at(places_.first);
    place = builder_.tensor(name_ + what, element, like.heads, like.rows, like.columns);
  }
  return place;
}

bool GradientSum::holds(int tensor, const Area& where) const {
  return std::ranges::any_of(areas_, [&](const Area& area) {
    const Area meets = common(area, where);
    return meets.heads > 0 && meets.rows > 0 && std::ranges::count(area.terms, tensor) > 0;
  });
}

void GradientSum::add_term(const Region& where, int tensor) {
  std::vector<Area> left{area_of(where)}, areas;
  for (Area& area : areas_) {
    const Area meets = common(area, area_of(where));
    if (meets.heads == 0 || meets.rows == 0) {
      areas.push_back(std::move(area));
      continue;
    }
    for (Area& part : without(area, meets)) areas.push_back(std::move(part));
    areas.push_back(meets);
    areas.back().terms = area.terms;
    areas.back().terms.push_back(tensor);
    std::vector<Area> uncovered;
    for (const Area& part : left) {
      const Area both = common(part, meets);
      if (both.heads == 0 || both.rows == 0) {
        uncovered.push_back(part);
        continue;
      }
      for (Area& rest : without(part, both)) uncovered.push_back(std::move(rest));
    }
    left = std::move(uncovered);
  }
  for (Area& part : left) {
    areas.push_back(std::move(part));
    areas.back().terms = {tensor};
  }
  areas_ = std::move(areas);
  join_neighbours();
}

void GradientSum::add(int tensor, std::int64_t head, std::int64_t heads) {
  add_term({tensor, head, heads, 0, builder_.at(tensor).rows, 1}, tensor);
}

/// Areas that are one in the order of rows, or of heads, become one: each costs a kernel.
void GradientSum::join_neighbours() {
  std::ranges::sort(areas_,
                    [](const Area& a, const Area& b) { return std::pair(a.head, a.row) < std::pair(b.head, b.row); });
  const auto join = [](Area& a, const Area& b) {
    if (a.terms != b.terms) return false;
    if (a.head == b.head && a.heads == b.heads && a.row + a.rows == b.row) {
      a.rows += b.rows;
      return true;
    }
    if (a.row == b.row && a.rows == b.rows && a.head + a.heads == b.head) {
      a.heads += b.heads;
      return true;
    }
    return false;
  };
  for (std::size_t i = 0; i < areas_.size(); ++i) {
    for (std::size_t k = i + 1; k < areas_.size();) {
      if (!join(areas_[i], areas_[k])) {
        ++k;
        continue;
      }
      areas_.erase(areas_.begin() + static_cast<std::ptrdiff_t>(k));
      k = i + 1;
    }
  }
}

/// Sums what has a part in this tensor there.
void GradientSum::settle(int tensor, const Area& where) {
  std::vector<Area> areas;
  for (Area& area : areas_) {
    const Area meets = common(area, where);
    if (meets.heads == 0 || meets.rows == 0 || std::ranges::count(area.terms, tensor) == 0) {
      areas.push_back(std::move(area));
      continue;
    }
    for (Area& part : without(area, meets)) areas.push_back(std::move(part));
    const int sum = made(places_.sum, places_.sums, " in the sum");
    std::vector<Region> from;
    for (const int term : area.terms) from.push_back(meets.in(term));
    builder_.add(Sum{meets.in(sum), std::move(from)});
    areas.push_back(meets);
    areas.back().terms = {sum};
  }
  areas_ = std::move(areas);
  join_neighbours();
}

Region GradientSum::part(const Region& of, bool prefers_second) {
  const Area where = area_of(of);
  const auto at = [this](bool second) {
    return second ? made(places_.second, Element::own, " of a call") : places_.first;
  };
  int place = at(prefers_second);
  if (holds(place, where)) {
    place = at(!prefers_second);
    if (holds(place, where)) {
      // Both are taken: the sum of both frees both.
      settle(place, where);
      if (!holds(at(prefers_second), where)) place = at(prefers_second);
    }
  }
  Region region = of;
  region.tensor = place;
  return region;
}

void GradientSum::write(int to, std::int64_t head, std::int64_t heads) {
  const Area where{head, heads, 0, builder_.at(to).rows, {}};
  std::vector<Area> kept, written;
  for (Area& area : areas_) {
    Area meets = common(area, where);
    if (meets.heads == 0 || meets.rows == 0) {
      kept.push_back(std::move(area));
      continue;
    }
    for (Area& part : without(area, meets)) kept.push_back(std::move(part));
    meets.terms = std::move(area.terms);
    written.push_back(std::move(meets));
  }
  std::vector<Area> empty{where};
  for (const Area& area : written) {
    std::vector<Area> rest;
    for (const Area& part : empty) {
      const Area both = common(part, area);
      if (both.heads == 0 || both.rows == 0) {
        rest.push_back(part);
        continue;
      }
      for (Area& left : without(part, both)) rest.push_back(std::move(left));
    }
    empty = std::move(rest);
    if (area.terms == std::vector{to}) continue;
    std::vector<Region> from;
    for (const int term : area.terms) from.push_back(area.in(term));
    builder_.add(Sum{area.in(to), std::move(from)});
  }
  for (const Area& area : empty) builder_.add(Clear{area.in(to)});
  areas_ = std::move(kept);
  join_neighbours();
}

}  // namespace fa::parallel
