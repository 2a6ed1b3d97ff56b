/* The C ABI on the host device: numbers, error texts, and structs of other versions. */

#include <fa/fa.h>

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define CHECK(condition)                                                                            \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, fa_last_error_message()); \
      ++failures;                                                                                   \
    }                                                                                               \
  } while (0)

enum { B = 2, H_Q = 4, H_KV = 2, S_Q = 3, S_KV = 5, D = 8 };

static const fa_device kHost = {FA_DEVICE_HOST, 0};

static float q[B * H_Q * S_Q * D], k[B * H_KV * S_KV * D], v[B * H_KV * S_KV * D];
static float o[B * H_Q * S_Q * D], lse[B * H_Q * S_Q];

static void fill(float* values, int count, unsigned seed) {
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
  }
}

static fa_tensor tensor4(void* data, int b, int h, int s, int d) {
  fa_tensor t = {.struct_size = sizeof t, .dtype = FA_F32, .rank = 4, .flags = FA_TENSOR_ROW_MAJOR, .data = data};
  t.shape[0] = b;
  t.shape[1] = h;
  t.shape[2] = s;
  t.shape[3] = d;
  return t;
}

static fa_config default_config(void) {
  fa_config config = {.struct_size = sizeof config, .head_dim = D, .dtype = FA_F32, .cache_mode = FA_CACHE_MEMORY};
  return config;
}

/* One row by the definition, bottom-right causal. */
static double expected_row(int b, int h, int i, double scale, double* row) {
  const float* qi = q + ((b * H_Q + h) * S_Q + i) * D;
  const int kv = b * H_KV + h / (H_Q / H_KV);
  double sum = 0;
  for (int c = 0; c < D; ++c) row[c] = 0;
  for (int j = 0; j <= i + S_KV - S_Q; ++j) {
    const float* kj = k + (kv * S_KV + j) * D;
    double score = 0;
    for (int c = 0; c < D; ++c) score += (double)qi[c] * kj[c];
    const double weight = exp(scale * score);
    sum += weight;
    for (int c = 0; c < D; ++c) row[c] += weight * v[(kv * S_KV + j) * D + c];
  }
  for (int c = 0; c < D; ++c) row[c] /= sum;
  return log(sum);
}

static void check_numbers(double scale) {
  for (int b = 0; b < B; ++b) {
    for (int h = 0; h < H_Q; ++h) {
      for (int i = 0; i < S_Q; ++i) {
        double row[D];
        const int index = (b * H_Q + h) * S_Q + i;
        const double expected = expected_row(b, h, i, scale, row);
        CHECK(fabs(lse[index] - expected) < 1e-5);
        for (int c = 0; c < D; ++c) CHECK(fabs(o[index * D + c] - row[c]) < 1e-5);
      }
    }
  }
}

static int run(fa_attention* attention) {
  fa_tensor tq = tensor4(q, B, H_Q, S_Q, D), tk = tensor4(k, B, H_KV, S_KV, D), tv = tensor4(v, B, H_KV, S_KV, D);
  fa_tensor to = tensor4(o, B, H_Q, S_Q, D), tl = tensor4(lse, B, H_Q, S_Q, 0);
  tl.rank = 3;
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &to, .lse = &tl};
  return fa_forward(attention, &inputs, &outputs, NULL, NULL);
}

static void test_forward(int has_scale, float scale) {
  fa_config config = default_config();
  config.causal = 1;
  config.has_scale = has_scale;
  config.scale = scale;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  CHECK(run(attention) == FA_OK);
  check_numbers(has_scale ? scale : 1 / sqrt((double)D));
  fa_destroy(attention);
}

/* sum over o of weight * o, of the library's own forward. */
static double weighted_output(fa_attention* attention, const float* weight) {
  double sum = 0;
  CHECK(run(attention) == FA_OK);
  for (int n = 0; n < B * H_Q * S_Q * D; ++n) sum += (double)weight[n] * o[n];
  return sum;
}

/* The slope of weighted_output by `count` elements against their gradient, for f32 arithmetic. */
static void check_slopes(fa_attention* attention, const float* weight, float* values, const float* gradient,
                         int count) {
  const float step = 1.0f / 64;
  for (int n = 0; n < count; n += 7) {
    const float kept = values[n];
    values[n] = kept + step;
    const double up = weighted_output(attention, weight);
    values[n] = kept - step;
    const double down = weighted_output(attention, weight);
    values[n] = kept;
    CHECK(fabs((up - down) / (2 * step) - gradient[n]) < 2e-3);
  }
}

static void test_backward(void) {
  static float dout[B * H_Q * S_Q * D], dq[B * H_Q * S_Q * D], dk[B * H_KV * S_KV * D], dv[B * H_KV * S_KV * D];
  fill(dout, B * H_Q * S_Q * D, 4);
  fa_config config = default_config();
  config.causal = 1;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  CHECK(run(attention) == FA_OK);
  fa_tensor tq = tensor4(q, B, H_Q, S_Q, D), tk = tensor4(k, B, H_KV, S_KV, D), tv = tensor4(v, B, H_KV, S_KV, D);
  fa_tensor to = tensor4(o, B, H_Q, S_Q, D), tl = tensor4(lse, B, H_Q, S_Q, 0), tg = tensor4(dout, B, H_Q, S_Q, D);
  fa_tensor tdq = tensor4(dq, B, H_Q, S_Q, D), tdk = tensor4(dk, B, H_KV, S_KV, D), tdv = tensor4(dv, B, H_KV, S_KV, D);
  tl.rank = 3;
  fa_backward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv, .o = &to, .lse = &tl};
  fa_backward_outputs outputs = {.struct_size = sizeof outputs, .dq = &tdq, .dk = &tdk, .dv = &tdv};
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "dout") == 0);
  inputs.dout = &tg;
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  check_slopes(attention, dout, q, dq, B * H_Q * S_Q * D);
  check_slopes(attention, dout, k, dk, B * H_KV * S_KV * D);
  check_slopes(attention, dout, v, dv, B * H_KV * S_KV * D);

  /* Outputs that are NULL are left alone; of none there is nothing to compute. */
  static float some[B * H_KV * S_KV * D];
  memcpy(some, dv, sizeof some);
  memset(dv, 0, sizeof dv);
  dq[3] = dk[3] = -777;
  outputs.dq = outputs.dk = NULL;
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  CHECK(memcmp(some, dv, sizeof some) == 0 && dq[3] == -777 && dk[3] == -777);
  outputs.dv = NULL;
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "dq") == 0);
  outputs.dq = &tdq, outputs.dk = &tdk, outputs.dv = &tdv;
  fa_shape shape = {.struct_size = sizeof shape, .b = B, .h_q = H_Q, .h_kv = H_KV, .s_q = S_Q, .s_kv = S_KV};
  shape.without_dq = shape.without_dv = 1;
  size_t bytes = 1;
  CHECK(fa_backward_workspace_size(attention, &shape, &bytes) == FA_OK && bytes == 0);
  shape.struct_size = offsetof(fa_shape, without_dq); /* of a program that was compiled before they were there */
  CHECK(fa_backward_workspace_size(attention, &shape, &bytes) == FA_OK);

  /* With dlse = 1 and dout = 0, dq is scale times the mean key: the gradient of the log-sum-exp. */
  static float ones[B * H_Q * S_Q];
  fa_tensor tdl = tensor4(ones, B, H_Q, S_Q, 0);
  tdl.rank = 3;
  inputs.dlse = &tdl;
  for (int n = 0; n < B * H_Q * S_Q; ++n) ones[n] = 1;
  memset(dout, 0, sizeof dout);
  CHECK(run(attention) == FA_OK);
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  const double before = lse[5];
  q[5 * D + 2] += 1.0f / 64;
  CHECK(run(attention) == FA_OK);
  q[5 * D + 2] -= 1.0f / 64;
  CHECK(fabs((lse[5] - before) * 64 - dq[5 * D + 2]) < 2e-3);

  CHECK(fa_backward(NULL, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(fa_backward(attention, NULL, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(fa_backward(attention, &inputs, NULL, NULL, NULL) == FA_INVALID_ARGUMENT);
  fa_destroy(attention);
}

static void test_strides(void) {
  /* [b, s, h, d] in memory, given as [b, h, s, d]. */
  static float packed[B * H_Q * S_Q * D];
  fa_config config = default_config();
  config.causal = 1;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  CHECK(run(attention) == FA_OK);
  fa_tensor tq = tensor4(q, B, H_Q, S_Q, D), tk = tensor4(k, B, H_KV, S_KV, D), tv = tensor4(v, B, H_KV, S_KV, D);
  fa_tensor to = tensor4(packed, B, H_Q, S_Q, D);
  const int64_t strides[4] = {S_Q * H_Q * D, D, H_Q * D, 1};
  to.flags = 0;
  memcpy(to.strides, strides, sizeof strides);
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &to};
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  CHECK(packed[((1 * S_Q + 2) * H_Q + 3) * D + 5] == o[((1 * H_Q + 3) * S_Q + 2) * D + 5]);
  to.flags = FA_TENSOR_READ_ONLY;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  fa_destroy(attention);
}

/* Rows 1 and 2 alone, as a part of the attention that test_forward computes, and what is refused. */
static void test_places(void) {
  static float part[B * H_Q * (S_Q - 1) * D], back[B * H_Q * (S_Q - 1) * D];
  fa_config config = default_config();
  config.causal = 1;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  CHECK(run(attention) == FA_OK);
  fa_tensor tq = tensor4(q + D, B, H_Q, S_Q - 1, D), to = tensor4(part, B, H_Q, S_Q - 1, D);
  fa_tensor tk = tensor4(k, B, H_KV, S_KV, D), tv = tensor4(v, B, H_KV, S_KV, D);
  const int64_t strides[4] = {H_Q * S_Q * D, S_Q * D, D, 1};
  tq.flags = 0;
  memcpy(tq.strides, strides, sizeof strides);
  fa_shard_place place = {.struct_size = sizeof place, .q = 1, .whole_s_q = S_Q};
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv, .place = &place};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &to};
  inputs.max_multiprocessors = 3; /* which the host device has no use for */
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  for (int h = 0; h < B * H_Q; ++h) {
    CHECK(memcmp(part + h * (S_Q - 1) * D, o + (h * S_Q + 1) * D, (S_Q - 1) * D * sizeof *o) == 0);
  }
  /* An older program's structs end before the place: aligned with the last key of its own rows. */
  place.q = 0, place.whole_s_q = 0;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  memcpy(back, part, sizeof part);
  place.q = 2, place.whole_s_q = 0;
  inputs.struct_size = offsetof(fa_forward_inputs, place);
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  CHECK(memcmp(back, part, sizeof part) == 0);
  inputs.struct_size = sizeof inputs;
  place.whole_s_q = 3;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "place.q") == 0);
  place.whole_s_q = 0, place.q_step = 2;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_UNSUPPORTED);
  CHECK(strcmp(fa_last_error_field("argument"), "place.q_step") == 0);
  place.q_step = 0, inputs.max_multiprocessors = -1;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "max_multiprocessors") == 0);
  place.struct_size = 3;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);

  static float dout[B * H_Q * (S_Q - 1) * D], statistics[B * H_Q * (S_Q - 1)], dq[B * H_Q * (S_Q - 1) * D];
  place = (fa_shard_place){.struct_size = sizeof place, .q = 1, .whole_s_q = S_Q};
  fill(dout, B * H_Q * (S_Q - 1) * D, 9);
  fa_tensor tl = tensor4(statistics, B, H_Q, S_Q - 1, 0), tg = tensor4(dout, B, H_Q, S_Q - 1, D);
  fa_tensor tdq = tensor4(dq, B, H_Q, S_Q - 1, D);
  tl.rank = 3;
  inputs.max_multiprocessors = 0;
  outputs.lse = &tl;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  fa_backward_inputs all = {
      .struct_size = sizeof all, .q = &tq, .k = &tk, .v = &tv, .o = &to, .lse = &tl, .dout = &tg, .place = &place};
  fa_backward_outputs gradients = {.struct_size = sizeof gradients, .dq = &tdq};
  CHECK(fa_backward(attention, &all, &gradients, NULL, NULL) == FA_OK);
  memcpy(back, dq, sizeof dq);
  place.q = 0, place.kv = 3;
  CHECK(fa_backward(attention, &all, &gradients, NULL, NULL) == FA_OK);
  CHECK(memcmp(back, dq, sizeof dq) != 0);
  /* The same place, which is read when the call runs. */
  const int64_t begin[4] = {0, 0, 0, 3};
  memcpy(back, dq, sizeof dq);
  const int64_t rows = S_Q, keys = S_KV;
  place = (fa_shard_place){.struct_size = sizeof place,
                           .whole_b = B,
                           .whole_h_q = H_Q,
                           .whole_s_q = rows,
                           .whole_s_kv = keys + 3,
                           .begin = begin};
  CHECK(fa_backward(attention, &all, &gradients, NULL, NULL) == FA_OK);
  CHECK(memcmp(back, dq, sizeof dq) == 0);
  place.kv = 1;
  CHECK(fa_backward(attention, &all, &gradients, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "place.kv") == 0);
  fa_destroy(attention);
}

static void test_shapes_of_places(void) {
  fa_config config = default_config();
  config.causal = 1;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  fa_shape shape = {.struct_size = sizeof shape, .b = B, .h_q = H_Q, .h_kv = H_KV, .s_q = S_Q, .s_kv = S_KV};
  shape.placed = shape.strided = shape.bounded = shape.place_in_memory = 1;
  CHECK(fa_prepare(attention, &shape) == FA_OK && fa_prepare_backward(attention, &shape) == FA_OK);
  fa_destroy(attention);
  config.varlen = 1;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  CHECK(fa_prepare(attention, &shape) == FA_UNSUPPORTED);
  CHECK(strcmp(fa_last_error_field("argument"), "varlen") == 0);
  fa_destroy(attention);
}

static void test_errors(void) {
  fa_config config = default_config();
  fa_attention* attention = (fa_attention*)&config;
  config.head_dim = 20;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(attention == NULL);
  CHECK(fa_last_error_code() == FA_INVALID_ARGUMENT);
  CHECK(strstr(fa_last_error_message(), "20") != NULL);
  CHECK(strcmp(fa_last_error_field("value"), "20") == 0);
  CHECK(strstr(fa_last_error_field("argument"), "head_dim") != NULL);
  CHECK(strlen(fa_last_error_field("accepted")) > 0);
  CHECK(strcmp(fa_last_error_field("no such field"), "") == 0);
  CHECK(strcmp(fa_last_error_field(NULL), "") == 0);

  config = default_config();
  config.dtype = 17;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "config.dtype") == 0);
  config = default_config();
  CHECK(fa_create(&config, (fa_device){9, 0}, &attention) == FA_INVALID_ARGUMENT);
  CHECK(fa_create(NULL, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(fa_create(&config, kHost, NULL) == FA_INVALID_ARGUMENT);
  CHECK(fa_forward(NULL, NULL, NULL, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  CHECK(fa_forward(attention, NULL, NULL, NULL, NULL) == FA_INVALID_ARGUMENT);
  fa_destroy(attention);
  fa_destroy(NULL);
  CHECK(strcmp(fa_status_name(FA_CACHE_MISS), "cache_miss") == 0);
  CHECK(strcmp(fa_status_name(FA_OK), "ok") == 0);
  CHECK(strcmp(fa_status_name(999), "unknown") == 0);
}

/* A program compiled with a later fa.h, whose config has one more field. */
typedef struct later_config {
  fa_config config;
  int64_t later_field;
} later_config;

static void test_struct_sizes(void) {
  fa_attention* attention = NULL;

  later_config later = {.config = default_config()};
  later.config.struct_size = sizeof later;
  CHECK(fa_create(&later.config, kHost, &attention) == FA_OK);
  fa_destroy(attention);
  later.later_field = 1;
  CHECK(fa_create(&later.config, kHost, &attention) == FA_UNSUPPORTED);

  /* A program compiled when the struct ended after `dtype`: what follows must not be read. */
  fa_config earlier;
  memset(&earlier, 0xff, sizeof earlier);
  earlier.struct_size = offsetof(fa_config, has_scale);
  earlier.head_dim = D;
  earlier.head_dim_v = 0;
  earlier.dtype = FA_F32;
  CHECK(fa_create(&earlier, kHost, &attention) == FA_OK);
  fa_destroy(attention);

  /* The last three cut a pointer in two, or a struct in the middle of a field. */
  const uint32_t absurd[] = {
      0, 4, 1u << 20, 0xffffffffu, offsetof(fa_config, kernel) + 4, sizeof(fa_config) - 4, sizeof(fa_config) + 1};
  for (size_t i = 0; i < sizeof absurd / sizeof absurd[0]; ++i) {
    fa_config config = default_config();
    config.struct_size = absurd[i];
    CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
    CHECK(strcmp(fa_last_error_field("argument"), "config.struct_size") == 0);
  }
}

static void test_overrides(void) {
  fa_attention* attention = NULL;
  fa_kernel_override override = {.struct_size = sizeof override, .pack_gqa = 7};
  fa_config config = default_config();
  config.kernel_backward = &override;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "config.kernel_backward.pack_gqa") == 0);
  config.kernel = &override;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "config.kernel.pack_gqa") == 0);
}

static void expect_refused(const fa_kernel_override* override, const char* argument, const char* named) {
  fa_attention* attention = NULL;
  fa_config config = default_config();
  config.kernel = override;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), argument) == 0);
  CHECK(strstr(fa_last_error_message(), named) != NULL);
}

/* The text of an override, beside the fields that it grew behind. */
static void test_override_texts(void) {
  fa_attention* attention = NULL;
  fa_config config = default_config();
  fa_kernel_override both = {.struct_size = sizeof both, .tile_m = 64, .take_turns = FA_CHOICE_NO};
  both.kernel = "sm90_forward";
  both.text = "tile_m=64 q_buffers=2, take_turns=0";
  config.kernel = &both;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK); /* what is said twice is the same */
  fa_destroy(attention);

  fa_kernel_override wrong = {.struct_size = sizeof wrong, .tile_m = 64, .text = "tile_m=128"};
  expect_refused(&wrong, "config.kernel.text", "tile_m=128 tile_m=64");
  wrong = (fa_kernel_override){.struct_size = sizeof wrong, .family = FA_FAMILY_SM90, .warps = 4};
  expect_refused(&wrong, "config.kernel.text", "warps");
  wrong = (fa_kernel_override){.struct_size = sizeof wrong, .kernel = "sm80", .text = "q_buffers=1"};
  expect_refused(&wrong, "config.kernel.text", "q_buffers");
  wrong = (fa_kernel_override){.struct_size = sizeof wrong, .text = "tile_m=many"};
  expect_refused(&wrong, "config.kernel.text", "tile_m=many");
  wrong = (fa_kernel_override){.struct_size = sizeof wrong, .tile_n = -1};
  expect_refused(&wrong, "config.kernel.text", "tile_n=-1");
  wrong = (fa_kernel_override){.struct_size = sizeof wrong, .text = "tile_q=64"};
  expect_refused(&wrong, "config.kernel.text", "tile_q");
  wrong = (fa_kernel_override){.struct_size = sizeof wrong, .kernel = "sm90_backward"};
  expect_refused(&wrong, "config.kernel.kernel", "sm90_forward");
  wrong = (fa_kernel_override){.struct_size = sizeof wrong, .family = FA_FAMILY_SM80, .kernel = "sm90"};
  expect_refused(&wrong, "config.kernel.kernel", "sm80");
  wrong = (fa_kernel_override){.struct_size = sizeof wrong, .family = 3};
  expect_refused(&wrong, "config.kernel.family", "3");

  /* A program compiled before the struct had a text, or its last numbers: what follows must not be read. */
  const uint32_t sizes[] = {offsetof(fa_kernel_override, q_buffers), offsetof(fa_kernel_override, warps_n),
                            offsetof(fa_kernel_override, affine_product), offsetof(fa_kernel_override, affine_reach),
                            offsetof(fa_kernel_override, kernel)};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
    fa_kernel_override earlier;
    memset(&earlier, 0xff, sizeof earlier);
    memset(&earlier, 0, sizes[i]);
    earlier.struct_size = sizes[i];
    earlier.tile_m = 64;
    config.kernel = &earlier;
    CHECK(fa_create(&config, kHost, &attention) == FA_OK);
    fa_destroy(attention);
  }
  fa_kernel_override cut = {.struct_size = offsetof(fa_kernel_override, text) + 4};
  expect_refused(&cut, "config.kernel.struct_size", "struct_size");
}

static void test_shapes(void) {
  fa_config config = default_config();
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  fa_shape shape = {.struct_size = sizeof shape, .b = B, .h_q = H_Q, .h_kv = H_KV, .s_q = S_Q, .s_kv = S_KV};
  CHECK(fa_prepare(attention, &shape) == FA_OK);
  int32_t ready = 7;
  CHECK(fa_prepare_async(attention, &shape) == FA_OK);
  CHECK(fa_prepare_backward_async(attention, &shape) == FA_OK);
  CHECK(fa_is_ready(attention, &shape, &ready) == FA_OK && ready == 1);
  ready = 7;
  CHECK(fa_backward_is_ready(attention, &shape, &ready) == FA_OK && ready == 1);
  CHECK(fa_is_ready(attention, &shape, NULL) == FA_INVALID_ARGUMENT);
  CHECK(fa_prepare_async(NULL, &shape) == FA_INVALID_ARGUMENT);
  size_t size = 12345;
  CHECK(fa_workspace_size(attention, &shape, &size) == FA_OK);
  CHECK(size != 12345);
  fa_kernel_info info = {.struct_size = sizeof info};
  CHECK(fa_kernel_info_get(attention, &shape, &info) == FA_OK);
  CHECK(strcmp(info.origin, "host") == 0);
  CHECK(info.struct_size == sizeof info);

  /* Nothing beyond the caller's size is written. */
  memset(&info, 0x55, sizeof info);
  info.struct_size = offsetof(fa_kernel_info, compile_ms);
  CHECK(fa_kernel_info_get(attention, &shape, &info) == FA_OK);
  CHECK(info.origin[0] == 0x55);

  size = 12345;
  CHECK(fa_prepare_backward(attention, &shape) == FA_OK);
  CHECK(fa_backward_workspace_size(attention, &shape, &size) == FA_OK);
  CHECK(size != 12345);
  info.struct_size = sizeof info;
  CHECK(fa_backward_kernel_info_get(attention, &shape, &info) == FA_OK);
  CHECK(strcmp(info.name, "fa_reference_backward") == 0);

  shape.h_kv = 3;
  CHECK(fa_prepare(attention, &shape) == FA_INVALID_ARGUMENT);
  CHECK(fa_prepare_backward(attention, &shape) == FA_INVALID_ARGUMENT);
  fa_destroy(attention);
}

#define PACKED(name, rows, heads)                        \
  fa_tensor name##_ = {.struct_size = sizeof(fa_tensor), \
                       .dtype = FA_F32,                  \
                       .rank = 3,                        \
                       .flags = FA_TENSOR_ROW_MAJOR,     \
                       .data = name,                     \
                       .shape = {rows, heads, D}}

/* Two sequences of a packed batch against two calls of their own, with dropout. */
static void test_variants(void) {
  enum { ROWS = 7, KEYS = 9 };
  static float packed_q[ROWS * H_Q * D], packed_k[KEYS * H_KV * D], packed_v[KEYS * H_KV * D];
  static float o[ROWS * H_Q * D], lse[ROWS * H_Q], dout[ROWS * H_Q * D];
  static float dq[ROWS * H_Q * D], dk[KEYS * H_KV * D], dv[KEYS * H_KV * D], part[ROWS * H_Q * D];
  const int32_t cu_q[] = {0, 3, ROWS}, cu_kv[] = {0, 5, KEYS};
  fa_attention* attention = NULL;
  fa_config config = default_config();
  fill(packed_q, ROWS * H_Q * D, 4);
  fill(packed_k, KEYS * H_KV * D, 5);
  fill(packed_v, KEYS * H_KV * D, 6);
  fill(dout, ROWS * H_Q * D, 7);
  config.varlen = 1;
  config.dropout = 0.5f;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  PACKED(packed_q, ROWS, H_Q);
  PACKED(packed_k, KEYS, H_KV);
  PACKED(packed_v, KEYS, H_KV);
  PACKED(o, ROWS, H_Q);
  PACKED(dout, ROWS, H_Q);
  PACKED(dq, ROWS, H_Q);
  PACKED(dk, KEYS, H_KV);
  PACKED(dv, KEYS, H_KV);
  PACKED(part, 4, H_Q);
  fa_tensor lse_ = {.struct_size = sizeof lse_,
                    .dtype = FA_F32,
                    .rank = 2,
                    .flags = FA_TENSOR_ROW_MAJOR,
                    .data = lse,
                    .shape = {H_Q, ROWS}};
  fa_sequences sequences = {.struct_size = sizeof sequences, .b = 2, .cu_seqlens_q = cu_q, .cu_seqlens_kv = cu_kv};
  fa_dropout_state state = {.struct_size = sizeof state, .seed = 1, .offset = 2};
  fa_forward_inputs inputs = {.struct_size = sizeof inputs,
                              .q = &packed_q_,
                              .k = &packed_k_,
                              .v = &packed_v_,
                              .sequences = &sequences,
                              .dropout = &state};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &o_, .lse = &lse_};
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  fa_backward_inputs given = {.struct_size = sizeof given,
                              .q = &packed_q_,
                              .k = &packed_k_,
                              .v = &packed_v_,
                              .o = &o_,
                              .lse = &lse_,
                              .dout = &dout_,
                              .sequences = &sequences,
                              .dropout = &state};
  fa_backward_outputs gradients = {.struct_size = sizeof gradients, .dq = &dq_, .dk = &dk_, .dv = &dv_};
  CHECK(fa_backward(attention, &given, &gradients, NULL, NULL) == FA_OK);
  CHECK(dv[0] != 0 || dv[1] != 0);

  /* The second sequence is sequence 0 of a batch whose offset is that of the first one's heads. */
  const int32_t only_q[] = {0, 4}, only_kv[] = {0, 4};
  sequences = (fa_sequences){.struct_size = sizeof sequences, .b = 1, .cu_seqlens_q = only_q, .cu_seqlens_kv = only_kv};
  state.offset += H_Q;
  packed_q_.shape[0] = packed_k_.shape[0] = packed_v_.shape[0] = 4;
  packed_q_.data = packed_q + 3 * H_Q * D;
  packed_k_.data = packed_k + 5 * H_KV * D;
  packed_v_.data = packed_v + 5 * H_KV * D;
  fa_forward_outputs second = {.struct_size = sizeof second, .o = &part_};
  CHECK(fa_forward(attention, &inputs, &second, NULL, NULL) == FA_OK);
  CHECK(memcmp(part, o + 3 * H_Q * D, 4 * H_Q * D * sizeof(float)) == 0);

  const int32_t wrong[] = {0, 5};
  sequences.cu_seqlens_kv = wrong;
  CHECK(fa_forward(attention, &inputs, &second, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "cu_seqlens_kv[1]") == 0);
  inputs.sequences = NULL;
  CHECK(fa_forward(attention, &inputs, &second, NULL, NULL) == FA_OK); /* no sequences: nothing to do */
  size_t size = 1;
  fa_shape shape = {.struct_size = sizeof shape, .b = 2, .h_q = H_Q, .h_kv = H_KV, .total_q = ROWS, .total_kv = KEYS};
  CHECK(fa_backward_workspace_size(attention, &shape, &size) == FA_OK);
  fa_destroy(attention);
}

static void test_dropout_mask(void) {
  const fa_dropout_state state = {.struct_size = sizeof state, .seed = 1, .offset = 6};
  fa_config config = default_config();
  fa_attention* attention = NULL;
  uint8_t keep[2 * 3 * 4 * 5];
  int kept = 0;
  CHECK(fa_dropout_mask(&state, 0.5f, 2, 3, 4, 5, keep) == FA_OK);
  for (size_t i = 0; i < sizeof keep; ++i) kept += keep[i];
  CHECK(kept > 30 && kept < 90);
  CHECK(fa_dropout_mask(&state, 1.0f, 2, 3, 4, 5, keep) == FA_INVALID_ARGUMENT);
  config.dropout = 1.0f;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "dropout") == 0);
}

#define DENSE(name, memory, ...)                      \
  fa_tensor name = {.struct_size = sizeof(fa_tensor), \
                    .dtype = FA_F32,                  \
                    .rank = 4,                        \
                    .flags = FA_TENSOR_ROW_MAJOR,     \
                    .data = memory,                   \
                    .shape = {__VA_ARGS__}}

/* Two requests over pages. */
enum { PAGE = 2, PAGES = 5, MAX_PAGES = 3, KEYS = 5 };
static float paged_k[PAGES * H_KV * PAGE * D], paged_v[PAGES * H_KV * PAGE * D], paged_q[2 * H_Q * D];
static float paged_o[2 * H_Q * D];
static int32_t paged_table[2 * MAX_PAGES], paged_keys[2];
static const int32_t paged_begin[] = {0, 1};

typedef struct {
  fa_tensor q, k, v, o, table;
  fa_sequences sequences;
  fa_paged_cache cache;
  fa_forward_inputs inputs;
  fa_forward_outputs outputs;
} paged_call;

static paged_call* make_paged_call(void) {
  static paged_call call;
  const int32_t table[2 * MAX_PAGES] = {3, -1, -1, 4, 0, 2};
  memcpy(paged_table, table, sizeof table);
  paged_keys[0] = 1, paged_keys[1] = KEYS;
  fill(paged_k, PAGES * H_KV * PAGE * D, 8);
  fill(paged_v, PAGES * H_KV * PAGE * D, 9);
  fill(paged_q, 2 * H_Q * D, 10);
  DENSE(q, paged_q, 2, H_Q, 1, D);
  DENSE(o, paged_o, 2, H_Q, 1, D);
  DENSE(k, paged_k, PAGES, H_KV, PAGE, D);
  DENSE(v, paged_v, PAGES, H_KV, PAGE, D);
  call.q = q, call.k = k, call.v = v, call.o = o;
  call.table = (fa_tensor){.struct_size = sizeof call.table,
                           .dtype = FA_I32,
                           .rank = 2,
                           .flags = FA_TENSOR_ROW_MAJOR,
                           .data = paged_table,
                           .shape = {2, MAX_PAGES}};
  call.sequences = (fa_sequences){.struct_size = sizeof call.sequences, .seqused_kv = paged_keys};
  call.cache = (fa_paged_cache){.struct_size = sizeof call.cache, .block_table = &call.table, .seq_begin = paged_begin};
  call.inputs = (fa_forward_inputs){.struct_size = sizeof call.inputs,
                                    .q = &call.q,
                                    .k = &call.k,
                                    .v = &call.v,
                                    .sequences = &call.sequences,
                                    .cache = &call.cache};
  call.outputs = (fa_forward_outputs){.struct_size = sizeof call.outputs, .o = &call.o};
  return &call;
}

static fa_attention* of_pages(int64_t page_size) {
  fa_attention* attention = NULL;
  fa_config config = default_config();
  config.page_size = page_size;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  return attention;
}

/* Against a call on the second request's keys in a row. */
static void test_pages(void) {
  static float row_k[H_KV * KEYS * D], row_v[H_KV * KEYS * D], row_o[H_Q * D];
  paged_call* const call = make_paged_call();
  fa_attention* const attention = of_pages(PAGE);
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_OK);

  /* The second request's keys 1 to 4 in a row. */
  for (int h = 0; h < H_KV; ++h) {
    for (int key = 1; key < KEYS; ++key) {
      const size_t from = (size_t)((paged_table[MAX_PAGES + key / PAGE] * H_KV + h) * PAGE + key % PAGE) * D;
      memcpy(row_k + (h * (KEYS - 1) + key - 1) * D, paged_k + from, D * sizeof(float));
      memcpy(row_v + (h * (KEYS - 1) + key - 1) * D, paged_v + from, D * sizeof(float));
    }
  }
  fa_attention* const plain = of_pages(0);
  DENSE(one_q, paged_q + H_Q * D, 1, H_Q, 1, D);
  DENSE(one_k, row_k, 1, H_KV, KEYS - 1, D);
  DENSE(one_v, row_v, 1, H_KV, KEYS - 1, D);
  DENSE(one_o, row_o, 1, H_Q, 1, D);
  fa_forward_inputs one = {.struct_size = sizeof one, .q = &one_q, .k = &one_k, .v = &one_v};
  fa_forward_outputs row = {.struct_size = sizeof row, .o = &one_o};
  CHECK(fa_forward(plain, &one, &row, NULL, NULL) == FA_OK);
  for (int i = 0; i < H_Q * D; ++i) CHECK(fabsf(row_o[i] - paged_o[H_Q * D + i]) < 1e-5f);
  one.cache = &call->cache;
  CHECK(fa_forward(plain, &one, &row, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "cache") == 0);
  fa_destroy(plain);

  paged_table[4] = PAGES;
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "cache.block_table[1][1]") == 0);
  call->inputs.cache = NULL;
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "cache.block_table") == 0);
  fa_shape shape = {.struct_size = sizeof shape, .b = 2, .h_q = H_Q, .h_kv = H_KV, .s_q = 1, .s_kv = 6};
  CHECK(fa_prepare(attention, &shape) == FA_OK);
  CHECK(fa_prepare_backward(attention, &shape) == FA_UNSUPPORTED);
  CHECK(strcmp(fa_last_error_field("argument"), "page_size") == 0);
  fa_destroy(attention);
}

/* As rows of a contiguous cache the pages of the first keys come to the same. */
static void test_contiguous_cache(void) {
  static float short_o[2 * H_Q * D];
  const int32_t few[] = {1, PAGE}, rows[] = {3, 4};
  paged_call* const call = make_paged_call();
  fa_attention *const attention = of_pages(PAGE), *const contiguous = of_pages(FA_CONTIGUOUS);
  call->sequences.seqused_kv = few;
  call->cache.seq_begin = NULL;
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_OK);
  memcpy(short_o, paged_o, sizeof paged_o);
  memset(paged_o, 0, sizeof paged_o);
  CHECK(fa_forward(contiguous, &call->inputs, &call->outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "cache.block_table") == 0);
  call->cache.block_table = NULL;
  call->cache.batch_index = rows;
  CHECK(fa_forward(contiguous, &call->inputs, &call->outputs, NULL, NULL) == FA_OK);
  CHECK(memcmp(short_o, paged_o, sizeof paged_o) == 0);
  fa_destroy(contiguous);
  fa_destroy(attention);
}

/* The host device needs no schedule, and checks what one would be made of. */
static void test_schedule(void) {
  paged_call* const call = make_paged_call();
  fa_attention* const attention = of_pages(PAGE);
  fa_shape shape = {.struct_size = sizeof shape, .b = 2, .h_q = H_Q, .h_kv = H_KV, .s_q = 1, .s_kv = 6};
  size_t size = 1;
  CHECK(fa_schedule_size(attention, &shape, &size) == FA_OK && size == 0);
  fa_schedule_memory memory = {.struct_size = sizeof memory};
  fa_schedule_inputs limits = {
      .struct_size = sizeof limits, .limits = &shape, .sequences = &call->sequences, .seq_begin = paged_begin};
  CHECK(fa_schedule(attention, &limits, &memory, NULL) == FA_OK);
  CHECK(fa_schedule(attention, &limits, NULL, NULL) == FA_OK);
  call->inputs.schedule = &memory;
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_OK);
  limits.sequences = NULL;
  CHECK(fa_schedule(attention, &limits, &memory, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "seqused_kv") == 0);
  limits.limits = NULL;
  CHECK(fa_schedule(attention, &limits, &memory, NULL) == FA_INVALID_ARGUMENT);
  CHECK(fa_schedule(NULL, &limits, &memory, NULL) == FA_INVALID_ARGUMENT);
  fa_destroy(attention);
}

/* Two requests whose first page is the same one, against a call whose table has all keys of each. */
static void test_shared_prefixes(void) {
  static float whole_o[2 * H_Q * D], whole_lse[2 * H_Q], shared_lse[2 * H_Q];
  const int32_t whole[2 * MAX_PAGES] = {3, 4, -1, 3, 0, 2}, own[2 * MAX_PAGES] = {-1, 4, -1, -1, 0, 2};
  const int32_t keys[] = {3, KEYS}, begin[] = {PAGE, PAGE}, rows[] = {0, 2}, lengths[] = {PAGE};
  int32_t pages[] = {3}, positions[] = {2, KEYS - 1};
  paged_call* const call = make_paged_call();
  fa_tensor lse_ = {.struct_size = sizeof lse_,
                    .dtype = FA_F32,
                    .rank = 3,
                    .flags = FA_TENSOR_ROW_MAJOR,
                    .data = whole_lse,
                    .shape = {2, H_Q, 1}};
  memcpy(paged_table, whole, sizeof whole);
  call->sequences.seqused_kv = keys;
  call->cache.seq_begin = NULL;
  call->outputs.lse = &lse_;
  fa_attention* attention = of_pages(PAGE);
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_OK);
  memcpy(whole_o, paged_o, sizeof whole_o);

  fa_tensor table = {.struct_size = sizeof table,
                     .dtype = FA_I32,
                     .rank = 2,
                     .flags = FA_TENSOR_ROW_MAJOR,
                     .data = pages,
                     .shape = {1, 1}};
  fa_shared_prefix level = {.block_table = &table, .cu_rows = rows, .lengths = lengths};
  memcpy(paged_table, own, sizeof own);
  memset(paged_o, 0, sizeof paged_o);
  lse_.data = shared_lse;
  call->cache.seq_begin = begin;
  call->inputs.prefixes = &level;
  call->inputs.prefix_count = 1;
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_OK);
  for (int i = 0; i < 2 * H_Q * D; ++i) CHECK(fabsf(paged_o[i] - whole_o[i]) < 1e-5f);
  for (int i = 0; i < 2 * H_Q; ++i) CHECK(fabsf(shared_lse[i] - whole_lse[i]) < 1e-5f);

  /* Its workspace has partial results of each level. */
  fa_shape shape = {.struct_size = sizeof shape, .b = 2, .h_q = H_Q, .h_kv = H_KV, .s_q = 1, .s_kv = 6};
  fa_shared_prefix_shape shapes[9] = {{.groups = 1, .s_kv = PAGE}, {.groups = 2, .s_kv = PAGE, .begin = 1}};
  size_t one = 0, two = 0;
  CHECK(fa_prepare_shared(attention, &shape, shapes, 2) == FA_OK);
  CHECK(fa_shared_workspace_size(attention, &shape, shapes, 1, &one) == FA_OK);
  CHECK(fa_shared_workspace_size(attention, &shape, shapes, 2, &two) == FA_OK);
  CHECK(one >= sizeof paged_o + sizeof shared_lse && two >= one + sizeof paged_o + sizeof shared_lse);

  CHECK(fa_shared_workspace_size(attention, &shape, shapes, 9, &two) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "prefix_count") == 0);
  CHECK(fa_prepare_shared(attention, &shape, shapes, 9) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "prefix_count") == 0);
  CHECK(fa_prepare_shared(attention, &shape, NULL, 1) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "prefixes") == 0);
  CHECK(fa_shared_workspace_size(attention, &shape, shapes, 1, NULL) == FA_INVALID_ARGUMENT);
  CHECK(fa_shared_workspace_size(NULL, &shape, shapes, 1, &two) == FA_INVALID_ARGUMENT);
  CHECK(fa_prepare_shared(NULL, &shape, shapes, 1) == FA_INVALID_ARGUMENT);

  level.cu_rows = NULL;
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "prefixes[0].cu_rows") == 0);
  level.cu_rows = rows;
  pages[0] = PAGES;
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "cache.block_table[0][0]") == 0);
  pages[0] = 3;
  call->inputs.prefixes = NULL;
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "prefixes") == 0);
  call->inputs.prefixes = &level;
  call->cache.seq_begin = NULL;
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "cache.seq_begin") == 0);
  call->cache.seq_begin = begin;
  fa_destroy(attention);

  /* A window counts positions: with one that hides nothing o stays as it is. */
  fa_config config = default_config();
  config.page_size = PAGE;
  config.has_window_left = 1;
  config.window_left = KEYS;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "prefixes[0].positions") == 0);
  fa_tensor places = table;
  places.data = positions;
  places.shape[1] = 2;
  level.positions = &places;
  memset(paged_o, 0, sizeof paged_o);
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_OK);
  for (int i = 0; i < 2 * H_Q * D; ++i) CHECK(fabsf(paged_o[i] - whole_o[i]) < 1e-5f);
  fa_destroy(attention);

  config.invariance = FA_INVARIANCE_BATCH;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  CHECK(fa_forward(attention, &call->inputs, &call->outputs, NULL, NULL) == FA_UNSUPPORTED);
  CHECK(strcmp(fa_last_error_field("argument"), "invariance") == 0);
  CHECK(fa_prepare_shared(attention, &shape, shapes, 1) == FA_UNSUPPORTED);
  fa_destroy(attention);
}

static void count_events(void* user, const fa_compile_event* event) {
  if (event->struct_size == sizeof *event && strlen(event->spec) > 0) ++*(int*)user;
}

static void test_cache(void) {
  fa_attention* attention = NULL;
  fa_config config = default_config();
  const char* packs[] = {"/nonexistent/kernels.fapack"};
  int events = 0;
  config.cache_packs = packs;
  config.cache_pack_count = 1;
  config.cache_max_bytes = -1;
  config.cache_max_entries = 100;
  config.cache_compilers = ">=12.0";
  config.on_compile = count_events;
  config.on_compile_user = &events;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  fa_cache_counters counters = {.struct_size = sizeof counters, .compiles = 77};
  CHECK(fa_cache_counters_get(attention, &counters) == FA_OK);
  CHECK(counters.struct_size == sizeof counters && counters.compiles == 0);
  counters.struct_size = 1;
  CHECK(fa_cache_counters_get(attention, &counters) == FA_INVALID_ARGUMENT);
  CHECK(fa_cache_counters_get(attention, NULL) == FA_INVALID_ARGUMENT);
  fa_destroy(attention);

  /* Nothing is stored: the miss names its command, and nothing is compiled. */
  fa_shape shape = {.struct_size = sizeof shape, .b = B, .h_q = H_Q, .h_kv = H_KV, .s_q = 100, .s_kv = 100};
  fa_kernel_info info = {.struct_size = sizeof info};
  config.compile = FA_COMPILE_NEVER;
  config.dtype = FA_F16;
  CHECK(fa_set_log_level(FA_LOG_ERROR) == FA_OK);
  CHECK(fa_find_kernel(&config, &shape, "sm_90a", &info) == FA_CACHE_MISS);
  CHECK(fa_set_log_level(FA_LOG_WARNING) == FA_OK);
  CHECK(strstr(fa_last_error_field("command"), "fa compile --arch sm_90a --dtype f16 --head-dim 8") != NULL);
  CHECK(strstr(fa_last_error_message(), packs[0]) != NULL);
  CHECK(events == 0);
  CHECK(fa_find_backward_kernel(&config, &shape, "sm_90a", &info) == FA_CACHE_MISS);
  CHECK(strstr(fa_last_error_field("command"), "--op backward") != NULL);
  CHECK(fa_find_kernel(&config, &shape, "sm_9", NULL) == FA_INVALID_ARGUMENT);
  CHECK(fa_find_kernel(&config, &shape, NULL, NULL) == FA_INVALID_ARGUMENT);

  config.tune = FA_TUNE_ON + 1;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "config.tune") == 0);
  config.tune = FA_TUNE_CACHED;

  config.cache_compilers = "newest";
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "compilers") == 0);
  config.cache_compilers = NULL;
  const char* pins[] = {"not a SHA-256"};
  config.cache_pack_sha256 = pins;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "pack_sha256") == 0);
  pins[0] = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  fa_destroy(attention);
  pins[0] = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  fa_destroy(attention);
  config.cache_pack_sha256 = NULL;
  config.cache_packs = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  config.cache_packs = packs;
  config.cache_pack_count = 1u << 30;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
}

static void count_messages(void* user, int level, const char* message) {
  if (level >= FA_LOG_DEBUG && strlen(message) > 0) ++*(int*)user;
}

static void test_log(void) {
  int messages = 0;
  CHECK(fa_set_log_callback(count_messages, &messages) == FA_OK);
  CHECK(fa_set_log_level(FA_LOG_DEBUG) == FA_OK);
  CHECK(fa_set_log_level(17) == FA_INVALID_ARGUMENT);
  CHECK(fa_set_log_level(FA_LOG_WARNING) == FA_OK);
  CHECK(fa_set_log_callback(NULL, NULL) == FA_OK);
}

/* A bias of the keys, a window and sinks: the gradients sum up as they must. */
static void test_functions(void) {
  static float bias[S_KV], dbias[S_KV], sink[H_Q] = {0.5f, -1.0f, 0.0f, 2.0f}, dsink[H_Q];
  static float dout[B * H_Q * S_Q * D], dq[B * H_Q * S_Q * D], dk[B * H_KV * S_KV * D], dv[B * H_KV * S_KV * D];
  static float ones[B * H_Q * S_Q];
  const fa_capture capture = {"bias", FA_F32, 1};
  fa_function score = {.struct_size = sizeof score, .capture_count = 1, .captures = &capture};
  score.expression = "score + bias[kv";
  fa_config config = default_config();
  config.score = &score;
  config.has_window_left = 1;
  config.window_left = 2;
  config.sink = 1;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("column"), "16") == 0);
  CHECK(strcmp(fa_last_error_field("accepted"), "']'") == 0);
  score.expression = "score + bias[kv]";
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);

  fa_tensor tq = tensor4(q, B, H_Q, S_Q, D), tk = tensor4(k, B, H_KV, S_KV, D), tv = tensor4(v, B, H_KV, S_KV, D);
  fa_tensor to = tensor4(o, B, H_Q, S_Q, D), tl = tensor4(lse, B, H_Q, S_Q, 0), tg = tensor4(dout, B, H_Q, S_Q, D);
  fa_tensor tdq = tensor4(dq, B, H_Q, S_Q, D), tdk = tensor4(dk, B, H_KV, S_KV, D), tdv = tensor4(dv, B, H_KV, S_KV, D);
  fa_tensor tb = tensor4(bias, S_KV, 0, 0, 0), tdb = tensor4(dbias, S_KV, 0, 0, 0), ts = tensor4(sink, H_Q, 0, 0, 0);
  fa_tensor tds = tensor4(dsink, H_Q, 0, 0, 0), tdl = tensor4(ones, B, H_Q, S_Q, 0);
  tl.rank = tdl.rank = 3;
  tb.rank = tdb.rank = ts.rank = tds.rank = 1;
  const fa_captured given = {"bias", &tb, 0}, gradient = {"bias", &tdb, 0};
  fa_forward_inputs forward = {.struct_size = sizeof forward, .q = &tq, .k = &tk, .v = &tv, .sink = &ts};
  fa_forward_outputs results = {.struct_size = sizeof results, .o = &to, .lse = &tl};
  CHECK(fa_forward(attention, &forward, &results, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "captures[bias]") == 0);
  forward.captures = &given;
  forward.capture_count = 1;
  CHECK(fa_forward(attention, &forward, &results, NULL, NULL) == FA_OK);

  /* The log-sum-exp grows as much as all scores and sinks do together. */
  for (int n = 0; n < B * H_Q * S_Q; ++n) ones[n] = 1;
  fa_backward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv, .o = &to, .lse = &tl};
  inputs.dout = &tg;
  inputs.dlse = &tdl;
  inputs.captures = &given;
  inputs.capture_count = 1;
  inputs.sink = &ts;
  fa_backward_outputs outputs = {.struct_size = sizeof outputs, .dq = &tdq, .dk = &tdk, .dv = &tdv, .dsink = &tds};
  outputs.captures = &gradient;
  outputs.capture_count = 1;
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  double sum = 0;
  for (int j = 0; j < S_KV; ++j) sum += dbias[j];
  CHECK(sum > 1 && sum < B * H_Q * S_Q - 1);
  for (int h = 0; h < H_Q; ++h) sum += dsink[h];
  CHECK(fabs(sum - B * H_Q * S_Q) < 1e-4);
  fa_destroy(attention);
}

/* Before anything opens NVRTC: only then does a path count. */
static void test_nvrtc_path(void) {
  fa_config config = {.struct_size = sizeof config, .head_dim = 64, .dtype = FA_F16, .cache_mode = FA_CACHE_MEMORY};
  const fa_shape shape = {.struct_size = sizeof shape, .b = 1, .h_q = 1, .s_q = 64, .s_kv = 64};
  CHECK(fa_set_nvrtc_path("/nowhere/libnvrtc.so.13") == FA_OK);
  CHECK(fa_find_kernel(&config, &shape, "sm_80", NULL) == FA_NO_COMPILER);
  CHECK(strstr(fa_last_error_message(), "/nowhere/libnvrtc.so.13") != NULL);
  CHECK(fa_set_nvrtc_path("") == FA_OK);
  CHECK(fa_set_nvrtc_path(NULL) == FA_OK);
}

/* Keys of two requests go into pages of two rows, turned by their positions. */
static void test_append(void) {
  enum { PAGES = 6, PAGE = 2, NEW = 3 };
  static float k_pool[PAGES * PAGE * D], v_pool[PAGES * PAGE * D], turned[NEW * D];
  static int32_t table[2 * 3] = {5, 1, -1, 0, 3, 4};
  const int32_t cu[3] = {0, 2, 3}, used[2] = {3, 6};
  const int row_of[NEW] = {5 * PAGE + 1, 1 * PAGE, 4 * PAGE + 1}, position_of[NEW] = {1, 2, 5};
  fa_config config = default_config();
  config.page_size = PAGE;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  fa_tensor tk = tensor4(k, NEW, 1, D, 0), tv = tensor4(v, NEW, 1, D, 0), tq = tensor4(q, NEW, 1, D, 0);
  fa_tensor to = tensor4(turned, NEW, 1, D, 0);
  fa_tensor kp = tensor4(k_pool, PAGES, 1, PAGE, D), vp = tensor4(v_pool, PAGES, 1, PAGE, D);
  fa_tensor tt = tensor4(table, 2, 3, 0, 0);
  tk.rank = tv.rank = tq.rank = to.rank = 3;
  tt.rank = 2;
  tt.dtype = FA_I32;
  const fa_paged_cache cache = {.struct_size = sizeof cache, .block_table = &tt};
  fa_rotary_embedding rotary = {.struct_size = sizeof rotary, .dims = 4, .base = 100};
  fa_append_inputs inputs = {.struct_size = sizeof inputs, .k = &tk, .v = &tv, .k_cache = &kp, .v_cache = &vp};
  inputs.cache = &cache;
  inputs.b = 2;
  inputs.cu_seqlens_k_new = cu;
  inputs.seqused_kv = used;
  inputs.rotary = &rotary;
  inputs.q = &tq;
  inputs.q_out = &to;
  CHECK(fa_append(attention, &inputs, NULL) == FA_OK);
  for (int n = 0; n < NEW; ++n) {
    for (int c = 0; c < D; ++c) {
      CHECK(v_pool[row_of[n] * D + c] == v[n * D + c]);
      if (c >= 4) CHECK(k_pool[row_of[n] * D + c] == k[n * D + c] && turned[n * D + c] == q[n * D + c]);
    }
    for (int i = 0; i < 2; ++i) {
      const double angle = position_of[n] * pow(100, -i / 2.0);
      const float* pair = k + n * D + i;
      const double first = pair[0] * cos(angle) - pair[2] * sin(angle);
      const double second = pair[2] * cos(angle) + pair[0] * sin(angle);
      CHECK(fabs(k_pool[row_of[n] * D + i] - first) < 1e-6 && fabs(k_pool[row_of[n] * D + i + 2] - second) < 1e-6);
    }
  }
  rotary.dims = 5;
  CHECK(fa_append(attention, &inputs, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "rotary.dims") == 0);
  inputs.rotary = NULL;
  CHECK(fa_append(attention, &inputs, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "q") == 0);
  inputs.q = inputs.q_out = NULL;
  table[2 * 3 - 1] = PAGES;
  CHECK(fa_append(attention, &inputs, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "cache.block_table") == 0);
  fa_append_shape shape = {.struct_size = sizeof shape, .rotary_dims = 4};
  fa_kernel_info info = {.struct_size = sizeof info};
  CHECK(fa_prepare_append(attention, &shape) == FA_OK);
  CHECK(fa_append_kernel_info_get(attention, &shape, &info) == FA_OK);
  CHECK(strcmp(info.name, "fa_reference_append") == 0);
  shape.has_table = 1;
  shape.table_dtype = FA_F16;
  CHECK(fa_prepare_append(attention, &shape) == FA_INVALID_ARGUMENT);
  config.compile = FA_COMPILE_NEVER;
  shape.has_table = 0;
  CHECK(fa_find_append_kernel(&config, &shape, "sm_90a", &info) == FA_CACHE_MISS);
  fa_destroy(attention);
}

/* The same numbers as with a v that is a view of k. */
static void test_value_in_key(void) {
  enum { WIDE = 2 * D, ROWS = B * H_Q * S_Q };
  static float wide_q[ROWS * WIDE], wide_k[B * H_KV * S_KV * WIDE], expected[ROWS * D], actual[ROWS * D];
  for (int i = 0; i < ROWS * WIDE; ++i) wide_q[i] = 0.01F * (float)(i % 37);
  for (int i = 0; i < B * H_KV * S_KV * WIDE; ++i) wide_k[i] = 0.1F * (float)(i % 23) - 1;
  fa_config config = default_config();
  config.head_dim = WIDE;
  config.head_dim_v = D;
  fa_attention *apart = NULL, *within = NULL;
  CHECK(fa_create(&config, kHost, &apart) == FA_OK);
  config.value_in_key = WIDE + 8;
  CHECK(fa_create(&config, kHost, &within) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "value_in_key") == 0);
  config.value_in_key = D;
  CHECK(fa_create(&config, kHost, &within) == FA_OK);
  fa_tensor tq = tensor4(wide_q, B, H_Q, S_Q, WIDE), tk = tensor4(wide_k, B, H_KV, S_KV, WIDE), tv = tk;
  fa_tensor to = tensor4(expected, B, H_Q, S_Q, D);
  const int64_t strides[4] = {H_KV * S_KV * WIDE, S_KV * WIDE, WIDE, 1};
  tv.flags = 0;
  tv.shape[3] = D;
  memcpy(tv.strides, strides, sizeof strides);
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv};
  const fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &to};
  CHECK(fa_forward(apart, &inputs, &outputs, NULL, NULL) == FA_OK);
  to.data = actual;
  CHECK(fa_forward(within, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "v") == 0);
  inputs.v = NULL;
  CHECK(fa_forward(within, &inputs, &outputs, NULL, NULL) == FA_OK);
  CHECK(memcmp(actual, expected, sizeof actual) == 0 && actual[0] != 0);
  fa_destroy(apart);
  fa_destroy(within);
}

/* Keys in two shards, merged in place, stacked and accumulated, are those of all keys. */
/* One row of a text as a decode has the bits that it has in the whole text. */
static void test_invariance(void) {
  enum { ROWS = B * H_Q * S_Q };
  static float whole[ROWS * D], last[B * H_Q * D];
  fa_config config = default_config();
  config.causal = 1;
  config.invariance = 3;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "config.invariance") == 0);
  config.invariance = FA_INVARIANCE_ROWS;
  config.accumulate = 1;
  CHECK(fa_create(&config, kHost, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "accumulate") == 0);
  config.accumulate = 0;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  fa_tensor tq = tensor4(q, B, H_Q, S_Q, D), tk = tensor4(k, B, H_KV, S_KV, D), tv = tensor4(v, B, H_KV, S_KV, D);
  fa_tensor to = tensor4(whole, B, H_Q, S_Q, D);
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &to};
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  static float q_last[B * H_Q * D];
  for (int i = 0; i < B * H_Q; ++i) memcpy(q_last + i * D, q + (i * S_Q + S_Q - 1) * D, D * sizeof(float));
  tq = tensor4(q_last, B, H_Q, 1, D);
  to = tensor4(last, B, H_Q, 1, D);
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  for (int i = 0; i < B * H_Q; ++i) {
    CHECK(memcmp(last + i * D, whole + (i * S_Q + S_Q - 1) * D, D * sizeof(float)) == 0);
  }
  fa_destroy(attention);
}

static void test_merge(void) {
  enum { ROWS = B * H_Q * S_Q, FIRST = 3 };
  static float whole[ROWS * D], part[2 * ROWS * D], merged[ROWS * D];
  float whole_lse[ROWS], part_lse[2 * ROWS], merged_lse[ROWS];
  fa_config config = default_config();
  fa_attention *attention = NULL, *accumulating = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  config.accumulate = 1;
  CHECK(fa_create(&config, kHost, &accumulating) == FA_OK);
  config.sink = 1;
  fa_attention* refused = NULL;
  CHECK(fa_create(&config, kHost, &refused) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "sink") == 0);
  config.sink = 0;
  fa_tensor tq = tensor4(q, B, H_Q, S_Q, D), tk = tensor4(k, B, H_KV, S_KV, D), tv = tensor4(v, B, H_KV, S_KV, D);
  fa_tensor to = tensor4(whole, B, H_Q, S_Q, D), tl = tensor4(whole_lse, B, H_Q, S_Q, 0);
  tl.rank = 3;
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &to, .lse = &tl};
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  fa_tensor po[2] = {to, to}, pl[2] = {tl, tl};
  tk.flags = tv.flags = 0; /* strides of all keys */
  const int64_t strides[4] = {H_KV * S_KV * D, S_KV * D, D, 1};
  memcpy(tk.strides, strides, sizeof strides);
  memcpy(tv.strides, strides, sizeof strides);
  for (int i = 0; i < 2; ++i) {
    tk.shape[2] = tv.shape[2] = i == 0 ? FIRST : S_KV - FIRST;
    tk.data = k + (i == 0 ? 0 : FIRST * D);
    tv.data = v + (i == 0 ? 0 : FIRST * D);
    po[i].data = part + i * ROWS * D;
    pl[i].data = part_lse + i * ROWS;
    outputs.o = &po[i];
    outputs.lse = &pl[i];
    CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  }
  fa_tensor mo = to, ml = tl;
  mo.data = merged;
  ml.data = merged_lse;
  const fa_state states[2] = {{&po[0], &pl[0]}, {&po[1], &pl[1]}};
  fa_merge_inputs merge = {.struct_size = sizeof merge, .states = states, .state_count = 2};
  outputs.o = &mo;
  outputs.lse = &ml;
  CHECK(fa_merge(attention, &merge, &outputs, NULL) == FA_OK);
  for (int i = 0; i < ROWS * D; ++i) CHECK(fabs(merged[i] - whole[i]) < 1e-5);
  for (int i = 0; i < ROWS; ++i) CHECK(fabs(merged_lse[i] - whole_lse[i]) < 1e-5);
  merge.state_count = 1;
  merge.stacked = 2;
  merge.stride_o = ROWS * D;
  merge.stride_lse = ROWS;
  memset(merged, 0, sizeof merged);
  CHECK(fa_merge(attention, &merge, &outputs, NULL) == FA_OK);
  for (int i = 0; i < ROWS * D; ++i) CHECK(fabs(merged[i] - whole[i]) < 1e-5);
  tk.shape[2] = tv.shape[2] = S_KV - FIRST; /* the second shard again, to the first */
  outputs.o = &po[0];
  outputs.lse = &pl[0];
  CHECK(fa_forward(accumulating, &inputs, &outputs, NULL, NULL) == FA_OK);
  for (int i = 0; i < ROWS * D; ++i) CHECK(fabs(part[i] - whole[i]) < 1e-5);
  merge.stacked = 0;
  CHECK(fa_merge(attention, &merge, &outputs, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "stride_o") == 0);
  merge.state_count = 17;
  CHECK(fa_merge(attention, &merge, &outputs, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "state_count") == 0);
  merge.state_count = 2;
  merge.states = NULL;
  CHECK(fa_merge(attention, &merge, &outputs, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "states") == 0);
  fa_merge_shape shape = {.struct_size = sizeof shape, .has_result_dtype = 1, .result_dtype = FA_F32};
  fa_kernel_info info = {.struct_size = sizeof info};
  CHECK(fa_prepare_merge(attention, &shape) == FA_OK);
  CHECK(fa_merge_kernel_info_get(attention, &shape, &info) == FA_OK);
  CHECK(strcmp(info.name, "fa_reference_merge_states") == 0);
  config.compile = FA_COMPILE_NEVER;
  CHECK(fa_find_merge_kernel(&config, &shape, "sm_90a", &info) == FA_CACHE_MISS);
  shape.result_dtype = FA_F16;
  CHECK(fa_prepare_merge(attention, &shape) == FA_INVALID_ARGUMENT);
  fa_destroy(attention);
  fa_destroy(accumulating);
}

static void test_quantize(void) {
  enum { COLUMNS = 32, KEYS = 6 };
  static float x[KEYS * COLUMNS], scale[KEYS], mean[COLUMNS], bias[KEYS];
  static int8_t q_codes[KEYS * COLUMNS], k_codes[KEYS * COLUMNS];
  for (int i = 0; i < KEYS * COLUMNS; ++i) x[i] = (float)(i % 7) - 2 + (i % COLUMNS == 3 ? 40 : 0);
  fa_config config = default_config();
  config.head_dim = COLUMNS;
  config.head_dim_v = 0;
  config.dtype = FA_I8;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  fa_tensor from = tensor4(x, 1, 1, KEYS, COLUMNS), q = from, k = from;
  q.data = q_codes;
  k.data = k_codes;
  q.dtype = k.dtype = FA_I8;
  fa_tensor rows = tensor4(scale, 1, 1, KEYS, 0), of_columns = tensor4(mean, 1, 1, COLUMNS, 0), of_bias = rows;
  rows.rank = of_columns.rank = of_bias.rank = 3;
  of_bias.data = bias;
  fa_quantize_inputs inputs = {
      .struct_size = sizeof inputs, .k = &from, .k_codes = &k, .k_scale = &rows, .k_mean = &of_columns};
  CHECK(fa_prepare_quantize(attention, &inputs) == FA_OK);
  CHECK(fa_quantize(attention, &inputs, NULL) == FA_OK);
  for (int d = 0; d < COLUMNS; ++d) {
    double sum = 0;
    for (int j = 0; j < KEYS; ++j) sum += x[j * COLUMNS + d];
    CHECK(fabs(mean[d] - sum / KEYS) < 1e-5);
    for (int j = 0; j < KEYS; ++j) {
      CHECK(fabs(scale[j] * k_codes[j * COLUMNS + d] - (x[j * COLUMNS + d] - mean[d])) <= 0.501 * scale[j]);
    }
  }
  inputs.k = inputs.k_codes = inputs.k_scale = NULL;
  inputs.q = &from;
  inputs.q_codes = &q;
  inputs.q_scale = &rows;
  inputs.row_bias = &of_bias;
  CHECK(fa_quantize(attention, &inputs, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "k_mean") == 0);
  inputs.mean_given = 1;
  CHECK(fa_quantize(attention, &inputs, NULL) == FA_OK);
  double product = 0;
  for (int d = 0; d < COLUMNS; ++d) product += (double)x[COLUMNS + d] * mean[d];
  CHECK(fabs(bias[1] - product) < 1e-2);
  fa_destroy(attention);
}

static void test_statistics(void) {
  enum { ROWS = 3, KEYS = 5, TOP = 7 };
  static float rows_o[ROWS * D], rows_lse[ROWS], greatest[1], entropy[ROWS], sums[KEYS];
#define ROWS_OF(name, rows)         \
  fa_tensor t_##name = {            \
    .struct_size = sizeof t_##name, \
    .dtype = FA_F32,                \
    .rank = 4,                      \
    .flags = FA_TENSOR_ROW_MAJOR,   \
    .data = name,                   \
    .shape = {1, 1, rows, D}        \
  }
  ROWS_OF(q, ROWS);
  ROWS_OF(k, KEYS);
  ROWS_OF(v, KEYS);
  ROWS_OF(rows_o, ROWS);
#undef ROWS_OF
  fa_tensor lse_ = {.struct_size = sizeof lse_,
                    .dtype = FA_F32,
                    .rank = 3,
                    .flags = FA_TENSOR_ROW_MAJOR,
                    .data = rows_lse,
                    .shape = {1, 1, ROWS}};
  fa_tensor entropy_ = lse_, sums_ = lse_, greatest_ = lse_;
  entropy_.data = entropy;
  sums_.data = sums;
  sums_.shape[2] = KEYS;
  greatest_.data = greatest;
  greatest_.rank = 1;
  fa_config config = {.struct_size = sizeof config,
                      .head_dim = D,
                      .dtype = FA_F32,
                      .max_logit = FA_MAX_LOGIT_SOFTMAX,
                      .max_logit_by_head = 1,
                      .entropy = 1,
                      .column_sums = FA_COLUMN_SUMS_KV_HEADS,
                      .top_keys = TOP};
  int32_t top[TOP];
  fa_tensor top_ = {.struct_size = sizeof top_,
                    .dtype = FA_I32,
                    .rank = 3,
                    .flags = FA_TENSOR_ROW_MAJOR,
                    .data = top,
                    .shape = {1, 1, TOP}};
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, (fa_device){FA_DEVICE_HOST, 0}, &attention) == FA_OK);
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &t_q, .k = &t_k, .v = &t_v};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs,
                                .o = &t_rows_o,
                                .lse = &lse_,
                                .max_logit = &greatest_,
                                .entropy = &entropy_,
                                .column_sums = &sums_,
                                .top_keys = &top_};
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  double logits = -1e30, p_sum = 0;
  for (int i = 0; i < ROWS; ++i) {
    double row_entropy = 0;
    for (int j = 0; j < KEYS; ++j) {
      double score = 0;
      for (int d = 0; d < D; ++d) score += (double)q[i * D + d] * k[j * D + d];
      score /= sqrt((double)D);
      if (score > logits) logits = score;
      const double p = exp(score - rows_lse[i]);
      row_entropy -= p * log(p);
    }
    CHECK(fabs(row_entropy - entropy[i]) < 1e-4);
  }
  for (int j = 0; j < KEYS; ++j) p_sum += sums[j];
  CHECK(fabs(logits - greatest[0]) < 1e-4);
  CHECK(fabs(p_sum - ROWS) < 1e-4);
  for (int i = 0; i + 1 < TOP; ++i) CHECK(i + 1 < KEYS ? sums[top[i]] >= sums[top[i + 1]] : top[i + 1] == -1);
  for (int j = 0; j < KEYS; ++j) CHECK(sums[j] <= sums[top[0]]);
  /* The sums may be left out then. */
  const int32_t first = top[0];
  top[0] = -7;
  outputs.column_sums = NULL;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  CHECK(top[0] == first);
  outputs.column_sums = &sums_;
  outputs.top_keys = NULL;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "top_keys") == 0);
  /* So an earlier version of the struct is refused here, */
  outputs.top_keys = &top_;
  outputs.struct_size = offsetof(fa_forward_outputs, top_keys);
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "top_keys") == 0);
  /* and goes with an earlier config. */
  fa_attention* earlier = NULL;
  config.struct_size = offsetof(fa_config, top_keys);
  CHECK(fa_create(&config, (fa_device){FA_DEVICE_HOST, 0}, &earlier) == FA_OK);
  CHECK(fa_forward(earlier, &inputs, &outputs, NULL, NULL) == FA_OK);
  fa_destroy(earlier);
  outputs.struct_size = sizeof outputs;

  outputs.entropy = NULL;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "entropy") == 0);
  /* A struct from before there were statistics asks for none, and is given none. */
  outputs.struct_size = offsetof(fa_forward_outputs, max_logit);
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "max_logit") == 0);
  fa_destroy(attention);
  config.struct_size = offsetof(fa_config, max_logit);
  CHECK(fa_create(&config, (fa_device){FA_DEVICE_HOST, 0}, &attention) == FA_OK);
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  fa_destroy(attention);
  config.struct_size = sizeof config;
  config.top_keys = 1025;
  CHECK(fa_create(&config, (fa_device){FA_DEVICE_HOST, 0}, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "statistics.top_keys") == 0);
  config.top_keys = 0;
  config.column_sums = 3;
  CHECK(fa_create(&config, (fa_device){FA_DEVICE_HOST, 0}, &attention) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "config.column_sums") == 0);
}

/* dq by the gradient of the entropy and of the greatest logits alone, of one row. */
static void test_statistics_gradients(void) {
  enum { KEYS = 5 };
  static float row_o[D], zeros[D], row_lse[1], greatest[1], entropy[1], dq[D];
  const float dentropy[1] = {0.5f}, dmax_logit[1] = {-2.0f};
#define TENSOR_OF(name, of, rows)   \
  fa_tensor t_##name = {            \
    .struct_size = sizeof t_##name, \
    .dtype = FA_F32,                \
    .rank = 4,                      \
    .flags = FA_TENSOR_ROW_MAJOR,   \
    .data = (void*)(of),            \
    .shape = {1, 1, rows, D}        \
  }
  TENSOR_OF(q, q, 1);
  TENSOR_OF(k, k, KEYS);
  TENSOR_OF(v, v, KEYS);
  TENSOR_OF(row_o, row_o, 1);
  TENSOR_OF(dout, zeros, 1);
  TENSOR_OF(dq, dq, 1);
#undef TENSOR_OF
  fa_tensor lse_ = {.struct_size = sizeof lse_,
                    .dtype = FA_F32,
                    .rank = 3,
                    .flags = FA_TENSOR_ROW_MAJOR,
                    .data = row_lse,
                    .shape = {1, 1, 1}};
  fa_tensor entropy_ = lse_, greatest_ = lse_, dentropy_ = lse_, dmax_logit_ = lse_;
  entropy_.data = entropy;
  greatest_.data = greatest;
  dentropy_.data = (void*)dentropy;
  dmax_logit_.data = (void*)dmax_logit;
  fa_config config = {.struct_size = sizeof config,
                      .head_dim = D,
                      .dtype = FA_F32,
                      .max_logit = FA_MAX_LOGIT_SOFTMAX,
                      .entropy = 1,
                      .entropy_gradient = 1,
                      .max_logit_gradient = 1};
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, (fa_device){FA_DEVICE_HOST, 0}, &attention) == FA_OK);
  fa_forward_inputs forward = {.struct_size = sizeof forward, .q = &t_q, .k = &t_k, .v = &t_v};
  fa_forward_outputs results = {
      .struct_size = sizeof results, .o = &t_row_o, .lse = &lse_, .max_logit = &greatest_, .entropy = &entropy_};
  CHECK(fa_forward(attention, &forward, &results, NULL, NULL) == FA_OK);
  fa_backward_inputs inputs = {.struct_size = sizeof inputs,
                               .q = &t_q,
                               .k = &t_k,
                               .v = &t_v,
                               .o = &t_row_o,
                               .lse = &lse_,
                               .dout = &t_dout,
                               .entropy = &entropy_,
                               .dentropy = &dentropy_,
                               .dmax_logit = &dmax_logit_};
  fa_backward_outputs outputs = {.struct_size = sizeof outputs, .dq = &t_dq};
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  double expected[D] = {0};
  for (int j = 0; j < KEYS; ++j) {
    double score = 0;
    for (int d = 0; d < D; ++d) score += (double)q[d] * k[j * D + d];
    score /= sqrt((double)D);
    const double p = exp(score - row_lse[0]);
    double ds = -dentropy[0] * p * (log(p) + entropy[0]);
    if (fabs(score - greatest[0]) < 1e-5) ds += dmax_logit[0];
    for (int d = 0; d < D; ++d) expected[d] += ds * k[j * D + d] / sqrt((double)D);
  }
  for (int d = 0; d < D; ++d) CHECK(fabs(expected[d] - dq[d]) < 1e-4);
  inputs.dmax_logit = NULL;
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "dmax_logit") == 0);
  /* An earlier version of the struct has none of them. */
  inputs.struct_size = offsetof(fa_backward_inputs, entropy);
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "entropy") == 0);
  fa_destroy(attention);
  /* It goes with an earlier config. */
  config.struct_size = offsetof(fa_config, entropy_gradient);
  CHECK(fa_create(&config, (fa_device){FA_DEVICE_HOST, 0}, &attention) == FA_OK);
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  fa_destroy(attention);
  config.struct_size = sizeof config;
  /* Of its one head the row has the greatest logit. */
  config.max_logit_by_head = 1;
  inputs.struct_size = sizeof inputs;
  inputs.dmax_logit = &dmax_logit_;
  CHECK(fa_create(&config, (fa_device){FA_DEVICE_HOST, 0}, &attention) == FA_OK);
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "dmax_logit") == 0);
  dmax_logit_.rank = 1;
  for (int d = 0; d < D; ++d) dq[d] = 0;
  CHECK(fa_backward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  for (int d = 0; d < D; ++d) CHECK(fabs(expected[d] - dq[d]) < 1e-4);
  fa_destroy(attention);
}

static void test_version(void) {
  char text[32];
  snprintf(text, sizeof text, "%d.%d.%d", FA_VERSION_MAJOR, FA_VERSION_MINOR, FA_VERSION_PATCH);
  CHECK(strcmp(text, FA_VERSION_STRING) == 0);
  CHECK(strcmp(fa_version(), FA_VERSION_STRING) == 0);
  CHECK(FA_VERSION_NUMBER == (FA_VERSION_MAJOR * 100 + FA_VERSION_MINOR) * 100 + FA_VERSION_PATCH);
}

/* A debug call writes P of a head, and says which number is broken. */
static void test_debug(void) {
  static float p[S_Q * S_KV];
  fa_config config = default_config();
  config.debug = 1;
  fa_attention* attention = NULL;
  CHECK(fa_create(&config, kHost, &attention) == FA_OK);
  fa_tensor tq = tensor4(q, B, H_Q, S_Q, D), tk = tensor4(k, B, H_KV, S_KV, D), tv = tensor4(v, B, H_KV, S_KV, D);
  fa_tensor to = tensor4(o, B, H_Q, S_Q, D), tl = tensor4(lse, B, H_Q, S_Q, 0), tp = tensor4(p, S_Q, S_KV, 0, 0);
  tl.rank = 3;
  tp.rank = 2;
  fa_probability_dump dump = {.struct_size = sizeof dump, .p = &tp, .b = B - 1, .h = H_Q - 1};
  fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &tq, .k = &tk, .v = &tv};
  fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &to, .lse = &tl, .dump = &dump};
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_OK);
  for (int i = 0; i < S_Q; ++i) {
    double sum = 0;
    for (int j = 0; j < S_KV; ++j) sum += p[i * S_KV + j];
    CHECK(fabs(sum - 1) < 1e-5);
  }
  fa_error_location location = {.struct_size = sizeof location};
  dump.h = H_Q;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_INVALID_ARGUMENT);
  CHECK(strcmp(fa_last_error_field("argument"), "dump.h") == 0);
  CHECK(fa_last_error_location(&location) == FA_INVALID_ARGUMENT);
  CHECK(fa_last_error_location(NULL) == FA_INVALID_ARGUMENT);
  outputs.dump = NULL;
  const float kept = v[D + 3];
  v[D + 3] = NAN;
  CHECK(fa_forward(attention, &inputs, &outputs, NULL, NULL) == FA_NOT_FINITE);
  CHECK(strcmp(fa_status_name(FA_NOT_FINITE), "not_finite") == 0);
  CHECK(strcmp(fa_last_error_field("tensor"), "v") == 0);
  CHECK(fa_last_error_location(&location) == FA_OK);
  CHECK(strcmp(location.tensor, "v") == 0 && strcmp(location.result, "o") == 0 && isnan(location.value));
  CHECK(location.b == 0 && location.h == 0 && location.q == -1 && location.kv == 1 && location.d == 3);
  CHECK(location.index_count == 0);
  v[D + 3] = kept;
  fa_destroy(attention);
}

int main(void) {
  CHECK(fa_last_error_code() == FA_OK);
  CHECK(strcmp(fa_last_error_message(), "") == 0);
  test_version();
  test_nvrtc_path();
  fill(q, B * H_Q * S_Q * D, 1);
  fill(k, B * H_KV * S_KV * D, 2);
  fill(v, B * H_KV * S_KV * D, 3);
  test_forward(0, 0.0f);
  test_forward(1, 0.0f);
  test_forward(1, -0.5f);
  test_backward();
  test_functions();
  test_append();
  test_invariance();
  test_merge();
  test_quantize();
  test_statistics();
  test_statistics_gradients();
  test_value_in_key();
  test_strides();
  test_places();
  test_shapes_of_places();
  test_overrides();
  test_override_texts();
  test_errors();
  test_struct_sizes();
  test_shapes();
  test_variants();
  test_dropout_mask();
  test_pages();
  test_contiguous_cache();
  test_schedule();
  test_shared_prefixes();
  test_cache();
  test_debug();
  test_log();
  if (failures == 0) puts("c_abi: all checks passed");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
