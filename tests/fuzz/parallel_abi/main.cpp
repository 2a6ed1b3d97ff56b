// Random and hostile calls of the C ABI of fa_parallel, by groups of ranks on the host device:
//
//   fa_parallel_abi_fuzz [--calls N] [--seed S] [--threads N]     makes at least N calls
//   fa_parallel_abi_fuzz --seed S --case INDEX                    makes those of one case again
#include "fuzz/parallel_abi/case.hpp"

int main(int count, char** arguments) {
  return fa::fuzz::main_of("fa_parallel_abi_fuzz", fa::fuzz::run_parallel_case, count, arguments);
}
