// Attention of llm.c by fa: takes the place of llm.c's own llmc/cudnn_att.cpp, behind the same header. README.md beside
// this file says how it is put in place.
//
// Axes of llm.c are B batch, T rows, NH heads, HS = C / NH head dim. Queries, keys and values lie packed, (B, T, 3, NH,
// HS), which fa reads and writes where they are, by strides. Attention is causal.

#include "cudnn_att.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>

#include <fa/fa.h>

#if defined(ENABLE_FP32)
#error "attention of fa in llm.c is for BF16 and FP16, as that of cuDNN"
#elif defined(ENABLE_FP16)
#define FA_LLM_C_DTYPE FA_F16
#else
#define FA_LLM_C_DTYPE FA_BF16
#endif

// The device that llm.c has chosen. A test of this file has no GPU, and says FA_DEVICE_HOST.
#ifndef FA_LLM_C_DEVICE
#define FA_LLM_C_DEVICE FA_DEVICE_CURRENT
#endif

// Whether gradients are the same bits in every run, as llm.c asks of cuDNN.
#ifndef FA_LLM_C_DETERMINISTIC
#define FA_LLM_C_DETERMINISTIC 0
#endif

namespace {

struct Workspace {
  void* data = nullptr;
  size_t size = 0;
};

std::map<int, fa_attention*> attentions;  // by head dim
Workspace workspace;                      // of backward, grown to what the largest call needs

void check(int status, const char* what) {
  if (status == FA_OK) return;
  std::fprintf(stderr, "[FA ERROR] %s: %s: %s\n", what, fa_status_name(status), fa_last_error_message());
  std::exit(EXIT_FAILURE);
}

const fa_attention* attention_of(int head_dim) {
  fa_attention*& attention = attentions[head_dim];
  if (attention == nullptr) {
    fa_config config = {};
    config.struct_size = sizeof config;
    config.head_dim = head_dim;
    config.dtype = FA_LLM_C_DTYPE;
    config.causal = 1;
    config.deterministic = FA_LLM_C_DETERMINISTIC;
    fa_device device = {};
    device.kind = FA_LLM_C_DEVICE;
    check(fa_create(&config, device, &attention), "fa_create");
  }
  return attention;
}

/// [b, h, s, d] by meaning, of memory (B, T, parts, NH, HS), from its part number `part` on.
fa_tensor heads(const floatX* data, int part, int parts, int B, int T, int NH, int HS) {
  const int64_t row = int64_t(parts) * NH * HS;
  fa_tensor tensor = {};
  tensor.struct_size = sizeof tensor;
  tensor.dtype = FA_LLM_C_DTYPE;
  tensor.rank = 4;
  tensor.data = const_cast<floatX*>(data + int64_t(part) * NH * HS);
  const int64_t shape[4] = {B, NH, T, HS}, strides[4] = {T * row, HS, row, 1};
  for (int axis = 0; axis < 4; ++axis) {
    tensor.shape[axis] = shape[axis];
    tensor.strides[axis] = strides[axis];
  }
  return tensor;
}

/// The log-sum-exp, (B, NH, T).
fa_tensor row_sums(const float* data, int B, int T, int NH) {
  fa_tensor tensor = {};
  tensor.struct_size = sizeof tensor;
  tensor.dtype = FA_F32;
  tensor.rank = 3;
  tensor.flags = FA_TENSOR_ROW_MAJOR;
  tensor.data = const_cast<float*>(data);
  tensor.shape[0] = B;
  tensor.shape[1] = NH;
  tensor.shape[2] = T;
  return tensor;
}

/// Memory that backward needs: kept, since taking it from a pool costs time in every step.
fa_workspace backward_workspace(const fa_attention* attention, int B, int T, int NH) {
  fa_shape shape = {};
  shape.struct_size = sizeof shape;
  shape.b = B;
  shape.h_q = shape.h_kv = NH;
  shape.s_q = shape.s_kv = T;
  size_t size = 0;
  check(fa_backward_workspace_size(attention, &shape, &size), "fa_backward_workspace_size");
  if (size > workspace.size) {
    cudaCheck(cudaFree(workspace.data));
    cudaCheck(cudaMalloc(&workspace.data, size));
    workspace.size = size;
  }
  fa_workspace result = {};
  result.struct_size = sizeof result;
  result.data = workspace.data;
  result.size = workspace.size;
  return result;
}

}  // namespace

void create_cudnn() {
  // Attentions are made when their head dim is known. A library that cannot be the headers' is found out here.
  std::printf("attention by fa %s\n", fa_version());
}

void destroy_cudnn() {
  for (auto& entry : attentions) fa_destroy(entry.second);
  attentions.clear();
  if (workspace.data != nullptr) cudaCheck(cudaFree(workspace.data));
  workspace = Workspace();
}

void attention_forward_cudnn(floatX* out, float* stats, floatX* inp, int B, int T, int NH, int C, cudaStream_t stream) {
  const int HS = C / NH;
  const fa_tensor q = heads(inp, 0, 3, B, T, NH, HS), k = heads(inp, 1, 3, B, T, NH, HS);
  const fa_tensor v = heads(inp, 2, 3, B, T, NH, HS), o = heads(out, 0, 1, B, T, NH, HS);
  const fa_tensor lse = row_sums(stats, B, T, NH);
  fa_forward_inputs inputs = {};
  inputs.struct_size = sizeof inputs;
  inputs.q = &q;
  inputs.k = &k;
  inputs.v = &v;
  fa_forward_outputs outputs = {};
  outputs.struct_size = sizeof outputs;
  outputs.o = &o;
  outputs.lse = stats != nullptr ? &lse : nullptr;  // llm.c wants none where no backward follows
  check(fa_forward(attention_of(HS), &inputs, &outputs, stream, nullptr), "fa_forward");
}

void attention_backward_cudnn(floatX* dqkvr, floatX* dout, floatX* qkvr, floatX* o, float* stats, int B, int T, int NH,
                              int C, cudaStream_t stream) {
  const int HS = C / NH;
  const fa_tensor q = heads(qkvr, 0, 3, B, T, NH, HS), k = heads(qkvr, 1, 3, B, T, NH, HS);
  const fa_tensor v = heads(qkvr, 2, 3, B, T, NH, HS);
  const fa_tensor out = heads(o, 0, 1, B, T, NH, HS), dout_view = heads(dout, 0, 1, B, T, NH, HS);
  const fa_tensor lse = row_sums(stats, B, T, NH);
  const fa_tensor dq = heads(dqkvr, 0, 3, B, T, NH, HS), dk = heads(dqkvr, 1, 3, B, T, NH, HS);
  const fa_tensor dv = heads(dqkvr, 2, 3, B, T, NH, HS);
  fa_backward_inputs inputs = {};
  inputs.struct_size = sizeof inputs;
  inputs.q = &q;
  inputs.k = &k;
  inputs.v = &v;
  inputs.o = &out;
  inputs.lse = &lse;
  inputs.dout = &dout_view;
  fa_backward_outputs outputs = {};
  outputs.struct_size = sizeof outputs;
  outputs.dq = &dq;
  outputs.dk = &dk;
  outputs.dv = &dv;
  const fa_attention* attention = attention_of(HS);
  const fa_workspace scratch = backward_workspace(attention, B, T, NH);
  check(fa_backward(attention, &inputs, &outputs, stream, scratch.size != 0 ? &scratch : nullptr), "fa_backward");
}
