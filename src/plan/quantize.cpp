#include "plan/quantize.hpp"

#include <limits>

#include "plan/catalogue.hpp"
#include "support/text.hpp"

namespace fa::plan {
namespace {

constexpr int kRowWarps = 8;
constexpr int kMeanWarps = 16;
constexpr int kColumns = 8;  // of a lane
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();

constexpr Field kFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDim"),
    field<&Quantize::e4m3>("e4m3").as("kE4m3", "codes are e4m3, else i8"),
    field<&Quantize::means>("means").as("kMeans", "takes what is subtracted from rows"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::warps>("warps").as("kWarps"),
};
static_assert(is_complete<Quantize>(kFields));

constexpr Kernel kKernel{
    .name = "quantize",
    .op = Op::quantize,
    .unit = {.header = "common/quantize.cuh",
             .params = "QuantizeParams",
             .variant_params = "QuantizeParams",
             .function = "kernel::quantize",
             .room = "kernel::Quantize"},
    .fields = kFields,
    .shared_bytes =
        [](const KernelSpec& spec) { return spec.as<Quantize>().means ? spec.warps * kernel::kMeanColumns * 4 : 0; },
};

/// Rows of a thread block, as templates/common/quantize.cuh takes them.
std::int64_t rows_of_block(const KernelSpec& spec) noexcept {
  int lanes = 2;
  while (lanes * kColumns < spec.d_qk) lanes *= 2;
  return spec.threads() / lanes;
}

void set_strides(const TensorView& view, std::int64_t& b, std::int64_t& h, std::int64_t& s) noexcept {
  b = view.strides[0];
  h = view.strides[1];
  s = view.strides[2];
}

bool starts_aligned(const TensorView& view) noexcept {
  const auto elements = static_cast<std::int64_t>(16 / size_of(view.dtype));
  bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (std::size_t axis = 0; axis < 3; ++axis) {
    aligned = aligned && (view.shape[axis] <= 1 || view.strides[axis] % elements == 0);
  }
  return aligned;
}

}  // namespace

const Kernel& Quantize::kernel() noexcept {
  return kKernel;
}

KernelSpec quantize_spec(const QuantizePass& pass, Arch arch) {
  check_dtype(arch, pass.x.dtype);
  KernelSpec spec;
  spec.own = Quantize{.e4m3 = pass.codes.dtype == DType::e4m3, .means = pass.means};
  spec.arch = arch;
  spec.dtype = pass.x.dtype;
  spec.d_qk = static_cast<int>(pass.x.shape[3]);
  spec.aligned = starts_aligned(pass.x);
  spec.warps = pass.means ? kMeanWarps : kRowWarps;
  return spec;
}

std::int64_t quantize_params(const QuantizePass& pass, const KernelSpec& spec, kernel::QuantizeParams& params) {
  params = {};
  const std::int64_t heads = pass.x.shape[0] * pass.x.shape[1];  // of sizes below 2^31
  const std::int64_t blocks_of_head = pass.means ? spec.d_qk / kernel::kMeanColumns : pass.x.shape[2];
  if (heads > kMaxRows / std::max<std::int64_t>(blocks_of_head, 1)) {
    support::throw_invalid("b * h * s", static_cast<double>(heads) * static_cast<double>(blocks_of_head),
                           "fewer than 2^31 rows");
  }
  params.x = pass.x.data;
  params.codes = pass.codes.data;
  params.scale = static_cast<float*>(pass.scale.data);
  params.mean = static_cast<float*>(pass.mean.data);
  params.bias = static_cast<float*>(pass.bias.data);
  set_strides(pass.x, params.stride_x_b, params.stride_x_h, params.stride_x_s);
  set_strides(pass.codes, params.stride_codes_b, params.stride_codes_h, params.stride_codes_s);
  set_strides(pass.scale, params.stride_scale_b, params.stride_scale_h, params.stride_scale_s);
  set_strides(pass.bias, params.stride_bias_b, params.stride_bias_h, params.stride_bias_s);
  params.stride_mean_b = pass.mean.strides[0];
  params.stride_mean_h = pass.mean.strides[1];
  params.b = static_cast<std::uint32_t>(pass.x.shape[0]);
  params.h = static_cast<std::uint32_t>(pass.x.shape[1]);
  params.s = static_cast<std::uint32_t>(pass.x.shape[2]);
  params.group = pass.mean.defined() ? static_cast<std::uint32_t>(pass.x.shape[1] / pass.mean.shape[1]) : 1;
  params.scale_given = pass.scale_given ? 1 : 0;
  const std::int64_t items = heads * blocks_of_head;
  const std::int64_t of_block = pass.means ? 1 : rows_of_block(spec);
  return (items + of_block - 1) / of_block;
}

}  // namespace fa::plan
