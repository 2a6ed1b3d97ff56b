#include "fuzz/c_abi/structs.hpp"

namespace fa::fuzz {

std::uint32_t Structs::struct_size(std::size_t size) {
  const auto real = static_cast<std::uint32_t>(size);
  if (!bad()) return real;
  switch (random_.below(6)) {
    case 0:
      return static_cast<std::uint32_t>(random_.below(9));
    case 1:
      return real + 1 + static_cast<std::uint32_t>(random_.below(64));
    case 2:
      return random_.one_in(2) ? kLargestStruct + static_cast<std::uint32_t>(random_.below(2)) : 0xffffffff;
    case 3:
      return 8 * static_cast<std::uint32_t>(random_.below(size / 8 + 1));
    default:
      return static_cast<std::uint32_t>(random_.below(size + 1));
  }
}

const char* Structs::text(const std::string& text) {
  std::byte* const block = memory_.block(text.size() + 1);
  std::memcpy(block, text.c_str(), text.size() + 1);
  return reinterpret_cast<const char*>(block);
}

}  // namespace fa::fuzz
