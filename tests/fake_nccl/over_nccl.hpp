#ifndef FA_TESTS_FAKE_NCCL_OVER_NCCL_HPP_
#define FA_TESTS_FAKE_NCCL_OVER_NCCL_HPP_

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <fa/parallel.hpp>

#include "fake_driver/fake_driver.hpp"
#include "fake_nccl/fake_nccl.hpp"

namespace fa::test {

/// Before anything asks for NCCL. Not by CTest, which passes one such variable on.
inline const int g_named = setenv("FA_NCCL_PATH", FA_FAKE_NCCL, 1);

inline void* at(std::uintptr_t page) {
  return reinterpret_cast<void*>((std::uintptr_t{1} << 50) + (page << 32));
}

class OverNccl : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(g_named, 0);
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == nullptr || dlsym(driver, fake_driver::kStreamCalls) == nullptr) {
      GTEST_SKIP() << "the fake driver is not on LD_LIBRARY_PATH";
    }
    void* const fake = dlopen(FA_FAKE_NCCL, RTLD_NOW);
    ASSERT_NE(fake, nullptr) << dlerror();
    launches_ = reinterpret_cast<fake_driver::Launches>(dlsym(driver, fake_driver::kLaunches));
    stream_calls_ = reinterpret_cast<fake_driver::StreamCalls>(dlsym(driver, fake_driver::kStreamCalls));
    done_ = &reinterpret_cast<fake_driver::Done>(dlsym(driver, fake_driver::kDone))();
    reached_ = &reinterpret_cast<fake_driver::Reached>(dlsym(driver, fake_driver::kReached))();
    capturing_ = &reinterpret_cast<fake_driver::Capturing>(dlsym(driver, fake_driver::kCapturing))();
    handles_ = &reinterpret_cast<fake_driver::GetHandles>(dlsym(driver, fake_driver::kHandles))();
    library_ = &reinterpret_cast<fake_nccl::GetLibrary>(dlsym(fake, fake_nccl::kLibrary))();
    library_->current = &comm_;
    *done_ = true;
    *capturing_ = false;
    *reached_ = nullptr;
    launches_().clear();
    stream_calls_().clear();
  }

  std::shared_ptr<Communicator> use(NcclOptions options = {}) {
    return use_nccl(reinterpret_cast<ncclComm*>(&comm_), options);
  }

  static ContextParallelConfig config(Scheme scheme) {
    ContextParallelConfig config;
    config.attention.head_dim = 128;
    config.attention.causal = true;
    config.attention.cache.mode = CachePolicy::Mode::memory;
    config.attention.tune = TunePolicy::off;
    config.scheme = scheme;
    return config;
  }

  static TensorView tensor(std::uintptr_t page, std::int64_t heads) {
    return {at(page), DType::bf16, {1, heads, 4096, 128}};
  }

  std::vector<std::string> kernels() const {
    std::vector<std::string> names;
    for (const fake_driver::Launch& launch : launches_()) names.push_back(launch.kernel);
    return names;
  }

  long count(const std::string& what) {
    const std::scoped_lock lock(comm_.mutex);
    return std::ranges::count(comm_.calls, what, &fake_nccl::Call::what);
  }

  fake_driver::Launches launches_ = nullptr;
  fake_driver::StreamCalls stream_calls_ = nullptr;
  std::atomic<bool>* done_ = nullptr;
  std::atomic<const void*>* reached_ = nullptr;
  std::atomic<bool>* capturing_ = nullptr;
  fake_driver::Handles* handles_ = nullptr;
  fake_nccl::Library* library_ = nullptr;
  fake_nccl::Communicator comm_;
};

}  // namespace fa::test

#endif  // FA_TESTS_FAKE_NCCL_OVER_NCCL_HPP_
