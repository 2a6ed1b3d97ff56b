#include <gtest/gtest.h>

#include "system.hpp"

int main(int argc, char** argv) {
  const int status = fa::cache::testing::run_child_program(argc, argv);
  if (status >= 0) return status;
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
