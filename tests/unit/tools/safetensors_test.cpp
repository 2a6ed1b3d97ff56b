#include "tools/safetensors.hpp"

#include <gtest/gtest.h>
#if !defined(_WIN32)
#include <sys/resource.h>
#endif

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>

#include <fa/error.hpp>

#include "tests/support/posix_names.hpp"

namespace fa::tools {
namespace {

namespace fs = std::filesystem;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

std::string join(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text.append(part);
  return text;
}

std::string little_endian(std::uint64_t number) {
  std::string text;
  for (int n = 0; n < 8; ++n) text += static_cast<char>(number >> (8 * n));
  return text;
}

std::string file_text(const std::string& header, const std::string& data) {
  return little_endian(header.size()) + header + data;
}

class Safetensors : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "fa_safetensors_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string path(const std::string& name = "t.safetensors") const { return (directory_ / name).string(); }

  std::string put(const std::string& text) const {
    std::ofstream(path(), std::ios::binary) << text;
    return path();
  }

  std::string get(const std::string& name = "t.safetensors") const {
    std::ostringstream text;
    text << std::ifstream(path(name), std::ios::binary).rdbuf();
    return text.str();
  }

  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }

  /// The error must have this code and name the file and every one of `words`.
  void expect_error(ErrorCode code, const std::vector<std::string>& words, const std::function<void()>& action) const {
    try {
      action();
      FAIL() << "no error; expected one that says " << testing::PrintToString(words);
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_EQ(error.code(), code) << what;
      EXPECT_NE(what.find(path()), std::string::npos) << what;
      for (const std::string& word : words) EXPECT_NE(what.find(word), std::string::npos) << word << " in: " << what;
      EXPECT_EQ(error.field("file"), path());
    }
  }

  void expect_bad_file(const std::string& text, ErrorCode code, const std::vector<std::string>& words) const {
    put(text);
    expect_error(code, words, [&] { SafetensorsFile::open(path()); });
  }
  void expect_bad_header(const std::string& header, const std::vector<std::string>& words,
                         const std::string& data = std::string(8, 'x')) const {
    expect_bad_file(file_text(header, data), ErrorCode::invalid_argument, words);
  }

  fs::path directory_;
};

TEST_F(Safetensors, ReadsWhatAnotherProgramWrote) {
  put(file_text(R"({"__metadata__":{"who":"me"},"b":{"dtype":"I64","shape":[],"data_offsets":[4,12]},)"
                R"("a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}   )",
                "abcd12345678"));
  const SafetensorsFile file = SafetensorsFile::open(path());
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.tensors()[0].name, "a");
  EXPECT_EQ(file.tensors()[1].dtype, "I64");
  EXPECT_TRUE(file.tensors()[1].shape.empty());
  EXPECT_EQ(file.metadata().at("who"), "me");
  EXPECT_TRUE(file.contains("b"));
  EXPECT_FALSE(file.contains("c"));
  Tensor a = file.read("a");
  EXPECT_EQ(a.dtype, DType::bf16);
  EXPECT_EQ(a.shape, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(a.bytes, bytes_of("abcd"));
  EXPECT_EQ(a.view().strides[0], 2);
  expect_error(ErrorCode::invalid_argument, {"\"b\"", "I64", "BF16"}, [&] { file.read("b"); });
  expect_error(ErrorCode::invalid_argument, {"\"c\"", "missing", "\"a\", \"b\""}, [&] { file.read("c"); });
}

TEST_F(Safetensors, RoundTripsEveryDtype) {
  std::map<std::string, Tensor> tensors;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32, DType::e4m3, DType::e5m2,
                            DType::i8, DType::u4x2}) {
    Tensor tensor{dtype, {3, 1, 5}, std::vector<std::byte>(15 * size_of(dtype))};
    for (std::size_t n = 0; n < tensor.bytes.size(); ++n) tensor.bytes[n] = static_cast<std::byte>(n * 37);
    tensors[to_string(dtype)] = tensor;
  }
  tensors["scalar"] = {DType::f32, {}, bytes_of("1234")};
  tensors["empty"] = {DType::f32, {4, 0, 2}, {}};
  tensors["quotes \" and \xc3\xa9"] = {DType::f32, {1}, bytes_of("5678")};
  write_safetensors(path(), tensors, {{"scale", "0.125"}});
  const SafetensorsFile file = SafetensorsFile::open(path());
  EXPECT_EQ(file.tensors().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("scale"), "0.125");
  for (const auto& [name, tensor] : tensors) {
    const Tensor again = file.read(name);
    EXPECT_EQ(again.dtype, tensor.dtype) << name;
    EXPECT_EQ(again.shape, tensor.shape) << name;
    EXPECT_EQ(again.bytes, tensor.bytes) << name;
  }
}

TEST_F(Safetensors, EveryWrittenTensorIsAligned) {
  write_safetensors(path(),
                    {{"a", {DType::f16, {3}, bytes_of("123456")}}, {"b", {DType::f64, {1}, bytes_of("12345678")}}});
  const SafetensorsFile file = SafetensorsFile::open(path());
  EXPECT_EQ(file.tensors()[0].name, "b");
  EXPECT_EQ((fs::file_size(path()) - 14) % 8, 0u);
}

TEST_F(Safetensors, AnEmptyFileOfTensorsIsLegal) {
  write_safetensors(path(), {});
  EXPECT_TRUE(SafetensorsFile::open(path()).tensors().empty());
}

// Whose other sizes may be anything: strides end at the greatest number.
TEST_F(Safetensors, ATensorWithoutElementsHasAView) {
  put(file_text(R"({"a":{"dtype":"I32","shape":[0,9222,3372036854870577],"data_offsets":[0,0]}})", ""));
  Tensor tensor = SafetensorsFile::open(path()).read("a");
  const TensorView view = tensor.view();
  EXPECT_EQ(view.elements(), 0);
  EXPECT_EQ(view.strides[0], std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(view.strides[1], 3372036854870577);
  EXPECT_EQ(view.strides[2], 1);
}

TEST_F(Safetensors, RefusesFilesThatCannotBeRead) {
  expect_error(ErrorCode::io, {"open"}, [&] { SafetensorsFile::open(path()); });
  fs::create_directory(path());
  expect_error(ErrorCode::io, {"regular file"}, [&] { SafetensorsFile::open(path()); });
}

TEST_F(Safetensors, RefusesTruncatedFiles) {
  expect_bad_file("", ErrorCode::io, {"0 bytes", "at least 8"});
  expect_bad_file("1234567", ErrorCode::io, {"7 bytes", "at least 8"});
  expect_bad_file(little_endian(100) + "{}", ErrorCode::io, {"header length = 100", "2 that follow"});
  const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  expect_bad_file(file_text(header, "1234567"), ErrorCode::io, {"\"a\"", "an end of 8", "at most 7"});
}

TEST_F(Safetensors, RefusesHugeHeaders) {
  expect_bad_file(little_endian(~std::uint64_t{0}) + "{}", ErrorCode::invalid_argument, {"18446744073709551615"});
  expect_bad_file(little_endian(100'000'001) + "{}", ErrorCode::invalid_argument, {"100000001", "at most 100000000"});
}

TEST_F(Safetensors, RefusesHeadersThatAreNotAnObject) {
  expect_bad_header("", {"header", "JSON"});
  expect_bad_header("{", {"header", "JSON"});
  expect_bad_header("{} {}", {"header", "JSON"});
  expect_bad_header("{\"a\xff\":1}", {"header", "JSON"});
  expect_bad_header("[1,2]", {"an array of 2", "a JSON object"});
  expect_bad_header("7", {"\"7\"", "a JSON object"});
  expect_bad_header("null", {"null", "a JSON object"});
}

TEST_F(Safetensors, RefusesDeepNesting) {
  expect_bad_header(R"({"a":{"shape":[[1]]}})", {"nesting", "at most 3"});
  std::string deep = "{\"a\":";
  for (const char bracket : {'[', ']'}) deep += std::string(1'000'000, bracket);
  expect_bad_header(deep + "}", {"nesting", "at most 3"});
}

TEST_F(Safetensors, RefusesRepeatedKeys) {
  const std::string entry = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  expect_bad_header(join({"{", entry, ",", entry, "}"}), {"repeated key", "\"a\""});
  expect_bad_header(R"({"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}})",
                    {"repeated", "\"dtype\""});
  expect_bad_header(R"({"__metadata__":{"k":"1","k":"2"}})", {"repeated", "\"k\""});
}

TEST_F(Safetensors, RefusesBadMetadata) {
  expect_bad_header(R"({"__metadata__":[]})", {"__metadata__", "an object of strings"});
  expect_bad_header(R"({"__metadata__":{"k":1}})", {"__metadata__", "\"k\"", "a string"});
}

TEST_F(Safetensors, RefusesIncompleteEntries) {
  expect_bad_header(R"({"a":1})", {"tensor \"a\"", "an object with dtype, shape, data_offsets"});
  expect_bad_header(R"({"a":{"shape":[2],"data_offsets":[0,8]}})", {"tensor \"a\"", "dtype = missing"});
  expect_bad_header(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", {"shape = missing"});
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[2]}})", {"data_offsets = missing"});
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"stride":[1]}})", {"\"stride\""});
}

TEST_F(Safetensors, RefusesBadDtypes) {
  expect_bad_header(R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})", {"tensor \"a\"", "F99", "BF16"});
  expect_bad_header(R"({"a":{"dtype":"f32","shape":[2],"data_offsets":[0,8]}})", {"f32", "F32"});
  expect_bad_header(R"({"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", {"dtype", "\"4\""});
}

TEST_F(Safetensors, RefusesBadShapes) {
  const auto with_shape = [](const std::string& shape) {
    return join({R"({"a":{"dtype":"F32","shape":)", shape, R"(,"data_offsets":[0,8]}})"});
  };
  expect_bad_header(with_shape("2"), {"tensor \"a\"", "shape", "an array"});
  expect_bad_header(with_shape("[-2]"), {"shape", "-2", "0 to 2^63 - 1"});
  expect_bad_header(with_shape("[2.0]"), {"shape", "2.0"});
  expect_bad_header(with_shape("[\"2\"]"), {"shape", "2"});
  expect_bad_header(with_shape("[9223372036854775808]"), {"shape", "9223372036854775808"});
  expect_bad_header(with_shape("[99999999999999999999999]"), {"shape", "0 to 2^63 - 1"});
  expect_bad_header(with_shape("[4294967296,4294967296]"), {"shape", "beyond 64 bits"});
  expect_bad_header(with_shape("[4294967296,4294967296,2]"), {"shape", "beyond 64 bits"});
  // 2^62 elements of 4 bytes wrap to 0 bytes; with the offsets of an empty tensor that would look right.
  expect_bad_header(R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})", {"beyond 64 bits"},
                    "");
  expect_bad_header(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", {"12 bits", "whole number of bytes"},
                    "12");
}

TEST_F(Safetensors, RefusesBadOffsets) {
  const auto with_offsets = [](const std::string& offsets) {
    return join({R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)", offsets, "}}"});
  };
  expect_bad_header(with_offsets("8"), {"tensor \"a\"", "data_offsets", "[begin, end]"});
  expect_bad_header(with_offsets("[0,8,9]"), {"data_offsets", "[begin, end]"});
  expect_bad_header(with_offsets("[-8,0]"), {"data_offsets", "-8"});
  expect_bad_header(with_offsets("[8,0]"), {"8 to 0", "begin <= end"});
  expect_bad_header(with_offsets("[0,4]"), {"4 bytes", "8 bytes, the size of the shape in F32"}, "1234");
  expect_bad_header(with_offsets("[1,9]"), {"a begin of 1", "hole"}, "123456789");
  expect_bad_header(with_offsets("[0,8]"), {"data = 9 bytes", "8, the end of the last tensor"}, "123456789");
  expect_bad_header("{}", {"data = 8 bytes"});
}

TEST_F(Safetensors, RefusesOverlapsAndHoles) {
  const auto two = [](int begin) {
    return join({R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],)",
                 R"("data_offsets":[)", std::to_string(begin), ",", std::to_string(begin + 4), "]}}"});
  };
  expect_bad_header(two(2), {"tensor \"b\"", "a begin of 2", "overlap"}, "123456");
  expect_bad_header(two(0), {"tensor \"b\"", "overlap"}, "1234");
  expect_bad_header(two(5), {"tensor \"b\"", "a begin of 5", "hole"}, "123456789");
}

TEST_F(Safetensors, ATensorThatVanishesAfterOpeningIsAnError) {
  write_safetensors(path(), {{"a", {DType::f32, {2}, bytes_of("12345678")}}});
  const SafetensorsFile file = SafetensorsFile::open(path());
  fs::resize_file(path(), fs::file_size(path()) - 1);
  expect_error(ErrorCode::io, {"\"a\"", "bytes read = 7", "8"}, [&] { file.read("a"); });
  fs::remove(path());
  expect_error(ErrorCode::io, {"open"}, [&] { file.read("a"); });
}

TEST_F(Safetensors, NeverWritesWhatItWouldNotRead) {
  const auto write = [&](const std::string& name, Tensor tensor) {
    return [this, name, tensor] { write_safetensors(path(), {{name, tensor}}); };
  };
  constexpr ErrorCode kCode = ErrorCode::invalid_argument;
  expect_error(kCode, {"\"a\"", "7", "8, the size"}, write("a", {DType::f32, {2}, bytes_of("1234567")}));
  expect_error(kCode, {"\"a\"", "-1"}, write("a", {DType::f32, {-1}, {}}));
  expect_error(kCode, {"__metadata__"}, write("__metadata__", {DType::f32, {0}, {}}));
  expect_error(kCode, {"UTF-8"}, write("\xff", {DType::f32, {0}, {}}));
  EXPECT_EQ(files(), 0u);
}

TEST_F(Safetensors, ReplacesAFileAndLeavesNothingElse) {
  put("something old");
  write_safetensors(path(), {{"a", {DType::f32, {1}, bytes_of("1234")}}});
  EXPECT_TRUE(SafetensorsFile::open(path()).contains("a"));
  EXPECT_EQ(files(), 1u);
}

TEST_F(Safetensors, FailedWritesLeaveNothing) {
  fs::create_directory(path());
  expect_error(ErrorCode::io, {"is a directory"}, [&] { write_safetensors(path(), {}); });
  EXPECT_EQ(files(), 1u);
  try {
    write_safetensors(path("missing/t.safetensors"), {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
  }
}

#if !defined(_WIN32)
TEST_F(Safetensors, AFullDiskKeepsTheOldFile) {
  put("something old");
  const Tensor large{DType::f32, {1 << 16}, std::vector<std::byte>(1 << 18)};
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 1 << 16;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error(ErrorCode::io, {"cannot write"}, [&] { write_safetensors(path(), {{"a", large}}); });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(get(), "something old");
  EXPECT_EQ(files(), 1u);
}
#endif

}  // namespace
}  // namespace fa::tools
