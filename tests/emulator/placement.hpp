#ifndef FA_TESTS_EMULATOR_PLACEMENT_HPP_
#define FA_TESTS_EMULATOR_PLACEMENT_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

#include <common/types.cuh>

#include "emulator/memory.hpp"
#include "plan/tensor_map.hpp"
#include "support/attention_case.hpp"

namespace emulator {

/// How tensors lie in memory.
enum class Placement : std::uint8_t {
  bhsd,
  bshd,
  padded,     ///< unreadable bytes between rows, and rows in reverse order of heads: a negative stride
  broadcast,  ///< K and V of all heads and batches are one: stride 0
  gaps,       ///< unreadable bytes between rows, and no stride that a tensor map refuses
};

/// A [b, h, s, d] tensor in the emulator's memory, its strides in elements; `row_bytes` of every row belong to it.
struct Placed {
  std::byte* region = nullptr;
  std::byte* data = nullptr;  // element (0, 0, 0, 0)
  std::int64_t b = 0, h = 0, s = 0;
  std::int64_t stride_b = 0, stride_h = 0, stride_s = 0;
  std::size_t element = 0;
  std::size_t row_bytes = 0;

  std::byte* row(std::int64_t ib, std::int64_t ih, std::int64_t is) const {
    return data + (ib * stride_b + ih * stride_h + is * stride_s) * static_cast<std::int64_t>(element);
  }
};

template <class Visit>
void for_each_row(std::int64_t b, std::int64_t h, std::int64_t s, const Visit& visit) {
  for (std::int64_t ib = 0; ib < b; ++ib) {
    for (std::int64_t ih = 0; ih < h; ++ih) {
      for (std::int64_t is = 0; is < s; ++is) visit(ib, ih, is);
    }
  }
}

/// A tensor that is read and written.
Placed place_state(Memory& memory, const char* name, const fa::test::HostTensor& tensor, Placement placement,
                   bool aligned);

/// Memory for a tensor like `tensor`, of which the elements alone can be read (or, of an output, written).
Placed place_input(Memory& memory, const char* name, const fa::test::HostTensor& tensor, Placement placement,
                   bool aligned);
Placed place_output(Memory& memory, const char* name, const fa::test::HostTensor& tensor, Placement placement,
                    bool aligned);

/// `tensor` where it was placed.
fa::TensorView view_of(const Placed& t, const fa::test::HostTensor& tensor);

/// Numbers that are read; null without any.
const std::int32_t* place_array(Memory& memory, const char* name, const std::vector<std::int32_t>& values);

/// Copies an output to `tensor`. Throws Fault(global_uninitialised) for an element that was never written.
void fetch(const Memory& memory, const Placed& t, fa::test::HostTensor& tensor);

/// Equal values in all heads and batches, as a broadcast tensor has them.
void make_broadcast(fa::test::HostTensor& tensor);

/// The map that a kernel is given for a tensor.
void encode(fa::kernel::TensorMap& map, const fa::plan::TensorMapSpec& spec);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_PLACEMENT_HPP_
