#ifndef FA_TESTS_UNIT_PARALLEL_PARALLEL_CASE_HPP_
#define FA_TESTS_UNIT_PARALLEL_PARALLEL_CASE_HPP_

#include <array>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include <fa/parallel.hpp>

/// Context parallelism of ranks in this process against one call of the whole, in float64 where not said otherwise.
namespace fa::test {

struct ParallelCase {
  int ranks = 2;
  ShardLayout layout = ShardLayout::zigzag;
  Scheme scheme = Scheme::ring;
  int ulysses = 0;
  int head_groups = 0;
  GradientTransfer gradients = GradientTransfer::f32;
  DType dtype = DType::f64;

  std::int64_t b = 1;
  std::int64_t h_q = 2;
  std::int64_t h_kv = 1;
  std::int64_t s_q = 32;
  std::int64_t s_kv = 32;
  int d_qk = 8;
  int d_v = 8;
  std::vector<std::int64_t> lengths = {};  ///< of a packed batch, instead of b, s_q and s_kv

  bool causal = true;
  CausalAlign align = CausalAlign::bottom_right;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::int64_t chunk = 0;
  bool alibi = false;
  bool documents = false;
  float dropout = 0;
  bool sink = false;
  bool dlse = false;
  bool late = false;        ///< kernels that the model takes for slow: a ring's own keys come last of some heads
  bool rows_first = false;  ///< tensors [b, s, h, d] in memory
  std::uint64_t seed = 1;   ///< of delays, too

  AttentionConfig attention() const;
  ContextParallelConfig config() const;
  ContextShape shape() const;
  /// Whether plans of a step have two calls side by side.
  bool expects_lanes() const;
};
std::string to_string(const ParallelCase& c);
void PrintTo(const ParallelCase& c, std::ostream* out);

/// Runs body(rank) on threads, and returns what each threw: "" for nothing.
std::vector<std::string> run_ranks(int ranks, const std::function<void(int)>& body);

/// The greatest difference of any output from that of one device, relative to its own greatest element.
struct Differences {
  double o = 0, lse = 0, dq = 0, dk = 0, dv = 0, dsink = 0;
  double greatest() const;
};

/// Runs forward and backward. Throws what a rank has thrown.
Differences run_case(const ParallelCase& c, const LocalGroupOptions& options = {});

/// Bytes of all outputs of all ranks.
std::vector<double> outputs_of(const ParallelCase& c, const LocalGroupOptions& options);

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_PARALLEL_PARALLEL_CASE_HPP_
