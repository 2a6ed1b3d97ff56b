#ifndef FA_TESTS_GPU_SCOPED_STREAM_HPP_
#define FA_TESTS_GPU_SCOPED_STREAM_HPP_

#include "driver/driver.hpp"

namespace fa::test {

/// A stream of its own, apart from the default one.
class ScopedStream {
 public:
  ScopedStream() { driver::check(driver::api().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate"); }
  ~ScopedStream() { driver::api().cuStreamDestroy(stream_); }
  ScopedStream(const ScopedStream&) = delete;
  ScopedStream& operator=(const ScopedStream&) = delete;
  CUstream get() const { return stream_; }

 private:
  CUstream stream_ = nullptr;
};

}  // namespace fa::test

#endif  // FA_TESTS_GPU_SCOPED_STREAM_HPP_
