// Random and hostile calls of the C ABI, for sanitizers to watch:
//
//   fa_c_abi_fuzz [--calls N] [--seed S] [--threads N]     makes at least N calls
//   fa_c_abi_fuzz --seed S --case INDEX                    makes those of one case again
#include "fuzz/c_abi/case.hpp"

int main(int count, char** arguments) {
  return fa::fuzz::main_of("fa_c_abi_fuzz", fa::fuzz::run_case, count, arguments);
}
