/* The C ABI from an installed package. */

#include <fa/fa.h>
#include <stdio.h>

int main(void) {
  enum { S = 16, D = 8 };
  static float q[S * D], k[S * D], v[S * D], o[S * D];
  for (int i = 0; i < S * D; ++i) v[i] = 1.0f;
  fa_config config = {.struct_size = sizeof config, .head_dim = D, .dtype = FA_F32};
  fa_attention* attention = NULL;
  if (fa_create(&config, (fa_device){FA_DEVICE_HOST, 0}, &attention) != FA_OK) {
    printf("fa_create: %s\n", fa_last_error_message());
    return 1;
  }
  fa_tensor tensor = {
      .struct_size = sizeof tensor, .dtype = FA_F32, .rank = 3, .flags = FA_TENSOR_ROW_MAJOR, .shape = {1, S, D}};
  fa_tensor tq = tensor, tk = tensor, tv = tensor, to = tensor;
  tq.data = q;
  tk.data = k;
  tv.data = v;
  to.data = o;
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &to};
  const int status = fa_forward(attention, &inputs, &outputs, NULL, NULL);
  if (status != FA_OK) printf("fa_forward: %s\n", fa_last_error_message());
  fa_destroy(attention);
  return status == FA_OK && o[S * D - 1] == 1.0f ? 0 : 1;
}
