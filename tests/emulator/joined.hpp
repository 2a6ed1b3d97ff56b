#ifndef FA_TESTS_EMULATOR_JOINED_HPP_
#define FA_TESTS_EMULATOR_JOINED_HPP_

#include <initializer_list>
#include <vector>

namespace emulator {

template <class T>
std::vector<T> joined(std::initializer_list<std::vector<T>> lists) {
  std::vector<T> all;
  for (const std::vector<T>& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_JOINED_HPP_
