#ifndef FA_TESTS_FUZZ_C_ABI_MEMORY_HPP_
#define FA_TESTS_FUZZ_C_ABI_MEMORY_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <fa/fa.h>

#include "fuzz/random.hpp"

namespace fa::fuzz {

/// Bytes of the elements that a tensor names, counted from its first: [low, high). Equal where there are none. Exact
/// below 2^53, and beyond that as large as no memory is.
struct Reach {
  double low = 0;
  double high = 0;
};
Reach reach_of(const fa_tensor& tensor);

std::size_t size_of(std::int32_t dtype);

/// Memory of one case. A block is exactly as large as it was asked to be, so that a sanitizer sees the first byte
/// beyond.
class Memory {
 public:
  explicit Memory(Random& random) : random_(random) {}
  ~Memory() { clear(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  /// Of zeros, at a multiple of 16 bytes.
  std::byte* block(std::size_t bytes);

  /// Where the first element of `tensor` may stand so that all of them are in memory: in a block of its own, in one of
  /// an earlier tensor where `shared`, or, if far apart, in address space without memory behind it. Null where no
  /// address space is that large.
  void* place(const fa_tensor& tensor, bool output, bool shared);

  /// Whether every block of an output is as it was.
  bool outputs_untouched() const;

  /// Gives everything back.
  void clear();

 private:
  struct Block {
    std::unique_ptr<std::byte[]> bytes;
    std::size_t size = 0;
    bool output = false;  ///< of one tensor alone
  };
  void fill(const fa_tensor& tensor, std::byte* bytes, std::size_t size);

  Random& random_;
  std::vector<Block> blocks_;
  std::vector<std::size_t> tensors_;  ///< which of them are of tensors
  bool far_ = false;                  ///< something stands far apart
};

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_C_ABI_MEMORY_HPP_
