#include "tools/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include <fa/error.hpp>

#include "cache/files.hpp"

namespace fa::tools {
namespace {

namespace platform = cache::platform;
using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensor bytes are copied as they are");

constexpr std::uint64_t kPrefix = 8;                    // bytes of the header's length
constexpr std::uint64_t kMaxHeader = 100'000'000;       // the limit of the format's own implementation
constexpr std::string_view kMetadata = "__metadata__";  // the one key that is no tensor
constexpr std::string_view kTensorKeys = "dtype, shape, data_offsets";

struct StoredType {
  std::string_view name;
  unsigned bits;
  std::optional<DType> dtype = std::nullopt;
};

constexpr std::array kTypes{StoredType{"F16", 16, DType::f16},
                            StoredType{"BF16", 16, DType::bf16},
                            StoredType{"F32", 32, DType::f32},
                            StoredType{"F64", 64, DType::f64},
                            StoredType{"BOOL", 8},
                            StoredType{"U8", 8, DType::u4x2},
                            StoredType{"I8", 8, DType::i8},
                            StoredType{"F8_E5M2", 8, DType::e5m2},
                            StoredType{"F8_E4M3", 8, DType::e4m3},
                            StoredType{"F8_E8M0", 8},
                            StoredType{"F6_E2M3", 6},
                            StoredType{"F6_E3M2", 6},
                            StoredType{"F4", 4},
                            StoredType{"I16", 16},
                            StoredType{"U16", 16},
                            StoredType{"I32", 32, DType::i32},
                            StoredType{"U32", 32},
                            StoredType{"I64", 64},
                            StoredType{"U64", 64},
                            StoredType{"C64", 64}};

const StoredType* find_type(std::string_view name) {
  const auto* at = std::find_if(kTypes.begin(), kTypes.end(), [&](const StoredType& t) { return t.name == name; });
  return at == kTypes.end() ? nullptr : at;
}

std::string_view stored_name(DType dtype) {
  const auto* at = std::find_if(kTypes.begin(), kTypes.end(), [&](const StoredType& t) { return t.dtype == dtype; });
  return at == kTypes.end() ? std::string_view{} : at->name;
}

std::string type_names() {
  std::string names;
  for (const StoredType& type : kTypes) names.append(names.empty() ? "" : ", ").append(type.name);
  return names;
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kEnough = 120;  // names come from the file and may be of any length
  const bool cut = text.size() > kEnough;
  return '"' + std::string(text.substr(0, kEnough)) + (cut ? "...\"" : "\"");
}

/// Says what is wrong at one place of one file.
class Blame {
 public:
  explicit Blame(std::string path) : path_(std::move(path)) {}
  Blame(std::string path, std::string tensor) : path_(std::move(path)), tensor_(std::move(tensor)) {}

  Blame at(const std::string& tensor) const { return {path_, tensor}; }

  /// `what` = `value`: accepted is `accepted`.
  [[noreturn]] void refuse(const std::string& what, const std::string& value, const std::string& accepted,
                           ErrorCode code = ErrorCode::invalid_argument) const {
    std::vector<ErrorField> fields{{"file", path_}, {"argument", what}, {"value", value}, {"accepted", accepted}};
    if (!tensor_.empty()) fields.push_back({"tensor", tensor_});
    throw Error(code, place() + what + " = " + value + ": accepted is " + accepted, std::move(fields));
  }

  /// The file system said no.
  [[noreturn]] void failed(const std::string& action, const std::error_code& error) const {
    failed(action, error.message());
  }
  [[noreturn]] void failed(const std::string& action, const std::string& reason) const {
    throw Error(ErrorCode::io, place() + "cannot " + action + ": " + reason,
                {{"file", path_}, {"call", action}, {"result", reason}});
  }

  const std::string& path() const { return path_; }

 private:
  std::string place() const {
    return "safetensors file " + in_quotes(path_) + (tensor_.empty() ? "" : ", tensor " + in_quotes(tensor_)) + ": ";
  }
  std::string path_;
  std::string tensor_;
};

std::string describe(const Json& value) {
  if (value.is_structured()) return value.is_object() ? "an object" : "an array of " + std::to_string(value.size());
  return in_quotes(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

// ---- Header text -> JSON ----

/// Refuses what nlohmann's parser lets pass: a key given twice, and nesting that no header has.
class HeaderGuard {
 public:
  explicit HeaderGuard(const Blame& blame) : blame_(blame) {}

  bool operator()(int depth, Json::parse_event_t event, const Json& parsed) {
    constexpr int kDeepest = 2;  // header object, tensor object, array of numbers
    if (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start) {
      if (depth > kDeepest) blame_.refuse("nesting of the header", "more than 3 levels", "at most 3 levels");
      if (event == Json::parse_event_t::object_start) keys_[static_cast<std::size_t>(depth)].clear();
    } else if (event == Json::parse_event_t::key) {
      const std::string& key = parsed.get_ref<const std::string&>();
      const auto level = static_cast<std::size_t>(depth - 1);
      if (!keys_[level].insert(key).second) blame_.refuse("repeated key", in_quotes(key), "keys that differ");
    }
    return true;
  }

 private:
  const Blame& blame_;
  std::array<std::set<std::string>, 3> keys_;  // of the object that is open at each depth
};

Json parse_header(const std::string& text, const Blame& blame) {
  Json header;
  try {
    HeaderGuard guard(blame);
    header = Json::parse(text.begin(), text.end(), std::ref(guard));
  } catch (const Json::exception& error) {
    blame.refuse("header", error.what(), "JSON in UTF-8");
  }
  if (!header.is_object()) blame.refuse("header", describe(header), "a JSON object");
  return header;
}

// ---- JSON -> tensors ----

std::map<std::string, std::string> parse_metadata(const Json& value, const Blame& blame) {
  if (!value.is_object()) blame.refuse(std::string(kMetadata), describe(value), "an object of strings");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) blame.refuse("__metadata__ entry " + in_quotes(key), describe(text), "a string");
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

std::uint64_t parse_unsigned(const Json& value, const std::string& what, const Blame& blame) {
  const auto number =
      value.is_number_unsigned() ? value.get<std::uint64_t>() : std::numeric_limits<std::uint64_t>::max();
  if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    blame.refuse(what, describe(value), "an integer from 0 to 2^63 - 1");
  }
  return number;
}

/// Bytes of a dense tensor; refuses products beyond 64 bits and a part of a byte.
std::uint64_t byte_size(const std::vector<std::int64_t>& shape, unsigned bits, const Blame& blame) {
  std::uint64_t total = bits;
  bool overflow = false;
  for (const std::int64_t axis : shape) {
    overflow |= __builtin_mul_overflow(total, static_cast<std::uint64_t>(axis), &total);
  }
  // An axis of 0 makes every product fit, wherever it stands.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  if (overflow) blame.refuse("shape", "a product beyond 64 bits", "sizes whose product fits the file");
  if (total % 8 != 0) blame.refuse("shape", std::to_string(total) + " bits", "a whole number of bytes");
  return total / 8;
}

StoredTensor parse_tensor(const std::string& name, const Json& entry, const Blame& blame) {
  if (!entry.is_object()) blame.refuse("entry", describe(entry), "an object with " + std::string(kTensorKeys));
  for (const auto& [key, value] : entry.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") {
      blame.refuse("key", in_quotes(key), std::string(kTensorKeys));
    }
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) blame.refuse(key, "missing", std::string(kTensorKeys));
  }
  StoredTensor tensor{.name = name, .dtype = {}, .shape = {}};

  const Json& dtype = entry["dtype"];
  const StoredType* type = dtype.is_string() ? find_type(dtype.get_ref<const std::string&>()) : nullptr;
  if (type == nullptr) blame.refuse("dtype", describe(dtype), type_names());
  tensor.dtype = type->name;

  if (!entry["shape"].is_array()) blame.refuse("shape", describe(entry["shape"]), "an array of integers");
  for (const Json& axis : entry["shape"]) {
    tensor.shape.push_back(static_cast<std::int64_t>(parse_unsigned(axis, "shape", blame)));
  }
  const Json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) blame.refuse("data_offsets", describe(offsets), "[begin, end]");
  tensor.begin = parse_unsigned(offsets[0], "data_offsets", blame);
  tensor.end = parse_unsigned(offsets[1], "data_offsets", blame);
  if (tensor.end < tensor.begin) {
    blame.refuse("data_offsets", std::to_string(tensor.begin) + " to " + std::to_string(tensor.end), "begin <= end");
  }
  const std::uint64_t expected = byte_size(tensor.shape, type->bits, blame);
  if (tensor.end - tensor.begin != expected) {
    blame.refuse("data_offsets", std::to_string(tensor.end - tensor.begin) + " bytes",
                 std::to_string(expected) + " bytes, the size of the shape in " + tensor.dtype);
  }
  return tensor;
}

/// The tensors must tile the data: one after the other, from its first byte to its last.
void check_tiling(const std::vector<StoredTensor>& tensors, std::uint64_t data_size, const Blame& blame) {
  std::uint64_t expected = 0;
  for (const StoredTensor& tensor : tensors) {
    const Blame here = blame.at(tensor.name);
    if (tensor.end > data_size) {
      here.refuse("data_offsets", "an end of " + std::to_string(tensor.end),
                  "at most " + std::to_string(data_size) + ", the bytes that the file has", ErrorCode::io);
    }
    if (tensor.begin != expected) {
      const char* why = tensor.begin < expected ? " (tensors overlap)" : " (a hole in the data)";
      here.refuse("data_offsets", "a begin of " + std::to_string(tensor.begin), std::to_string(expected) + why);
    }
    expected = tensor.end;
  }
  if (expected != data_size) {
    blame.refuse("data", std::to_string(data_size) + " bytes",
                 std::to_string(expected) + ", the end of the last tensor");
  }
}

std::uint64_t regular_file_size(const Blame& blame) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(blame.path(), error);
  if (error) blame.failed("open it", error);
  if (!std::filesystem::is_regular_file(status)) {
    blame.refuse("path", in_quotes(blame.path()), "a regular file", ErrorCode::io);
  }
  const std::uintmax_t size = std::filesystem::file_size(blame.path(), error);
  if (error) blame.failed("read its size", error);
  return size;
}

void read_exactly(std::ifstream& file, char* to, std::uint64_t count, const Blame& blame) {
  file.read(to, static_cast<std::streamsize>(count));
  if (static_cast<std::uint64_t>(file.gcount()) != count) {
    blame.refuse("bytes read", std::to_string(file.gcount()), std::to_string(count), ErrorCode::io);
  }
}

std::ifstream open_for_reading(const Blame& blame) {
  std::ifstream file(blame.path(), std::ios::binary);
  if (!file) blame.failed("open it", {errno, std::generic_category()});
  return file;
}

// ---- Writing ----

/// Where the bytes of a new file go: into a temporary file beside its destination, gone at the end of the scope unless
/// it was moved there; or into what stands there, where that is no regular file.
class OutputFile {
 public:
  explicit OutputFile(const Blame& blame) : blame_(blame), destination_(find(blame)) {
    if (destination_.in_place) {
      file_ = cache::Descriptor(platform::open_to_write(destination_.path));
      if (!file_.valid()) fail("open it");
      return;
    }
    path_ = destination_.path;
    path_ += cache::temporary_name(".tmp");
    file_ = cache::Descriptor(platform::create_file(platform::kHere, path_, platform::Readers::system_default));
    if (file_.valid()) return;
    path_.clear();
    fail("create a file beside it");
  }
  ~OutputFile() {
    { const cache::Descriptor closed = std::move(file_); }
    if (!path_.empty()) platform::remove_file(platform::kHere, path_);
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, std::size_t size) {
    if (!cache::write_all(file_.get(), {static_cast<const std::byte*>(data), size})) fail("write");
  }

  void finish() {
    if (!destination_.in_place && !platform::flush(file_.get())) fail("write");
    if (!platform::close(file_.release())) fail("write");
    if (destination_.in_place) return;
    if (!platform::rename_file(platform::kHere, path_, platform::kHere, destination_.path)) fail("replace it");
    path_.clear();
  }

 private:
  static cache::Destination find(const Blame& blame) {
    std::string problem;
    std::optional<cache::Destination> found = cache::find_destination(blame.path(), &problem);
    if (!found) blame.failed("write it", problem);
    return *std::move(found);
  }
  [[noreturn]] void fail(const std::string& action) const { blame_.failed(action, {errno, std::generic_category()}); }

  const Blame& blame_;
  cache::Destination destination_;
  std::filesystem::path path_;  ///< of the temporary file, while there is one
  cache::Descriptor file_;
};

using Named = std::pair<const std::string, Tensor>;

/// Wide elements first: every tensor then starts at a multiple of its element size.
std::vector<const Named*> in_file_order(const std::map<std::string, Tensor>& tensors) {
  std::vector<const Named*> order;
  for (const Named& named : tensors) order.push_back(&named);
  std::stable_sort(order.begin(), order.end(),
                   [](const Named* a, const Named* b) { return size_of(a->second.dtype) > size_of(b->second.dtype); });
  return order;
}

void check_for_writing(const Named& named, const Blame& blame) {
  const auto& [name, tensor] = named;
  const Blame here = blame.at(name);
  if (name == kMetadata) here.refuse("name", in_quotes(name), "any other name");
  for (const std::int64_t axis : tensor.shape) {
    if (axis < 0) here.refuse("shape", std::to_string(axis), "sizes from 0 on");
  }
  const std::uint64_t expected = byte_size(tensor.shape, static_cast<unsigned>(8 * size_of(tensor.dtype)), here);
  if (tensor.bytes.size() != expected) {
    here.refuse("bytes", std::to_string(tensor.bytes.size()), std::to_string(expected) + ", the size of the shape");
  }
}

std::string header_text(const std::vector<const Named*>& order, const std::map<std::string, std::string>& metadata,
                        const Blame& blame) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(kMetadata)] = metadata;
  std::uint64_t offset = 0;
  for (const Named* named : order) {
    const auto& [name, tensor] = *named;
    const std::uint64_t end = offset + tensor.bytes.size();
    header[name] = {{"dtype", stored_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception& error) {
    blame.refuse("names and metadata", error.what(), "text in UTF-8");
  }
  text.append((kPrefix - text.size() % kPrefix) % kPrefix, ' ');  // the data then starts aligned
  if (text.size() > kMaxHeader) {
    blame.refuse("header", std::to_string(text.size()) + " bytes", "at most " + std::to_string(kMaxHeader));
  }
  return text;
}

}  // namespace

TensorView Tensor::view() {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t axis = shape.size(); axis-- > 1;) {
    // Only beside an axis of 0, and then no element is read.
    const bool beyond = __builtin_mul_overflow(strides[axis], shape[axis], &strides[axis - 1]);
    if (beyond) strides[axis - 1] = std::numeric_limits<std::int64_t>::max();
  }
  return {static_cast<void*>(bytes.data()), dtype, std::span<const std::int64_t>(shape),
          std::span<const std::int64_t>(strides)};
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  const Blame blame(path);
  const std::uint64_t size = regular_file_size(blame);
  if (size < kPrefix) blame.refuse("size", std::to_string(size) + " bytes", "at least 8 bytes", ErrorCode::io);
  std::ifstream file = open_for_reading(blame);
  std::array<unsigned char, kPrefix> prefix{};
  read_exactly(file, reinterpret_cast<char*>(prefix.data()), kPrefix, blame);
  std::uint64_t length = 0;
  for (std::size_t n = 0; n < kPrefix; ++n) length |= std::uint64_t{prefix[n]} << (8 * n);
  const std::string length_text = std::to_string(length) + " bytes";
  if (length > kMaxHeader) blame.refuse("header length", length_text, "at most " + std::to_string(kMaxHeader));
  if (length > size - kPrefix) {
    blame.refuse("header length", length_text, "at most the " + std::to_string(size - kPrefix) + " that follow",
                 ErrorCode::io);
  }
  std::string text(length, '\0');
  read_exactly(file, text.data(), length, blame);

  SafetensorsFile result;
  result.path_ = path;
  result.data_begin_ = kPrefix + length;
  const Json header = parse_header(text, blame);
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadata) {
      result.metadata_ = parse_metadata(entry, blame);
    } else {
      result.tensors_.push_back(parse_tensor(name, entry, blame.at(name)));
    }
  }
  std::sort(result.tensors_.begin(), result.tensors_.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  check_tiling(result.tensors_, size - result.data_begin_, blame);
  return result;
}

const StoredTensor* SafetensorsFile::find(const std::string& name) const {
  const auto at =
      std::find_if(tensors_.begin(), tensors_.end(), [&](const StoredTensor& tensor) { return tensor.name == name; });
  return at == tensors_.end() ? nullptr : &*at;
}

bool SafetensorsFile::contains(const std::string& name) const {
  return find(name) != nullptr;
}

Tensor SafetensorsFile::read(const std::string& name) const {
  const Blame blame(path_, name);
  const StoredTensor* stored = find(name);
  if (stored == nullptr) {
    std::string names;
    for (const StoredTensor& tensor : tensors_) names.append(names.empty() ? "" : ", ").append(in_quotes(tensor.name));
    blame.refuse("tensor", "missing", names.empty() ? "nothing: the file is empty" : names);
  }
  const std::optional<DType> dtype = find_type(stored->dtype)->dtype;
  if (!dtype) blame.refuse("dtype", stored->dtype, "F16, BF16, F32, F64, I32, I8, F8_E4M3, F8_E5M2 or U8");
  Tensor tensor{*dtype, stored->shape, std::vector<std::byte>(stored->end - stored->begin)};
  std::ifstream file = open_for_reading(blame);
  file.seekg(static_cast<std::streamoff>(data_begin_ + stored->begin));
  read_exactly(file, reinterpret_cast<char*>(tensor.bytes.data()), tensor.bytes.size(), blame);
  return tensor;
}

void write_safetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const Blame blame(path);
  for (const Named& named : tensors) check_for_writing(named, blame);
  const std::vector<const Named*> order = in_file_order(tensors);
  const std::string text = header_text(order, metadata, blame);
  std::array<unsigned char, kPrefix> prefix{};
  for (std::size_t n = 0; n < kPrefix; ++n) prefix[n] = static_cast<unsigned char>(text.size() >> (8 * n));

  OutputFile file(blame);
  file.write(prefix.data(), prefix.size());
  file.write(text.data(), text.size());
  for (const Named* named : order) file.write(named->second.bytes.data(), named->second.bytes.size());
  file.finish();
}

}  // namespace fa::tools
