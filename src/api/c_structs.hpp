#ifndef FA_SRC_API_C_STRUCTS_HPP_
#define FA_SRC_API_C_STRUCTS_HPP_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <fa/fa.h>

#include <fa/attention.hpp>

/// Structs of the C ABI and what they stand for. What is wrong with one throws an Error that names the field.
namespace fa::api::c {

/// Sizes beyond this are uninitialised memory, not a newer version of a struct.
constexpr std::uint32_t kLargestStruct = 4096;

[[noreturn]] void refuse(const std::string& argument, const std::string& value, const std::string& accepted);

template <typename Pointer>
void require(const Pointer* pointer, const std::string& argument) {
  if (pointer == nullptr) {
    refuse(argument, "NULL", "a pointer");
  }
}

bool all_zero(const char* bytes, std::size_t count) noexcept;

/// What the size of a version of a struct is a multiple of.
template <typename Struct>
constexpr std::size_t granule(std::uint32_t /*size*/) {
  return alignof(Struct);
}

/// It had no pointers at first.
template <>
constexpr std::size_t granule<fa_kernel_override>(std::uint32_t size) {
  return size <= offsetof(fa_kernel_override, kernel) ? alignof(std::uint32_t) : alignof(fa_kernel_override);
}

/// Every version of a struct is a whole number of its alignments long: any other size may cut a pointer in two.
template <typename Struct>
void check_struct_size(const Struct& given, const std::string& argument) {
  constexpr std::uint32_t kSmallest = 2 * sizeof(std::uint32_t);
  const std::uint32_t size = given.struct_size;
  if (size < kSmallest || size > kLargestStruct || size % granule<Struct>(size) != 0) {
    refuse(argument + ".struct_size", std::to_string(size), "the sizeof of the struct");
  }
}

/// A copy of a caller's struct in this library's version of it.
template <typename Struct>
Struct read_struct(const Struct* source, const std::string& argument) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  require(source, argument);
  const std::uint32_t size = source->struct_size;
  check_struct_size(*source, argument);
  Struct copy{};
  std::memcpy(&copy, source, std::min<std::size_t>(size, sizeof(Struct)));
  if (size > sizeof(Struct) &&
      !all_zero(reinterpret_cast<const char*>(source) + sizeof(Struct), size - sizeof(Struct))) {
    throw Error(ErrorCode::unsupported,
                argument + " sets a field that this version of fa (" + version() + ") does not know",
                {{"argument", argument}, {"value", std::to_string(size)}});
  }
  return copy;
}

/// The enumerator numbered `value`; `last` is the greatest that exists.
template <typename Enum>
Enum to_enum(std::int32_t value, Enum last, const std::string& argument) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    refuse(argument, std::to_string(value), "0 to " + std::to_string(static_cast<std::int32_t>(last)));
  }
  return static_cast<Enum>(value);
}

/// Fills the caller's struct up to the size it was compiled with.
template <typename Struct>
void write_struct(Struct* target, Struct values) {
  const std::uint32_t size = target->struct_size;
  values.struct_size = size;
  std::memcpy(target, &values, std::min<std::size_t>(size, sizeof values));
}

/// A NULL tensor is one that was not given.
TensorView to_view(const fa_tensor* source, const std::string& argument);
Device to_device(fa_device device);
AttentionConfig to_config(const fa_config* source);
ForwardInputs to_inputs(const fa_forward_inputs* source);
ForwardOutputs to_outputs(const fa_forward_outputs* source);
BackwardInputs to_inputs(const fa_backward_inputs* source);
BackwardOutputs to_outputs(const fa_backward_outputs* source);
AppendInputs to_inputs(const fa_append_inputs* source);
AppendShape to_shape(const fa_append_shape* source);
ScheduleInputs to_inputs(const fa_schedule_inputs* source);
Schedule to_schedule(const fa_schedule_memory* source);  ///< an empty one for NULL

/// With the states that its inputs name.
struct GivenMerge {
  std::array<AttentionState, MergeInputs::kMaxListed> states;
  MergeInputs inputs;
};
void read_merge(const fa_merge_inputs* source, GivenMerge* merge);

/// The levels that its inputs name.
struct GivenPrefixes {
  std::array<SharedPrefix, SharedPrefix::kMaxLevels> levels;
  std::size_t count = 0;

  std::span<const SharedPrefix> given() const { return std::span(levels).first(count); }
};
void read_prefixes(const fa_forward_inputs* source, GivenPrefixes* prefixes);
std::vector<SharedPrefixShape> to_shapes(const fa_shared_prefix_shape* source, std::uint64_t count);

QuantizeInputs to_inputs(const fa_quantize_inputs* source);
MergeShape to_shape(const fa_merge_shape* source);
AttentionShape to_shape(const fa_shape* source);
DropoutState to_dropout(const fa_dropout_state* source);
Workspace to_workspace(const fa_workspace* source);  ///< an empty one for NULL

fa_kernel_info to_c(const KernelInfo& info);
fa_cache_counters to_c(const CacheCounters& counters);

}  // namespace fa::api::c

#endif  // FA_SRC_API_C_STRUCTS_HPP_
