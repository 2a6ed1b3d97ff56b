#ifndef FA_TOOLS_PARALLEL_ROWS_HPP_
#define FA_TOOLS_PARALLEL_ROWS_HPP_

#include <chrono>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fa/parallel.hpp>

#include "gpu.hpp"
#include "json.hpp"

namespace bench {

/// A scheme, and the ranks that share heads beside it; 0: as the library takes them.
struct Choice {
  fa::Scheme scheme = fa::Scheme::automatic;
  int ulysses = 0;
};

struct Options {
  std::vector<std::int64_t> tokens{16384, 65536, 262144};
  std::vector<std::pair<std::int64_t, std::int64_t>> heads{{16, 16}, {32, 8}};
  std::vector<Choice> choices{{fa::Scheme::ring}, {fa::Scheme::all_gather}, {fa::Scheme::ulysses}, {}};
  bool all_choices = false;
  fa::ShardLayout layout = fa::ShardLayout::zigzag;
  bool causal = true;
  bool packed = false;
  bool copied = false;  ///< K and V do not lie in memory that ranks share
  bool single = true;
  int reserved = 0;
  fa::NcclTransfers transfers = fa::NcclTransfers::automatic;
  Rounds rounds;
  double limit_s = 0;                         ///< 0: none
  double limit_mb = 0;                        ///< 0: what is free
  std::chrono::milliseconds timeout{120000};  ///< of a group of transfers
  std::string json;
};

/// Measures and prints all rows. Rank 0 writes them to a file as well, a line at once.
class Bench {
 public:
  Bench(const Options& options, std::shared_ptr<fa::Communicator> communicator);
  /// `facts`: what the first line of the file says besides.
  void run(const Json& facts);

 private:
  struct Size {
    std::int64_t tokens = 0, h_q = 0, h_kv = 0;
    std::vector<std::int64_t> lengths;  ///< of a packed batch
    fa::ContextShape shape() const { return {1, h_q, h_kv, tokens, tokens}; }
  };
  /// What is measured of a choice that stands for several that were asked for.
  struct Measured {
    fa::SchemeTime chosen;
    Times times;
    Json memory;
  };

  fa::AttentionConfig attention() const;
  fa::ContextParallelConfig config(const Choice& choice) const;
  fa::AttentionShape call_shape(const Size& size, std::int64_t tokens) const;
  std::vector<Choice> choices(const Size& size) const;
  /// Why something of so many bytes and seconds is not begun; empty where it is. Equal on all ranks.
  std::string refusal(std::size_t bytes, double seconds);
  Times single(const Size& size, std::string& reason);
  void row(const Size& size);
  /// Nothing where a rank cannot prepare its calls, for a reason.
  std::optional<Measured> measure(const Size& size, const Choice& choice, const Tensors& own, std::string& reason);
  std::string refusal_of(const Size& size, const Choice& choice, const Times& one);
  void print(const Size& size, const Choice& choice, const Times& one, const Measured& measured);
  void print_refused(const Size& size, const Choice& choice, const std::string& reason);
  Json line(const Size& size, const Choice& choice) const;
  fa::ClusterSpeeds measured_speeds(const Size& size, const Times& one) const;
  void write(const Json& line);

  const Options& options_;
  Ranks ranks_;
  LinkSpeeds links_;
  std::ofstream json_;
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

}  // namespace bench

#endif  // FA_TOOLS_PARALLEL_ROWS_HPP_
