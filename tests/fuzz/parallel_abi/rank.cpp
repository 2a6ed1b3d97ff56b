#include "fuzz/parallel_abi/rank.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <type_traits>
#include <utility>

#include "fuzz/calls.hpp"

namespace fa::fuzz {
namespace {

constexpr std::byte kUntouched{0xa5};
constexpr std::size_t kMostBytes = std::size_t{1} << 23;

std::vector<std::int64_t> lengths_of(const Setup& setup, const Data& data) {
  if (setup.packed()) return setup.lengths;
  return {data.of_q ? setup.s_q : setup.s_kv};
}

}  // namespace

Outcome observed(int status) {
  Outcome outcome{status, {}, {}};
  if (status == FA_OK) return outcome;
  outcome.error = fa_last_error_message();
  if (status < FA_OK || status > FA_NOT_FINITE) {
    outcome.message = "status " + std::to_string(status);
  } else if (status == FA_INTERNAL) {
    outcome.message = "a broken invariant of the library";
  } else if (fa_last_error_code() != status) {
    outcome.message = "another code as the last error";
  } else if (outcome.error.empty()) {
    outcome.message = "no message";
  }
  for (const char* const field : {"argument", "accepted"}) {
    if (status == FA_INVALID_ARGUMENT && std::strlen(fa_last_error_field(field)) == 0) {
      outcome.message = std::string("no field ") + field;
    }
  }
  return outcome;
}

void on_ranks(int ranks, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::exception_ptr problem;
  const std::uint64_t index = current_case();
  const auto work = [&](int rank) {
    set_current_case(index);
    try {
      body(rank);
    } catch (...) {
      const std::scoped_lock lock(mutex);
      problem = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < ranks; ++rank) threads.emplace_back(work, rank);
  work(0);
  for (std::thread& thread : threads) thread.join();
  if (problem) std::rethrow_exception(problem);
}

const fa_parallel_config* RankCall::config(const Setup& setup) {
  fa_config attention = setup.attention;
  for (std::int32_t* const field :
       {&attention.head_dim, &attention.head_dim_v, &attention.dtype, &attention.causal, &attention.causal_align,
        &attention.varlen, &attention.zero_padding, &attention.accumulate, &attention.invariance,
        &attention.has_k_dtype, &attention.value_in_key, &attention.has_o_dtype, &attention.key_scales}) {
    change(field);
  }
  for (std::int64_t* const field :
       {&attention.window_left, &attention.window_right, &attention.chunk, &attention.page_size}) {
    change(field);
  }
  if (wild()) attention.dropout = random_.one_in(2) ? -1 : 2e30F;
  const auto function = [&](const fa_function& given) -> const fa_function* {
    if (given.expression == nullptr) return nullptr;
    fa_function value = given;
    value.expression = text(wild() ? "q +" : given.expression);
    return pass(value);
  };
  attention.score = function(setup.score);
  attention.mask = function(setup.mask);
  fa_parallel_config value = setup.config;
  value.attention = pass(attention);
  for (std::int32_t* const field : {&value.layout, &value.scheme, &value.ulysses, &value.head_groups, &value.gradients,
                                    &value.has_reserved_multiprocessors, &value.reserved_multiprocessors}) {
    change(field);
  }
  return pass(value);
}

const fa_parallel_shape* RankCall::shape(const Setup& setup) {
  fa_parallel_shape value = setup.shape();
  for (std::int64_t* const field : {&value.b, &value.h_q, &value.h_kv, &value.s_q, &value.s_kv}) change(field);
  return pass(value);
}

const std::int64_t* RankCall::lengths(const Setup& setup, std::uint64_t* count) {
  *count = setup.packed() ? setup.lengths.size() : 0;
  std::vector<std::int64_t> values = setup.lengths;
  if (wild()) values.push_back(random_.wild());
  for (std::int64_t& value : values) change(&value);
  if (setup.packed() || wild()) *count = values.size();
  if (!setup.packed() && *count == 0) return nullptr;
  return wild() ? nullptr : array(values);
}

/// The head dim's axis last, the others in some order, with gaps.
void RankCall::lay_out(fa_tensor* tensor) {
  if (own.one_in(3)) {
    tensor->flags |= FA_TENSOR_ROW_MAJOR;
    for (std::int64_t& stride : tensor->strides) stride = own.wild();  // which nobody reads
    return;
  }
  std::array<int, 4> order{0, 1, 2, 3};
  for (int i = tensor->rank - 2; i > 0; --i) {
    std::swap(order[static_cast<std::size_t>(i)], order[own.index(static_cast<std::size_t>(i) + 1)]);
  }
  const bool dense = own.one_in(2);
  std::int64_t stride = 1;
  for (int i = tensor->rank - 1; i >= 0; --i) {
    const int axis = order[static_cast<std::size_t>(i)];
    tensor->strides[axis] = stride;
    stride *= std::max<std::int64_t>(tensor->shape[axis], 1);
    if (!dense && own.one_in(2)) stride += own.between(1, 9);
  }
}

const fa_tensor* RankCall::tensor(const Data& data, const std::vector<std::int64_t>& rows, int name, bool output,
                                  Whole* whole) {
  if (wild() && random_.one_in(4)) return nullptr;
  fa_tensor value{};
  value.dtype = data.dtype;
  value.rank = static_cast<std::int32_t>(data.shape.size());
  std::ranges::copy(data.shape, value.shape);
  if (data.row_axis >= 0) value.shape[data.row_axis] = static_cast<std::int64_t>(rows.size());
  lay_out(&value);
  const bool was_spoilt = std::exchange(spoilt_, false);
  if (!output && own.one_in(2)) value.flags |= FA_TENSOR_READ_ONLY;
  if (wild()) value.flags ^= random_.one_in(2) ? 1U : static_cast<std::uint32_t>(random_.next());
  change(&value.dtype);
  change(&value.rank);
  const std::size_t axis = random_.index(4);
  change(&value.shape[axis]);
  if (wild()) value.strides[axis] = random_.one_in(2) ? 0 : random_.wild();
  const std::uint32_t size = struct_size(sizeof value);
  spoilt_ = spoilt_ || size != sizeof value;
  Part part;
  part.tensor = cut(value, size);
  part.name = name;
  part.output = output;
  const Reach reach = reach_of(part.tensor);
  const double bytes = reach.high - reach.low;
  if (bytes > static_cast<double>(kMostBytes)) {
    must_fail_ = spoilt_ = true;
    value.data = reinterpret_cast<void*>(std::uintptr_t{1} << 44);
  } else {
    // Without a guard a sanitizer sees the first byte beyond; with one, other builds see bytes that were written.
    const std::size_t guard = own.one_in(2) ? 64 : 0;
    part.size = static_cast<std::size_t>(bytes) + 2 * guard;
    part.block = memory_.block(part.size);
    std::fill_n(part.block, part.size, kUntouched);
    value.data = part.block + guard - static_cast<std::ptrdiff_t>(reach.low);
    part.tensor.data = value.data;
    if (!output && !spoilt_) move_rows((*whole)[name], part.tensor, rows, true);
    part.before.assign(part.block, part.block + part.size);
    if (wild()) value.data = random_.one_in(2) ? nullptr : static_cast<std::byte*>(value.data) + 1;
    if (wild() && !parts_.empty()) value.data = parts_[random_.index(parts_.size())].tensor.data;  // larger, perhaps
    if (value.data != part.tensor.data && value.data != nullptr && spoilt_) {
      // Of another tensor there may be less memory.
      const bool off = value.data == static_cast<std::byte*>(part.tensor.data) + 1;
      must_fail_ = must_fail_ || (!off && !parts_.empty());
      must_fail_ = must_fail_ || (off && bytes > 0);
    }
    parts_.push_back(std::move(part));
  }
  spoilt_ = spoilt_ || was_spoilt;
  return write(value, size);
}

const fa_tensor* RankCall::part_tensor(const Setup& setup, Whole& whole, int name, bool output) {
  const Data& data = whole[name];
  const std::vector<std::int64_t> rows = rows_of_rank(setup.config.layout, setup.ranks, rank_, lengths_of(setup, data));
  return tensor(data, rows, name, output, &whole);
}

const fa_tensor* RankCall::whole_tensor(Whole& whole, int name, bool output) {
  const Data& data = whole[name];
  std::vector<std::int64_t> rows(
      data.row_axis < 0 ? 0 : static_cast<std::size_t>(data.shape[static_cast<std::size_t>(data.row_axis)]));
  std::iota(rows.begin(), rows.end(), 0);
  return tensor(data, rows, name, output, &whole);
}

const fa_dropout_state* RankCall::dropout(const Setup& setup) {
  if (setup.attention.dropout == 0) return nullptr;
  return pass(setup.dropout);
}

/// What calls of shards have no use for, and a certain refusal of what has no memory.
template <class Inputs>
void RankCall::add_strangers(const Setup& setup, Inputs* inputs) {
  const bool without_memory = must_fail_;
  inputs->dropout = dropout(setup);
  if (random_.one_in(8)) inputs->max_multiprocessors = static_cast<std::int32_t>(random_.between(0, 200));
  change(&inputs->max_multiprocessors);
  if (wild()) inputs->capture_count = random_.one_in(2) ? 9 : random_.next();
  if (inputs->capture_count <= 8) inputs->capture_count = 0;
  fa_mask_tiles tiles{};
  tiles.data = memory_.block(256);
  tiles.size = 256;
  if (wild() && random_.one_in(4)) inputs->tiles = write(tiles, sizeof tiles);
  if constexpr (std::is_same_v<Inputs, fa_forward_inputs>) {
    fa_tensor scale{};
    scale.dtype = FA_F32;
    scale.rank = 1;
    scale.shape[0] = scale.strides[0] = 1;
    scale.data = memory_.block(4);
    if (wild() && random_.one_in(4)) inputs->k_scale = write(scale, sizeof scale);
    fa_paged_cache cache{};
    cache.block_table = write(scale, sizeof scale);
    if (wild() && random_.one_in(4)) inputs->cache = write(cache, sizeof cache);
    if (wild() && random_.one_in(4)) inputs->prefix_count = 1;
    must_fail_ = must_fail_ || inputs->k_scale != nullptr || inputs->cache != nullptr || inputs->prefix_count != 0;
  }
  must_fail_ = must_fail_ || inputs->tiles != nullptr;
  if (without_memory) {
    fa_shard_place place{};
    inputs->place = write(place, sizeof place);
  }
}

const fa_forward_inputs* RankCall::forward_inputs(const Setup& setup, Whole& whole) {
  fa_forward_inputs inputs{};
  inputs.q = part_tensor(setup, whole, kQ, false);
  inputs.k = part_tensor(setup, whole, kK, false);
  inputs.v = part_tensor(setup, whole, kV, false);
  if ((setup.attention.sink != 0) != wild()) inputs.sink = part_tensor(setup, whole, kSink, false);
  add_strangers(setup, &inputs);
  return pass(inputs);
}

const fa_forward_outputs* RankCall::forward_outputs(const Setup& setup, Whole& whole) {
  fa_forward_outputs outputs{};
  outputs.o = part_tensor(setup, whole, kO, true);
  if (!random_.one_in(4)) outputs.lse = part_tensor(setup, whole, kLse, true);
  return pass(outputs);
}

const fa_backward_inputs* RankCall::backward_inputs(const Setup& setup, Whole& whole) {
  fa_backward_inputs inputs{};
  inputs.q = part_tensor(setup, whole, kQ, false);
  inputs.k = part_tensor(setup, whole, kK, false);
  inputs.v = part_tensor(setup, whole, kV, false);
  inputs.o = part_tensor(setup, whole, kO, false);
  inputs.lse = part_tensor(setup, whole, kLse, false);
  inputs.dout = part_tensor(setup, whole, kDout, false);
  if (setup.has_dlse) inputs.dlse = part_tensor(setup, whole, kDlse, false);
  if ((setup.attention.sink != 0) != wild()) inputs.sink = part_tensor(setup, whole, kSink, false);
  add_strangers(setup, &inputs);
  return pass(inputs);
}

const fa_backward_outputs* RankCall::backward_outputs(const Setup& setup, Whole& whole) {
  fa_backward_outputs outputs{};
  outputs.dq = part_tensor(setup, whole, kDq, true);
  outputs.dk = part_tensor(setup, whole, kDk, true);
  outputs.dv = part_tensor(setup, whole, kDv, true);
  if (setup.has_dsink) outputs.dsink = part_tensor(setup, whole, kDsink, true);
  return pass(outputs);
}

const fa_shard_copy* RankCall::shard_copy(const Setup& setup) {
  fa_shard_copy value{};
  value.layout = setup.config.layout;
  value.ranks = setup.ranks;
  value.rank = rank_;
  value.lengths = lengths(setup, &value.length_count);
  value.device = {FA_DEVICE_HOST, random_.wild32()};
  for (std::int32_t* const field : {&value.layout, &value.ranks, &value.rank, &value.statistics}) change(field);
  if (wild()) value.device.kind = random_.wild32();
  if (must_fail_) value.ranks = 0;
  return pass(value);
}

const fa_nccl_options* RankCall::nccl_options() {
  fa_nccl_options value{};
  value.without_watch = random_.one_in(2);
  value.transfers = static_cast<std::int32_t>(random_.between(-1, 4));
  change(&value.timeout_ms);
  return pass(value);
}

std::string RankCall::damage(int status) const {
  const bool refused = status == FA_INVALID_ARGUMENT || status == FA_UNSUPPORTED;
  for (const Part& part : parts_) {
    std::vector<std::byte> now(part.block, part.block + part.size);
    if (part.output && !refused && !spoilt_) {  // elements are the call's to write, and nothing else
      const std::ptrdiff_t first = static_cast<std::byte*>(part.tensor.data) - part.block;
      const std::size_t size = size_of(part.tensor.dtype);
      for (const std::int64_t offset : offsets_of(part.tensor)) {
        std::fill_n(now.data() + first + offset, size, kUntouched);
      }
    }
    if (part.output && !refused && spoilt_) continue;
    if (now != part.before) {
      return std::string(part.output ? "an output" : "an input") + " has other bytes than " +
             (refused || !part.output ? "before" : "its elements'");
    }
  }
  return {};
}

void RankCall::take(const Setup& setup, Whole* results) const {
  for (const Part& part : parts_) {
    if (!part.output) continue;
    Data& data = (*results)[part.name];
    move_rows(data, part.tensor, rows_of_rank(setup.config.layout, setup.ranks, rank_, lengths_of(setup, data)), false);
  }
}

bool RankCall::is_copied(const Setup& setup, Whole& whole, int name, bool to_part) const {
  const std::vector<std::int64_t> rows =
      rows_of_rank(setup.config.layout, setup.ranks, rank_, lengths_of(setup, whole[name]));
  Data wanted = whole[name], got = wanted, dense = wanted;
  std::ranges::fill(wanted.bytes, kUntouched);
  std::ranges::fill(got.bytes, kUntouched);
  dense.shape[static_cast<std::size_t>(dense.row_axis)] = static_cast<std::int64_t>(rows.size());
  move_rows(whole[name], dense.tensor(), rows, true);
  move_rows(wanted, dense.tensor(), rows, false);
  std::vector<std::int64_t> read = rows;
  if (!to_part) {
    read.resize(static_cast<std::size_t>(got.shape[static_cast<std::size_t>(got.row_axis)]));
    std::iota(read.begin(), read.end(), 0);
  }
  for (const Part& part : parts_) {
    if (part.output) move_rows(got, part.tensor, read, false);
  }
  return got.bytes == wanted.bytes;
}

}  // namespace fa::fuzz
