#include "tools/safetensors.hpp"

#include <cstring>
#include <string_view>

#include <fa/error.hpp>

#include "fuzz/targets/memory_file.hpp"
#include "fuzz/targets/target.hpp"

namespace fa::fuzz {
namespace {

void read_all(const tools::SafetensorsFile& file) {
  for (const tools::StoredTensor& stored : file.tensors()) {
    try {
      tools::Tensor tensor = file.read(stored.name);
      require(tensor.bytes.size() == stored.end - stored.begin, "a tensor has the bytes that its header says");
      const TensorView view = tensor.view();
      require(static_cast<std::size_t>(view.elements()) * size_of(view.dtype) == tensor.bytes.size(),
              "the elements of a tensor are its bytes");
    } catch (const Error&) {  // of a dtype or rank that fa has no use for
    }
  }
}

void open(std::string_view bytes) {
  const MemoryFile memory(bytes);
  try {
    read_all(tools::SafetensorsFile::open(memory.path()));
  } catch (const Error& error) {
    require(!error.field("file").empty(), "an error names its file");
  }
}

/// A file whose header has the length of `header`, for mutations to get as far as the header's text.
std::string with_length(std::string_view header, std::string_view data) {
  std::string result(8, '\0');
  const std::uint64_t length = header.size();
  std::memcpy(result.data(), &length, sizeof length);
  return result.append(header).append(data);
}

}  // namespace

std::vector<std::string> seeds() {
  return {with_length(R"({"q":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]}})", std::string(12, 'x')),
          with_length(R"({"__metadata__":{"a":"b"},"k":{"dtype":"BF16","shape":[1,1,2,8],"data_offsets":[0,32]},)"
                      R"("v":{"dtype":"F4","shape":[4],"data_offsets":[32,34]}})",
                      std::string(34, '\x3f')),
          with_length(R"({"e":{"dtype":"I64","shape":[0,9223372036854775807],"data_offsets":[0,0]}})", ""),
          with_length(R"({"e":{"dtype":"I32","shape":[0,9222,3372036854870577],"data_offsets":[0,0]}})", ""),
          with_length("{}", "")};
}

}  // namespace fa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  fa::fuzz::open(bytes);
  // The same behind a length that fits: the first closing brace that is followed by no printable byte ends the header.
  if (size < 8) return 0;
  const std::string_view rest = bytes.substr(8);
  const std::size_t end = rest.rfind("}}");
  const std::size_t length = end == std::string_view::npos ? rest.size() : end + 2;
  fa::fuzz::open(fa::fuzz::with_length(rest.substr(0, length), rest.substr(length)));
  return 0;
}
