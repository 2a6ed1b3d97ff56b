#ifndef FA_TESTS_DOCS_SNIPPET_H_
#define FA_TESTS_DOCS_SNIPPET_H_

/* What the C snippets of the pages name without declaring it. */

#include <fa/fa.h>
#include <stdio.h>

enum { b = 2, h_q = 4, h_kv = 2, s_q = 5, s_kv = 7 };
static float q_data[b * h_q * s_q * 64], k_data[b * h_kv * s_kv * 64], v_data[b * h_kv * s_kv * 64];
static float o_data[b * h_q * s_q * 64];
static const fa_device device = {FA_DEVICE_HOST, 0};
static void* const stream = NULL;

#endif /* FA_TESTS_DOCS_SNIPPET_H_ */
