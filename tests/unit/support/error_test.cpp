#include <gtest/gtest.h>

#include <fa/device.hpp>
#include <fa/error.hpp>
#include <type_traits>

#include "support/text.hpp"

namespace fa {
namespace {

TEST(Error, HoldsCodeMessageAndFields) {
  const Error error(ErrorCode::cuda, "it broke", {{"call", "cuInit"}, {"result", "999"}});
  const Error copy = error;  // NOLINT: copying is what is tested
  EXPECT_EQ(copy.code(), ErrorCode::cuda);
  EXPECT_STREQ(copy.what(), "it broke");
  EXPECT_EQ(copy.field("result"), "999");
  EXPECT_EQ(copy.field("nothing"), "");
  EXPECT_EQ(copy.fields().size(), 2U);
  static_assert(std::is_nothrow_copy_constructible_v<Error>);
}

TEST(Error, EveryCodeHasAName) {
  for (int code = 1; code <= 10; ++code) EXPECT_STRNE(to_string(static_cast<ErrorCode>(code)), "unknown");
  EXPECT_STREQ(to_string(ErrorCode::invalid_argument), "invalid_argument");
  EXPECT_STREQ(to_string(static_cast<ErrorCode>(77)), "unknown");
}

TEST(Error, InvalidNamesArgumentValueAndWhatIsAccepted) {
  try {
    support::throw_invalid("head_dim", 20, "a multiple of 8 from 8 to 256");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_STREQ(error.what(), "head_dim = 20: accepted is a multiple of 8 from 8 to 256");
    EXPECT_EQ(error.field("argument"), "head_dim");
    EXPECT_EQ(error.field("value"), "20");
    EXPECT_EQ(error.field("accepted"), "a multiple of 8 from 8 to 256");
  }
}

TEST(Error, UnsupportedHasItsOwnCode) {
  try {
    support::throw_unsupported("dtype", "f64", "f16, bf16 or f32");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
  }
}

TEST(Device, Prints) {
  EXPECT_EQ(to_string(Device::host()), "host");
  EXPECT_EQ(to_string(Device::cuda(1)), "cuda:1");
  EXPECT_EQ(to_string(Device::current()), "current");
}

}  // namespace
}  // namespace fa
