#ifndef FA_TESTS_DIFFERENTIAL_CALLS_HPP_
#define FA_TESTS_DIFFERENTIAL_CALLS_HPP_

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "differential/configuration.hpp"
#include "differential/dense.hpp"
#include "differential/judge.hpp"
#include "differential/pages.hpp"

namespace fa::differential {

/// Everything of one call: tensors on the device, and results.
class Calls {
 public:
  Calls(const Configuration& c, const Call& call, Where where, const Attention& attention);

  const Inputs& inputs() const { return in_; }

  void forward();

  /// What a debug call says of itself that is not so; empty if nothing is.
  const std::string& wrong_inside() const { return wrong_inside_; }

  const State& state() const { return other_keys_; }

  void backward(const Results& expected);

  void judge_forward(const Results& e, Judge* judge) const;

  void judge_backward(const Results& e, Judge* judge) const;

  bool scratch_touched() const { return scratch_touched_; }

 private:
  /// The same as a debug call: it names a broken number where a result has one, and there alone. P of a head makes O.
  void look_inside(const ForwardInputs& in);

  /// One NaN in a row of V that has a weight is what is named.
  void name_a_nan(ForwardInputs in, const Segment& of, std::int64_t h, const Tensor& p, const Tensor& o,
                  const Tensor& lse);

  bool is_broken(const Segment& of, const Tensor& o, const Tensor& lse) const;

  /// A row of P by V, of which what has no weight may be anything.
  void compare_p(const Segment& of, std::int64_t h, std::int64_t i, const Tensor& p, const Tensor& o,
                 const Tensor& lse);

  /// Where statistics go that the configuration asks for.
  StatisticsOutputs make_statistics();

  /// Positions that a request over a KV cache may have.
  std::int64_t positions() const;

  /// Column sums of segments, in the places of a tensor's.
  Expected in_places(const Results& e) const;

  /// Rows of sequences get what other keys may have come to, some of them nothing, and then anything in o.
  void make_state();

  void make_pages();
  const Tensor& queries() const { return in_.stored_q.codes.defined() ? in_.stored_q.codes : in_.q; }
  const Tensor& keys() const { return pages_ ? pages_->k : in_.stored_k.codes.defined() ? in_.stored_k.codes : in_.k; }
  const Tensor& values() const;
  void set_scales(ForwardInputs& in) const;

  /// Memory of a schedule, which `in` has then.
  Tensor schedule(const AttentionShape& shape, ForwardInputs& in);

  PagedCache cache() const;

  bool declared(std::size_t i) const;

  Tensor output(const std::vector<std::int64_t>& shape, const Layout& layout, DType dtype) const;

  /// Memory of exactly as many bytes, with guards. Its contents are arbitrary.
  Tensor scratch(std::size_t bytes) const;
  void check(Tensor t);
  static Workspace given(const Tensor& t);

  /// Of a call with these tensors: a strange layout may well be aligned, and of a mixed one every tensor.
  AttentionShape shape_of(std::initializer_list<const Tensor*> tensors) const;

  PackedSequences sequences() const;

  DropoutState dropout() const;

  Captures captures() const;

  /// Of rows without keys either infinity is accepted.
  void raise_empty_rows(const Results& expected);

  std::function<bool(std::int64_t)> untouched(const std::vector<bool>& rows) const;

  void synchronize() const;

  const Configuration& c_;
  const Call& call_;
  Where where_;
  const Attention& attention_;
  Inputs in_;
  Tensor cu_q_, cu_kv_, used_q_, used_kv_, state_;
  std::optional<Pages> pages_;
  Tensor table_, index_, begin_;
  Tensor max_logit_, entropy_, sums_;
  Tensor o_, lse_, dq_, dk_, dv_, dsink_;
  std::vector<Tensor> gradients_;
  State other_keys_;
  bool scratch_touched_ = false;
  std::string wrong_inside_;
};

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_CALLS_HPP_
