#include "parallel/ulysses.hpp"

#include <utility>

#include "parallel/layout.hpp"

namespace fa::parallel {

Ulysses::Ulysses(Builder& builder, std::vector<int> members, int me)
    : builder_(builder), members_(std::move(members)), me_(me) {}

void Ulysses::send_heads(int tensor, const std::vector<Pieces>& pieces, const Pieces& whole, int* gathered) {
  const PlanTensor given = builder_.at(tensor);
  const std::int64_t heads = given.heads / size();
  const int packed = builder_.tensor(given.name + " to send", given.element, given.heads, given.rows, given.columns);
  builder_.add(Copy{builder_.whole(packed), builder_.whole(tensor)});
  *gathered = builder_.tensor(given.name + " of heads", given.element, heads, rows_of(whole), given.columns);
  for (int member = 0; member < size(); ++member) {
    const Pieces& from = pieces[static_cast<std::size_t>(member)];
    const Pieces to = placed_in(from, whole);
    int source = packed;
    std::int64_t head = me_ * heads;
    if (member != me_) {
      source = builder_.tensor(given.name + " come", given.element, heads, rows_of(from), given.columns);
      head = 0;
      transfers_.push_back({true, rank(member), builder_.heads_of(packed, member * heads, heads)});
      transfers_.push_back({false, rank(member), builder_.whole(source)});
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
      arrivals_.push_back({{*gathered, 0, heads, to[i].row, to[i].count, to[i].row_step},
                           {source, head, heads, from[i].row, from[i].count, from[i].row_step}});
    }
  }
}

void Ulysses::take_heads() {
  flush();
}

int Ulysses::result(const char* name, Element element, std::int64_t heads, const Pieces& whole, std::int64_t columns) {
  return builder_.tensor(std::string(name) + " of heads", element, heads, rows_of(whole), columns);
}

void Ulysses::send_rows(int result, int tensor, const std::vector<Pieces>& pieces, const Pieces& whole) {
  const PlanTensor given = builder_.at(result);
  const PlanTensor wanted = builder_.at(tensor);
  const int come = builder_.tensor(wanted.name + " come", wanted.element, wanted.heads, wanted.rows, wanted.columns);
  for (int member = 0; member < size(); ++member) {
    const Pieces& to = pieces[static_cast<std::size_t>(member)];
    const Pieces from = placed_in(to, whole);
    int target = come;
    std::int64_t head = me_ * given.heads;
    if (member != me_) {
      target = builder_.tensor(wanted.name + " to send", wanted.element, given.heads, rows_of(to), given.columns);
      head = 0;
      transfers_.push_back({true, rank(member), builder_.whole(target)});
      transfers_.push_back({false, rank(member), builder_.heads_of(come, member * given.heads, given.heads)});
    }
    for (std::size_t i = 0; i < to.size(); ++i) {
      builder_.add(Copy{{target, head, given.heads, to[i].row, to[i].count, to[i].row_step},
                        {result, 0, given.heads, from[i].row, from[i].count, from[i].row_step}});
    }
  }
  arrivals_.push_back({builder_.whole(tensor), builder_.whole(come)});
}

void Ulysses::take_rows() {
  flush();
}

void Ulysses::flush() {
  builder_.wait(builder_.exchange(std::exchange(transfers_, {})));
  for (const Arrival& arrival : std::exchange(arrivals_, {})) builder_.add(Copy{arrival.to, arrival.from});
}

}  // namespace fa::parallel
