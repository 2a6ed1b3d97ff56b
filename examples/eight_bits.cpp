// Attention of 8 bits: q, k and v as codes that `quantize` makes, and caches whose codes `append` makes. The error of o
// is given twice: against float64 of the inputs as they were, and against float64 of what the codes stand for. The
// first is what a model sees, the second is the kernels' own. Four columns of K have a mean of 12 deviations, as those
// of many models: i8 with the mean taken away is what keeps them.
//
// Ends with 0 if the second error is as small as docs/numerics.md says.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include <fa/attention.hpp>

#include "decode/memory.hpp"

namespace {

using decode::Gpu, decode::Shared;
using fa::DType;
using Numbers = std::vector<double>;

constexpr std::int64_t kHeads = 2, kLength = 160, kHeadDim = 64;
constexpr std::size_t kRows = kHeads * kLength, kSize = kRows * kHeadDim;

std::uint16_t to_bf16(double x) {
  const auto value = static_cast<float>(x);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double from_bf16(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return static_cast<double>(value);
}

/// What a code stands for, without its scale.
double value_of(DType dtype, std::uint8_t code) {
  if (dtype == DType::i8) return static_cast<std::int8_t>(code);
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

/// A tensor [1, heads, rows, columns] in memory that CPU and device see.
struct Memory {
  Memory(const std::shared_ptr<Gpu>& gpu, DType type)
      : dtype(type), bytes(gpu, kSize * fa::size_of(type)), scales(gpu, kRows) {}

  fa::TensorView view() { return fa::TensorView(bytes.data(), dtype, {1, kHeads, kLength, kHeadDim}); }
  fa::TensorView rows() { return fa::TensorView(scales.data(), DType::f32, {1, kHeads, kLength}); }
  std::uint16_t* halves() { return reinterpret_cast<std::uint16_t*>(bytes.data()); }

  /// bf16 as it is, codes times their scales.
  Numbers values() {
    Numbers result(kSize);
    for (std::size_t i = 0; i < kSize; ++i) {
      result[i] = dtype == DType::bf16 ? from_bf16(halves()[i])
                                       : value_of(dtype, bytes[i]) * static_cast<double>(scales[i / kHeadDim]);
    }
    return result;
  }

  DType dtype;
  Shared<std::uint8_t> bytes;
  Shared<float> scales;
};

Numbers float64_of(const Numbers& q, const Numbers& k, const Numbers& v) {
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = DType::f64;
  Numbers o(kSize);
  const auto view = [](const Numbers& numbers) {
    return fa::TensorView(numbers.data(), DType::f64, {1, kHeads, kLength, kHeadDim});
  };
  fa::TensorView out = view(o);
  out.read_only = false;
  fa::Attention::create(config, fa::Device::host()).forward({view(q), view(k), view(v)}, {out, {}});
  return o;
}

double relative_error(const Numbers& actual, const Numbers& expected) {
  double squares = 0, of_all = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    squares += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    of_all += expected[i] * expected[i];
  }
  return std::sqrt(squares / of_all);
}

struct Scheme {
  const char* name;
  DType dtype;  ///< of q and k; of a cache, of k and v
  bool cache, smoothed, precise;
  double most_of_codes;  ///< the error against what the codes stand for
};

constexpr Scheme kSchemes[] = {
    {"e4m3", DType::e4m3, false, false, false, 0.05},
    {"e4m3, precise", DType::e4m3, false, false, true, 0.01},
    {"i8", DType::i8, false, false, false, 0.05},
    {"i8, smoothed", DType::i8, false, true, false, 0.05},
    {"i8, smoothed, precise", DType::i8, false, true, true, 0.01},
    {"bf16 over a cache of e4m3", DType::e4m3, true, false, false, 0.01},
    {"bf16 over a cache of i8", DType::i8, true, false, false, 0.01},
};

class Program {
 public:
  explicit Program(std::shared_ptr<Gpu> gpu)
      : gpu_(std::move(gpu)),
        q_(gpu_, DType::bf16),
        k_(gpu_, DType::bf16),
        v_(gpu_, DType::bf16),
        o_(gpu_, DType::bf16) {
    std::mt19937 random(7);
    std::normal_distribution<double> normal;
    for (std::size_t i = 0; i < kSize; ++i) {
      q_.halves()[i] = to_bf16(normal(random));
      k_.halves()[i] = to_bf16(normal(random) + (i % kHeadDim < 4 ? 12 : 0));
      v_.halves()[i] = to_bf16(normal(random));
    }
    expected_ = float64_of(q_.values(), k_.values(), v_.values());
  }

  /// False where o is further from float64 of the codes than it may be.
  bool run(const Scheme& scheme) {
    const Numbers of_codes = scheme.cache ? over_cache(scheme) : over_codes(scheme);
    const Numbers o = o_.values();
    const double own = relative_error(o, of_codes);
    std::printf("%-26s error of o %6.2f %%, against what the codes stand for %6.3f %%\n", scheme.name,
                100 * relative_error(o, expected_), 100 * own);
    return own <= scheme.most_of_codes;
  }

 private:
  void wait() const {
    if (gpu_) gpu_->synchronize();
  }
  fa::Stream stream() const { return gpu_ ? gpu_->stream() : nullptr; }
  fa::Attention create(const fa::AttentionConfig& config) const {
    return fa::Attention::create(config, gpu_ ? fa::Device::cuda(0) : fa::Device::host());
  }

  /// o of codes that quantize makes, a scale a row; float64 of what they stand for.
  Numbers over_codes(const Scheme& scheme) {
    fa::AttentionConfig config;
    config.head_dim = kHeadDim;
    config.dtype = scheme.dtype;
    config.key_scales = config.value_scales = true;
    config.precise = scheme.precise;
    const fa::Attention attention = create(config);
    Memory q(gpu_, scheme.dtype), k(gpu_, scheme.dtype), v(gpu_, DType::e4m3);
    Shared<float> mean(gpu_, kHeads * kHeadDim);
    fa::QuantizeInputs codes{q_.view(), k_.view(), v_.view(), q.view(), k.view(), v.view()};
    codes.q_scale = q.rows(), codes.k_scale = k.rows(), codes.v_scale = v.rows();
    if (scheme.smoothed) codes.k_mean = fa::TensorView(mean.data(), DType::f32, {1, kHeads, kHeadDim});
    attention.quantize(codes, stream());
    fa::ForwardInputs inputs{q.view(), k.view(), v.view()};
    inputs.q_scale = codes.q_scale, inputs.k_scale = codes.k_scale, inputs.v_scale = codes.v_scale;
    attention.forward(inputs, {o_.view(), {}}, stream());
    wait();
    return float64_of(q.values(), k.values(), v.values());  // softmax does not see the mean
  }

  /// o of q in bf16, and a contiguous cache that append fills.
  Numbers over_cache(const Scheme& scheme) {
    fa::AttentionConfig config;
    config.head_dim = kHeadDim;
    config.page_size = fa::kContiguous;
    config.k_dtype = config.v_dtype = scheme.dtype;
    const fa::Attention attention = create(config);
    Memory k(gpu_, scheme.dtype), v(gpu_, scheme.dtype);
    Shared<std::int32_t> length(gpu_, 1);
    length[0] = kLength;
    fa::AppendInputs fresh{k_.view(), v_.view(), k.view(), v.view()};
    fresh.seqused_kv = length.data();
    fresh.k_scale = k.rows(), fresh.v_scale = v.rows();
    attention.append(fresh, stream());
    fa::ForwardInputs inputs{q_.view(), k.view(), v.view()};
    inputs.sequences.seqused_kv = length.data();
    inputs.k_scale = k.rows(), inputs.v_scale = v.rows();
    attention.forward(inputs, {o_.view(), {}}, stream());
    wait();
    return float64_of(q_.values(), k.values(), v.values());
  }

  std::shared_ptr<Gpu> gpu_;
  Memory q_, k_, v_, o_;
  Numbers expected_;
};

/// A GPU that has kernels of 8 bits.
std::shared_ptr<Gpu> open_gpu() {
  std::shared_ptr<Gpu> gpu = Gpu::open();
  if (!gpu) return nullptr;
  fa::AttentionConfig config;
  config.head_dim = kHeadDim;
  config.dtype = DType::e4m3;
  try {
    fa::Attention::create(config, fa::Device::cuda(0));
    return gpu;
  } catch (const fa::Error& error) {
    if (error.code() != fa::ErrorCode::unsupported) throw;
    return nullptr;
  }
}

int run() {
  const std::shared_ptr<Gpu> gpu = open_gpu();
  std::printf("attention on %s\n", gpu ? "a GPU" : "the host");
  Program program(gpu);
  bool right = true;
  for (const Scheme& scheme : kSchemes) right = program.run(scheme) && right;
  return right ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
