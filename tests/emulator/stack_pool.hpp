#ifndef FA_TESTS_EMULATOR_STACK_POOL_HPP_
#define FA_TESTS_EMULATOR_STACK_POOL_HPP_

#include <boost/context/stack_context.hpp>

#include <boost/context/preallocated.hpp>  // relies on the include above

namespace emulator {

/// Fixed-size stacks with a guard page, kept for the next fiber when one ends.
class StackPool {
 public:
  static boost::context::stack_context allocate();
  static void deallocate(boost::context::stack_context& stack) noexcept;

  /// The stack as a fiber sees it. Tops are moved apart, so that the stacks of a warp do not share cache sets.
  static boost::context::preallocated place(const boost::context::stack_context& stack, int lane);
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_STACK_POOL_HPP_
