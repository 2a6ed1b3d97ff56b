#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fa/error.hpp>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compile/compiler.hpp"
#include "support/elf64.hpp"

namespace fa::compile {
namespace {

// A cubin is an ELF file. Its section .nv.info is a list of attributes {format, kind, size, payload}; those read here
// hold a symbol's index and a number (NVIDIA documents neither; cuobjdump --dump-resource-usage shows the same).
constexpr std::uint8_t kFormatSized = 4;
constexpr std::uint8_t kFrameSize = 0x11;
constexpr std::uint8_t kMinStackSize = 0x12;
constexpr std::uint8_t kRegisterCount = 0x2f;

constexpr std::uint64_t kReservedShared = 1024;  // bytes of each block, from compute capability 9.0

namespace elf64 = support::elf64;
using Bytes = std::span<const std::byte>;

[[noreturn]] void throw_malformed(const char* reason) {
  throw Error(ErrorCode::internal, std::string("the compiled kernel cannot be read: ") + reason);
}

Bytes slice(Bytes bytes, std::uint64_t offset, std::uint64_t size) {
  if (offset > bytes.size() || size > bytes.size() - offset) throw_malformed("a part lies outside of the file");
  return bytes.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size));
}

template <class T>
T read(Bytes bytes, std::uint64_t offset) {
  T value;
  std::memcpy(&value, slice(bytes, offset, sizeof(T)).data(), sizeof(T));
  return value;
}

std::string_view read_string(Bytes table, std::uint64_t offset) {
  if (offset >= table.size()) throw_malformed("a name lies outside of its table");
  const char* begin = reinterpret_cast<const char*>(table.data()) + offset;
  return {begin, std::find(begin, begin + (table.size() - static_cast<std::size_t>(offset)), '\0')};
}

int clamp_to_int(std::uint64_t value) {
  return static_cast<int>(std::min<std::uint64_t>(value, 0x7fffffff));
}

class CubinReader {
 public:
  explicit CubinReader(Bytes bytes) : bytes_(bytes), header_(read<elf64::Header>(bytes, 0)) {
    if (std::memcmp(header_.e_ident, elf64::kMagic, sizeof elf64::kMagic) != 0) throw_malformed("it is no ELF file");
    if (header_.e_ident[elf64::kClassIndex] != elf64::kClass64 || header_.e_shentsize != sizeof(elf64::Section)) {
      throw_malformed("it is no 64-bit ELF file");
    }
    names_ = contents(section(header_.e_shstrndx));
  }

  KernelFacts facts(const std::string& kernel) const {
    const auto text = find_section(".text." + kernel);
    if (!text) throw Error(ErrorCode::internal, "the compiled module holds no kernel " + kernel);
    KernelFacts facts;
    facts.registers = static_cast<int>(text->sh_info >> 24);  // overruled below; where older compilers put it
    read_attributes(symbol_index(kernel), facts);
    facts.static_shared = static_shared(kernel);
    return facts;
  }

  struct Instructions {
    std::uint32_t info;  ///< registers and barriers
    std::vector<std::byte> bytes;

    friend bool operator==(const Instructions&, const Instructions&) = default;
  };

  /// Of each kernel and of functions that are not inlined, by the name of the section.
  std::map<std::string, Instructions> instructions() const {
    std::map<std::string, Instructions> sections;
    for (unsigned index = 0; index < header_.e_shnum; ++index) {
      const elf64::Section header = section(index);
      const std::string_view name = read_string(names_, header.sh_name);
      if (!name.starts_with(".text.")) continue;
      const Bytes bytes = contents(header);
      // The low half of sh_info is the number of a symbol.
      sections[std::string(name)] = {header.sh_info >> 16, {bytes.begin(), bytes.end()}};
    }
    return sections;
  }

 private:
  /// As the driver counts it: without what the system keeps for itself of each block.
  int static_shared(const std::string& kernel) const {
    const auto section_of_kernel = find_section(".nv.shared." + kernel);
    if (!section_of_kernel) return 0;
    const std::uint64_t reserved = find_section(".nv.shared.reserved.0") ? kReservedShared : 0;
    return clamp_to_int(section_of_kernel->sh_size - std::min(section_of_kernel->sh_size, reserved));
  }

  elf64::Section section(std::uint64_t index) const {
    if (index >= header_.e_shnum) throw_malformed("a section does not exist");
    if (header_.e_shoff > bytes_.size()) throw_malformed("a part lies outside of the file");
    return read<elf64::Section>(bytes_, header_.e_shoff + index * sizeof(elf64::Section));
  }

  Bytes contents(const elf64::Section& header) const {
    if (header.sh_type == elf64::kNoBits) throw_malformed("a section has no contents");
    return slice(bytes_, header.sh_offset, header.sh_size);
  }

  std::optional<elf64::Section> find_section(std::string_view name) const {
    for (unsigned index = 0; index < header_.e_shnum; ++index) {
      const elf64::Section candidate = section(index);
      if (read_string(names_, candidate.sh_name) == name) return candidate;
    }
    return std::nullopt;
  }

  std::uint32_t symbol_index(std::string_view name) const {
    const auto table = find_section(".symtab");
    if (!table) throw_malformed("it has no symbols");
    const Bytes symbols = contents(*table);
    const Bytes strings = contents(section(table->sh_link));
    for (std::uint32_t index = 0; index < symbols.size() / sizeof(elf64::Symbol); ++index) {
      const auto symbol = read<elf64::Symbol>(symbols, index * sizeof(elf64::Symbol));
      if ((symbol.st_info & 0xfU) == elf64::kFunction && read_string(strings, symbol.st_name) == name) return index;
    }
    throw_malformed("the kernel has no symbol");
  }

  void read_attributes(std::uint32_t symbol, KernelFacts& facts) const {
    const auto info = find_section(".nv.info");
    if (!info) throw_malformed("it has no section .nv.info");
    const Bytes list = contents(*info);
    std::uint64_t offset = 0;
    while (offset + 4 <= list.size()) {
      const auto format = read<std::uint8_t>(list, offset);
      const auto kind = read<std::uint8_t>(list, offset + 1);
      const auto size = read<std::uint16_t>(list, offset + 2);
      offset += 4;
      if (format != kFormatSized) continue;
      const Bytes payload = slice(list, offset, size);
      offset += size;
      if (size < 8 || read<std::uint32_t>(payload, 0) != symbol) continue;
      const int value = clamp_to_int(read<std::uint32_t>(payload, 4));
      if (kind == kRegisterCount) facts.registers = value;
      if (kind == kFrameSize || kind == kMinStackSize) facts.local_bytes = std::max(facts.local_bytes, value);
    }
  }

  Bytes bytes_;
  elf64::Header header_;
  Bytes names_;
};

}  // namespace

std::string instruction_difference(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  const auto sections = CubinReader(a).instructions();
  const auto others = CubinReader(b).instructions();
  for (const auto& [name, section] : sections) {
    const auto other = others.find(name);
    if (other == others.end()) return name + " is missing";
    if (section == other->second) continue;
    return fmt::format("{} differs: {} and {} bytes", name, section.bytes.size(), other->second.bytes.size());
  }
  for (const auto& [name, section] : others) {
    if (!sections.contains(name)) return name + " is new";
  }
  return {};
}

KernelFacts read_facts(const std::vector<std::byte>& cubin, const std::string& kernel_name) {
  return CubinReader(cubin).facts(kernel_name);
}

}  // namespace fa::compile
