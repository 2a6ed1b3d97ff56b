#include "api/inspect.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "api/build.hpp"
#include "api/host_sequences.hpp"
#include "api/packed.hpp"
#include "api/paged.hpp"
#include "api/problem.hpp"
#include "api/scratch.hpp"
#include "driver/nvtx.hpp"

namespace fa::api {
namespace {

constexpr std::uint64_t kNothing = ~std::uint64_t{0};

void wait_for(Stream stream) {
  driver::check(driver::api().cuStreamSynchronize(stream), "cuStreamSynchronize");
}

void fetch(void* to, const void* from, std::size_t bytes) {
  driver::check(driver::api().cuMemcpyDtoH(to, reinterpret_cast<CUdeviceptr>(from), bytes), "cuMemcpyDtoH");
}

/// Compiled, or stored, by the configuration's policy; loaded once a process.
std::shared_ptr<const driver::LoadedKernel> load(const plan::KernelSpec& spec, const AttentionConfig& config,
                                                 const driver::ContextRef& context, cache::Store& store) {
  Supply supply(config);
  supply.accept.driver = driver::api().version;
  supply.command = [&] { return remedy(spec, config); };
  return load_kernel(choose_kernel({&spec, 1}, store, supply), context, nullptr);
}

}  // namespace

DeviceInspection::DeviceInspection(const AttentionConfig& config, const Functions& functions, double scale,
                                   const driver::ContextRef& context, std::shared_ptr<cache::Store> store)
    : config_(config),
      functions_(functions),
      scale_(scale),
      context_(context),
      store_(std::move(store)),
      host_(config, functions, scale) {}

void DeviceInspection::check(const ForwardCall& call, const VariantCall& variant, Stream stream) const {
  inspect(call, variant, call.cache, call.k.shape[0], stream);
}

void DeviceInspection::check(const BackwardCall& call, const VariantCall& variant, Stream stream) const {
  inspect(call, variant, {}, 0, stream);
}

template <class Call>
void DeviceInspection::inspect(const Call& call, const VariantCall& variant, const PagedCache& cache,
                               std::int64_t pages, Stream stream) const {
  if (driver::is_capturing(stream)) return;
  const reference::Fetch read = fetch;
  Inspection inspection(config_, host_, call, variant, &read);
  const std::vector<std::uint64_t> found = scan(inspection.results(), stream);
  const auto first = std::ranges::find_if(found, [](std::uint64_t place) { return place != kNothing; });
  if (first == found.end()) return;
  const HostSequences sequences(call.sequences, stream);
  const HostCache table(cache, call.sequences.b, stream);
  wait_for(stream);
  if (config_.page_size != 0) {
    check_requests(config_, sequences.sequences, table.cache, call.shape, pages);
  } else if (config_.varlen) {
    check_lengths(sequences.sequences, call.shape);
  }
  inspection.use(sequences.sequences, table.cache);
  const InspectedResult& result = inspection.results()[static_cast<std::size_t>(first - found.begin())];
  inspection.report(result, plan::found_element(result.scanned, *first));
}

std::shared_ptr<const driver::LoadedKernel> DeviceInspection::scanner() const {
  const std::lock_guard lock(mutex_);
  if (scanner_ == nullptr) scanner_ = load(plan::scan_results_spec(context_.info().arch), config_, context_, *store_);
  return scanner_;
}

std::vector<std::uint64_t> DeviceInspection::scan(const std::vector<InspectedResult>& results, Stream stream) const {
  if (results.empty()) return {};
  const plan::KernelSpec spec = plan::scan_results_spec(context_.info().arch);
  const std::shared_ptr<const driver::LoadedKernel> kernel = scanner();
  std::vector<plan::ScannedResult> scanned;
  for (const InspectedResult& result : results) scanned.push_back(result.scanned);
  std::vector<std::uint64_t> found(results.size(), kNothing);
  const std::size_t bytes = found.size() * sizeof(std::uint64_t);
  Scratch scratch({}, bytes, stream);
  const auto place = reinterpret_cast<CUdeviceptr>(scratch.data());
  kernel::ScanResultsParams params;
  const std::int64_t grid = scan_results_params(scanned, static_cast<std::uint64_t*>(scratch.data()), params);
  const driver::NvtxRange range(canonical(spec).c_str());
  driver::check(driver::api().cuMemsetD8Async(place, 0xff, bytes, stream), "cuMemsetD8Async");
  driver::launch(kernel->function(), static_cast<unsigned>(grid), static_cast<unsigned>(spec.threads()), 0, stream,
                 &params);
  driver::check(driver::api().cuMemcpyDtoHAsync(found.data(), place, bytes, stream), "cuMemcpyDtoHAsync");
  scratch.release();
  wait_for(stream);
  return found;
}

void DeviceInspection::dump(const ForwardCall& call, const plan::ForwardTensors& tensors,
                            const std::optional<ShardPlace>& place, const ProbabilityDump& dump, Stream stream) const {
  if (dump.p.elements() == 0) return;
  plan::Problem problem = make_problem(config_, call.shape, context_.info().arch, &functions_.of(call.shape));
  problem.place = place;
  const plan::KernelSpec spec = plan::probabilities_spec(problem);
  const std::shared_ptr<const driver::LoadedKernel> kernel = load(spec, config_, context_, *store_);
  kernel::ProbabilitiesParams params;
  const plan::PackedArgs packed = packed_args(config_, call.sequences, call.dropout, call.cache);
  const std::int64_t grid =
      probabilities_params(problem, spec, tensors, scale_, packed, dump.p, dump.b, dump.h, params);
  const driver::NvtxRange range(canonical(spec).c_str());
  driver::launch(kernel->function(), static_cast<unsigned>(grid), static_cast<unsigned>(spec.threads()), 0, stream,
                 &params);
}

}  // namespace fa::api
