#ifndef FA_SRC_PARALLEL_ULYSSES_HPP_
#define FA_SRC_PARALLEL_ULYSSES_HPP_

#include <vector>

#include "parallel/builder.hpp"

namespace fa::parallel {

/// All-to-all over heads: each rank of a group gives rows of all heads and gets all rows of the group, of some heads
/// (Jacobs et al., "DeepSpeed Ulysses", 2023).
class Ulysses {
 public:
  /// `outer` are the groups' rows. `me` is this rank's place in its group of `members`.
  Ulysses(Builder& builder, std::vector<int> members, int me);

  /// Sends a tensor of the caller, and makes one of the group's rows. `pieces` are those of each member, `whole` those
  /// of the group.
  void send_heads(int tensor, const std::vector<Pieces>& pieces, const Pieces& whole, int* gathered);
  /// Gathered tensors are complete behind this.
  void take_heads();

  /// A tensor of the group's rows for results.
  int result(const char* name, Element element, std::int64_t heads, const Pieces& whole, std::int64_t columns);
  /// Sends a result's rows to their ranks, into a tensor of the caller.
  void send_rows(int result, int tensor, const std::vector<Pieces>& pieces, const Pieces& whole);
  void take_rows();

 private:
  /// What is copied once an exchange is complete.
  struct Arrival {
    Region to, from;
  };

  void flush();
  int size() const noexcept { return static_cast<int>(members_.size()); }
  int rank(int member) const { return members_[static_cast<std::size_t>(member)]; }

  Builder& builder_;
  std::vector<int> members_;
  int me_ = 0;
  std::vector<PlanTransfer> transfers_;
  std::vector<Arrival> arrivals_;
};

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_ULYSSES_HPP_
