#include "api/schedule.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "api/held_tiles.hpp"
#include "api/validate.hpp"
#include "api/views.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

constexpr std::uintptr_t kAlignment = 256;

/// The memory that a schedule is made in is none that it is made from.
void check_disjoint(const ScheduleCall& call, const Schedule& memory) {
  const PackedSequences& sequences = call.sequences;
  CallTensors tensors;
  tensors.add_read("cu_seqlens_q", sequences.cu_seqlens_q, DType::i32, sequences.b + 1);
  tensors.add_read("seqused_q", sequences.seqused_q, DType::i32, sequences.b);
  tensors.add_read("seqused_kv", sequences.seqused_kv, DType::i32, sequences.b);
  tensors.add_read("seq_begin", call.cache.seq_begin, DType::i32, sequences.b);
  tensors.add_memory("schedule", memory.data, memory.size);
  tensors.check_disjoint();
}

}  // namespace

ScheduleCall check_schedule(const AttentionConfig& config, const ScheduleInputs& inputs, const Schedule& memory) {
  if (config.page_size == 0) throw_invalid("page_size", 0, "another: schedules are of calls over a KV cache");
  ScheduleCall call;
  call.shape = checked(config, inputs.limits);
  call.sequences = inputs.sequences;
  call.cache.seq_begin = inputs.seq_begin;
  PackedSequences& sequences = call.sequences;
  const AttentionShape& shape = call.shape;
  if (sequences.b != 0 && sequences.b != shape.b) {
    throw_invalid("sequences.b", sequences.b, fmt::format("0, or the b = {} of the limits", shape.b));
  }
  sequences.b = shape.b;
  call.empty = shape.b == 0 || shape.h_q == 0 || shape.s_q == 0;
  check_array("seqused_kv", sequences.seqused_kv, !call.empty);
  check_array("seq_begin", inputs.seq_begin, false);
  check_array("cu_seqlens_q", sequences.cu_seqlens_q, !call.empty && config.varlen);
  check_array("seqused_q", sequences.seqused_q, false);
  if (sequences.cu_seqlens_kv != nullptr) {
    throw_invalid("cu_seqlens_kv", "given", "none of a KV cache: seqused_kv has the lengths");
  }
  check_disjoint(call, memory);
  if (config.varlen) return call;
  for (const auto& [name, array] :
       {std::pair{"cu_seqlens_q", sequences.cu_seqlens_q}, std::pair{"seqused_q", sequences.seqused_q}}) {
    if (array != nullptr) throw_invalid(name, "given", "none without AttentionConfig::varlen");
  }
  return call;
}

void check_takes_schedules(const AttentionConfig& config, const Schedule& schedule) {
  if (schedule.data == nullptr || config.page_size != 0) return;
  throw_invalid("schedule", "given", "none without AttentionConfig::page_size");
}

void check_schedule_memory(const Schedule& schedule, std::size_t needed) {
  if (reinterpret_cast<std::uintptr_t>(schedule.data) % kAlignment != 0) {
    throw_invalid("schedule", schedule.data, "a multiple of 256 bytes");
  }
  if (schedule.data != nullptr && schedule.size >= needed) return;
  if (schedule.data == nullptr) throw_invalid("schedule", "a null pointer", fmt::format("{} bytes", needed));
  throw Error(
      ErrorCode::out_of_memory,
      fmt::format("schedule = {} bytes: accepted are {} or more for these limits", schedule.size, needed),
      {{"argument", "schedule"}, {"value", std::to_string(schedule.size)}, {"accepted", std::to_string(needed)}});
}

void expect_scheduled(const Schedule& schedule, std::uint64_t tag) {
  const std::uint64_t found = held(schedule.data);
  if (found == tag) return;
  throw_invalid("schedule",
                found == 0 ? "memory that Attention::schedule was not given" : "made for calls of other limits",
                "memory in which Attention::schedule has made one for b, h_q, h_kv, s_q, s_kv, total_q, masks and "
                "alignment of the call");
}

}  // namespace fa::api
