#ifndef FA_SRC_API_VIEWS_HPP_
#define FA_SRC_API_VIEWS_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <fa/functions.hpp>
#include <fa/tensor.hpp>

namespace fa::api {

/// What messages call a tensor: q, captures[bias], gradient of captures[bias].
struct Label {
  enum class Of : std::uint8_t { argument, capture, gradient };

  Label() = default;
  Label(const char* argument) : name(argument) {}  // NOLINT(google-explicit-constructor): a name is a label
  Label(std::string_view wanted, Of kind) : name(wanted), of(kind) {}

  /// For messages alone: calls that are served build no text.
  std::string text() const;

  std::string_view name;
  Of of = Of::argument;
};

/// "[2, 3]"; of a rank that no view has, the axes that there are.
std::string shape_text(const TensorView& view);

/// What every tensor of a call has to be before anything is computed from its shape, strides or memory: of rank 1 to 4
/// and a known dtype, with sizes from 0, offsets below 2^60 bytes, and memory for its elements at a multiple of their
/// size. Throws fa::Error(invalid_argument).
void check_memory(const Label& label, const TensorView& view);

/// Throws fa::Error(invalid_argument) for a view, which has passed check_memory, that cannot be an output.
void check_writable(const Label& label, const TensorView& view);

/// How far a view's elements lie from its first one.
struct Reach {
  std::int64_t low = 0;   ///< bytes, at most 0, to the lowest byte
  std::int64_t high = 0;  ///< bytes, at least 0, to the highest
  bool empty = false;     ///< no element
  int too_far = -1;       ///< the axis that leads beyond kMaxReach; what is computed from others then means nothing

  bool known() const noexcept { return too_far < 0; }
};
inline constexpr std::int64_t kMaxReach = std::int64_t{1} << 60;  ///< bytes from a tensor's first element to any other
Reach reach_of(const TensorView& view) noexcept;

/// Whether the bytes from a view's lowest to its highest meet those of another. What may share memory does.
inline bool spans_meet(const void* a, std::int64_t low_a, std::int64_t high_a, const void* b, std::int64_t low_b,
                       std::int64_t high_b) noexcept {
  // Addresses are unsigned and may differ by more than any reach: only those that do not are counted from each other.
  const auto distance =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(b) - reinterpret_cast<std::uintptr_t>(a));
  const bool close = distance <= 2 * kMaxReach && distance >= -2 * kMaxReach;
  return close && high_a >= distance + low_b && distance + high_b >= low_a;
}

/// Whether two of `view`'s elements share a byte, by a test that may call exotic stride patterns overlapping but never
/// the reverse. So it calls views that check_memory refuses.
bool overlaps_itself(const TensorView& view) noexcept;

/// Whether an element of `a` shares a byte with one of `b`: exact for views that are slices of one packed buffer.
/// Views that check_memory refuses are said to overlap.
bool overlap(const TensorView& a, const TensorView& b) noexcept;

/// Of a backward with everything: 12 inputs, what is captured, 4 arrays of lengths, the state of dropout and a place.
/// A forward has 8 inputs, and 3 arrays of a cache. Memory that calls are given besides is beside these.
inline constexpr std::size_t kMostTensors = Captures::kMax + 18;

inline constexpr std::size_t kMostArrays = 8;

/// Of a workspace, lists of tiles and a schedule.
inline constexpr std::size_t kMostMemory = 3;

/// The tensors of one call, each of which has passed check_memory and outlives this. Those that are not given are left
/// out.
class CallTensors {
 public:
  CallTensors() = default;
  CallTensors(const CallTensors&) = delete;
  CallTensors& operator=(const CallTensors&) = delete;

  void add_read(const Label& label, const TensorView& view) { read_.add(label, view); }
  /// Of `count` numbers, if there is an array.
  void add_read(const Label& label, const void* array, DType dtype, std::int64_t count);
  void add_written(const Label& label, const TensorView& view) { written_.add(label, view); }
  /// What is no tensor, and the library's while the call runs.
  void add_memory(const Label& label, const void* data, std::size_t bytes);

  /// Throws fa::Error(invalid_argument) when one that is written shares memory with any other, or memory with anything.
  void check_disjoint() const;

  struct Item {
    Label label;
    const TensorView* view = nullptr;
    Reach reach;
  };
  std::span<const Item> read() const noexcept { return {read_.items.data(), read_.count}; }
  std::span<const Item> written() const noexcept { return {written_.items.data(), written_.count}; }

 private:
  struct List {
    void add(const Label& label, const TensorView& view);

    std::array<Item, kMostTensors> items;
    std::size_t count = 0;
  };

  List read_;
  List written_;
  std::array<TensorView, kMostArrays> arrays_;
  std::size_t array_count_ = 0;
  std::array<Item, kMostMemory> memory_;
  std::array<TensorView, kMostMemory> memory_views_;
  std::size_t memory_count_ = 0;
};

}  // namespace fa::api

#endif  // FA_SRC_API_VIEWS_HPP_
