#include "fuzz/c_abi/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace fa::fuzz {
namespace {

constexpr std::size_t kLargestBlock = std::size_t{1} << 20;
constexpr std::size_t kFarBytes = std::size_t{1} << 36;
constexpr std::byte kUntouched{0xa5};

/// Address space that costs memory only where it is touched; null where there is none.
std::byte* far_space() {
  static std::byte* const space = [] {
    void* const memory =
        mmap(nullptr, kFarBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
  }();
  return space;
}

}  // namespace

std::size_t size_of(std::int32_t dtype) {
  return dtype == FA_E4M3 || dtype == FA_E5M2 || dtype == FA_I8 || dtype == FA_U4X2 ? 1
         : dtype == FA_F16 || dtype == FA_BF16                                      ? 2
         : dtype == FA_F32 || dtype == FA_I32                                       ? 4
                                                                                    : 8;
}

Reach reach_of(const fa_tensor& tensor) {
  const auto element = static_cast<double>(size_of(tensor.dtype));
  const int rank = std::clamp(tensor.rank, 0, 4);
  Reach reach{0, element};
  double row_major = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    const std::int64_t length = tensor.shape[axis];
    if (length <= 0) return {};
    const bool dense = (tensor.flags & FA_TENSOR_ROW_MAJOR) != 0;
    const double stride = dense ? row_major : static_cast<double>(tensor.strides[axis]);
    const double way = stride * static_cast<double>(length - 1) * element;
    (way < 0 ? reach.low : reach.high) += way;
    row_major *= static_cast<double>(length);
  }
  return rank == 0 ? Reach{} : reach;
}

void Memory::clear() {
  blocks_.clear();
  tensors_.clear();
  if (far_) madvise(far_space(), kFarBytes, MADV_DONTNEED);
  far_ = false;
}

std::byte* Memory::block(std::size_t bytes) {
  blocks_.push_back({std::make_unique<std::byte[]>(bytes), bytes});
  return blocks_.back().bytes.get();
}

void Memory::fill(const fa_tensor& tensor, std::byte* bytes, std::size_t size) {
  const std::size_t element = size_of(tensor.dtype);
  const std::uint64_t kind = random_.below(10);
  if (kind == 0) return;
  for (std::size_t at = 0; at + element <= size; at += element) {
    std::uint64_t value = random_.next();
    if (kind > 1) {  // numbers of about 1, and small integers
      const std::uint64_t mantissa = value >> 8;
      switch (tensor.dtype) {
        case FA_F16:
          value = 0x3400 + mantissa % 0x0a00 + (value & 0x80 ? 0x8000 : 0);
          break;
        case FA_BF16:
          value = 0x3e80 + mantissa % 0x0140 + (value & 0x80 ? 0x8000 : 0);
          break;
        case FA_F32:
          value = 0x3e800000 + mantissa % 0x01400000 + (value & 0x80 ? 0x80000000 : 0);
          break;
        case FA_I32:
          value = mantissa % 4;
          break;
        default:
          value = 0x3fd0000000000000 + mantissa % 0x0020000000000000;
          break;
      }
    }
    std::memcpy(bytes + at, &value, element);
  }
}

void* Memory::place(const fa_tensor& tensor, bool output, bool shared) {
  const Reach reach = reach_of(tensor);
  const double needed = reach.high - reach.low;
  if (shared && !tensors_.empty()) {
    Block& known = blocks_[tensors_[random_.index(tensors_.size())]];
    if (static_cast<double>(known.size) >= needed) {
      known.output = false;
      const std::size_t element = size_of(tensor.dtype);
      const std::size_t room = (known.size - static_cast<std::size_t>(needed)) / element;
      const std::size_t offset = random_.one_in(2) ? 0 : random_.index(room + 1) * element;
      return known.bytes.get() + offset - static_cast<std::ptrdiff_t>(reach.low);
    }
  }
  if (needed <= static_cast<double>(kLargestBlock)) {
    const auto size = static_cast<std::size_t>(needed);
    std::byte* const bytes = block(size);
    tensors_.push_back(blocks_.size() - 1);
    blocks_.back().output = output;
    if (output) {
      std::fill_n(bytes, size, kUntouched);
    } else {
      fill(tensor, bytes, size);
    }
    return bytes - static_cast<std::ptrdiff_t>(reach.low);
  }
  constexpr std::size_t kHalf = kFarBytes / 2;
  if (std::max(-reach.low, reach.high) > static_cast<double>(kHalf) || far_space() == nullptr) return nullptr;
  far_ = true;
  return far_space() + kHalf;
}

bool Memory::outputs_untouched() const {
  return std::all_of(blocks_.begin(), blocks_.end(), [](const Block& block) {
    const std::byte* const bytes = block.bytes.get();
    return !block.output || std::all_of(bytes, bytes + block.size, [](std::byte byte) { return byte == kUntouched; });
  });
}

}  // namespace fa::fuzz
