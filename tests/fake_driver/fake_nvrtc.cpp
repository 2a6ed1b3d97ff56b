#include <nvrtc.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "support/elf64.hpp"

// An NVRTC that compiles nothing: every program becomes a module with the kernel that its file is named after, which
// uses a few registers and, for one unit in four, spills; with FA_FAKE_NVRTC_SPILLS=0 none does.
struct _nvrtcProgram {
  std::string kernel;
  std::size_t unit = 0;  // its hash
  std::vector<char> cubin;
};

namespace {

namespace elf64 = fa::support::elf64;

constexpr std::uint8_t kFormatSized = 4;
constexpr std::uint8_t kFrameSize = 0x11;
constexpr std::uint8_t kRegisterCount = 0x2f;
constexpr std::uint32_t kKernelSymbol = 1;

void append(std::string& bytes, const void* data, std::size_t size) {
  bytes.append(static_cast<const char*>(data), size);
}

void append_attribute(std::string& info, std::uint8_t kind, std::uint32_t value) {
  const std::uint8_t head[2] = {kFormatSized, kind};
  const std::uint16_t size = 8;
  append(info, head, sizeof(head));
  append(info, &size, sizeof(size));
  append(info, &kKernelSymbol, sizeof(kKernelSymbol));
  append(info, &value, sizeof(value));
}

struct Section {
  std::string name;
  std::uint32_t type;
  std::string contents;
  std::uint32_t link = 0;
};

/// The ELF file of `sections`, the second of which holds their names.
std::vector<char> elf_of(std::vector<Section> sections) {
  std::string& names = sections[1].contents;
  std::vector<std::uint32_t> name_at;
  for (const Section& section : std::vector<Section>(sections)) {
    name_at.push_back(static_cast<std::uint32_t>(names.size()));
    names += section.name;
    names += '\0';
  }
  elf64::Header header{};
  std::memcpy(header.e_ident, elf64::kMagic, sizeof elf64::kMagic);
  header.e_ident[elf64::kClassIndex] = elf64::kClass64;
  header.e_shentsize = sizeof(elf64::Section);
  header.e_shnum = static_cast<std::uint16_t>(sections.size());
  header.e_shstrndx = 1;
  header.e_shoff = sizeof(header);
  std::string file;
  append(file, &header, sizeof(header));
  std::size_t offset = sizeof(header) + sections.size() * sizeof(elf64::Section);
  for (std::size_t i = 0; i < sections.size(); ++i) {
    elf64::Section entry{};
    entry.sh_name = name_at[i];
    entry.sh_type = sections[i].type;
    entry.sh_offset = offset;
    entry.sh_size = sections[i].contents.size();
    entry.sh_link = sections[i].link;
    append(file, &entry, sizeof(entry));
    offset += sections[i].contents.size();
  }
  for (const Section& section : sections) file += section.contents;
  return {file.begin(), file.end()};
}

std::vector<char> module_of(const std::string& kernel, std::size_t unit) {
  elf64::Symbol symbols[2] = {};
  symbols[kKernelSymbol].st_name = 1;
  symbols[kKernelSymbol].st_info = elf64::kFunction;
  std::string symbol_table;
  append(symbol_table, symbols, sizeof(symbols));
  std::string info;
  append_attribute(info, kRegisterCount, 32);
  const char* const spills = std::getenv("FA_FAKE_NVRTC_SPILLS");
  const bool may_spill = spills == nullptr || std::string_view(spills) != "0";
  append_attribute(info, kFrameSize, may_spill && unit % 4 == 0 ? 16 : 0);
  const std::string strings = std::string(1, '\0') + kernel + '\0';
  return elf_of({{"", elf64::kNull, ""},
                 {".shstrtab", elf64::kStrings, ""},
                 {".text." + kernel, elf64::kProgram, "code"},
                 {".symtab", elf64::kSymbols, symbol_table, 4},
                 {".strtab", elf64::kStrings, strings},
                 {".nv.info", elf64::kProgram, info}});
}

}  // namespace

#if defined(_WIN32)
#define FA_FAKE extern "C" __declspec(dllexport)
#else
#define FA_FAKE extern "C" __attribute__((visibility("default")))
#endif

FA_FAKE nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return NVRTC_SUCCESS;
}
FA_FAKE const char* nvrtcGetErrorString(nvrtcResult) {
  return "of the fake NVRTC";
}
FA_FAKE nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  *count = 0;  // whatever is asked for
  return NVRTC_SUCCESS;
}
FA_FAKE nvrtcResult nvrtcGetSupportedArchs(int*) {
  return NVRTC_SUCCESS;
}
FA_FAKE nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* unit, const char* name, int,
                                       const char* const*, const char* const*) {
  const std::string_view file = name;
  *program = new _nvrtcProgram{std::string(file.substr(0, file.rfind(".cu"))), std::hash<std::string_view>{}(unit), {}};
  return NVRTC_SUCCESS;
}
FA_FAKE nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  *program = nullptr;
  return NVRTC_SUCCESS;
}
FA_FAKE nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int, const char* const*) {
  program->cubin = module_of(program->kernel, program->unit);
  return NVRTC_SUCCESS;
}
FA_FAKE nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, std::size_t* size) {
  *size = 1;
  return NVRTC_SUCCESS;
}
FA_FAKE nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char* log) {
  *log = '\0';
  return NVRTC_SUCCESS;
}
FA_FAKE nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, std::size_t* size) {
  *size = program->cubin.size();
  return NVRTC_SUCCESS;
}
FA_FAKE nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin) {
  std::ranges::copy(program->cubin, cubin);
  return NVRTC_SUCCESS;
}
