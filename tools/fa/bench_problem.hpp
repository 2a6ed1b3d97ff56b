#ifndef FA_TOOLS_FA_BENCH_PROBLEM_HPP_
#define FA_TOOLS_FA_BENCH_PROBLEM_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/validate.hpp"
#include "api/variants.hpp"
#include "bench_blocks.hpp"
#include "gpu.hpp"
#include "options.hpp"
#include "reference/variant.hpp"
#include "variant_options.hpp"

namespace fa::cli {

/// Memory order of the tensors that are timed.
enum class Layout { bshd, bhsd };

/// What is timed.
enum class Operation {
  forward,
  backward,
  append,  ///< of `fa bench` alone, which has problems of its own for it (bench_append.hpp)
  decode,  ///< likewise: a forward whose bytes count (bench_decode.hpp)
  merge,   ///< of partial results (bench_merge.hpp)
  shared,  ///< decodes with shared prefixes (bench_shared.hpp)
  mla,     ///< decodes of multi-head latent attention: problems of it are decodes
};

/// "forward", "backward", "append", "decode", "merge", "shared" or "mla".
const char* to_string(Operation op);

/// Of every problem with dropout.
constexpr DropoutState kBenchDropout{.seed = 20240229, .offset = 4711};

/// One point of a benchmark's grid.
struct BenchProblem {
  Operation op = Operation::forward;
  DType dtype = DType::bf16;
  int d_qk = 128;
  int d_v = 128;
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  Layout layout = Layout::bshd;
  AttentionShape shape;
  bool deterministic = false;
  TunePolicy tune = TunePolicy::cached;
  PackedOptions packed = {};
  VariantOptions variant = {};
  std::vector<std::int32_t> cumulative = {};     ///< varlen: where the sequences start, of q and of k and v
  std::vector<std::int32_t> cumulative_kv = {};  ///< of k and v, where that differs; over pages without varlen too
  Invariance invariance = Invariance::none;
  Statistics statistics = {};                   ///< of forward
  std::int64_t page_size = 0;                   ///< of forward: k and v are in pages, or kContiguous; 0: plain tensors
  bool value_in_key = false;                    ///< V is the first d_v columns of K
  std::optional<DType> k_dtype = std::nullopt;  ///< of forward: what K is stored as, with a scale a row
  std::optional<DType> v_dtype = std::nullopt;
  int group_size = 0;       ///< of u4x2; 0: 32
  bool key_scales = false;  ///< of 8-bit floats: scales of 1
  bool value_scales = false;
  bool precise = false;                            ///< likewise
  std::optional<ShardPlace> place = std::nullopt;  ///< with the sizes of the whole
  int max_multiprocessors = 0;

  /// With `kernel`, unless every field is open, for the operation that is timed.
  AttentionConfig config(const KernelOverride& kernel = {}) const;
  /// What o is of: of 8-bit floats bf16.
  double softmax_scale() const;
  std::optional<DType> v_stored() const;  ///< of i8 e4m3
  DType o_dtype() const { return size_of(dtype) == 1 ? DType::bf16 : dtype; }
  std::string text() const;
  /// "plain", "varlen+dropout=0.1", "softcap=30"
  std::string variant_text() const;

  /// 2 b h_q s_q s_kv (d_qk + d_v), of a packed batch by the lengths that it has, half of it under a causal mask, 2.5
  /// times it for backward: the convention of the FlashAttention papers. Windows, chunks and mask functions do not
  /// count. Of a call with a place under a causal mask the pairs that it keeps.
  double flops() const;
  /// Where rows and keys from `row` and `key` on of the last batch entry's last `heads` stand.
  ShardPlace place_of(std::int64_t heads, std::int64_t row, std::int64_t key) const;

  /// Rows and keys of each batch entry, sequence or request.
  std::vector<std::int64_t> lengths_q() const;
  std::vector<std::int64_t> lengths_kv() const;
  /// Whether K is stored in latent rows, which have their scales.
  bool latent() const { return value_in_key && k_dtype.has_value(); }
  /// Elements of a row of k in memory, but of 4 bits.
  int key_columns() const { return latent() ? static_cast<int>(api::kLatentRowBytes) : d_qk; }
  std::int64_t pages() const;  ///< of all requests
  /// Of K, V, Q and O, without what pages leave empty.
  double bytes() const;
};

/// `b` lengths uniform in [1, longest], seeded, as cumulative lengths.
std::vector<std::int32_t> uniform_lengths(std::int64_t b, std::int64_t longest);

/// The tensors of one problem on a GPU, as often as `sets` says: a call over another set finds nothing in caches.
class BenchTensors {
 public:
  explicit BenchTensors(const BenchProblem& problem, int sets = 1);

  ForwardInputs inputs(int set = 0) const;
  ForwardOutputs outputs(int set = 0) const;
  BackwardInputs backward_inputs() const;
  BackwardOutputs backward_outputs() const;

  /// The greatest error of the last query rows (o, dq) and the last keys (dk, dv) of the last head against float64, as
  /// a fraction of what is allowed; infinite for NaN. Reads what the last call of the problem's operation wrote.
  double check() const;

  /// Makes an output that nobody wrote fail the check.
  void spoil_output();

 private:
  /// A tensor that functions name, filled on the host, and its gradient.
  struct Captured {
    TensorView host;  ///< in `memory`
    std::vector<std::byte> memory;
    DeviceBuffer device;
    DeviceBuffer gradient;  ///< empty unless it is required
  };

  void add_captures();
  Captures captures(bool gradients) const;
  /// [h_q], not defined where there are no sinks.
  TensorView of_heads(const DeviceBuffer& buffer) const;
  /// What the reference needs of the variants, for rows and keys from the given ones on of the last heads.
  reference::VariantArgs variant_args(std::vector<expression::CapturedView>* views, std::int64_t heads,
                                      std::int64_t row, std::int64_t key) const;
  /// Of q or o.
  TensorView view(const DeviceBuffer& buffer, int set, std::int64_t heads, std::int64_t rows, int head_dim) const;
  TensorView view(const DeviceBuffer& buffer, int set, std::int64_t heads, std::int64_t rows, int head_dim,
                  DType dtype) const;
  /// Of k or v.
  TensorView keys_view(const DeviceBuffer& buffer, int set, int head_dim, const std::optional<DType>& stored) const;
  /// The scales of the rows of `keys`; not defined where they are not stored in 8 bits.
  TensorView scales_view(const DeviceBuffer& buffer, int set, const TensorView& keys) const;
  std::byte* of_set(const DeviceBuffer& buffer, int set) const;
  void fill_block_table();
  /// The last batch entry of a tensor, [1, h, s, d], on the host in `memory`.
  TensorView fetch_last(const DeviceBuffer& buffer, const TensorView& tensor, const std::vector<std::int32_t>& starts,
                        std::vector<std::byte>* memory) const;
  /// The same of the last request's keys, of a contiguous cache or of pages.
  TensorView fetch_last_row(const DeviceBuffer& buffer, const TensorView& cache, std::vector<std::byte>* memory) const;
  TensorView fetch_last_pages(const DeviceBuffer& buffer, const TensorView& pool, std::vector<std::byte>* memory) const;
  PackedSequences sequences() const;
  DropoutState dropout() const;
  /// Sequences start at `starts`, where the batch is packed.
  TensorView last_entry(const TensorView& tensor, const std::vector<std::int32_t>& starts) const;
  /// What a fast tanh is allowed more than anything else.
  double variant_slack() const;
  double check_forward() const;
  double check_backward() const;

  BenchProblem problem_;
  int sets_;
  api::Functions functions_;
  std::deque<Captured> captures_;
  std::vector<float> sink_;
  DeviceBuffer device_sink_;
  DeviceBuffer dsink_;
  DeviceBuffer q_;
  DeviceBuffer k_;
  DeviceBuffer v_;
  DeviceBuffer k_scale_;  ///< empty unless K is stored in 8 bits
  DeviceBuffer v_scale_;
  DeviceBuffer o_;
  DeviceBuffer lse_;
  DeviceBuffer max_logit_;  ///< this and the next two: empty unless they are asked for; of all sets
  DeviceBuffer entropy_;
  DeviceBuffer column_sums_;
  DeviceBuffer top_keys_;
  DeviceBuffer dout_;  ///< this and the gradients: empty unless the problem is one of backward
  DeviceBuffer dq_;
  DeviceBuffer dk_;
  DeviceBuffer dv_;
  DeviceBuffer cumulative_;          ///< empty unless packed
  DeviceBuffer cumulative_kv_;       ///< likewise
  std::vector<std::int32_t> table_;  ///< [b, max_pages], empty unless there are pages
  DeviceBuffer block_table_;
  DeviceBuffer used_kv_;  ///< [b], of requests; empty unless they have a KV cache
};

/// Makes `operation` ready for the shape of `problem`; which kernel serves it.
KernelInfo prepare(const Attention& attention, const BenchProblem& problem);

/// Bytes of scratch that the operation needs.
std::size_t workspace_size(const Attention& attention, const BenchProblem& problem);

/// Queues the operation.
void launch(const Attention& attention, const BenchProblem& problem, const BenchTensors& tensors, Stream stream,
            Workspace workspace = {});

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_PROBLEM_HPP_
