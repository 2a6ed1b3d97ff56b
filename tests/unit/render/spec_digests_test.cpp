#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cache/digest.hpp"
#include "compile/compiler.hpp"
#include "files.hpp"
#include "plan/arch.hpp"
#include "plan/catalogue.hpp"
#include "render/source.hpp"
#include "spec_list.hpp"

// What a kernel is must not change by accident: canonical texts, rendered units and options are what the cache hashes,
// and equal ones give equal cubins. golden/spec_digests.txt holds digests of all three for the kernels of a fixed list
// of problems, of a pairwise cover of them and, behind these, of every family and field. After a change that is meant,
// accept what is rendered now:
//
//     FA_UPDATE_GOLDEN=1 fa_unit_render --gtest_filter='SpecDigests.*'
//
// and say in the commit which kernels changed, and why.

namespace fa::render {
namespace {

constexpr std::array<const char*, 5> kArchs = {"sm_90a", "sm_80", "sm_89", "sm_100a", "sm_120a"};

std::string digest_line(const NamedSpec& named) {
  constexpr std::size_t kDigits = 12;
  return fmt::format("{} {} {}", cache::digest(canonical(named.spec)).substr(0, kDigits),
                     cache::digest(unit_of(named.spec)).substr(0, kDigits), named.name);
}

std::string options_line(const char* arch_name) {
  std::string text;
  for (const std::string& option : compile::code_options(plan::parse_arch(arch_name))) text += option + '\n';
  return fmt::format("{} options of {}\n", cache::digest(text), arch_name);
}

/// Between two lines.
std::string difference(const std::string& golden, const std::string& now) {
  const auto part = [](const std::string& line, int wanted) {
    std::istringstream words(line);
    std::string word;
    for (int i = 0; i <= wanted; ++i) words >> word;
    return word;
  };
  if (golden.substr(golden.find(' ', 20)) != now.substr(now.find(' ', 20))) return "it is another kernel";
  return part(golden, 0) != part(now, 0) ? "its canonical text changed" : "its unit changed";
}

std::filesystem::path golden_path() {
  return std::filesystem::path(FA_TEST_GOLDEN_DIR) / "spec_digests.txt";
}

TEST(SpecDigests, OfTheGoldenListAndAPairwiseCoverAreTheSame) {
  std::vector<NamedSpec> specs;  // of each line; of those of options one without a name
  std::string text;
  const auto add = [&](const std::vector<NamedSpec>& list) {
    for (const NamedSpec& spec : list) {
      specs.push_back(spec);
      text += digest_line(spec) + '\n';
    }
    return list.size();
  };
  const auto add_options = [&](const char* arch) {
    specs.emplace_back();
    text += options_line(arch);
  };
  EXPECT_GE(add(golden_list()), 100u);
  EXPECT_GE(add(pairwise_list()), 500u);
  for (const char* const name : kArchs) add_options(name);
  EXPECT_GE(add(family_list()), 200u);
  EXPECT_GE(add(field_list()), 100u);
  add_options("sm_75");
  if (std::getenv("FA_UPDATE_GOLDEN") != nullptr) write_file(golden_path(), text);
  const std::vector<std::string> golden = lines_of(read_file(golden_path()));
  const std::vector<std::string> now = lines_of(text);
  const std::size_t common = std::min(golden.size(), now.size());
  std::size_t first = common, different = std::max(golden.size(), now.size()) - common;
  for (std::size_t i = common; i-- > 0;) {
    if (golden[i] == now[i]) continue;
    first = i;
    ++different;
  }
  if (different == 0) return;
  ASSERT_LT(first, common) << golden.size() << " lines became " << now.size();
  ASSERT_FALSE(specs[first].name.empty()) << golden[first] << " became " << now[first];
  FAIL() << different << " of " << golden.size() << " lines differ, and of the first spec " << specs[first].name << ", "
         << difference(golden[first], now[first]) << "\n  was: " << golden[first] << "\n  now: " << now[first] << "\n  "
         << canonical(specs[first].spec) << "\n\n"
         << unit_of(specs[first].spec);
}

/// Kernels, and each with what its fields are.
std::set<std::string> words_of(const std::vector<NamedSpec>& list) {
  std::set<std::string> words;
  for (const NamedSpec& named : list) {
    const std::string text = canonical(named.spec) + ' ';
    const std::string kernel = text.substr(0, text.find(' '));
    words.insert(kernel);
    for (std::size_t at = kernel.size() + 1; at < text.size(); at = text.find(' ', at) + 1) {
      const std::string word = text.substr(at, text.find(' ', at) - at);
      if (word.find('=') != std::string::npos) words.insert(kernel + ' ' + word);
    }
  }
  return words;
}

/// A list that leaves a kernel or a field out watches nothing there.
TEST(SpecDigests, CoverEveryKernelAndField) {
  std::set<std::string> all = words_of(golden_list());
  all.merge(words_of(pairwise_list()));
  all.merge(words_of(family_list()));
  all.merge(words_of(field_list()));
  for (const plan::Kernel* const kernel : plan::catalogue()) {
    EXPECT_TRUE(all.contains(std::string(kernel->name))) << kernel->name;
    for (const plan::Field& field : kernel->fields) {
      if (field.shown == plan::Field::Shown::derived) continue;
      const std::string begin = fmt::format("{} {}=", kernel->name, field.name);
      const auto first = all.lower_bound(begin);
      EXPECT_TRUE(first != all.end() && first->starts_with(begin)) << begin;
    }
  }
}

TEST(SpecDigests, CoverWhatFieldsAre) {
  const std::set<std::string> words = words_of(pairwise_list());
  const auto expect_values = [&](const std::string& kernel, const std::vector<std::string>& fields) {
    for (const std::string& field : fields) EXPECT_TRUE(words.contains(kernel + ' ' + field)) << kernel << ' ' << field;
  };
  for (const char* const kernel : {"sm80_forward", "sm90_forward", "forward_combine", "sm80_backward",
                                   "sm80_backward_dq", "sm90_backward", "backward_preprocess", "backward_convert",
                                   "backward_reduce", "backward_sink", "row_norms", "mask_rows", "mask_keys"}) {
    EXPECT_TRUE(words.contains(kernel)) << kernel;
  }
  expect_values("sm80_forward",
                {"causal=1", "positive_scale=0", "aligned=0", "q_in_registers=1", "loop_bodies=2", "stages=2",
                 "conditional_rescale=0", "pack_gqa=1", "split=1", "warps_n=2", "varlen=1", "dropout=1", "sink=1"});
  expect_values("sm90_forward", {"causal=0", "positive_scale=0", "tile_m=256", "q_buffers=1", "softmax_chunks=1",
                                 "take_turns=0", "pack_gqa=1", "split=1", "skips_hidden=1", "own_ends=1", "dynamic=1",
                                 "affine_product=1", "affine_reach=1", "exact_max=1", "varlen=1", "dropout=1"});
  expect_values("sm80_backward", {"aligned=0", "write_dq=0", "delayed_dq=1", "split=1", "substeps=2", "varlen=1",
                                  "dropout=1", "left_window=1", "chunked=1"});
  expect_values("sm90_backward", {"ordered_dq=1", "cluster=2", "split=1", "write_dq=1", "varlen=1", "dropout=1"});
}

}  // namespace
}  // namespace fa::render
