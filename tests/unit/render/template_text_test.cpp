#include <gtest/gtest.h>

#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "files.hpp"
#include "render/embedded_templates.hpp"
#include "render/source.hpp"
#include "render/templates.hpp"

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

/// An asm statement: its instructions, and whether the compiler has to leave it where it stands.
struct Asm {
  bool is_volatile = false;
  std::string text;
};

/// All of a template, without comments.
std::vector<Asm> asm_statements(const std::string& source) {
  std::string code;
  for (const std::string& line : lines_of(source)) code += without_comment(line) + "\n";
  std::vector<Asm> result;
  const std::regex start(R"(\basm\b\s*(volatile)?\s*\()");
  for (std::sregex_iterator it(code.begin(), code.end(), start), end; it != end; ++it) {
    Asm found{(*it)[1].matched, {}};
    bool quoted = false;
    for (auto i = static_cast<std::size_t>(it->position() + it->length()); i < code.size(); ++i) {
      if (code[i] == '"') {
        quoted = !quoted;
      } else if (quoted) {
        found.text += code[i];
      } else if (code[i] == ':' || code[i] == ')') {
        break;
      }
    }
    result.push_back(std::move(found));
  }
  return result;
}

/// Whether the compiler may execute the asm wherever it likes: it computes, or it reads from an address that it has
/// picked itself, or behind a predicate of its own.
bool may_move(const Asm& statement) {
  static const std::regex separator(R"((?:;|\\n|\{|\})\s*)");
  static const std::regex arithmetic(
      R"((?:ex2|lg2|rcp|tanh|sqrt|rsqrt|sin|cos|cvt|prmt|mul|fma|setp|selp|mov|max)\.[\w.]+ [^\[\]]*)");
  static const std::regex guarded(R"(@!?\w+ ld\.\S+ .*)");
  static const std::regex picked(
      R"(\{\\n\.reg \.b64 picked;\\nslct\.b64\.s32 picked, %1, %2, %3;\\nld\.global\.nc\.\w+ %0, \[picked\];\\n\})");
  static const std::regex halves(R"(mov\.b32 \{\w+, \w+\}, %\d;)");  // a register in two
  if (std::regex_match(statement.text, picked)) return true;
  const std::string text = std::regex_replace(statement.text, halves, "");
  for (std::sregex_token_iterator it(text.begin(), text.end(), separator, -1), end; it != end; ++it) {
    const std::string instruction = *it;
    if (instruction.empty() || instruction.starts_with("%") || instruction.starts_with(".reg")) continue;
    if (!std::regex_match(instruction, arithmetic) && !std::regex_match(instruction, guarded)) return false;
  }
  return !text.empty();
}

TEST(TemplateText, AsmThatTouchesMemoryStaysBehindItsTests) {
  std::size_t moving = 0, staying = 0;
  for (const EmbeddedTemplate& entry : embedded_templates()) {
    for (const Asm& statement : asm_statements(entry.text)) {
      EXPECT_TRUE(statement.is_volatile || may_move(statement)) << entry.name << ": " << statement.text;
      (statement.is_volatile ? staying : moving) += 1;
    }
  }
  EXPECT_GT(moving, 10U);
  EXPECT_GT(staying, 60U);
}

TEST(TemplateText, TheRuleForAsmFindsWhatItIsFor) {
  const auto moves = [](const std::string& source) {
    const std::vector<Asm> found = asm_statements(source);
    EXPECT_EQ(found.size(), 1U) << source;
    return !found.empty() && !found[0].is_volatile && may_move(found[0]);
  };
  EXPECT_FALSE(moves(R"(asm("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address));)"));
  EXPECT_FALSE(moves(R"(asm("mov.b32 %0, 0;\nld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));)"));
  EXPECT_FALSE(moves(R"(asm("bar.sync 0;");)"));
  EXPECT_FALSE(moves(R"(asm("@p st.global.f32 [%0], %1;" :: "l"(address), "f"(value));)"));
  EXPECT_FALSE(moves(R"(asm volatile("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));)"));
  const std::string pick = R"(asm("{\n.reg .b64 picked;\nslct.b64.s32 picked, %1, %2, %3;\n)";
  EXPECT_FALSE(moves(pick + R"(ld.global.nc.f32 %0, [%1];\n}" : "=f"(y) : "l"(a));)"));
  EXPECT_TRUE(moves(pick + R"(ld.global.nc.f32 %0, [picked];\n}" : "=f"(y) : "l"(a));)"));
  EXPECT_TRUE(moves(R"(asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));)"));
  const std::string halve = R"(asm("{\n.reg .b16 first, last;\nmov.b32 {first, last}, %1;\n)";
  EXPECT_TRUE(moves(halve + R"(cvt.rn.f16x2.e4m3x2 %0, first;\n}" : "=r"(y) : "r"(x));)"));
  EXPECT_FALSE(moves(halve + R"(ld.shared.b16 %0, [first];\n}" : "=h"(y) : "r"(x));)"));
  EXPECT_TRUE(
      moves(R"(asm("{\n.reg .pred p;\nsetp.ne.u64 p, %1, 0;\n@p ld.global.nc.f32 %0, [%1];\n}\n" : "+f"(y));)"));
}

/// What decides whether a loop goes on, of all loops of a template.
std::vector<std::string> conditions_of(const std::string& source, const std::string& keyword) {
  std::string code;
  for (const std::string& line : lines_of(source)) code += without_comment(line) + "\n";
  std::vector<std::string> result;
  const std::regex start("\\b" + keyword + R"(\s*\()");
  for (std::sregex_iterator it(code.begin(), code.end(), start), end; it != end; ++it) {
    std::string text;
    int depth = 1;
    for (auto i = static_cast<std::size_t>(it->position() + it->length()); i < code.size(); ++i) {
      depth += code[i] == '(' ? 1 : code[i] == ')' ? -1 : 0;
      if (depth == 0) break;
      text += code[i];
    }
    if (keyword == "for" && text.find(';') != std::string::npos) {
      text = text.substr(text.find(';') + 1);
      text = text.substr(0, text.find(';'));
    } else if (keyword == "for") {
      text.clear();  // over a range
    }
    result.push_back(text);
  }
  return result;
}

/// Whether what is computed from elements of tensors decides on another round.
bool asks_for_values(const std::string& condition) {
  static const std::regex values(R"(\b(lost|is_far|rises|grew|any_infinite|softmax|sum|max|offset|vote_\w+)\b)");
  static const std::regex bound(R"(\w+ < k[A-Z]\w* &&)");
  return std::regex_search(condition, values) && !std::regex_search(condition, bound);
}

// A loop that goes on while numbers of tensors say so may never end: rounding can keep them what they are. Where
// `while` stands nothing but these decides: jobs that are handed out, barriers, and whole numbers that shrink in every
// round.
TEST(TemplateText, NoLoopGoesOnForWhatTensorsHold) {
  const std::map<std::string, std::set<std::string>> known = {
      {"common/constants.cuh", {"power < n"}},
      {"common/paged.cuh", {"b != 0"}},
      {"common/row_pieces.cuh", {"width > 1 && count % width != 0"}},
      {"common/schedule.cuh", {"end - first > 1"}},
      {"common/sequences.cuh", {"count > 1"}},
      {"sm90/sm90_backward.cuh", {"true"}},
      {"sm90/sm90_backward_add_dq.cuh", {"true"}},
      {"sm90/sm90_backward_by_columns.cuh",
       {"addition.state != Addition::State::told && !ptx::mbarrier_test(ds_full, parity_of_one(count))"}},
      {"sm90/sm90_dropout_warps.cuh", {"consume_work(cursor, q_slot)"}},
      {"sm90/sm90_forward.cuh", {"true"}},
      {"sm90/sm90_fp8_forward.cuh", {"true", "at.left > 0"}},
      {"sm90/sm90_fp8_producer.cuh", {"true"}},
      {"sm90/sm90_producer.cuh", {"true", "index < tiles"}}};
  int loops = 0;
  for (const EmbeddedTemplate& entry : embedded_templates()) {
    for (const std::string& condition : conditions_of(entry.text, "for")) {
      EXPECT_FALSE(asks_for_values(condition)) << entry.name << ": " << condition;
      ++loops;
    }
    if (in_ptx(entry.name)) continue;  // waits
    const auto found = known.find(entry.name);
    for (const std::string& condition : conditions_of(entry.text, "while")) {
      EXPECT_TRUE(found != known.end() && found->second.contains(condition)) << entry.name << ": " << condition;
      ++loops;
    }
  }
  EXPECT_GT(loops, 300);
}

TEST(TemplateText, TheRuleForLoopsFindsWhatItIsFor) {
  EXPECT_EQ(conditions_of("while (softmax.lost(kLeastLost)) {}", "while")[0], "softmax.lost(kLeastLost)");
  const auto asks = [](const std::string& source) { return asks_for_values(conditions_of(source, "for").at(0)); };
  EXPECT_TRUE(asks("for (; softmax.lost(kLeast);) again();"));
  EXPECT_TRUE(asks("for (int i = 0; ptx::vote_any(grew); ++i) {}"));
  EXPECT_FALSE(asks("for (int round = 0; round < kRounds && softmax.lost(kLeast); ++round) {}"));
  EXPECT_FALSE(asks("for (int r = 0; r < 2; ++r) sum += s[r];"));
}

/// NVRTC 12.0 takes a temporary `Type<X>{...}.f()`, or of an alias, behind a test without braces for something else.
std::vector<std::string> bare_temporaries(const std::string& text) {
  static const std::regex pattern(R"((?:\)|else)\s+[\w:]+(?:<[^;{}()]*>)?\{[^;{}]*\}\.\w+)");
  std::vector<std::string> found;
  for (std::sregex_iterator i(text.begin(), text.end(), pattern), end; i != end; ++i) found.push_back(i->str());
  return found;
}

TEST(TemplateText, TemporariesBehindTestsHaveBraces) {
  for (const EmbeddedTemplate& entry : embedded_templates()) {
    EXPECT_EQ(bare_temporaries(entry.text), std::vector<std::string>{}) << entry.name;
  }
  EXPECT_EQ(bare_temporaries("if constexpr (kOn) Sums<T>{*this}.add(x);").size(), 1U);
  EXPECT_EQ(bare_temporaries("if constexpr (kOn && !kOff) Sums{self()}.add(x);").size(), 1U);
  EXPECT_EQ(bare_temporaries("if constexpr (f(a)) {\n} else\nSums<T>{a, b}.add(x);").size(), 1U);
  EXPECT_EQ(bare_temporaries("if constexpr (kOn) {\nSums<T>{*this}.add(x);\n}").size(), 0U);
}

/// NVRTC 12.0 takes no early clobber either: one constraint letter an operand.
bool has_early_clobber(const std::string& text) {
  return text.find("\"=&") != std::string::npos || text.find("\"+&") != std::string::npos;
}

TEST(TemplateText, OperandsHaveOneLetterOfConstraint) {
  for (const EmbeddedTemplate& entry : embedded_templates()) EXPECT_FALSE(has_early_clobber(entry.text)) << entry.name;
  EXPECT_TRUE(has_early_clobber("asm(\"mov.b32 %0, %1;\" : \"=&r\"(y) : \"r\"(x));"));
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
    EXPECT_EQ(lines.back(), "#endif");
  }
}

/// Without indentation and comments.
std::string embedded_form(const std::string& text) {
  static const std::regex indentation("\n +"), comment(" *//[^\n]*");
  return std::regex_replace(std::regex_replace(text, indentation, "\n"), comment, "");
}

/// What looks like a comment is one.
TEST(TemplateText, NoStringHasTwoSlashes) {
  for (const auto& item : std::filesystem::recursive_directory_iterator(FA_TEST_TEMPLATE_DIR)) {
    if (item.path().extension() != ".cuh") continue;
    for (const std::string& line : lines_of(read_file(item.path()))) {
      const std::size_t at = line.find("//");
      if (at == std::string::npos) continue;
      EXPECT_EQ(std::count(line.begin(), line.begin() + static_cast<std::ptrdiff_t>(at), '"') % 2, 0) << line;
    }
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
    EXPECT_EQ(entry.text, embedded_form(read_file(root / entry.name))) << entry.name;
  }
  EXPECT_EQ(names, files);
}

/// So that a results file tells whether the library has the templates of the tree.
TEST(TemplateText, AFolderHasTheDigestOfWhatIsEmbedded) {
  EXPECT_EQ(read_templates(FA_TEST_TEMPLATE_DIR, "FA_TEMPLATE_DIR").digest(), templates_digest());
}

}  // namespace
}  // namespace fa::render
