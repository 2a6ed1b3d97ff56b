#ifndef FA_TESTS_UNIT_API_EXPECT_LOCATION_HPP_
#define FA_TESTS_UNIT_API_EXPECT_LOCATION_HPP_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <fa/error.hpp>

namespace fa::test {

/// Where a debug call says that it is broken; nothing where it passes.
inline std::optional<ErrorLocation> location_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::not_finite) << error.what();
    EXPECT_NE(error.location(), nullptr);
    if (error.location() != nullptr) {
      EXPECT_EQ(error.field("tensor"), error.location()->tensor);
      EXPECT_EQ(error.field("result"), error.location()->result);
      return *error.location();
    }
  }
  return std::nullopt;
}

/// Those that the tensor does not have are -1.
struct Axes {
  std::int64_t b = -1, h = -1, q = -1, kv = -1, d = -1;
};

inline void expect_at(const std::optional<ErrorLocation>& found, const std::string& tensor, const Axes& at,
                      const std::string& result) {
  ASSERT_TRUE(found) << "nothing was found, of " << tensor;
  EXPECT_EQ(found->tensor, tensor);
  EXPECT_EQ(found->result, result);
  EXPECT_EQ(found->b, at.b) << tensor;
  EXPECT_EQ(found->h, at.h) << tensor;
  EXPECT_EQ(found->q, at.q) << tensor;
  EXPECT_EQ(found->kv, at.kv) << tensor;
  EXPECT_EQ(found->d, at.d) << tensor;
}

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_API_EXPECT_LOCATION_HPP_
