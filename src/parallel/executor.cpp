#include "parallel/executor.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>

#include "parallel/errors.hpp"

namespace fa::parallel {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Some heads and rows of a view.
TensorView part_of(TensorView view, const Region& region) {
  const std::int64_t offset = region.head * view.strides[1] + region.row * view.strides[2];
  view.data = static_cast<std::byte*>(view.data) + offset * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[1] = region.heads;
  view.shape[2] = region.rows;
  view.strides[2] *= region.row_step;
  return view;
}

/// [1, h, rows, d] as the packed [rows, h, d].
TensorView packed(const TensorView& view) {
  TensorView result = view;
  result.rank = 3;
  result.shape = {view.shape[2], view.shape[1], view.shape[3], 0};
  result.strides = {view.strides[2], view.strides[1], view.strides[3], 0};
  return result;
}

/// [b, h, rows, 1] as [b, h, rows], packed as [h, rows].
TensorView statistic(const TensorView& view, bool is_packed) {
  TensorView result = view;
  result.rank = is_packed ? 2 : 3;
  if (is_packed) {
    result.shape = {view.shape[1], view.shape[2], 0, 0};
    result.strides = {view.strides[1], view.strides[2], 0, 0};
  } else {
    result.shape[3] = result.strides[3] = 0;
  }
  return result;
}

bool rows_aligned(const TensorView& view) {
  if (!view.defined()) return true;
  const auto elements = static_cast<std::int64_t>(16 / size_of(view.dtype));
  bool fits = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (std::size_t axis = 0; axis < 3; ++axis) fits = fits && view.strides[axis] % elements == 0;
  return fits;
}

ShardPlace place_of(const Problem& problem, const Call& call) {
  const Block& block = call.blocks.front();
  const auto sequence = static_cast<std::size_t>(block.sequence);
  ShardPlace place;
  place.b = problem.packed ? block.sequence : 0;
  place.h_q = call.head_offset;
  place.q = block.q;
  place.q_step = block.q_step;
  place.kv = block.kv;
  place.kv_step = block.kv_step;
  place.whole_b = problem.packed ? static_cast<std::int64_t>(problem.lengths_q.size()) : problem.b;
  place.whole_h_q = problem.h_q;
  place.whole_s_q = problem.lengths_q[sequence];
  place.whole_s_kv = problem.lengths_kv[sequence];
  return place;
}

}  // namespace

const Attention& Attentions::find(int key, const AttentionConfig& config) {
  std::unique_ptr<Attention>& made = made_[key];
  if (!made) made = std::make_unique<Attention>(Attention::create(config, device_));
  return *made;
}

const Attention& Attentions::of_call(const Call& call, bool accumulate, bool backward) {
  AttentionConfig config = config_;
  config.sink = false;
  config.accumulate = accumulate;
  config.varlen = call.packed;
  config.zero_padding = call.packed && backward;
  config.check_sequences = false;  // lengths are the plan's
  if (call.mask != BlockMask::placed) {
    config.causal = call.mask == BlockMask::causal;
    config.causal_align = CausalAlign::bottom_right;
    config.window_left = config.window_right = -1;
    config.chunk = 0;
  }
  const int key = static_cast<int>(call.mask) * 8 + (accumulate ? 4 : 0) + (call.packed ? 2 : 0) + (backward ? 1 : 0);
  return find(key, config);
}

const Attention& Attentions::of_sink() {
  AttentionConfig config = config_;
  config.varlen = config.causal = false;
  config.window_left = config.window_right = -1;
  config.chunk = 0;
  config.score = {};
  config.mask = {};
  config.dropout = 0;
  return find(-1, config);
}

const Attention& Attentions::of_states() {
  AttentionConfig config;
  config.head_dim = config_.head_dim;
  config.head_dim_v = config_.head_dim_v;
  config.dtype = config_.dtype;
  config.cache = config_.cache;
  config.compile = config_.compile;
  config.on_compile = config_.on_compile;
  return find(-2, config);
}

const Attention& Attentions::of_sum(std::int64_t columns) {
  AttentionConfig config = of_states().config();
  config.head_dim = config.head_dim_v = static_cast<int>(columns);
  return find(-1000 - static_cast<int>(columns), config);
}

const Attention& Attentions::of_statistic_sum() {
  AttentionConfig config = of_states().config();
  config.head_dim = config.head_dim_v = 8;
  config.dtype = config_.dtype == DType::f64 ? DType::f64 : DType::f32;
  return find(-3, config);
}

/// One run of a plan.
class Run {
 public:
  Run(const Executor& executor, Communicator& communicator, const GivenTensors& given, const CallContext& context,
      const RunMemory& memory, Stream stream)
      : executor_(executor),
        communicator_(communicator),
        given_(given),
        context_(context),
        scratch_(static_cast<std::byte*>(memory.scratch)),
        shared_(static_cast<std::byte*>(memory.shared)),
        stream_(stream),
        by_copy_engines_(executor.places_ && !executor.memory_.is_capturing(stream)),
        streams_{stream, nullptr} {
    bool fits = true;
    for (const TensorView& view : given) fits = fits && (view.rank != 4 || view.shape[3] == 1 || rows_aligned(view));
    if (!fits) return;
    std::size_t offset = executor.scratch_size_;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::size_t size = executor.workspace_sizes_[lane];
      offset -= size;
      if (size > 0) workspaces_[lane] = {scratch_ + offset, size};
    }
  }

  void run() {
    const std::vector<Op>& ops = executor_.plan_.ops;
    try {
      for (index_ = 0; index_ < ops.size(); ++index_) {
        const bool is_call =
            std::holds_alternative<Forward>(ops[index_]) || std::holds_alternative<Backward>(ops[index_]);
        if (!is_call) queue_late();
        std::visit([this](const auto& op) { this->run(op); }, ops[index_]);
        if (is_call) queue_late();
      }
      queue_late();
    } catch (const std::exception& problem) {
      if (is_forked_) follow_quietly(streams_[1]);
      if (late_ != nullptr) follow_quietly(executor_.memory_.lane(1));
      if (!groups_.empty() || late_ != nullptr)
        communicator_.abort("rank " + std::to_string(communicator_.rank()) + ": " + problem.what());
      throw;
    }
  }

 private:
  const Attention& attention() const { return *executor_.attention_of_[index_]; }

  TensorView view(const Region& region) const {
    const auto tensor = static_cast<std::size_t>(region.tensor);
    if (tensor < kGivenCount) return part_of(given_[tensor], region);
    const PlanTensor& planned = executor_.plan_.tensors[tensor];
    TensorView whole;
    whole.data =
        is_shared(tensor) ? shared_ + executor_.places_->own.offsets[tensor] : scratch_ + executor_.offsets_[tensor];
    whole.dtype = executor_.dtype_of(planned.element);
    whole.rank = 4;
    whole.shape = {planned.b, planned.heads, planned.rows, planned.columns};
    const std::int64_t matrix = planned.rows * planned.columns;
    whole.strides = {matrix, planned.b * matrix, planned.columns, 1};
    if (planned.by_rows) whole.strides = {planned.elements(), planned.columns, planned.heads * planned.columns, 1};
    return part_of(whole, region);
  }

  bool is_shared(std::size_t tensor) const {
    return executor_.places_ && executor_.places_->own.offsets[tensor] != SharedLayout::kNowhere;
  }

  void run(const Copy& op) { executor_.memory_.copy(view(op.to), view(op.from), on()); }

  void run(const Clear& op) { executor_.memory_.clear(view(op.to), is_log_sum(op.to), on()); }
  /// Not gradients of sinks.
  bool is_log_sum(const Region& region) const {
    const PlanTensor& tensor = executor_.plan_.tensors[static_cast<std::size_t>(region.tensor)];
    return tensor.element == Element::statistic && tensor.columns == 1;
  }

  void run(const Sum& op) {
    const TensorView to = view(op.to);
    std::vector<AttentionState> states;
    for (const Region& from : op.from) states.push_back({view(from), {}});
    // More than a call takes are summed into the first of them.
    std::span<AttentionState> rest(states);
    while (rest.size() > MergeInputs::kMaxListed) {
      const auto some = rest.first(MergeInputs::kMaxListed);
      const TensorView into = some.front().o;
      attention().merge({.states = some, .sum = true}, {into}, on());
      rest = rest.subspan(MergeInputs::kMaxListed - 1);
      rest.front().o = into;
    }
    attention().merge({.states = rest, .sum = true}, {to}, on());
  }

  void run(const AddSink& op) {
    const AttentionState state{view(op.o), statistic(view(op.lse), false)};
    attention().merge({.states = std::span(&state, 1), .sink = context_.sink}, {state.o, state.lse}, on());
  }

  /// Puts hold no call up, but take the host longer to queue than a kernel: a call that follows is queued in front.
  void run(const Exchange& op) {
    if (!by_copy_engines_) return queue(op, gathered(op.lanes));
    const Stream beside = executor_.memory_.lane(1), ready = gathered(op.lanes);
    if (beside != ready) executor_.memory_.follow(beside, ready);
    late_ = &op;
  }
  void queue_late() {
    if (const Exchange* const op = std::exchange(late_, nullptr)) queue(*op, executor_.memory_.lane(1));
  }

  void queue(const Exchange& op, Stream ready) {
    std::vector<Communicator::Transfer> transfers;
    for (const PlanTransfer& planned : op.transfers) {
      const TensorView tensor = view(planned.region);
      transfers.push_back({planned.sends, planned.peer, tensor.data, tensor.elements(), tensor.dtype});
      if (executor_.places_) transfers.back().place = place_of_transfer(planned, tensor);
    }
    groups_.push_back(communicator_.exchange(transfers, ready));
    if (by_copy_engines_) return;
    // A forward that fills the GPU at once would let transfers wait until it ends.
    std::size_t next = index_ + 1, lane = lane_;
    const std::vector<Op>& ops = executor_.plan_.ops;
    for (; next < ops.size() && std::holds_alternative<Lane>(ops[next]); ++next) {
      lane = static_cast<std::size_t>(std::get<Lane>(ops[next]).number);
    }
    if (next < ops.size() && std::holds_alternative<Forward>(ops[next])) executor_.memory_.pause(streams_[lane]);
  }

  void* place_of_transfer(const PlanTransfer& planned, const TensorView& tensor) {
    return planned.sends ? shared_ + executor_.places_->sends[next_send_++] : tensor.data;
  }

  /// A stream that has come to what these lanes hold.
  Stream gathered(unsigned lanes) const {
    if (!is_forked_) return stream_;
    if (lanes != 3) return streams_[lanes == 2 ? 1 : 0];
    const Stream both = executor_.memory_.lane(1);
    for (const Stream lane : streams_) executor_.memory_.follow(both, lane);
    return both;
  }

  void run(const Wait& op) { communicator_.wait(groups_[static_cast<std::size_t>(op.number)], on()); }

  void run(const Fork&) {
    streams_[1] = executor_.memory_.lane(0);
    executor_.memory_.follow(streams_[1], stream_);
    is_forked_ = true;
  }
  void run(const Lane& op) { lane_ = static_cast<std::size_t>(op.number); }
  void run(const Join&) {
    executor_.memory_.follow(stream_, streams_[1]);
    is_forked_ = false;
    lane_ = 0;
  }
  /// What a call that fails has queued is over when the caller's stream is.
  void follow_quietly(Stream other) const noexcept {
    try {
      executor_.memory_.follow(stream_, other);
    } catch (const Error&) {  // the failure before it is told
    }
  }

  Stream on() const noexcept { return streams_[lane_]; }
  const Workspace& workspace() const noexcept { return workspaces_[lane_]; }

  template <class Inputs>
  void set_common(const Call& call, Inputs& inputs) const {
    const auto given = [&](const Region& region) { return call.packed ? packed(view(region)) : view(region); };
    inputs.q = given(call.q);
    inputs.k = given(call.k);
    inputs.v = given(call.v);
    inputs.max_multiprocessors = context_.max_multiprocessors;
    if (inputs.max_multiprocessors == 0 && executor_.beside_[index_].value && !by_copy_engines_) {
      inputs.max_multiprocessors = context_.most_blocks;
    }
    if (call.mask == BlockMask::placed) {
      inputs.captures = context_.captures;
      inputs.dropout = context_.dropout;
      inputs.place = place_of(executor_.problem_, call);
      // A call says where it draws, where it draws at all.
      if (executor_.config_.dropout == 0) inputs.dropout = {};
    }
    if (!call.packed) return;
    const auto* const lengths = static_cast<const std::int32_t*>(executor_.lengths_.at(executor_.lengths_of_[index_]));
    const auto count = static_cast<std::int64_t>(call.cu_q.size());
    const auto* const used_kv = lengths + 2 * count + call.used_q.size();
    inputs.sequences = {count - 1,
                        lengths,
                        lengths + count,
                        call.used_q.empty() ? nullptr : lengths + 2 * count,
                        call.used_kv.empty() ? nullptr : used_kv,
                        call.max_q,
                        call.max_kv};
  }

  void run(const Forward& op) {
    ForwardInputs inputs;
    set_common(op.call, inputs);
    const TensorView o = op.call.packed ? packed(view(op.call.o)) : view(op.call.o);
    const ForwardOutputs outputs{o, statistic(view(op.call.lse), op.call.packed)};
    bounded(inputs, [&] { attention().forward(inputs, outputs, on(), workspace()); });
  }

  /// Kernels that cannot be bounded take all multiprocessors: transfers wait for them then.
  template <class Inputs, class Queue>
  void bounded(Inputs& inputs, const Queue& queue) {
    bool& refused = executor_.unbounded_[index_].value;
    if (refused && context_.may_be_unbounded) inputs.max_multiprocessors = 0;
    try {
      return queue();
    } catch (const Error& error) {
      const bool of_bound = error.code() == ErrorCode::unsupported && error.field("argument") == "max_multiprocessors";
      if (!of_bound || inputs.max_multiprocessors == 0 || !context_.may_be_unbounded) throw;
    }
    refused = true;
    inputs.max_multiprocessors = 0;
    queue();
  }

  void run(const Backward& op) {
    BackwardInputs inputs;
    set_common(op.call, inputs);
    const auto given = [&](const Region& region) { return op.call.packed ? packed(view(region)) : view(region); };
    inputs.o = given(op.call.o);
    inputs.lse = statistic(view(op.call.lse), op.call.packed);
    inputs.dout = given(op.dout);
    if (op.dlse.heads > 0) inputs.dlse = statistic(view(op.dlse), op.call.packed);
    const BackwardOutputs outputs{given(op.dq), given(op.dk), given(op.dv)};
    bounded(inputs, [&] { attention().backward(inputs, outputs, on(), workspace()); });
  }

  void run(const SinkGradient& op) {
    BackwardInputs inputs;
    inputs.q = view(op.q);
    inputs.k = part_of(view(op.k), {0, 0, op.k.heads, 0, 0, 1});
    inputs.v = part_of(view(op.v), {0, 0, op.v.heads, 0, 0, 1});
    inputs.o = view(op.o);
    inputs.lse = statistic(view(op.lse), false);
    inputs.dout = view(op.dout);
    if (op.dlse.heads > 0) inputs.dlse = statistic(view(op.dlse), false);
    inputs.sink = context_.sink;
    BackwardOutputs outputs;
    const TensorView sums = view(op.dsink);
    outputs.dsink = TensorView(sums.data, sums.dtype, {executor_.problem_.h_q});
    attention().backward(inputs, outputs, on(), workspace());
  }

  void run(const TakeSink& op) {
    const TensorView to = view(op.to), from = view(op.from);
    TensorView source = to;
    source.data = from.data;
    source.strides = {0, 0, 1, 1};
    executor_.memory_.copy(to, source, on());
  }

  const Executor& executor_;
  Communicator& communicator_;
  const GivenTensors& given_;
  const CallContext& context_;
  std::byte* scratch_;
  std::byte* shared_;
  Stream stream_;
  const bool by_copy_engines_;  ///< transfers, which graphs have as messages
  Stream streams_[kLanes];      ///< of lanes
  Workspace workspaces_[kLanes]{};
  std::size_t lane_ = 0;
  bool is_forked_ = false;
  const Exchange* late_ = nullptr;  ///< to be queued behind the call that follows
  std::size_t next_send_ = 0;       ///< of the plan's, in order
  std::vector<std::uint64_t> groups_;
  std::size_t index_ = 0;
};

Executor::Executor(const Problem& problem, Plan plan, const AttentionConfig& config, Memory& memory,
                   std::optional<SharedPlaces> places)
    : problem_(problem),
      plan_(std::move(plan)),
      config_(config),
      memory_(memory),
      places_(std::move(places)),
      unbounded_(plan_.ops.size()) {
  offsets_.resize(plan_.tensors.size());
  for (std::size_t i = kGivenCount; i < plan_.tensors.size(); ++i) {
    if (places_ && places_->own.offsets[i] != SharedLayout::kNowhere) continue;
    const PlanTensor& tensor = plan_.tensors[i];
    offsets_[i] = scratch_size_;
    scratch_size_ += aligned(static_cast<std::size_t>(tensor.elements()) * size_of(dtype_of(tensor.element)));
  }
}

DType Executor::dtype_of(Element element) const {
  return element == Element::own || config_.dtype == DType::f64 ? config_.dtype : DType::f32;
}

AttentionShape Executor::shape_of(const Call& call, bool bounded) const {
  AttentionShape shape;
  shape.h_q = call.q.heads;
  shape.h_kv = call.k.heads;
  shape.b = call.packed ? static_cast<std::int64_t>(call.cu_q.size()) - 1 : problem_.b;
  shape.s_q = call.max_q;
  shape.s_kv = call.max_kv;
  if (call.packed) {
    shape.total_q = call.q.rows;
    shape.total_kv = call.k.rows;
  }
  shape.placed = call.mask == BlockMask::placed;
  shape.strided = shape.placed && (call.blocks.front().q_step != 1 || call.blocks.front().kv_step != 1);
  shape.bounded = bounded;
  return shape;
}

/// With the bound, and as the call runs where its kernel takes none.
std::vector<AttentionShape> Executor::shapes_of(const Call& call, const CallContext& context) const {
  std::vector<AttentionShape> shapes{shape_of(call, false)};
  if (context.max_multiprocessors > 0) shapes.push_back(shape_of(call, true));
  return shapes;
}

const Attention& Executor::prepare_sum(Attentions& attentions, const Sum& sum) const {
  const PlanTensor& to = plan_.tensors[static_cast<std::size_t>(sum.to.tensor)];
  bool has_own = false, has_wide = false;
  for (const Region& from : sum.from) {
    (plan_.tensors[static_cast<std::size_t>(from.tensor)].element == Element::own ? has_own : has_wide) = true;
  }
  if (to.element == Element::statistic) {
    const Attention& attention = attentions.of_statistic_sum();
    attention.prepare_merge({.sum = true});
    return attention;
  }
  MergeShape shape{.mixed = has_own && has_wide, .sum = true};
  if (!has_own) shape.states = dtype_of(Element::wide);
  if (to.element == Element::wide) shape.result = dtype_of(Element::wide);
  if (dtype_of(Element::wide) == config_.dtype) shape = {.sum = true};
  const Attention& attention = attentions.of_sum(to.columns);
  attention.prepare_merge(shape);
  return attention;
}

void Executor::prepare(Attentions& attentions, const CallContext& context) {
  std::vector<std::int32_t> lengths;
  lengths_of_.assign(plan_.ops.size(), 0);
  attention_of_.assign(plan_.ops.size(), nullptr);
  std::size_t workspaces[kLanes] = {}, lane = 0;
  const auto add_lengths = [&](std::size_t op, const Call& call) {
    if (!call.packed) return;
    lengths_of_[op] = lengths.size() * sizeof(std::int32_t);
    lengths.insert(lengths.end(), call.cu_q.begin(), call.cu_q.end());
    lengths.insert(lengths.end(), call.cu_kv.begin(), call.cu_kv.end());
    lengths.insert(lengths.end(), call.used_q.begin(), call.used_q.end());
    lengths.insert(lengths.end(), call.used_kv.begin(), call.used_kv.end());
  };
  for (std::size_t i = 0; i < plan_.ops.size(); ++i) {
    if (const auto* const next = std::get_if<Lane>(&plan_.ops[i])) lane = static_cast<std::size_t>(next->number);
    if (std::holds_alternative<Join>(plan_.ops[i])) lane = 0;
    if (const auto* const forward = std::get_if<Forward>(&plan_.ops[i])) {
      const Attention& attention = attentions.of_call(forward->call, forward->accumulate, false);
      for (const AttentionShape& shape : shapes_of(forward->call, context)) {
        attention.prepare(shape);
        workspaces[lane] = std::max(workspaces[lane], attention.workspace_size(shape));
      }
      attention_of_[i] = &attention;
      add_lengths(i, forward->call);
    } else if (const auto* const backward = std::get_if<Backward>(&plan_.ops[i])) {
      const Attention& attention = attentions.of_call(backward->call, false, true);
      for (const AttentionShape& shape : shapes_of(backward->call, context)) {
        attention.prepare_backward(shape);
        workspaces[lane] = std::max(workspaces[lane], attention.backward_workspace_size(shape));
      }
      attention_of_[i] = &attention;
      add_lengths(i, backward->call);
    } else if (const auto* const sum = std::get_if<Sum>(&plan_.ops[i])) {
      attention_of_[i] = &prepare_sum(attentions, *sum);
    } else if (std::holds_alternative<AddSink>(plan_.ops[i])) {
      attention_of_[i] = &attentions.of_states();
      attention_of_[i]->prepare_merge();
    } else if (const auto* const sink = std::get_if<SinkGradient>(&plan_.ops[i])) {
      const Attention& attention = attentions.of_sink();
      const AttentionShape shape{.b = problem_.b,
                                 .h_q = sink->q.heads,
                                 .h_kv = sink->k.heads,
                                 .s_q = sink->q.rows,
                                 .s_kv = 0,
                                 .gradients = {.dq = false, .dk = false, .dv = false}};
      attention.prepare_backward(shape);
      workspaces[lane] = std::max(workspaces[lane], attention.backward_workspace_size(shape));
      attention_of_[i] = &attention;
    }
  }
  int under_way = -1, waited = -1;
  for (const Op& op : plan_.ops) {
    if (const auto* const exchange = std::get_if<Exchange>(&op)) under_way = exchange->number;
    if (const auto* const wait = std::get_if<Wait>(&op)) waited = wait->number;
    beside_.push_back({under_way > waited});
  }
  if (plan_.exchanges > 0) memory_.load_pause();
  if (plan_.has_lanes() || places_) memory_.load_lanes();
  for (std::size_t i = 0; i < kLanes; ++i) {
    workspace_sizes_[i] = aligned(workspaces[i]);
    scratch_size_ += workspace_sizes_[i];
  }
  if (lengths.empty()) return;
  lengths_ = Buffer(memory_, lengths.size() * sizeof(std::int32_t));
  memory_.upload(lengths_.at(0), lengths.data(), lengths.size() * sizeof(std::int32_t));
}

void Executor::run(Communicator& communicator, const GivenTensors& given, const CallContext& context,
                   const RunMemory& memory, Stream stream) const {
  Run(*this, communicator, given, context, memory, stream).run();
}

}  // namespace fa::parallel
