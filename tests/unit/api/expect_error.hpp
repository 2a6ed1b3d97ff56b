#ifndef FA_TESTS_UNIT_API_EXPECT_ERROR_HPP_
#define FA_TESTS_UNIT_API_EXPECT_ERROR_HPP_

#include <gtest/gtest.h>

#include <string>

#include <fa/error.hpp>

namespace fa::test {

/// `call` must throw fa::Error with `code`, whose message and fields name `argument`.
template <typename Call>
void expect_error(ErrorCode code, const std::string& argument, Call&& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown about " << argument;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_EQ(error.field("argument"), argument) << error.what();
    EXPECT_NE(std::string(error.what()).find(argument), std::string::npos) << error.what();
    EXPECT_FALSE(error.field("accepted").empty()) << error.what();
  }
}

template <typename Call>
void expect_invalid(const std::string& argument, Call&& call) {
  expect_error(ErrorCode::invalid_argument, argument, call);
}

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_API_EXPECT_ERROR_HPP_
