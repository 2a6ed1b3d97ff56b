#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <string>
#include <vector>

#include "files.hpp"
#include "render/embedded_templates.hpp"

// The rules that keep the kernels free of toolkit headers and let another machine implement templates/ptx.
namespace fa::render {
namespace {

bool in_ptx(const std::string& name) {
  return name.starts_with("ptx/");
}

std::string without_comment(const std::string& line) {
  return line.substr(0, line.find("//"));
}

/// The lines that the compiler of a kernel sees: not those that only the host's compiler does.
std::vector<std::string> device_lines(const EmbeddedTemplate& entry) {
  std::vector<std::string> result;
  bool rtc = false;
  bool host_only = false;
  for (const std::string& line : lines_of(entry.text)) {
    if (line == "#if defined(__CUDACC_RTC__)") rtc = true;
    if (line == "#else" && rtc) host_only = true;
    if (line == "#endif") rtc = host_only = false;
    if (!host_only) result.push_back(without_comment(line));
  }
  return result;
}

TEST(TemplateText, EveryIncludeIsATemplate) {
  std::set<std::string> names;
  for (const EmbeddedTemplate& entry : embedded_templates()) names.insert(entry.name);
  const std::regex include(R"(\s*#\s*include\b\s*(.*?)\s*)");
  int checked = 0;
  for (const EmbeddedTemplate& entry : embedded_templates()) {
    for (const std::string& line : device_lines(entry)) {
      std::smatch match;
      if (!std::regex_match(line, match, include)) continue;
      const std::string target = match[1];
      ASSERT_GE(target.size(), 2U) << entry.name;
      EXPECT_TRUE(target.front() == '<' && target.back() == '>') << entry.name << ": " << line;
      EXPECT_TRUE(names.contains(target.substr(1, target.size() - 2))) << entry.name << ": " << line;
      // flatten() knows this spelling only.
      EXPECT_EQ(line, "#include " + target) << entry.name;
      ++checked;
    }
  }
  EXPECT_GT(checked, 10);
}

TEST(TemplateText, DeviceLanguageStaysInPtx) {
  const std::regex device_word(
      R"(\b(asm|__asm__|__shared__|__constant__|__global__|__device__|__launch_bounds__|threadIdx|blockIdx|blockDim|)"
      R"(gridDim|warpSize|clock64|printf|__sync\w*|__shfl\w*|__any\w*|__all\w*|__ballot\w*|__activemask|__ldg|)"
      R"(__cvta\w*|__nanosleep|__threadfence\w*|atomic[A-Z]\w*)\b)");
  for (const EmbeddedTemplate& entry : embedded_templates()) {
    if (in_ptx(entry.name)) continue;
    for (const std::string& line : device_lines(entry)) {
      std::smatch match;
      EXPECT_FALSE(std::regex_search(line, match, device_word)) << entry.name << ": " << line;
    }
  }
}

TEST(TemplateText, PtxHoldsTheInstructions) {
  int instructions = 0;
  for (const EmbeddedTemplate& entry : embedded_templates()) {
    if (in_ptx(entry.name)) instructions += count_of(entry.text, "asm");
  }
  EXPECT_GT(instructions, 10) << "the rule above looks for a word that is not used";
}

TEST(TemplateText, HeadersAreGuardedByTheirPath) {
  for (const EmbeddedTemplate& entry : embedded_templates()) {
    std::string guard = std::string("FA_TEMPLATES_") + entry.name + "_";
    for (char& c : guard) {
      c = c == '/' || c == '.' ? '_' : c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    }
    const std::vector<std::string> lines = lines_of(entry.text);
    ASSERT_GE(lines.size(), 3U) << entry.name;
    EXPECT_EQ(lines[0], "#ifndef " + guard);
    EXPECT_EQ(lines[1], "#define " + guard);
    EXPECT_EQ(lines.back(), "#endif  // " + guard);
  }
}

TEST(TemplateText, EmbeddedTextIsTheFile) {
  const std::filesystem::path root = FA_TEST_TEMPLATE_DIR;
  std::set<std::string> files;
  for (const auto& item : std::filesystem::recursive_directory_iterator(root)) {
    if (item.path().extension() == ".cuh") files.insert(item.path().lexically_relative(root).generic_string());
  }
  std::set<std::string> names;
  for (const EmbeddedTemplate& entry : embedded_templates()) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name << " is embedded twice";
    EXPECT_EQ(entry.text, read_file(root / entry.name)) << entry.name;
  }
  EXPECT_EQ(names, files);
}

}  // namespace
}  // namespace fa::render
