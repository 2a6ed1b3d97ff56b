#include "reference/parallel.hpp"

#include <algorithm>
#include <thread>

namespace fa::reference {

int hardware_threads() {
  static const int count = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));  // reads a file
  return count;
}

}  // namespace fa::reference
