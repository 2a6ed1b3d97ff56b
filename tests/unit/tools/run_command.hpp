#ifndef FA_TESTS_UNIT_TOOLS_RUN_COMMAND_HPP_
#define FA_TESTS_UNIT_TOOLS_RUN_COMMAND_HPP_

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "run_program.hpp"
#include "support/attention_case.hpp"
#include "support/paged_case.hpp"
#include "tests/support/posix_names.hpp"
#include "tools/safetensors.hpp"

/// `fa run` on the host device, of files that a test writes.
namespace fa::test {

inline tools::Tensor stored(const HostTensor& tensor, bool heads = true) {
  const TensorView view = tensor.view();
  tools::Tensor result{view.dtype, {view.shape.begin(), view.shape.begin() + view.rank}, tensor.bytes()};
  if (!heads) result.shape.erase(result.shape.begin() + 1);
  return result;
}

class RunCommand : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "fa_run_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string path(const char* name) const { return (directory_ / name).string(); }

  /// Whether `fa run` on `tensors` succeeds.
  bool run(const std::map<std::string, tools::Tensor>& tensors, const std::string& options) const {
    tools::write_safetensors(path("in"), tensors);
    const Ran ran = run_program(
        FA_TEST_CLI, "run --device host --input '" + path("in") + "' --output '" + path("out") + "' " + options);
    std::ofstream(path("log"), std::ios::binary) << ran.output;
    return ran.status == 0;
  }

  void expect_written(const char* name, const TensorView& expected, double allowed) const {
    tools::Tensor tensor = tools::SafetensorsFile::open(path("out")).read(name);
    EXPECT_LE(compare(tensor.view(), expected).max_abs_over_max_ref, allowed) << name;
  }

  /// What the last run printed.
  std::string log() const {
    std::ifstream file(path("log"), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::filesystem::path directory_;
};

inline tools::Tensor numbers(const std::vector<std::int32_t>& values, std::vector<std::int64_t> shape) {
  tools::Tensor tensor{DType::i32, std::move(shape), std::vector<std::byte>(4 * values.size())};
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

/// What a cache file holds besides q.
inline std::map<std::string, tools::Tensor> cache_file(const PagedData& data) {
  const auto b = static_cast<std::int64_t>(data.used_kv.size());
  std::map<std::string, tools::Tensor> tensors = {{"seqused_kv", numbers(data.used_kv, {b})}};
  if (!data.contiguous) tensors["block_table"] = numbers(data.table, {data.table_rows, data.max_pages});
  if (!data.begin.empty()) tensors["seq_begin"] = numbers(data.begin, {b});
  if (!data.batch_index.empty()) tensors["batch_index"] = numbers(data.batch_index, {b});
  return tensors;
}

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_TOOLS_RUN_COMMAND_HPP_
