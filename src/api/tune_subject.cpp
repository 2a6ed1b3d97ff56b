#include "api/tune_subject.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include <fa/error.hpp>

#include "reference/convert.hpp"
#include "support/log.hpp"
#include "tune/bucket.hpp"

namespace fa::api {
namespace {

constexpr std::size_t kBlockElements = 262139;  // a prime: no two rows of a tensor that is tiled with it are equal
constexpr std::size_t kLeastFlush = std::size_t{32} << 20;
constexpr std::size_t kSamples = 64;
constexpr std::size_t kSampleBytes = 4096;
constexpr double kWarmUpMs = 10;    // for the clocks to rise
constexpr double kEnoughMs = 0.15;  // of one time: an event is exact to half a microsecond
constexpr int kMostRepeats = 8;

void check_call(CUresult result, const char* call) {
  driver::check(result, call);
}

/// Roughly normal numbers, the same in every process.
std::vector<std::byte> random_block(DType dtype) {
  std::uint64_t state = 0x2545f4914f6cdd1d;
  const auto uniform = [&state] {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return double(state >> 11) * 0x1p-53 - 0.5;
  };
  std::vector<std::byte> block(kBlockElements * size_of(dtype));
  for (std::size_t i = 0; i < kBlockElements; ++i) {
    const double value = (uniform() + uniform() + uniform() + uniform()) * std::sqrt(3.0);
    if (dtype == DType::f32) {
      const auto single = static_cast<float>(value);
      std::memcpy(&block[i * sizeof single], &single, sizeof single);
    } else {
      const std::uint16_t half = dtype == DType::f16 ? reference::encode_f16(value) : reference::encode_bf16(value);
      std::memcpy(&block[i * sizeof half], &half, sizeof half);
    }
  }
  return block;
}

/// What two right kernels may differ by, relative to the greatest magnitude of their results: each rounds twice to the
/// element type.
double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 1.0 / 64 : dtype == DType::f16 ? 1.0 / 512 : 1.0 / 8192;
}

float decode(const std::byte* data, DType dtype) {
  if (dtype == DType::f32) {
    float value = 0;
    std::memcpy(&value, data, sizeof value);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, data, sizeof bits);
  return dtype == DType::f16 ? reference::decode_f16(bits) : reference::decode_bf16(bits);
}

void* pointer(CUdeviceptr data) {
  return reinterpret_cast<void*>(data);
}

}  // namespace

GpuSubject::GpuSubject(const Contest& contest, const plan::Problem& problem, bool backward,
                       const driver::ContextRef& context, Stream stream)
    : contest_(contest), problem_(problem), scope_(context.context()), repeats_(contest.specs.size(), 1) {
  const driver::Api& api = driver::api();
  CUdevice device = 0;
  int l2 = 0;
  check_call(api.cuDeviceGet(&device, context.info().ordinal), "cuDeviceGet");
  check_call(api.cuDeviceGetAttribute(&l2, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device), "cuDeviceGetAttribute");
  flush_bytes_ = std::max(2 * static_cast<std::size_t>(l2), kLeastFlush);
  std::size_t free_bytes = 0;
  std::size_t all_bytes = 0;
  check_call(api.cuMemGetInfo(&free_bytes, &all_bytes), "cuMemGetInfo");
  const std::size_t needed =
      static_cast<std::size_t>(tune::tensor_bytes(problem, backward)) + contest.workspace + flush_bytes_;
  if (needed > free_bytes / 2) {
    throw Error(ErrorCode::out_of_memory, fmt::format("{} MiB of scratch memory are needed, and {} MiB are free",
                                                      needed >> 20, free_bytes >> 20));
  }
  check_call(api.cuStreamSynchronize(stream), "cuStreamSynchronize");
  try {
    check_call(api.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    check_call(api.cuEventCreate(&start_, CU_EVENT_DEFAULT), "cuEventCreate");
    check_call(api.cuEventCreate(&end_, CU_EVENT_DEFAULT), "cuEventCreate");
    flush_ = allocate(flush_bytes_);
    workspace_ = {contest.workspace == 0 ? nullptr : pointer(allocate(contest.workspace)), contest.workspace};

    const auto [b, h_q, h_kv, s_q, s_kv] = std::array{problem.b, problem.h_q, problem.h_kv, problem.s_q, problem.s_kv};
    const auto tensor = [this, &problem, b = b](std::int64_t heads, std::int64_t rows, int d, bool random) {
      const auto elements = static_cast<std::size_t>(b * heads * rows * d);
      const CUdeviceptr data = random ? random_tensor(elements) : allocate(elements * size_of(problem.dtype));
      return TensorView(pointer(data), problem.dtype, {b, rows, heads, d}).swap_axes(1, 2);
    };
    const double allowed = tolerance(problem.dtype);
    tensors_.q = tensor(h_q, s_q, problem.d_qk, true);
    tensors_.k = tensor(h_kv, s_kv, problem.d_qk, true);
    tensors_.v = tensor(h_kv, s_kv, problem.d_v, true);
    tensors_.o = tensor(h_q, s_q, problem.d_v, backward);
    const auto rows = static_cast<std::size_t>(b * h_q * s_q);
    const CUdeviceptr lse = allocate(rows * sizeof(float));
    tensors_.lse = TensorView(pointer(lse), DType::f32, {b, h_q, s_q});
    if (backward) {
      // About what a forward would have written, so that probabilities are of the usual size.
      const float usual = std::log(static_cast<float>(std::max<std::int64_t>(s_kv, 1))) + 0.5F;
      fill(lse, rows * sizeof usual, &usual, sizeof usual);
      tensors_.dout = tensor(h_q, s_q, problem.d_v, true);
      tensors_.dq = tensor(h_q, s_q, problem.d_qk, false);
      tensors_.dk = tensor(h_kv, s_kv, problem.d_qk, false);
      tensors_.dv = tensor(h_kv, s_kv, problem.d_v, false);
      const auto [wants_dq, wants_dk, wants_dv] = problem.gradients;
      const auto add = [&](const TensorView& view, bool wanted) {
        if (wanted) add_output(view, static_cast<std::size_t>(view.elements()), 2 * allowed);
      };
      add(tensors_.dq, wants_dq);
      add(tensors_.dk, wants_dk);
      add(tensors_.dv, wants_dv);
    } else {
      add_output(tensors_.o, static_cast<std::size_t>(tensors_.o.elements()), allowed);
      add_output(tensors_.lse, rows, 1e-3);
    }
    synchronize();
  } catch (...) {
    release();
    throw;
  }
}

GpuSubject::~GpuSubject() {
  release();
}

void GpuSubject::release() noexcept {
  const driver::Api& api = driver::api();
  if (stream_ != nullptr) {
    for (const CUdeviceptr data : allocations_) api.cuMemFreeAsync(data, stream_);
    api.cuStreamSynchronize(stream_);  // the pool gives back to the system what is free then
    api.cuStreamDestroy(stream_);
  }
  if (start_ != nullptr) api.cuEventDestroy(start_);
  if (end_ != nullptr) api.cuEventDestroy(end_);
}

CUdeviceptr GpuSubject::allocate(std::size_t bytes) {
  return allocations_.emplace_back(driver::allocate(std::max<std::size_t>(bytes, 1), stream_));
}

void GpuSubject::fill(CUdeviceptr data, std::size_t bytes, const void* pattern, std::size_t pattern_bytes) {
  const driver::Api& api = driver::api();
  std::size_t filled = std::min(bytes, pattern_bytes);
  if (filled == 0) return;
  check_call(api.cuMemcpyHtoDAsync(data, pattern, filled, stream_), "cuMemcpyHtoDAsync");
  synchronize();  // the pattern may go
  while (filled < bytes) {
    const std::size_t count = std::min(filled, bytes - filled);
    check_call(api.cuMemcpyDtoDAsync(data + filled, data, count, stream_), "cuMemcpyDtoDAsync");
    filled += count;
  }
}

CUdeviceptr GpuSubject::random_tensor(std::size_t elements) {
  const std::vector<std::byte> block = random_block(problem_.dtype);
  const std::size_t bytes = elements * size_of(problem_.dtype);
  const CUdeviceptr data = allocate(bytes);
  // Tensors start at different places of the block: equal q and k would make scores that nobody has.
  const std::size_t shift = (allocations_.size() * 4099 % 65536) * size_of(problem_.dtype);
  fill(data, bytes, block.data() + shift, block.size() - shift);
  return data;
}

void GpuSubject::add_output(const TensorView& view, std::size_t elements, double allowed) {
  outputs_.push_back({reinterpret_cast<CUdeviceptr>(view.data), elements * size_of(view.dtype), view.dtype, allowed});
}

void GpuSubject::synchronize() {
  check_call(driver::api().cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

std::string GpuSubject::prepare(std::size_t candidate) {
  try {
    contest_.make(candidate);
    return {};
  } catch (const Error& error) {
    if (candidate == 0) throw;
    return error.what();
  } catch (const std::exception& exception) {  // of a compilation hook
    if (candidate == 0) throw;
    return exception.what();
  }
}

std::vector<float> GpuSubject::sample(const Output& output) {
  const std::size_t element = size_of(output.dtype);
  const std::size_t size = std::min(kSampleBytes, output.bytes);
  const std::size_t samples = output.bytes <= kSampleBytes ? 1 : kSamples;
  std::vector<std::byte> bytes(samples * size);
  for (std::size_t i = 0; i < samples; ++i) {
    const std::size_t last = output.bytes - size;
    const std::size_t offset = samples == 1 ? 0 : last / element * i / (samples - 1) * element;
    check_call(driver::api().cuMemcpyDtoHAsync(&bytes[i * size], output.data + offset, size, stream_),
               "cuMemcpyDtoHAsync");
  }
  synchronize();
  std::vector<float> values(bytes.size() / element);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = decode(&bytes[i * element], output.dtype);
  return values;
}

std::string GpuSubject::check(std::size_t candidate) {
  for (const Output& output : outputs_) {  // NaN, should anything not be written
    check_call(driver::api().cuMemsetD8Async(output.data, 0xff, output.bytes, stream_), "cuMemsetD8Async");
  }
  try {
    contest_.launch(candidate, tensors_, stream_, workspace_);
  } catch (const Error& error) {  // such as more threads than its registers allow
    if (candidate == 0) throw;
    return error.what();
  }
  for (Output& output : outputs_) {
    std::vector<float> values = sample(output);
    if (std::ranges::any_of(values, [](float value) { return std::isnan(value); })) return "it left NaN in an output";
    if (candidate == 0) {
      output.expected = std::move(values);
      continue;
    }
    float greatest = 0;
    for (const float value : output.expected) {
      if (std::isfinite(value)) greatest = std::max(greatest, std::abs(value));
    }
    const double allowed = output.allowed * std::max(greatest, 1e-6F);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float expected = output.expected[i];
      if (values[i] == expected || std::abs(double{values[i]} - expected) <= allowed) continue;
      return fmt::format("it computed {} where the default computed {}", values[i], expected);
    }
  }
  double once = time_once(candidate);
  for (double spent = once; candidate == 0 && spent < kWarmUpMs; spent += std::max(once, 0.05)) {
    once = time_once(candidate);
  }
  repeats_[candidate] = static_cast<int>(std::clamp(kEnoughMs / std::max(once, 1e-3), 1.0, double{kMostRepeats}));
  return {};
}

double GpuSubject::time_once(std::size_t candidate) {
  const driver::Api& api = driver::api();
  // The write fills the L2 cache, and keeps the GPU busy while the call is queued behind it.
  check_call(api.cuMemsetD8Async(flush_, 0, flush_bytes_, stream_), "cuMemsetD8Async");
  check_call(api.cuEventRecord(start_, stream_), "cuEventRecord");
  contest_.launch(candidate, tensors_, stream_, workspace_);
  check_call(api.cuEventRecord(end_, stream_), "cuEventRecord");
  check_call(api.cuEventSynchronize(end_), "cuEventSynchronize");
  float milliseconds = 0;
  check_call(api.cuEventElapsedTime(&milliseconds, start_, end_), "cuEventElapsedTime");
  return double{milliseconds};
}

double GpuSubject::time(std::size_t candidate) {
  double sum = 0;
  const int repeats = repeats_[candidate];
  for (int i = 0; i < repeats; ++i) sum += time_once(candidate);
  return sum / repeats;
}

}  // namespace fa::api
