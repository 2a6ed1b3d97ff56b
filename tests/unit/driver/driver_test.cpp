#include "driver/driver.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <fa/error.hpp>
#include <optional>
#include <string>
#include <thread>

namespace fa::driver {
namespace {

/// The failure of api(), or nothing where there is a driver.
std::optional<Error> driver_failure() {
  try {
    api();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

void expect_clear(const Error& error) {
  EXPECT_EQ(error.code(), ErrorCode::no_driver);
  EXPECT_FALSE(error.field("problem").empty());
  EXPECT_FALSE(error.field("remedy").empty());
  EXPECT_NE(std::string(error.what()).find(error.field("remedy")), std::string::npos);
}

TEST(Driver, OpensOrSaysWhatIsMissing) {
  if (const auto error = driver_failure()) {
    expect_clear(*error);
    return;
  }
  EXPECT_GE(api().version, 12000);
  EXPECT_EQ(&api(), &api());
  EXPECT_NE(api().cuLaunchKernel, nullptr);
}

TEST(Driver, ThreadsAgree) {
  const bool expected = driver_failure().has_value();
  std::vector<std::thread> threads;
  std::vector<int> failed(8, -1);
  for (int& slot : failed) {
    threads.emplace_back([&slot] { slot = driver_failure().has_value() ? 1 : 0; });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int slot : failed) EXPECT_EQ(slot, expected ? 1 : 0);
}

TEST(Driver, EveryEntranceReportsTheMissingDriver) {
  const auto error = driver_failure();
  if (!error) GTEST_SKIP() << "there is a driver";
  for (const auto& entrance : std::vector<void (*)()>{
           [] { list_devices(); },
           [] { current_context(); },
           [] { ContextRef::acquire(Device::current()); },
           [] { ContextRef::acquire(Device::cuda(0)); },
           [] { is_capturing(nullptr); },
       }) {
    try {
      entrance();
      FAIL();
    } catch (const Error& thrown) {
      expect_clear(thrown);
    }
  }
}

TEST(Driver, CheckNamesCallAndResult) {
  EXPECT_NO_THROW(check(CUDA_SUCCESS, "cuInit"));
  try {
    check(CUDA_ERROR_INVALID_VALUE, "cuLaunchKernel");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cuda);
    EXPECT_EQ(error.field("call"), "cuLaunchKernel");
    EXPECT_FALSE(error.field("result").empty());
    EXPECT_EQ(std::string(error.what()).find("cuLaunchKernel failed with "), 0U);
  }
}

TEST(Driver, OutOfMemoryHasItsOwnCode) {
  try {
    check(CUDA_ERROR_OUT_OF_MEMORY, "cuMemAllocAsync");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
  }
}

TEST(Driver, TheHostDeviceHasNoContext) {
  EXPECT_THROW(ContextRef::acquire(Device::host()), Error);
}

}  // namespace
}  // namespace fa::driver
