/* The C ABI of fa_parallel from an installed package: a group of one rank. */

#include <fa/parallel.h>
#include <stdio.h>

int main(void) {
  enum { S = 16, D = 8 };
  static float x[S * D], o[S * D];
  for (int i = 0; i < S * D; ++i) x[i] = 1.0f;
  fa_communicator* communicator = NULL;
  fa_parallel* parallel = NULL;
  fa_config attention = {.struct_size = sizeof attention, .head_dim = D, .dtype = FA_F32, .causal = 1};
  fa_parallel_config config = {.struct_size = sizeof config, .layout = FA_LAYOUT_ZIGZAG, .attention = &attention};
  if (fa_communicator_local_group(1, 0, &communicator) != FA_OK ||
      fa_parallel_create(&config, communicator, &parallel) != FA_OK) {
    printf("%s\n", fa_last_error_message());
    return 1;
  }
  fa_tensor tx = {.struct_size = sizeof tx,
                  .dtype = FA_F32,
                  .rank = 4,
                  .flags = FA_TENSOR_ROW_MAJOR,
                  .data = x,
                  .shape = {1, 1, S, D}};
  fa_tensor to = tx;
  to.data = o;
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &tx, .k = &tx, .v = &tx};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &to};
  int32_t rank = -1, size = -1;
  int status = fa_communicator_rank(communicator, &rank, &size);
  if (status == FA_OK) status = fa_parallel_check_agreement(parallel, NULL);
  if (status == FA_OK) status = fa_parallel_forward(parallel, &inputs, &outputs, NULL, NULL, 0);
  if (status != FA_OK) printf("%s\n", fa_last_error_message());
  config.layout = 9;
  fa_parallel* refused = NULL;
  const int bad = fa_parallel_create(&config, communicator, &refused);
  fa_parallel_destroy(parallel);
  fa_communicator_destroy(communicator);
  return status == FA_OK && bad == FA_INVALID_ARGUMENT && refused == NULL && rank == 0 && size == 1 &&
                 o[S * D - 1] == 1.0f
             ? 0
             : 1;
}
