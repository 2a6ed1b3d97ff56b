#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fa/c_bridge.hpp>

#include "parallel/config.hpp"
#include "parallel/errors.hpp"
#include "parallel/executor.hpp"
#include "parallel/layout.hpp"
#include "parallel/memory.hpp"
#include "parallel/views.hpp"

namespace fa {

using namespace parallel;
using c_bridge::check_tensors;
using c_bridge::NamedTensor;

/// Plans of so many sizes are kept. Half of them go at a time: freeing their memory waits for the device.
constexpr std::size_t kKeptPlans = 128;
// Beside transfers, thread blocks for each multiprocessor: those on multiprocessors that NCCL has for a while are late
// by a small part of a call.
constexpr int kBlocksBesideTransfers = 16;

class ContextParallel::Impl {
 public:
  Impl(const ContextParallelConfig& config, std::shared_ptr<Communicator> communicator, ShardLayout layout)
      : config_(config),
        communicator_(std::move(communicator)),
        layout_(layout),
        memory_(memory_of(communicator_->device())),
        attentions_(config_.attention, communicator_->device()) {
    check_config(config_, layout_, communicator_->size());
    // What no call could be served with is refused here, as Attention::create does.
    Attention::create(config_.attention, communicator_->device());
  }

  void forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream,
               std::span<const std::int64_t> lengths) {
    communicator_->check();
    check_tensors(shared_tensors(inputs), std::array{NamedTensor{"o", outputs.o}, NamedTensor{"lse", outputs.lse}});
    Call call = call_of(inputs, lengths);
    call.given[kO] = checked_tensor(call, "o", outputs.o, call.shape.h_q, true, d_v(), own());
    call.owned_lse = !outputs.lse.defined();
    if (!call.owned_lse) call.given[kLse] = checked_statistic(call, "lse", outputs.lse);
    run(call, false, stream);
  }

  void backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream,
                std::span<const std::int64_t> lengths) {
    communicator_->check();
    std::vector<NamedTensor> read = shared_tensors(inputs);
    read.insert(read.end(), {{"o", inputs.o}, {"lse", inputs.lse}, {"dout", inputs.dout}, {"dlse", inputs.dlse}});
    check_tensors(read, std::array{NamedTensor{"dq", outputs.dq}, NamedTensor{"dk", outputs.dk},
                                   NamedTensor{"dv", outputs.dv}, NamedTensor{"dsink", outputs.dsink}});
    Call call = call_of(inputs, lengths);
    const ContextShape& shape = call.shape;
    call.given[kO] = checked_tensor(call, "o", inputs.o, shape.h_q, true, d_v(), own());
    call.given[kLse] = checked_statistic(call, "lse", inputs.lse);
    call.given[kDout] = checked_tensor(call, "dout", inputs.dout, shape.h_q, true, d_v(), own());
    call.has_dlse = inputs.dlse.defined();
    if (call.has_dlse) call.given[kDlse] = checked_statistic(call, "dlse", inputs.dlse);
    call.given[kDq] = checked_tensor(call, "dq", outputs.dq, shape.h_q, true, d_qk(), own());
    call.given[kDk] = checked_tensor(call, "dk", outputs.dk, shape.h_kv, false, d_qk(), own());
    call.given[kDv] = checked_tensor(call, "dv", outputs.dv, shape.h_kv, false, d_v(), own());
    if (outputs.captures.size() > 0) throw_unsupported("captures", "gradients", "none with context parallelism");
    call.has_sink_gradient = outputs.dsink.defined();
    if (call.has_sink_gradient) call.given[kDsink] = checked_sink("dsink", outputs.dsink, shape.h_q);
    run(call, true, stream);
  }

  void prepare(const ContextShape& shape, bool with_backward, std::span<const std::int64_t> lengths) {
    Call call;
    call.lengths = checked_lengths(lengths);
    call.shape = whole_shape(shape, call.lengths);
    // Calls that give everything, and lie as transfers take them: others are planned when they come.
    for (const bool dense : {true, false}) {
      call.dense_kv = dense && can_be_dense(call.shape);
      call.dense_rows = dense && config_.attention.varlen;
      if (dense && !call.dense_kv && !call.dense_rows) continue;
      call.has_sink_gradient = config_.attention.sink;
      find(call, false);
      if (with_backward) find(call, true);
    }
    needed_lse_ = std::max(needed_lse_, lse_bytes(call.shape));
    reserve();
  }

  void check_agreement(Stream stream) {
    communicator_->check();
    const int n = communicator_->size(), me = communicator_->rank();
    // As numbers of 4 bytes, which every transport has: the hash twice.
    const Buffer buffer(*memory_, sizeof(std::uint64_t) * static_cast<std::size_t>(n));
    std::vector<std::uint64_t> all(static_cast<std::size_t>(n));
    all[static_cast<std::size_t>(me)] = hash_of(config_, layout_, speeds_);
    memory_->upload(buffer.at(0), all.data(), buffer.size());
    std::vector<Communicator::Transfer> transfers;
    for (int peer = 0; peer < n; ++peer) {
      if (peer == me) continue;
      transfers.push_back({true, peer, buffer.at(sizeof(std::uint64_t) * static_cast<std::size_t>(me)), 2, DType::i32});
      transfers.push_back(
          {false, peer, buffer.at(sizeof(std::uint64_t) * static_cast<std::size_t>(peer)), 2, DType::i32});
    }
    const std::uint64_t group = communicator_->exchange(transfers, stream);
    communicator_->wait(group, stream);
    communicator_->synchronize(stream);
    memory_->download(all.data(), buffer.at(0), buffer.size());
    for (int peer = 0; peer < n; ++peer) {
      if (all[static_cast<std::size_t>(peer)] == all[static_cast<std::size_t>(me)]) continue;
      throw_invalid("configuration",
                    "another one on rank " + std::to_string(peer) + " than on rank " + std::to_string(me),
                    "the same configuration and layout on every rank");
    }
  }

  SchemeTime scheme(const ContextShape& shape, std::span<const std::int64_t> lengths) const {
    const std::vector<std::int64_t> checked = checked_lengths(lengths);
    return scheme_times(config_, layout_, whole_shape(shape, checked), checked, communicator_->size(), speeds_).front();
  }

  Problem problem(const ContextShape& shape, std::span<const std::int64_t> lengths) const {
    const std::vector<std::int64_t> checked = checked_lengths(lengths);
    return planned_problem(whole_shape(shape, checked), checked);
  }

  ContextMemory memory(const ContextShape& shape, bool with_backward, std::span<const std::int64_t> lengths) const {
    const Problem problem = this->problem(shape, lengths);
    ContextMemory memory;
    const std::size_t size = size_of(config_.attention.dtype);
    const auto kv = problem.b * problem.h_kv * (problem.d_qk + problem.d_v) * total(problem.lengths_kv);
    memory.shard_kv = static_cast<std::size_t>(kv / problem.ranks) * size;
    for (const bool backward : {false, true}) {
      if (backward && !with_backward) continue;
      const std::unique_ptr<Executor> executor = executor_of(problem, backward);
      memory.kv_in_flight =
          std::max(memory.kv_in_flight, static_cast<std::size_t>(executor->plan().kv_in_flight()) * size);
      memory.scratch = std::max(memory.scratch, executor->scratch_bytes() + executor->shared_bytes());
    }
    return memory;
  }

  std::string describe(const ContextShape& shape, bool backward, std::span<const std::int64_t> lengths) const {
    const Problem problem = this->problem(shape, lengths);
    const int rank = communicator_->rank();
    return parallel::to_string(backward ? backward_plan(problem, rank) : forward_plan(problem, rank));
  }

  std::uint64_t hash() const { return hash_of(config_, layout_, speeds_); }
  const ContextParallelConfig& config() const noexcept { return config_; }
  ShardLayout layout() const noexcept { return layout_; }
  Communicator& communicator() const noexcept { return *communicator_; }
  void set_speeds(const ClusterSpeeds& speeds) {
    if (uses_ > 0) throw_invalid("speeds", "set after a call", "to be set before the first call");
    speeds_ = speeds;
  }

 private:
  /// A call's tensors as plans have them, and what picks its plan.
  struct Call {
    ContextShape shape;
    std::vector<std::int64_t> lengths;
    GivenTensors given;
    CallContext context;
    bool dense_kv = false;
    bool dense_rows = false;
    bool has_dlse = false;
    bool owned_lse = false;
    bool has_sink_gradient = false;
  };
  using Key = std::tuple<bool, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                         std::vector<std::int64_t>, bool, bool, bool, bool>;

  Problem planned_problem(const ContextShape& shape, const std::vector<std::int64_t>& lengths) const {
    const int ranks = communicator_->size();
    Problem problem = problem_of(config_, layout_, ranks, shape, lengths,
                                 scheme_times(config_, layout_, shape, lengths, ranks, speeds_).front());
    set_late_heads(problem, size_of(own()), speeds_, communicator_->shares_memory());
    return problem;
  }

  /// Where ranks share memory each knows the plans of all: it writes to where these receive.
  std::unique_ptr<Executor> executor_of(const Problem& problem, bool backward) const {
    const auto plan_of = [backward](const Problem& of, int rank) {
      return backward ? backward_plan(of, rank) : forward_plan(of, rank);
    };
    const int rank = communicator_->rank();
    Plan plan = plan_of(problem, rank);
    std::optional<SharedPlaces> places;
    if (communicator_->shares_memory() && problem.ranks > 1) {
      // Which of the others copies K and V is not known: as many bytes as if all did.
      Problem copying = problem;
      copying.dense_kv = copying.dense_rows = false;
      std::vector<Plan> plans;
      for (int other = 0; other < problem.ranks; ++other) plans.push_back(plan_of(copying, other));
      const auto own_size = static_cast<std::int64_t>(size_of(own()));
      places = shared_places(plan, plans, rank, {own_size, static_cast<std::int64_t>(size_of(wide()))});
    }
    return std::make_unique<Executor>(problem, std::move(plan), config_.attention, *memory_, std::move(places));
  }

  DType own() const noexcept { return config_.attention.dtype; }
  DType wide() const noexcept { return own() == DType::f64 ? DType::f64 : DType::f32; }
  std::int64_t d_qk() const noexcept { return config_.attention.head_dim; }
  std::int64_t d_v() const noexcept {
    return config_.attention.head_dim_v > 0 ? config_.attention.head_dim_v : config_.attention.head_dim;
  }

  std::vector<std::int64_t> checked_lengths(std::span<const std::int64_t> lengths) const {
    const bool varlen = config_.attention.varlen;
    if (!varlen && !lengths.empty()) throw_invalid("lengths", "given", "nothing without varlen");
    check_lengths(layout_, communicator_->size(), lengths, "lengths");
    return {lengths.begin(), lengths.end()};
  }

  /// Rows of a packed batch are those of its sequences.
  ContextShape whole_shape(ContextShape shape, const std::vector<std::int64_t>& lengths) const {
    if (!config_.attention.varlen) return shape;
    shape.b = 1;
    shape.s_q = shape.s_kv = total(lengths);
    return shape;
  }

  TensorView checked_tensor(const Call& call, const char* name, const TensorView& given, std::int64_t heads, bool is_q,
                            std::int64_t columns, DType dtype) const {
    const std::int64_t rows = (is_q ? call.shape.s_q : call.shape.s_kv) / communicator_->size();
    return shard_view(name, given, {call.shape.b, heads, rows, columns}, dtype, config_.attention.varlen);
  }

  TensorView checked_statistic(const Call& call, const char* name, const TensorView& given) const {
    const std::int64_t rows = call.shape.s_q / communicator_->size();
    return statistic_view(name, given, {call.shape.b, call.shape.h_q, rows, 1}, wide(), config_.attention.varlen);
  }

  TensorView checked_sink(const char* name, const TensorView& given, std::int64_t heads) const {
    if (given.rank != 1 || given.shape[0] != heads || given.dtype != wide()) {
      throw_invalid(name, given.defined() ? "another tensor" : "nothing",
                    std::string(fa::to_string(wide())) + " [h_q] = [" + std::to_string(heads) + "]");
    }
    TensorView view = given;
    view.rank = 4;
    view.shape = {1, 1, heads, 1};
    view.strides = {0, 0, given.strides[0], 1};
    return view;
  }

  /// What forward and backward both read. A call with a tensor that none may have is refused before other ranks wait
  /// for what it sends.
  template <class Inputs>
  static std::vector<NamedTensor> shared_tensors(const Inputs& inputs) {
    std::vector<NamedTensor> tensors{{"q", inputs.q}, {"k", inputs.k}, {"v", inputs.v}, {"sink", inputs.sink}};
    for (const Captured& captured : inputs.captures) tensors.push_back({captured.name, captured.tensor});
    if (inputs.dropout.device != nullptr) {  // two numbers of 8 bytes
      tensors.push_back({"dropout.device", TensorView(inputs.dropout.device, DType::f64, {2})});
    }
    return tensors;
  }

  template <class Inputs>
  static void refuse_fields(const Inputs& inputs) {
    const std::string none = "nothing with context parallelism";
    const PackedSequences& sequences = inputs.sequences;
    if (sequences.b != 0 || sequences.cu_seqlens_q != nullptr || sequences.cu_seqlens_kv != nullptr ||
        sequences.seqused_q != nullptr || sequences.seqused_kv != nullptr) {
      throw_invalid("sequences", "given", "nothing: `lengths` says where sequences are");
    }
    if (inputs.tiles.data != nullptr) throw_unsupported("tiles", "given", none);
    if constexpr (requires { inputs.cache; }) {
      if (inputs.cache.block_table.defined()) throw_unsupported("cache", "given", none);
      if (inputs.schedule.data != nullptr) throw_unsupported("schedule", "given", none);
      if (!inputs.prefixes.empty()) throw_unsupported("prefixes", "given", none);
      for (const auto& [name, scale] :
           {std::pair{"k_scale", &inputs.k_scale}, std::pair{"v_scale", &inputs.v_scale},
            std::pair{"q_scale", &inputs.q_scale}, std::pair{"row_bias", &inputs.row_bias}}) {
        if (scale->defined()) throw_unsupported(name, "given", none);
      }
    }
    if (inputs.place) throw_unsupported("place", "given", none + ", which places calls itself");
    if (inputs.max_multiprocessors < 0) {
      throw_invalid("max_multiprocessors", inputs.max_multiprocessors, "1 and more, or 0: all");
    }
  }

  template <class Inputs>
  Call call_of(const Inputs& inputs, std::span<const std::int64_t> lengths) const {
    refuse_fields(inputs);
    Call call;
    const std::int64_t n = communicator_->size();
    const bool varlen = config_.attention.varlen;
    call.lengths = checked_lengths(lengths);
    const ShardSize q = shard_size("q", inputs.q, varlen), k = shard_size("k", inputs.k, varlen);
    call.shape = {q.b, q.heads, k.heads, q.rows * n, k.rows * n};
    if (varlen && q.rows * n != total(call.lengths)) {
      throw_invalid("q", std::to_string(q.rows) + " rows",
                    std::to_string(total(call.lengths) / n) + " rows, the rank's part of all lengths");
    }
    if (varlen && k.rows != q.rows) throw_invalid("k", std::to_string(k.rows) + " rows", "as many as q has");
    call.given[kQ] = checked_tensor(call, "q", inputs.q, q.heads, true, d_qk(), own());
    call.given[kK] = checked_tensor(call, "k", inputs.k, k.heads, false, d_qk(), own());
    call.given[kV] = checked_tensor(call, "v", inputs.v, k.heads, false, d_v(), own());
    const TensorView &keys = call.given[kK], &values = call.given[kV];
    const bool travel = can_travel(keys) && can_travel(values);
    call.dense_kv = travel && is_dense(keys) && is_dense(values);
    call.dense_rows = travel && varlen && is_dense_by_rows(keys) && is_dense_by_rows(values);
    call.context.captures = inputs.captures;
    call.context.dropout = inputs.dropout;
    if (config_.attention.sink) {
      call.given[kSink] = checked_sink("sink", inputs.sink, q.heads);
      call.context.sink = inputs.sink;
    } else if (inputs.sink.defined()) {
      throw_invalid("sink", "given", "nothing without AttentionConfig::sink");
    }
    call.context.max_multiprocessors = inputs.max_multiprocessors;
    call.context.may_be_unbounded = inputs.max_multiprocessors == 0;
    return call;
  }

  /// Puts take what lies in memory that ranks share.
  bool can_travel(const TensorView& tensor) const {
    if (!communicator_->shares_memory()) return true;
    const auto elements = static_cast<std::size_t>(tensor.elements());
    return communicator_->is_shared(tensor.data, elements * size_of(tensor.dtype));
  }

  int multiprocessors(const Call& call) const {
    const int all = memory_->multiprocessors();
    if (call.context.max_multiprocessors > 0 || all == 0 || communicator_->size() == 1) {
      return call.context.max_multiprocessors;
    }
    const int left = all - config_.reserved_multiprocessors;
    return config_.reserved_multiprocessors == 0 ? 0 : std::max(left, 1);
  }

  static Key key_of(const Call& call, bool backward) {
    const ContextShape& s = call.shape;
    return {backward,
            s.b,
            s.h_q,
            s.h_kv,
            s.s_q,
            s.s_kv,
            call.lengths,
            call.dense_kv,
            call.dense_rows,
            call.has_dlse,
            backward && call.has_sink_gradient};
  }

  /// Nothing can be compiled or allocated while a stream is captured.
  void check_prepared(const Call& call, bool backward) const {
    const bool has_memory = scratch_.size() >= needed_ && shared_.size() >= needed_shared_ &&
                            (!call.owned_lse || lse_.size() >= lse_bytes(call.shape));
    if (has_memory && plans_.contains(key_of(call, backward))) return;
    throw_invalid("stream", "captured", "a call of sizes that `prepare`, or an earlier call, has planned");
  }

  /// A plan with its memory, and when it was asked for.
  struct Planned {
    std::unique_ptr<Executor> executor;
    std::uint64_t used = 0;
    bool was_captured = false;  ///< a graph may have its memory
  };

  /// Packed batches are of other lengths in each step: plans that were not asked for lately go.
  void drop_plans() {
    std::vector<std::uint64_t> used;
    for (const auto& [key, planned] : plans_) {
      if (!planned.was_captured) used.push_back(planned.used);
    }
    if (used.size() < kKeptPlans) return;
    const auto newest = used.begin() + kKeptPlans / 2;
    std::ranges::nth_element(used, newest);
    std::erase_if(plans_, [bound = *newest](const auto& entry) {
      return !entry.second.was_captured && entry.second.used < bound;
    });
  }

  /// The plan of a call, made when its sizes are new.
  Planned& find(Call& call, bool backward) {
    call.context.max_multiprocessors = multiprocessors(call);
    call.context.most_blocks = kBlocksBesideTransfers * memory_->multiprocessors();
    const ContextShape& s = call.shape;
    const Key key = key_of(call, backward);
    if (const auto found = plans_.find(key); found != plans_.end()) {
      found->second.used = ++uses_;
      return found->second;
    }
    drop_plans();
    Problem problem = planned_problem(s, call.lengths);
    problem.dense_kv = call.dense_kv;
    problem.dense_rows = call.dense_rows;
    problem.dlse = call.has_dlse;
    problem.sink = config_.attention.sink && (!backward || call.has_sink_gradient);
    auto made = executor_of(problem, backward);
    made->prepare(attentions_, call.context);
    needed_ = std::max(needed_, made->scratch_bytes());
    needed_shared_ = std::max(needed_shared_, made->shared_bytes());
    return plans_.emplace(key, Planned{std::move(made), ++uses_}).first->second;
  }

  void reserve() {
    grow(scratch_, captured_, needed_, *memory_);
    grow(lse_, captured_, needed_lse_, *memory_);
    grow(shared_, captured_shared_, needed_shared_, *communicator_);
  }

  /// Graphs that were captured have the memory of before. Else it is given back first, once the device has ended the
  /// calls that are queued.
  template <class Owner, class Source>
  void grow(Owner& buffer, std::vector<Owner>& captured, std::size_t needed, Source& source) {
    if (buffer.size() >= needed) return;
    if (was_captured_ && buffer.size() > 0) captured.push_back(std::move(buffer));
    buffer = {};
    buffer = Owner(source, needed);
  }

  /// Of the log-sum-exp of a call that does not ask for it.
  std::size_t lse_bytes(const ContextShape& shape) const {
    return static_cast<std::size_t>(shape.b * shape.h_q * (shape.s_q / communicator_->size())) * size_of(wide());
  }

  /// Whether tensors of this shape may lie in the order of heads, b and rows.
  bool can_be_dense(const ContextShape& shape) const {
    return shape.h_kv == 1 || (!config_.attention.varlen && shape.b == 1);
  }

  void run(Call& call, bool backward, Stream stream) {
    const ContextShape& s = call.shape;
    if (s.b == 0 || s.h_q == 0 || (s.s_q == 0 && (!backward || s.s_kv == 0))) return;
    const bool captured = memory_->is_capturing(stream);
    if (captured) check_prepared(call, backward);
    Planned& planned = find(call, backward);
    if (captured) planned.was_captured = was_captured_ = true;
    if (call.owned_lse) needed_lse_ = std::max(needed_lse_, lse_bytes(s));
    reserve();
    if (call.owned_lse) {
      TensorView& lse = call.given[kLse];
      lse = TensorView(lse_.at(0), wide(), {s.b, s.h_q, s.s_q / communicator_->size(), 1});
    }
    planned.executor->run(*communicator_, call.given, call.context, {scratch_.at(0), shared_.at(0)}, stream);
  }

  ContextParallelConfig config_;
  std::shared_ptr<Communicator> communicator_;
  ShardLayout layout_;
  std::unique_ptr<Memory> memory_;
  Attentions attentions_;
  ClusterSpeeds speeds_;
  std::map<Key, Planned> plans_;
  std::uint64_t uses_ = 0;
  Buffer scratch_, lse_;
  SharedBuffer shared_;  ///< grown by all ranks in the same call
  bool was_captured_ = false;
  std::vector<Buffer> captured_;  ///< which graphs may have
  std::vector<SharedBuffer> captured_shared_;
  std::size_t needed_ = 0, needed_lse_ = 0, needed_shared_ = 0;
};

ContextParallel ContextParallel::create(const ContextParallelConfig& config, std::shared_ptr<Communicator> communicator,
                                        ShardLayout layout) {
  if (!communicator) throw_invalid("communicator", "null", "a communicator, of use_nccl or make_local_group");
  communicator->check();
  return ContextParallel(std::make_unique<Impl>(config, std::move(communicator), layout));
}

ContextParallel::ContextParallel(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
ContextParallel::ContextParallel(ContextParallel&&) noexcept = default;
ContextParallel& ContextParallel::operator=(ContextParallel&&) noexcept = default;
ContextParallel::~ContextParallel() = default;

void ContextParallel::forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream,
                              std::span<const std::int64_t> lengths) {
  impl_->forward(inputs, outputs, stream, lengths);
}

void ContextParallel::backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream,
                               std::span<const std::int64_t> lengths) {
  impl_->backward(inputs, outputs, stream, lengths);
}

void ContextParallel::prepare(const ContextShape& shape, bool with_backward, std::span<const std::int64_t> lengths) {
  impl_->prepare(shape, with_backward, lengths);
}

void ContextParallel::check_agreement(Stream stream) {
  impl_->check_agreement(stream);
}

SchemeTime ContextParallel::scheme(const ContextShape& shape, std::span<const std::int64_t> lengths) const {
  return impl_->scheme(shape, lengths);
}

ContextMemory ContextParallel::memory(const ContextShape& shape, bool with_backward,
                                      std::span<const std::int64_t> lengths) const {
  return impl_->memory(shape, with_backward, lengths);
}

std::string ContextParallel::describe(const ContextShape& shape, bool backward,
                                      std::span<const std::int64_t> lengths) const {
  return impl_->describe(shape, backward, lengths);
}

std::uint64_t ContextParallel::hash() const {
  return impl_->hash();
}

const ContextParallelConfig& ContextParallel::config() const noexcept {
  return impl_->config();
}

ShardLayout ContextParallel::layout() const noexcept {
  return impl_->layout();
}

Communicator& ContextParallel::communicator() const noexcept {
  return impl_->communicator();
}

void ContextParallel::set_speeds(const ClusterSpeeds& speeds) {
  impl_->set_speeds(speeds);
}

}  // namespace fa
