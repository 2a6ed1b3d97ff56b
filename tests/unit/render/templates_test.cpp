#include "render/templates.hpp"

#include <gtest/gtest.h>
#if !defined(_WIN32)
#include <sys/stat.h>
#endif

#include <algorithm>
#include <cstdio>
#include <fa/error.hpp>
#include <filesystem>
#include <memory>
#include <string>

#include "files.hpp"
#include "render/embedded_templates.hpp"
#include "tests/support/posix_names.hpp"

// Templates are read once a process, so that each case with a directory of its own is a process of its own: this
// program again, which then runs one test that prints what it found.
namespace fa::render {
namespace {

namespace fs = std::filesystem;

constexpr const char* kReportVariable = "FA_TEST_REPORT_TEMPLATES";

TEST(TemplatesChild, Reports) {
  if (std::getenv(kReportVariable) == nullptr) GTEST_SKIP() << "runs as a child of the Templates tests";
  try {
    std::printf("[report]digest %s %zu\n", templates_digest().c_str(), templates().headers().size());
    for (const EmbeddedTemplate& entry : embedded_templates()) {
      const std::string unit = std::string("#include <") + entry.name + ">\n";
      std::printf("%s %s\n", entry.name, templates_digest(unit).c_str());
    }
    std::printf("[end]");
  } catch (const Error& error) {
    std::printf("[report]%s %s: %s[end]", to_string(error.code()), error.field("argument").data(), error.what());
  } catch (const std::exception& error) {
    std::printf("[report]not an fa::Error: %s[end]", error.what());
  }
}

/// What a process finds whose FA_TEMPLATE_DIR is `directory`.
std::string report_with(const fs::path& directory) {
  const char* const runner = std::getenv("FA_TEST_RUNNER");  // of a build for another machine
  const std::string program =
      (runner != nullptr ? runner + std::string(" ") : "") + ::testing::internal::GetArgvs().front();
  const std::string command = program + " --gtest_filter=TemplatesChild.Reports 2>&1";
  setenv("FA_TEMPLATE_DIR", directory.string().c_str(), 1);
  setenv(kReportVariable, "1", 1);
  for (const char* name : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) unsetenv(name);  // the child has one test to run
  FILE* pipe = popen(command.c_str(), "r");
  unsetenv("FA_TEMPLATE_DIR");
  unsetenv(kReportVariable);
  if (pipe == nullptr) return "no child process";
  std::string output;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
  const int status = pclose(pipe);
  const std::size_t start = output.find("[report]");
  const std::size_t end = output.find("[end]");
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || start == std::string::npos || end == std::string::npos) {
    return "the child failed:\n" + output;
  }
  return output.substr(start + 8, end - start - 8);
}

/// A directory with a copy of the embedded templates, removed with the object.
class Directory {
 public:
  Directory() {
    std::string pattern = (fs::temp_directory_path() / "fa_render_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
    for (const EmbeddedTemplate& entry : embedded_templates()) write_file(path_ / entry.name, entry.text);
  }
  ~Directory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

TEST(Templates, AreSortedAndUnique) {
  const std::vector<Header>& all = templates().headers();
  ASSERT_FALSE(all.empty());
  for (std::size_t i = 1; i < all.size(); ++i) EXPECT_LT(all[i - 1].name, all[i].name);
  EXPECT_EQ(&templates().headers(), &all) << "read once";
}

TEST(Templates, DigestIs32HexDigits) {
  EXPECT_EQ(templates_digest().size(), 32U);
  EXPECT_EQ(templates_digest().find_first_not_of("0123456789abcdef"), std::string::npos);
}

TEST(Templates, CopyOfTheEmbeddedOnesHasTheirDigest) {
  const Directory directory;
  const std::string copied = report_with(directory.path());
  EXPECT_EQ(copied.substr(0, 7), "digest ");
  EXPECT_EQ(copied, report_with("")) << "an empty variable means the embedded ones";
}

TEST(Templates, DigestChangesWithAByteOfAnyFile) {
  const std::string original = report_with("");
  for (const EmbeddedTemplate& entry : {embedded_templates().front(), embedded_templates().back()}) {
    const Directory directory;
    std::string text = entry.text;
    text[text.size() / 2] ^= 1;
    write_file(directory.path() / entry.name, text);
    const std::string changed = report_with(directory.path());
    EXPECT_EQ(changed.substr(0, 7), "digest ");
    EXPECT_NE(changed, original) << entry.name;
  }
}

TEST(Templates, DigestChangesWithNamesAndBoundaries) {
  const Directory directory;
  write_file(directory.path() / "x/a.cuh", "one");
  write_file(directory.path() / "x/b.cuh", "two");
  const std::string first = report_with(directory.path());
  write_file(directory.path() / "x/a.cuh", "onet");
  write_file(directory.path() / "x/b.cuh", "wo");
  const std::string moved_boundary = report_with(directory.path());
  fs::rename(directory.path() / "x/b.cuh", directory.path() / "x/c.cuh");
  const std::string renamed = report_with(directory.path());
  EXPECT_EQ(first.substr(0, 7), "digest ");
  EXPECT_NE(first, moved_boundary);
  EXPECT_NE(moved_boundary, renamed);
}

/// The lines of a report behind the first: each template and the digest of what a unit that includes it depends on.
std::string units_of(const std::string& report) {
  return report.substr(report.find('\n'));
}

TEST(Templates, ANewFileChangesNoUnitsDigest) {
  const Directory directory;
  write_file(directory.path() / "common/aaa.cuh", "#include <ptx/wgmma.cuh>\n");
  const std::string grown = report_with(directory.path());
  const std::string original = report_with("");
  EXPECT_NE(grown.substr(0, grown.find('\n')), original.substr(0, original.find('\n')));
  EXPECT_EQ(units_of(grown), units_of(original));
  EXPECT_GT(units_of(grown).size(), 32 * embedded_templates().size());
}

TEST(Templates, WhatIsIncludedCountsHoweverItIsSpelled) {
  const auto includes = [](const std::string& unit) {
    std::vector<std::string> names;
    const TemplateSet set({{"b/b.cuh", "b"}, {"a.cuh", "#include <b/b.cuh>\n"}, {"c.cuh", "#include <a.cuh>"}});
    for (const Header* header : set.included_by(unit).headers) names.push_back(header->name);
    return names;
  };
  using Names = std::vector<std::string>;
  const Names all{"a.cuh", "b/b.cuh"};
  EXPECT_EQ(includes(""), Names{});
  EXPECT_EQ(includes("#include <cstddef>\n"), Names{});
  EXPECT_EQ(includes("#include <b/b.cuh>"), Names{"b/b.cuh"});
  EXPECT_EQ(includes("#include <c.cuh>\n"), (Names{"a.cuh", "b/b.cuh", "c.cuh"}));
  for (const char* unit :
       {"#include <a.cuh>", "int x;\n#include <a.cuh>  // of a kind\n", "  # \tinclude\t<a.cuh>\r\n",
        "#include \"a.cuh\"", "#include<a.cuh>", "#if 0\n#include <a.cuh>\n#endif\n",
        "#ifdef FA_NEVER\n# include <a.cuh>\n#endif\n", "/*\n#include <a.cuh>\n*/", "\xef\xbb\xbf#include <a.cuh>\n"}) {
    EXPECT_EQ(includes(unit), all) << unit;
  }
}

TEST(Templates, IncludesMayGoInCircles) {
  const TemplateSet set({{"a.cuh", "#include <b.cuh>\n"}, {"b.cuh", "#include <a.cuh>\n#include <b.cuh>\n"}});
  EXPECT_EQ(set.included_by("#include <b.cuh>\n").headers.size(), 2U);
  EXPECT_EQ(set.included_by("#include <b.cuh>\n").digest, set.digest());
}

TEST(Templates, OtherFilesDoNotCount) {
  const Directory directory;
  write_file(directory.path() / "README.md", "text");
  write_file(directory.path() / "sm80/notes.txt", "text");
  EXPECT_EQ(report_with(directory.path()), report_with(""));
}

#if !defined(_WIN32)
/// Whoever opened it would wait for ever.
TEST(Templates, AFifoIsAnIoError) {
  const Directory directory;
  ASSERT_EQ(mkfifo((directory.path() / "x.cuh").c_str(), 0600), 0);
  const std::string report = report_with(directory.path());
  EXPECT_NE(report.find("x.cuh is not a regular file"), std::string::npos) << report;
}
#endif

TEST(Templates, DirectoryThatIsNotThereIsAnIoError) {
  const std::string report = report_with("/nonexistent/fa_templates");
  EXPECT_EQ(report.find(std::string(to_string(ErrorCode::io)) + " FA_TEMPLATE_DIR: "), 0U) << report;
  EXPECT_NE(report.find("/nonexistent/fa_templates"), std::string::npos) << report;
}

TEST(Templates, DirectoryWithoutTemplatesIsAnIoError) {
  const Directory directory;
  fs::create_directories(directory.path() / "empty");
  const std::string report = report_with(directory.path() / "empty");
  EXPECT_EQ(report.substr(0, 3), std::string(to_string(ErrorCode::io)) + " ") << report;
}

TEST(Templates, FileInsteadOfADirectoryIsAnIoError) {
  const Directory directory;
  const std::string report = report_with(directory.path() / embedded_templates().front().name);
  EXPECT_EQ(report.substr(0, 3), std::string(to_string(ErrorCode::io)) + " ") << report;
}

// A kernel compiled without one of its headers' text would be a riddle.
TEST(Templates, FileThatCannotBeReadIsAnIoError) {
  const Directory dangling;
  std::error_code error;
  fs::create_symlink("nowhere.cuh", dangling.path() / "common/aaa.cuh", error);
  if (error) GTEST_SKIP() << "no symbolic links can be made here";
  EXPECT_EQ(report_with(dangling.path()).substr(0, 3), "io ");
}

TEST(Templates, DirectoryNamedLikeATemplateIsPassedOver) {
  const Directory directory;
  fs::create_directories(directory.path() / "common/folder.cuh");
  EXPECT_EQ(report_with(directory.path()), report_with(""));
}

}  // namespace
}  // namespace fa::render
