#ifndef FA_TESTS_LLM_C_CUDNN_ATT_H_
#define FA_TESTS_LLM_C_CUDNN_ATT_H_

// What examples/llm_c/cudnn_att.cpp expects of the header of that name in llm.c, written for a test without llm.c.

#include <cstdio>
#include <cstdlib>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#if defined(ENABLE_FP16)
using floatX = half;
#else
using floatX = __nv_bfloat16;
#endif

#define cudaCheck(error)                                 \
  do {                                                   \
    if ((error) != cudaSuccess) std::exit(EXIT_FAILURE); \
  } while (false)

void create_cudnn();
void destroy_cudnn();
void attention_forward_cudnn(floatX* out, float* stats, floatX* inp, int B, int T, int NH, int C, cudaStream_t stream);
void attention_backward_cudnn(floatX* dqkvr, floatX* dout, floatX* qkvr, floatX* o, float* stats, int B, int T, int NH,
                              int C, cudaStream_t stream);

#endif  // FA_TESTS_LLM_C_CUDNN_ATT_H_
