#ifndef FA_SRC_API_VIEWS_HPP_
#define FA_SRC_API_VIEWS_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
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

/// Whether two of `view`'s elements share a byte, by a test that may call exotic stride patterns overlapping but never
/// the reverse. So it calls views that check_memory refuses.
bool overlaps_itself(const TensorView& view) noexcept;

/// Whether an element of `a` shares a byte with one of `b`: exact for views that are slices of one packed buffer.
/// Views that check_memory refuses are said to overlap.
bool overlap(const TensorView& a, const TensorView& b) noexcept;

/// The tensors of one call, each of which has passed check_memory and outlives this. Those that are not given are left
/// out.
class CallTensors {
 public:
  void add_read(const Label& label, const TensorView& view) { read_.add(label, view); }
  void add_written(const Label& label, const TensorView& view) { written_.add(label, view); }

  /// Throws fa::Error(invalid_argument) when one that is written shares memory with any other.
  void check_disjoint() const;

 private:
  struct Item {
    Label label;
    const TensorView* view = nullptr;
  };
  struct List {
    void add(const Label& label, const TensorView& view);

    /// Of a call with everything: 9 inputs, what is captured, 4 arrays of lengths, the state of dropout and a
    /// place.
    std::array<Item, Captures::kMax + 15> items{};
    std::size_t count = 0;
  };

  List read_;
  List written_;
};

}  // namespace fa::api

#endif  // FA_SRC_API_VIEWS_HPP_
