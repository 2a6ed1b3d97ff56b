#ifndef FA_TESTS_FUZZ_C_ABI_STRUCTS_HPP_
#define FA_TESTS_FUZZ_C_ABI_STRUCTS_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "fuzz/c_abi/memory.hpp"
#include "fuzz/random.hpp"

namespace fa::fuzz {

/// Structs as a caller passes them, in memory of exactly their size; one choice in `mischief` (0: none) is a wild one.
class Structs {
 public:
  Structs(Random& random, Memory& memory, std::uint64_t mischief)
      : random_(random), memory_(memory), mischief_(mischief) {}

  const char* text(const std::string& text);

  /// Whether the next choice is to be a wild one.
  bool bad() { return mischief_ != 0 && random_.one_in(mischief_); }

 protected:
  std::uint32_t struct_size(std::size_t size);

  /// The bytes that a caller which believes in `size` passes; the rest are zero.
  template <class Struct>
  static Struct cut(const Struct& value, std::uint32_t size) {
    Struct seen{};
    std::memcpy(&seen, &value, std::min<std::size_t>(size, sizeof value));
    return seen;
  }

  template <class Struct>
  const Struct* write(Struct value, std::uint32_t size) {
    // Of a size that is refused for itself, nothing but the size is looked at.
    const std::size_t bytes = size > kLargestStruct ? sizeof value : std::max<std::size_t>(size, sizeof size);
    value.struct_size = size;
    std::byte* const block = memory_.block(bytes);
    std::memcpy(block, &value, std::min(bytes, sizeof value));
    if (bytes > sizeof value && random_.one_in(2))
      block[bytes - 1 - random_.index(bytes - sizeof value)] = std::byte{1};
    return reinterpret_cast<const Struct*>(block);
  }

  template <class Struct>
  const Struct* give(const Struct& value) {
    return write(value, struct_size(sizeof value));
  }

  template <class Item>
  const Item* array(const std::vector<Item>& items) {
    std::byte* const block = memory_.block(items.size() * sizeof(Item));
    if (!items.empty()) std::memcpy(block, items.data(), items.size() * sizeof(Item));
    return reinterpret_cast<const Item*>(block);
  }

  void spoil(std::int32_t* field) {
    if (bad()) *field = random_.wild32();
  }
  void spoil(std::int64_t* field) {
    if (bad()) *field = random_.wild();
  }

  static constexpr std::uint32_t kLargestStruct = 4096;

  Random& random_;
  Memory& memory_;
  std::uint64_t mischief_;
};

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_C_ABI_STRUCTS_HPP_
