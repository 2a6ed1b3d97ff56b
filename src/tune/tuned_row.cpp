#include "tune/tuned_row.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include <fa/error.hpp>

#include "plan/arch.hpp"
#include "plan/backward.hpp"
#include "plan/candidates.hpp"
#include "plan/catalogue.hpp"
#include "plan/planner.hpp"
#include "tune/bucket.hpp"

namespace fa::tune {
namespace {

// Of what a bucket calls "any".
constexpr std::int64_t kLongest = std::int64_t{1} << 17;
constexpr std::int64_t kMostHeads = std::int64_t{1} << 13;

/// "name=value" words of a bucket's text; those of the planned kernel do not collide with those of the lengths.
class Words {
 public:
  explicit Words(std::string_view text) {
    while (!text.empty()) {
      const std::string_view word = text.substr(0, text.find(' '));
      text.remove_prefix(std::min(word.size() + 1, text.size()));
      const std::size_t equals = word.find('=');
      if (equals != std::string_view::npos) {
        values_.emplace(word.substr(0, equals), word.substr(equals + 1));
      } else {
        names_.push_back(word);
      }
    }
  }

  bool has(std::string_view name) const { return std::ranges::find(names_, name) != names_.end(); }
  std::string_view last_name() const { return names_.empty() ? std::string_view() : names_.back(); }

  std::string_view text(std::string_view name) const {
    const auto found = values_.find(name);
    return found != values_.end() ? found->second : std::string_view();
  }

  /// `absent` where there is no such number, `any` where it is a class without an end.
  std::int64_t number(std::string_view name, std::int64_t absent, std::int64_t any = 0) const {
    const std::string_view value = text(name);
    if (value == "any") return any;
    std::int64_t result = absent;
    std::from_chars(value.data(), value.data() + value.size(), result);
    return result;
  }

 private:
  std::map<std::string_view, std::string_view> values_;
  std::vector<std::string_view> names_;
};

std::optional<DType> dtype_of(std::string_view text) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    if (text == to_string(dtype)) return dtype;
  }
  return std::nullopt;
}

/// A problem of the bucket with one batch; nullopt when the text is none of a bucket.
std::optional<plan::Problem> problem_of(const Words& words) {
  const std::optional<DType> dtype = dtype_of(words.text("dtype"));
  const std::int64_t group = words.number("group", 0);
  if (!dtype || group <= 0) return std::nullopt;
  plan::Problem problem;
  problem.arch = plan::parse_target(std::string(words.text("arch")));
  problem.dtype = *dtype;
  problem.d_qk = static_cast<int>(words.number("d_qk", 0));
  problem.d_v = static_cast<int>(words.number("d_v", 0));
  problem.causal = words.number("causal", 0) != 0;
  problem.causal_align = words.has("top_left") ? CausalAlign::top_left : CausalAlign::bottom_right;
  problem.positive_scale = words.number("positive_scale", 1) != 0;
  problem.aligned = words.number("aligned", 1) != 0;
  problem.b = 1;
  problem.h_q = words.number("heads", 0, kMostHeads);
  problem.h_kv = problem.h_q / group;
  problem.s_q = words.number("s_q", 0, kLongest);
  problem.s_kv = words.number("s_kv", 0, kLongest);
  const bool sound = problem.d_qk > 0 && problem.d_v > 0 && problem.h_kv > 0 && problem.s_q > 0 && problem.s_kv > 0;
  return sound ? std::optional(problem) : std::nullopt;
}

plan::KernelSpec planned_for(const plan::Problem& problem, const plan::Fixed& fixed, bool backward) {
  return backward ? plan::plan_backward(problem, fixed, false).main.front() : plan::plan_forward(problem, fixed).kernel;
}

/// The problems that the text may be about: heads may be those of several batches, and a family may have been fixed.
template <class Visit>
bool any_problem(plan::Problem problem, plan::Family planned, const Visit& visit) {
  const std::int64_t group = problem.h_q / problem.h_kv;
  for (; problem.h_q >= group; problem.h_q /= 2, problem.b *= 2) {
    problem.h_kv = problem.h_q / group;
    if (problem.h_kv * group != problem.h_q) break;
    for (const plan::Family family : {plan::Family::automatic, planned}) {
      if (visit(problem, plan::Fixed(family))) return true;
    }
  }
  return false;
}

}  // namespace

std::optional<TunedRow> tuned_row(const Table::Row& row, std::string* reason) {
  const Words words(row.problem);
  const plan::Kernel* const planned = plan::find_kernel(words.last_name());
  const bool backward = planned != nullptr && planned->op == plan::Op::backward;
  std::optional<TunedRow> found;
  *reason = "its text is no bucket's";
  try {
    const std::optional<plan::Problem> problem = problem_of(words);
    if (!problem || planned == nullptr || !(backward || planned->op == plan::Op::forward)) return std::nullopt;
    *reason = "the planner chooses otherwise";
    any_problem(*problem, planned->family, [&](const plan::Problem& p, const plan::Fixed& fixed) {
      const plan::KernelSpec first = planned_for(p, fixed, backward);
      if (bucket_text(p, first) != row.problem) return false;
      *reason = "its kernel is no candidate any more";
      for (const plan::KernelSpec& spec : backward ? plan::backward_candidates(p, fixed, first, SIZE_MAX)
                                                   : plan::forward_candidates(p, fixed, first, SIZE_MAX)) {
        if (canonical(spec) == row.winner.kernel) found = TunedRow{p, spec};
      }
      return found.has_value();
    });
  } catch (const Error& error) {
    *reason = error.what();
  }
  if (found) reason->clear();
  return found;
}

}  // namespace fa::tune
