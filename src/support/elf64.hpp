#ifndef FA_SRC_SUPPORT_ELF64_HPP_
#define FA_SRC_SUPPORT_ELF64_HPP_

#include <cstdint>

/// What cubins are made of: as much of the 64-bit ELF format as is read here, for systems without an <elf.h>. Names are
/// those of the specification.
namespace fa::support::elf64 {

inline constexpr char kMagic[] = {'\x7f', 'E', 'L', 'F'};
inline constexpr unsigned kClassIndex = 4;  ///< in e_ident
inline constexpr unsigned char kClass64 = 2;

enum SectionType : std::uint32_t { kNull = 0, kProgram = 1, kSymbols = 2, kStrings = 3, kNoBits = 8 };
inline constexpr unsigned kFunction = 2;  ///< the low half of st_info

struct Header {
  unsigned char e_ident[16];
  std::uint16_t e_type;
  std::uint16_t e_machine;
  std::uint32_t e_version;
  std::uint64_t e_entry;
  std::uint64_t e_phoff;
  std::uint64_t e_shoff;
  std::uint32_t e_flags;
  std::uint16_t e_ehsize;
  std::uint16_t e_phentsize;
  std::uint16_t e_phnum;
  std::uint16_t e_shentsize;
  std::uint16_t e_shnum;
  std::uint16_t e_shstrndx;
};
static_assert(sizeof(Header) == 64);

struct Section {
  std::uint32_t sh_name;
  std::uint32_t sh_type;
  std::uint64_t sh_flags;
  std::uint64_t sh_addr;
  std::uint64_t sh_offset;
  std::uint64_t sh_size;
  std::uint32_t sh_link;
  std::uint32_t sh_info;
  std::uint64_t sh_addralign;
  std::uint64_t sh_entsize;
};
static_assert(sizeof(Section) == 64);

struct Symbol {
  std::uint32_t st_name;
  unsigned char st_info;
  unsigned char st_other;
  std::uint16_t st_shndx;
  std::uint64_t st_value;
  std::uint64_t st_size;
};
static_assert(sizeof(Symbol) == 24);

}  // namespace fa::support::elf64

#endif  // FA_SRC_SUPPORT_ELF64_HPP_
