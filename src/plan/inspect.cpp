#include "plan/inspect.hpp"

#include <cstring>

#include "plan/catalogue.hpp"

namespace fa::plan {
namespace {

constexpr int kScanWarps = 8;
constexpr int kProbabilityWarps = 4;

constexpr Field kScanFields[] = {
    field<&SpecHead::warps>("warps").as("kWarps"),
};
constexpr Kernel kScan{
    .name = "scan_results",
    .op = Op::scan_results,
    .unit = {.header = "common/scan_results.cuh",
             .params = "ScanResultsParams",
             .variant_params = "ScanResultsParams",
             .function = "kernel::scan_results",
             .has_element = false},
    .fields = kScanFields,
};

constexpr Field kProbabilitiesFields[] = {
    field<&SpecHead::d_qk>("d_qk").as("kHeadDimQk"),
    field<&SpecHead::causal>("causal").as("kCausal"),
    field<&SpecHead::aligned>("aligned").as("kAligned", "rows start at multiples of 16 bytes"),
    field<&SpecHead::warps>("warps").as("kWarps"),
    field<&SpecHead::varlen>("varlen").when_set().as("kVarlen"),
    field<&SpecHead::dropout>("dropout").when_set().as("kDropout"),
    field<&SpecHead::page_size>("page_size").when_not_0().as("kPageSize", "keys of a page"),
};
constexpr Kernel kProbabilities{
    .name = "probabilities",
    .op = Op::probabilities,
    .unit = {.header = "common/probabilities.cuh",
             .params = "ProbabilitiesParams",
             .variant_params = "ProbabilitiesParams",
             .function = "kernel::probabilities"},
    .fields = kProbabilitiesFields,
};

/// Bits that are all set in NaNs and infinities. e4m3 has NaNs alone.
std::uint32_t exponent_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f16:
      return 0x7c00;
    case DType::bf16:
      return 0x7f80;
    case DType::e4m3:
      return 0x7f;
    default:
      return 0x7f800000;
  }
}

std::uint32_t minus_infinity_of(DType dtype) noexcept {
  const std::uint32_t sign = size_of(dtype) == 2 ? 0x8000 : 0x80000000;
  return sign | exponent_of(dtype);
}

std::int64_t columns_of(const TensorView& view) noexcept {
  return view.rank == 4 ? view.shape[3] : 1;
}

}  // namespace

const Kernel& ScanResults::kernel() noexcept {
  return kScan;
}

const Kernel& Probabilities::kernel() noexcept {
  return kProbabilities;
}

KernelSpec scan_results_spec(Arch arch) noexcept {
  KernelSpec spec;
  spec.own = ScanResults{};
  spec.arch = arch;
  spec.warps = kScanWarps;
  return spec;
}

std::int64_t scan_results_params(std::span<const ScannedResult> results, std::uint64_t* found,
                                 kernel::ScanResultsParams& params) noexcept {
  std::memset(static_cast<void*>(&params), 0, sizeof params);
  params.found = found;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const ScannedResult& from = results[i];
    kernel::ScannedResult& to = params.results[i];
    const bool packed = from.cu != nullptr;
    to.data = from.view.data;
    to.cu = from.cu;
    to.used = from.used;
    to.stride_b = from.view.strides[0];
    to.stride_h = from.view.strides[1];
    to.stride_s = from.view.strides[2];
    to.b = static_cast<int>(packed ? from.b : from.view.shape[0]);
    to.h = static_cast<int>(from.view.shape[1]);
    to.s = static_cast<int>(packed ? from.longest : from.view.shape[2]);
    to.d = static_cast<int>(columns_of(from.view));
    to.total = static_cast<int>(from.view.shape[2]);
    to.bytes = static_cast<int>(size_of(from.view.dtype));
    to.exponent = exponent_of(from.view.dtype);
    to.minus_infinity = from.minus ? minus_infinity_of(from.view.dtype) : 0;
  }
  return static_cast<std::int64_t>(results.size()) * kernel::kScanBlocks;
}

FoundElement found_element(const ScannedResult& result, std::uint64_t place) noexcept {
  const auto index = static_cast<std::int64_t>(place);
  const std::int64_t d = columns_of(result.view), h = result.view.shape[1];
  const std::int64_t s = result.cu != nullptr ? result.longest : result.view.shape[2];
  return {index / d / s / h, index / d / s % h, index / d % s, index % d};
}

KernelSpec probabilities_spec(const Problem& problem) {
  KernelSpec spec;
  spec.own = Probabilities{};
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.causal = problem.causal;
  spec.aligned = problem.aligned;
  spec.warps = kProbabilityWarps;
  spec.varlen = problem.varlen;
  spec.dropout = problem.dropout;
  spec.page_size = problem.page_size;
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  spec.tile_m = spec.tile_n = 1;
  return spec;
}

std::int64_t probabilities_params(const Problem& problem, const KernelSpec& spec, const ForwardTensors& tensors,
                                  double scale, const PackedArgs& packed, const TensorView& p, std::int64_t b,
                                  std::int64_t h, kernel::ProbabilitiesParams& params) noexcept {
  forward_params(problem, tensors, scale, 1, spec, 1, packed, params);
  params.group = static_cast<int>(problem.h_q / problem.h_kv);
  params.p = static_cast<float*>(p.data);
  params.stride_row = p.strides[0];
  params.stride_column = p.strides[1];
  params.columns = static_cast<int>(p.shape[1]);
  params.batch = static_cast<int>(b);
  params.head = static_cast<int>(h);
  return p.shape[0];
}

}  // namespace fa::plan
