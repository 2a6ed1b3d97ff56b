#ifndef FA_SRC_API_SCRATCH_HPP_
#define FA_SRC_API_SCRATCH_HPP_

#include <cstddef>

#include <fa/attention.hpp>

#include "driver/driver.hpp"

namespace fa::api {

/// The scratch memory of one call: the caller's, or the stream's memory pool's, which gets it back in the end.
class Scratch {
 public:
  /// Throws fa::Error: invalid_argument for a misaligned workspace, out_of_memory for one of less than `needed` bytes
  /// or when the pool has none.
  Scratch(const Workspace& workspace, std::size_t needed, Stream stream);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const noexcept { return data_; }
  /// Gives pool memory back now. Throws fa::Error(cuda).
  void release();

 private:
  void* data_ = nullptr;
  CUdeviceptr owned_ = 0;
  Stream stream_ = nullptr;
};

}  // namespace fa::api

#endif  // FA_SRC_API_SCRATCH_HPP_
