#ifndef FA_TESTS_FAKE_DRIVER_LAUNCHES_TEST_HPP_
#define FA_TESTS_FAKE_DRIVER_LAUNCHES_TEST_HPP_

#include <gtest/gtest.h>

#include <fa/attention.hpp>

#include "compile/compiler.hpp"
#include "driver/driver.hpp"
#include "fake_driver/fake_driver.hpp"
#include "support/dynamic_library.hpp"

namespace fa {

/// Kernels are compiled, and launched by a driver that only writes it down.
class LaunchesTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto loaded = support::DynamicLibrary::open("libcuda.so.1", nullptr);
    launches_ = loaded.function<fake_driver::Launches>(fake_driver::kLaunches);
    if (launches_ == nullptr) GTEST_SKIP() << "the fake driver is not on LD_LIBRARY_PATH";
    driver::api();  // keeps it loaded
    if (const auto info = compile::compiler_info(); !info.available) GTEST_SKIP() << info.problem;
    config_.tune = TunePolicy::off;
    config_.cache.mode = CachePolicy::Mode::memory;
  }

  AttentionConfig config_;
  fake_driver::Launches launches_ = nullptr;
};

}  // namespace fa

#endif  // FA_TESTS_FAKE_DRIVER_LAUNCHES_TEST_HPP_
