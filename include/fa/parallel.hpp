#ifndef FA_PARALLEL_HPP_
#define FA_PARALLEL_HPP_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fa/attention.hpp>

/// Context parallelism: one attention over a sequence that many ranks share, each with some of its rows
/// (docs/context_parallel.md). A library of its own, fa_parallel, beside fa.
///
///   fa::ContextParallelConfig config;
///   config.attention.head_dim = 128;
///   config.attention.causal = true;
///   auto parallel = fa::ContextParallel::create(config, fa::use_nccl(comm), fa::ShardLayout::zigzag);
///   parallel.forward({q, k, v}, {o, lse}, stream);   // this rank's rows
#if defined(FA_STATIC)
#define FA_PARALLEL_API
#elif defined(_WIN32)
#if defined(FA_PARALLEL_BUILDING)
#define FA_PARALLEL_API __declspec(dllexport)
#else
#define FA_PARALLEL_API __declspec(dllimport)
#endif
#else
#define FA_PARALLEL_API __attribute__((visibility("default")))
#endif

struct ncclComm;

namespace fa {

/// Which rows of each sequence a rank has, of n ranks. Lengths that are no multiple of n, of zigzag of 2 n, are
/// refused.
enum class ShardLayout : std::uint8_t {
  contiguous = 0,  ///< the rank-th of n equal parts
  zigzag = 1,      ///< parts `rank` and 2 n - 1 - `rank` of 2 n equal ones: causal attention is shared out evenly
  striped = 2,     ///< rows rank, rank + n, rank + 2 n, …
};

/// How ranks come to the keys of others.
enum class Scheme : std::uint8_t {
  automatic = 0,   ///< the one that a model of time says is the fastest (choose_scheme)
  ring = 1,        ///< K and V travel from rank to rank, while each computes with those that it has
  all_gather = 2,  ///< every rank gets K and V of all, some heads at a time
  ulysses = 3,     ///< all-to-all over heads: a rank computes some heads of all rows
};

/// What dK and dV are sent in, from ranks that have computed parts of them.
enum class GradientTransfer : std::uint8_t {
  f32 = 0,     ///< f64 for f64
  native = 1,  ///< AttentionConfig::dtype: half of the bytes; each addition rounds
};

/// "contiguous", "zigzag" or "striped"; "automatic", "ring", "all_gather" or "ulysses".
FA_PARALLEL_API const char* to_string(ShardLayout layout) noexcept;
FA_PARALLEL_API const char* to_string(Scheme scheme) noexcept;

/// How ranks exchange tensors. Implementations: use_nccl and make_local_group; a program may have its own.
///
/// Every rank calls the same functions in the same order. A rank that fails, or does not come within a bound, makes the
/// calls of all others throw fa::Error (ErrorCode::cuda, field "problem"); none waits for ever.
class FA_PARALLEL_API Communicator {
 public:
  /// One tensor without gaps, to or from another rank. Of two ranks, transfers meet in the order of their calls.
  struct Transfer {
    bool sends = false;
    int peer = 0;
    void* data = nullptr;
    std::int64_t count = 0;  ///< elements
    DType dtype = DType::bf16;
    /// Where it goes in shared memory (`share`): as far into the receiver's part as this address is into this rank's.
    /// `data` lies in shared memory then. null: to where the receiver says, from and to any memory. All transfers of a
    /// group are of one kind.
    void* place = nullptr;
  };

  virtual ~Communicator();
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual Device device() const noexcept = 0;

  /// Queues transfers as one group, behind what `stream` holds and behind earlier groups. Returns before they are done,
  /// with a number for `wait`: groups are numbered from 0 on.
  virtual std::uint64_t exchange(std::span<const Transfer> group, Stream stream) = 0;

  /// What is queued on `stream` from now on comes behind that group and all before it. On the host device: returns when
  /// they are done.
  virtual void wait(std::uint64_t group, Stream stream) = 0;

  /// Returns when `stream` and all groups have run. Throws fa::Error within the bound where a rank has failed or is
  /// late.
  virtual void synchronize(Stream stream) = 0;

  /// Throws fa::Error where something has failed since; does not wait.
  virtual void check() = 0;

  /// Ends the communication of all ranks: their calls throw, with `problem` as the reason.
  virtual void abort(const std::string& problem) noexcept = 0;

  /// Whether `share` gives memory. The same on all ranks.
  virtual bool shares_memory() const noexcept { return false; }

  /// This rank's part of memory that others write to: transfers with a `place` need no thread blocks. All ranks ask for
  /// as many bytes, in the same order, and wait for each other. 256-byte aligned. Throws fa::Error.
  virtual void* share(std::size_t bytes);

  /// Whether all of `bytes` bytes from `data` on lie in what `share` has given this rank.
  virtual bool is_shared(const void* data, std::size_t bytes) const;

  /// Gives it back, of this rank alone. Waits for what is queued on the device.
  virtual void unshare(void* memory) noexcept;
};

/// Ranks that are threads of this process, on the host device: for tests, and for programs without a GPU.
struct LocalGroupOptions {
  std::chrono::milliseconds timeout{30000};  ///< how long a rank waits for another one
  std::uint64_t seed = 0;                    ///< of delays
  std::chrono::microseconds max_delay{0};    ///< before each transfer, drawn anew
  /// Called by each rank's own thread for transfers before it starts group `group`. What it throws fails the rank.
  std::function<void(int rank, std::uint64_t group)> on_exchange = nullptr;
  bool shares_memory = false;  ///< transfers go to memory that ranks share, as those over NCCL can
};
FA_PARALLEL_API std::vector<std::shared_ptr<Communicator>> make_local_group(int size,
                                                                            const LocalGroupOptions& options = {});

/// How tensors travel over NCCL.
enum class NcclTransfers : std::uint8_t {
  automatic = 0,  ///< `puts` where they can be used, else `messages`
  messages = 1,   ///< ncclSend and ncclRecv, whose thread blocks take multiprocessors from kernels
  /// ncclPutSignal into windows that this library registers: copy engines write to other ranks' memory. Takes NCCL
  /// 2.30.7 or later, and 2 to 8 ranks that reach each other's memory. Captured calls send messages all the same: all
  /// ranks capture a call, or none does.
  puts = 2,
};

/// "automatic", "messages" or "puts".
FA_PARALLEL_API const char* to_string(NcclTransfers transfers) noexcept;

/// NCCL 2.18 or later, opened at run time (libnccl.so.2; FA_NCCL_PATH names another file). The communicator is the
/// application's: it outlives this object, and all its calls come from one thread at a time.
struct NcclOptions {
  /// How long a group may take from when the device comes to it, and so how long ranks may be behind. Then the
  /// communicator is aborted: a late or failed rank ends with an error on all others. Replays of graphs cannot be seen:
  /// once a group was captured, `synchronize` bounds all that it waits for, kernels too.
  std::chrono::milliseconds timeout{60000};
  /// A thread watches groups that were queued outside of stream capture. Without it `synchronize` alone does.
  bool watch = true;
  NcclTransfers transfers = NcclTransfers::automatic;  ///< the same on all ranks
};
FA_PARALLEL_API std::shared_ptr<Communicator> use_nccl(ncclComm* comm, const NcclOptions& options = {});

/// Everything that is fixed over the life of a ContextParallel, equal on all ranks.
struct ContextParallelConfig {
  /// The whole attention. f16, bf16 and f32 (f64 on the host). Refused: pages, accumulate, value_in_key, 8-bit floats
  /// and caches, invariance, captures that require gradients, zero_padding.
  AttentionConfig attention;
  Scheme scheme = Scheme::automatic;
  /// Ranks next to each other that share heads (Ulysses); groups of them share rows by `scheme`, ring or all_gather. A
  /// divisor of the ranks and of h_kv. 0: with Scheme::ulysses all ranks, with automatic by the model, else 1.
  int ulysses = 0;
  /// all_gather: pieces that K and V come in, a divisor of a rank's KV heads. 0: four, or as many as keep the keys of
  /// other ranks that are held at a time to two shards.
  int head_groups = 0;
  GradientTransfer gradients = GradientTransfer::f32;
  /// Multiprocessors that kernels leave to transfers, on a GPU. 0: none. Transfers then run before a call's blocks, or
  /// between them, which was the fastest wherever it was measured (docs/context_parallel.md).
  int reserved_multiprocessors = 0;
};

/// Speeds that schemes are compared by (docs/scale.md).
struct ClusterSpeeds {
  double flops = 800e12;           ///< a second, of the forward kernel of one GPU
  double backward_flops = 560e12;  ///< likewise of the backward
  double link = 300e9;             ///< bytes a second of one GPU, each way, to ranks of its node
  double network = 50e9;           ///< to ranks of other nodes
  double latency = 15e-6;          ///< seconds that a group of transfers takes without bytes
  double launch = 5e-6;            ///< seconds that a call takes without work
  double memory = 3e12;            ///< bytes a second of a local copy, each way
  int ranks_of_node = 8;
};

/// Sizes of the whole. Of packed batches the heads alone count.
struct ContextShape {
  std::int64_t b = 1;
  std::int64_t h_q = 1;
  std::int64_t h_kv = 1;
  std::int64_t s_q = 1;
  std::int64_t s_kv = 1;
};

/// What the model says of one choice, in seconds.
struct SchemeTime {
  Scheme scheme = Scheme::ring;
  int ulysses = 1;
  double forward = 0;
  double backward = 0;
  double single = 0;  ///< forward and backward of one GPU with all rows
  double efficiency(int ranks) const noexcept { return single / (ranks * (forward + backward)); }
};

/// Every choice that the sizes allow, the fastest forward and backward together first. Throws
/// fa::Error(invalid_argument) where none is.
FA_PARALLEL_API std::vector<SchemeTime> compare_schemes(const ContextParallelConfig& config, ShardLayout layout,
                                                        const ContextShape& shape, int ranks,
                                                        const ClusterSpeeds& speeds = {});

/// Which rows of sequences of these lengths a rank has, in the order of its shard. Rows of packed batches count from
/// the first of the batch.
FA_PARALLEL_API std::vector<std::int64_t> shard_rows(ShardLayout layout, int ranks, int rank,
                                                     std::span<const std::int64_t> lengths);

/// How shard copies a rank's rows of `whole` to `part`, and unshard back. Both tensors are on `device`, of one dtype:
/// [b, h, s, d] or [b, s, d], with `lengths` packed, [total, h, d]. Row statistics are [b, h, s], packed [h, total].
/// Rows that are not the rank's stay as they are. The copies are queued on `stream`.
struct ShardCopy {
  ShardLayout layout = ShardLayout::zigzag;
  int ranks = 1;
  int rank = 0;
  std::span<const std::int64_t> lengths = {};  ///< of a packed batch; empty: dense
  bool statistics = false;
  Device device = Device::current();
};
FA_PARALLEL_API void shard(const ShardCopy& how, const TensorView& whole, const TensorView& part,
                           Stream stream = nullptr);
FA_PARALLEL_API void unshard(const ShardCopy& how, const TensorView& part, const TensorView& whole,
                             Stream stream = nullptr);

/// Scratch memory of one rank, in bytes.
struct ContextMemory {
  std::size_t shard_kv = 0;      ///< K and V of the rank, for comparison
  std::size_t kv_in_flight = 0;  ///< keys and values of other ranks
  std::size_t scratch = 0;       ///< all tensors of a plan, with those; without the kernels' own workspaces
};

/// Attention of rows that ranks share. One for each rank; each call is made by all ranks, in the same order.
class FA_PARALLEL_API ContextParallel {
 public:
  /// Checks `config`; compiles nothing and transfers nothing. The device is the communicator's. Throws fa::Error:
  /// invalid_argument (a null communicator included), unsupported, no_driver, cuda.
  static ContextParallel create(const ContextParallelConfig& config, std::shared_ptr<Communicator> communicator,
                                ShardLayout layout = ShardLayout::zigzag);

  ContextParallel(ContextParallel&&) noexcept;
  ContextParallel& operator=(ContextParallel&&) noexcept;
  ~ContextParallel();

  /// Attention of this rank's rows over the keys of all ranks. Tensors are shards: q [b, h_q, s_q / n, d_qk], and so
  /// on. Captures and the sink are those of the whole.
  ///
  /// Packed batches (AttentionConfig::varlen): tensors are packed shards, and `lengths` are the whole lengths of the
  /// sequences, on the host, in which queries and keys are alike.
  ///
  /// Stream: work is queued on `stream`, some of it on another, transfers on one of the communicator's; all meet again
  /// at the end. Calls of one ContextParallel run one after the other, on one stream at a time. Cost: sizes that are
  /// new are planned, and memory for them is taken; `prepare` does so beforehand. Prepared calls may be captured.
  ///
  /// Errors: throws fa::Error. After a failure of communication no more calls are served.
  void forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream = nullptr,
               std::span<const std::int64_t> lengths = {});
  void backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream = nullptr,
                std::span<const std::int64_t> lengths = {});

  /// Plans calls of these sizes of the whole, compiles their kernels and takes their memory. Where ranks share memory
  /// all of them call it, in the same order as other calls.
  void prepare(const ContextShape& shape, bool with_backward, std::span<const std::int64_t> lengths = {});

  /// Throws fa::Error(invalid_argument) on every rank unless configuration, layout and speeds are the same on all. All
  /// ranks call it. It waits.
  void check_agreement(Stream stream = nullptr);

  /// Which scheme serves calls of these sizes.
  SchemeTime scheme(const ContextShape& shape, std::span<const std::int64_t> lengths = {}) const;
  ContextMemory memory(const ContextShape& shape, bool with_backward, std::span<const std::int64_t> lengths = {}) const;
  /// What this rank does in a forward, or a backward: one line an operation.
  std::string describe(const ContextShape& shape, bool backward, std::span<const std::int64_t> lengths = {}) const;
  /// Of configuration, layout and speeds.
  std::uint64_t hash() const;

  const ContextParallelConfig& config() const noexcept;
  ShardLayout layout() const noexcept;
  Communicator& communicator() const noexcept;
  /// What schemes are chosen by, and how a ring's calls are ordered: the same on all ranks, before the first call.
  void set_speeds(const ClusterSpeeds& speeds);

 private:
  class Impl;
  explicit ContextParallel(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fa

#endif  // FA_PARALLEL_HPP_
