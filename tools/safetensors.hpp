#ifndef FA_TOOLS_SAFETENSORS_HPP_
#define FA_TOOLS_SAFETENSORS_HPP_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <fa/tensor.hpp>

/// Reads and writes safetensors files: 8 bytes of little-endian header length, a JSON header, and the tensors' bytes.
/// Nothing in a file is trusted. Errors are fa::Error: io when the file system fails or the file ends too early,
/// invalid_argument for everything else that is wrong with a file or a request.
namespace fa::tools {

/// One entry of a header.
struct StoredTensor {
  std::string name;
  std::string dtype;                ///< as the file spells it: "F16", "BF16", "I64", ...
  std::vector<std::int64_t> shape;  ///< any rank, scalars included
  std::uint64_t begin = 0;          ///< bytes [begin, end) of the data behind the header
  std::uint64_t end = 0;
};

/// A dense row-major tensor in host memory.
struct Tensor {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;

  /// Valid while `bytes` is. Throws fa::Error(invalid_argument) unless there are 1 to 4 axes.
  TensorView view();
};

class SafetensorsFile {
 public:
  /// Reads and validates the header, and nothing of the data.
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const { return path_; }
  /// In the order of their bytes; dtypes that fa has no use for are listed too.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(const std::string& name) const;

  /// Loads one tensor of dtype F16, BF16, F32, F64, I32, I8, F8_E4M3, F8_E5M2 or U8. The last is u4x2: two codes a
  /// byte.
  Tensor read(const std::string& name) const;

 private:
  SafetensorsFile() = default;
  const StoredTensor* find(const std::string& name) const;

  std::string path_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::uint64_t data_begin_ = 0;  // offset in the file
};

/// Writes a new file and puts it in the place of `path` in one step: readers see the old file or the whole new one, and
/// a failure leaves nothing behind. A link stays, and what it leads to is replaced; a device or a FIFO is written to.
void write_safetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace fa::tools

#endif  // FA_TOOLS_SAFETENSORS_HPP_
