#include "emulator/tensor_map.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

namespace emulator {
namespace {

constexpr std::uint64_t kMagic = 0x70616d726f736e65;
constexpr std::uint64_t kMaxDim = std::uint64_t{1} << 32;
constexpr std::uint64_t kMaxStride = std::uint64_t{1} << 40;
constexpr std::uint32_t kMaxBox = 256;
constexpr std::size_t kMaxRank = 5;

struct Encoded {
  std::uint64_t magic;
  std::uint64_t base;
  std::uint64_t strides[4];
  std::uint32_t dims[5];  // less one
  std::uint16_t box[5];
  std::uint8_t rank;
  std::uint8_t element_bytes;
  std::uint8_t swizzle;
  std::uint8_t unused[7];
};
static_assert(sizeof(Encoded) <= 128);

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("tensor map: " + what);
}

void validate(const TensorShape& shape) {
  const std::size_t rank = shape.dims.size();
  require(rank >= 1 && rank <= kMaxRank, fmt::format("{} axes, not 1 to 5", rank));
  require(shape.box.size() == rank && shape.strides.size() + 1 == rank, "dims, strides and box of different ranks");
  require(reinterpret_cast<std::uintptr_t>(shape.base) % 16 == 0, "the base is not 16-byte aligned");
  for (const std::uint64_t dim : shape.dims) require(dim >= 1 && dim <= kMaxDim, fmt::format("a dim of {}", dim));
  for (const std::uint64_t stride : shape.strides) {
    require(stride % 16 == 0 && stride < kMaxStride,
            fmt::format("a stride of {} bytes, not a multiple of 16 below 2^40", stride));
  }
  for (const std::uint32_t box : shape.box) require(box >= 1 && box <= kMaxBox, fmt::format("a box of {}", box));
  const std::uint32_t row = shape.box[0] * static_cast<std::uint32_t>(shape.element_bytes);
  require(row % 16 == 0, fmt::format("box rows of {} bytes, not a multiple of 16", row));
  const auto span = static_cast<std::uint32_t>(swizzle_span(shape.swizzle));
  require(span == 0 || row <= span, fmt::format("box rows of {} bytes under a swizzle of {}", row, span));
}

}  // namespace

int swizzle_span(Swizzle swizzle) {
  return swizzle == Swizzle::none ? 0 : 16 << static_cast<int>(swizzle);
}

std::uint32_t swizzled(std::uint32_t address, Swizzle swizzle) {
  const auto chunks = static_cast<std::uint32_t>(swizzle_span(swizzle)) / 16;
  return chunks == 0 ? address : address ^ (address >> 3 & (chunks - 1) << 4);
}

void encode_tensor_map(unsigned char (&map)[128], const TensorShape& shape) {
  validate(shape);
  Encoded encoded{};
  encoded.magic = kMagic;
  encoded.base = reinterpret_cast<std::uintptr_t>(shape.base);
  std::copy(shape.strides.begin(), shape.strides.end(), encoded.strides);
  for (std::size_t i = 0; i < shape.dims.size(); ++i) {
    encoded.dims[i] = static_cast<std::uint32_t>(shape.dims[i] - 1);
    encoded.box[i] = static_cast<std::uint16_t>(shape.box[i]);
  }
  encoded.rank = static_cast<std::uint8_t>(shape.dims.size());
  encoded.element_bytes = static_cast<std::uint8_t>(shape.element_bytes);
  encoded.swizzle = static_cast<std::uint8_t>(shape.swizzle);
  std::memset(map, 0, sizeof map);
  std::memcpy(map, &encoded, sizeof encoded);
}

bool decode_tensor_map(const unsigned char* map, TensorShape& shape) {
  Encoded encoded;
  std::memcpy(&encoded, map, sizeof encoded);
  if (encoded.magic != kMagic) return false;
  shape.base = reinterpret_cast<const void*>(encoded.base);
  shape.element_bytes = encoded.element_bytes;
  shape.swizzle = static_cast<Swizzle>(encoded.swizzle);
  shape.dims.assign(encoded.dims, encoded.dims + encoded.rank);
  for (std::uint64_t& dim : shape.dims) ++dim;
  shape.box.assign(encoded.box, encoded.box + encoded.rank);
  shape.strides.assign(encoded.strides, encoded.strides + encoded.rank - 1);
  return true;
}

TensorBox::TensorBox(TensorShape shape, std::array<int, 5> at) : shape_(std::move(shape)) {
  const auto element = static_cast<std::uint32_t>(shape_.element_bytes);
  row_bytes_ = shape_.box[0] * element;
  const std::uint64_t count =
      std::accumulate(shape_.box.begin() + 1, shape_.box.end(), std::uint64_t{1}, std::multiplies<>());
  const std::int64_t inner = static_cast<std::int64_t>(shape_.dims[0]);
  const std::int64_t first = std::clamp<std::int64_t>(at[0], 0, inner);
  const std::int64_t last = std::clamp<std::int64_t>(std::int64_t{at[0]} + shape_.box[0], 0, inner);
  for (std::uint64_t i = 0; i < count; ++i) {
    Row row;
    std::uint64_t source = reinterpret_cast<std::uintptr_t>(shape_.base) + static_cast<std::uint64_t>(first) * element;
    bool inside = last > first;
    std::uint64_t rest = i;
    for (std::size_t axis = 1; axis < shape_.dims.size(); ++axis) {
      const std::int64_t c = at[axis] + static_cast<std::int64_t>(rest % shape_.box[axis]);
      rest /= shape_.box[axis];
      inside = inside && c >= 0 && c < static_cast<std::int64_t>(shape_.dims[axis]);
      if (inside) source += static_cast<std::uint64_t>(c) * shape_.strides[axis - 1];  // addresses have 64 bits
    }
    if (inside) {
      row = {reinterpret_cast<const std::byte*>(source), static_cast<std::uint32_t>(first - at[0]) * element,
             static_cast<std::uint32_t>(last - first) * element};
    }
    rows_.push_back(row);
  }
}

}  // namespace emulator
