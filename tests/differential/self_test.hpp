#ifndef FA_TESTS_DIFFERENTIAL_SELF_TEST_HPP_
#define FA_TESTS_DIFFERENTIAL_SELF_TEST_HPP_

namespace fa::differential {

/// Sees that wrong results are found, on the host device: every mistake of the formula, and any element that is moved
/// by two bounds. Returns how many were not.
int self_test();

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_SELF_TEST_HPP_
