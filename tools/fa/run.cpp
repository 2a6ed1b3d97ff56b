#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "commands.hpp"
#include "elements.hpp"
#include "gpu.hpp"
#include "options.hpp"
#include "plan/arch.hpp"
#include "support/text.hpp"
#include "terminal.hpp"
#include "tolerance.hpp"
#include "tools/safetensors.hpp"

namespace fa::cli {
namespace {

using tools::Tensor;

struct RunOptions {
  std::string input;
  std::string output;
  std::string device = "auto";
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  std::optional<float> scale;
  KernelOverride kernel;
  bool verify = false;
  bool json = false;
};

struct Inputs {
  Tensor q;
  Tensor k;
  Tensor v;
};

struct Outputs {
  Tensor o;
  Tensor lse;
};

/// Where it runs, and why there.
struct Place {
  Device device = Device::host();
  std::string text;
};

struct RunReport {
  Place place;
  KernelInfo kernel;
  double launch_ms = 0;
};

/// One tensor against float64.
struct Deviation {
  double max = 0;
  double mean = 0;
  double allowed = 0;

  bool passes() const noexcept { return max <= allowed; }
};

struct Verdict {
  Deviation o;
  Deviation lse;

  bool passes() const noexcept { return o.passes() && lse.passes(); }
};

Inputs read_inputs(const std::string& path) {
  const tools::SafetensorsFile file = tools::SafetensorsFile::open(path);
  Inputs inputs{file.read("q"), file.read("k"), file.read("v")};
  if (inputs.q.shape.size() != 3 && inputs.q.shape.size() != 4) {
    support::throw_invalid("q", fmt::format("a tensor of rank {}", inputs.q.shape.size()), "[b, h, s, d] or [b, s, d]");
  }
  if (inputs.v.shape.empty()) {
    support::throw_invalid("v", "a scalar", "[b, h, s, d] or [b, s, d]");
  }
  return inputs;
}

AttentionConfig make_config(const RunOptions& options, const Inputs& inputs) {
  const auto head_dim = [](const Tensor& tensor) {
    return static_cast<int>(std::min<std::int64_t>(tensor.shape.back(), std::numeric_limits<int>::max()));
  };
  AttentionConfig config;
  config.head_dim = head_dim(inputs.q);
  config.head_dim_v = head_dim(inputs.v);
  config.dtype = inputs.q.dtype;
  config.scale = options.scale;
  config.causal = options.causal;
  config.causal_align = options.causal_align;
  config.kernel = if_given(options.kernel);
  return config;
}

Place place_on(const driver::DeviceInfo& info) {
  return {Device::cuda(info.ordinal),
          fmt::format("cuda:{}, {}, {}", info.ordinal, info.name, plan::to_string(info.arch))};
}

/// A GPU if there is one that can do it, else the host, saying why.
Place choose_place(const AttentionConfig& config) {
  if (config.dtype == DType::f64) {
    return {Device::host(), "host (f64 is computed there only)"};
  }
  std::string problem;
  const std::optional<driver::DeviceInfo> gpu = find_gpu(&problem);
  if (!gpu) {
    return {Device::host(), fmt::format("host ({})", problem)};
  }
  try {
    Attention::create(config, Device::cuda(gpu->ordinal));
    return place_on(*gpu);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) {
      throw;
    }
    return {Device::host(), fmt::format("host ({})", error.what())};
  }
}

Place find_place(const std::string& wish, const AttentionConfig& config) {
  if (wish == "auto") {
    return choose_place(config);
  }
  const Device device = parse_device(wish);
  if (device.kind() == Device::Kind::host) {
    return {device, "host"};
  }
  for (const driver::DeviceInfo& info : driver::list_devices()) {
    if (info.ordinal == device.ordinal()) {
      return place_on(info);
    }
  }
  support::throw_invalid("--device", wish, "a GPU that `fa info` lists");
}

Tensor make_tensor(DType dtype, std::vector<std::int64_t> shape) {
  std::size_t elements = 1;
  for (const std::int64_t size : shape) {
    elements *= static_cast<std::size_t>(size);
  }
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.bytes.resize(elements * size_of(dtype));
  return tensor;
}

/// o has the rows of q and the head dim of v; lse has the rows.
Outputs make_outputs(const Inputs& inputs) {
  std::vector<std::int64_t> rows = inputs.q.shape;
  rows.pop_back();
  Outputs outputs;
  outputs.lse = make_tensor(inputs.q.dtype == DType::f64 ? DType::f64 : DType::f32, rows);
  rows.push_back(inputs.v.shape.back());
  outputs.o = make_tensor(inputs.q.dtype, rows);
  return outputs;
}

AttentionShape shape_of(const Inputs& inputs) {
  const auto heads = [](const Tensor& tensor) { return tensor.shape.size() == 4 ? tensor.shape[1] : 1; };
  const auto rows = [](const Tensor& tensor) { return tensor.shape.size() < 2 ? 0 : tensor.shape.rbegin()[1]; };
  AttentionShape shape;
  shape.b = inputs.q.shape[0];
  shape.h_q = heads(inputs.q);
  shape.h_kv = heads(inputs.k);
  shape.s_q = rows(inputs.q);
  shape.s_kv = rows(inputs.k);
  return shape;
}

RunReport run_on_host(const Attention& attention, Inputs* inputs, Outputs* outputs) {
  const auto start = std::chrono::steady_clock::now();
  attention.forward({inputs->q.view(), inputs->k.view(), inputs->v.view()}, {outputs->o.view(), outputs->lse.view()});
  RunReport report;
  report.launch_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  report.kernel = attention.kernel_info(shape_of(*inputs));
  return report;
}

/// A host tensor and its copy on the GPU.
class DeviceTensor {
 public:
  explicit DeviceTensor(Tensor* tensor) : tensor_(tensor), buffer_(tensor->bytes.size()) {
    buffer_.upload(tensor->bytes.data(), tensor->bytes.size());
  }
  TensorView view() const {
    TensorView view = tensor_->view();
    view.data = buffer_.data();
    return view;
  }
  void fetch() { buffer_.download(tensor_->bytes.data(), tensor_->bytes.size()); }

 private:
  Tensor* tensor_;
  DeviceBuffer buffer_;
};

RunReport run_on_gpu(const Gpu& gpu, const Attention& attention, Inputs* inputs, Outputs* outputs) {
  const DeviceTensor q(&inputs->q), k(&inputs->k), v(&inputs->v);
  DeviceTensor o(&outputs->o), lse(&outputs->lse);
  const AttentionShape shape = shape_of(*inputs);
  RunReport report;
  report.kernel = attention.kernel_info(shape);
  const DeviceBuffer workspace(attention.workspace_size(shape));
  Event start, end;
  start.record(gpu.stream());
  attention.forward({q.view(), k.view(), v.view()}, {o.view(), lse.view()}, gpu.stream(),
                    {workspace.data(), workspace.size()});
  end.record(gpu.stream());
  end.synchronize();
  report.launch_ms = end.milliseconds_since(start);
  o.fetch();
  lse.fetch();
  return report;
}

RunReport run_attention(const AttentionConfig& config, const Place& place, Inputs* inputs, Outputs* outputs) {
  if (place.device.kind() == Device::Kind::host) {
    return run_on_host(Attention::create(config, place.device), inputs, outputs);
  }
  const Gpu gpu(place.device.ordinal());
  return run_on_gpu(gpu, Attention::create(config, gpu.device()), inputs, outputs);
}

std::size_t elements(const Tensor& tensor) {
  return tensor.bytes.size() / size_of(tensor.dtype);
}

Tensor widen(const Tensor& tensor) {
  Tensor wide = make_tensor(DType::f64, tensor.shape);
  for (std::size_t i = 0; i < elements(tensor); ++i) {
    store_element(wide.bytes.data(), DType::f64, i, load_element(tensor.bytes.data(), tensor.dtype, i));
  }
  return wide;
}

/// Equal infinities and two NaNs differ by nothing; anything else that is not finite is infinitely wrong.
double difference(double actual, double expected) {
  if (actual == expected || (std::isnan(actual) && std::isnan(expected))) {
    return 0;
  }
  const double absolute = std::abs(actual - expected);
  return std::isnan(absolute) ? std::numeric_limits<double>::infinity() : absolute;
}

double greatest_finite_magnitude(const Tensor& tensor) {
  double greatest = 0;
  for (std::size_t i = 0; i < elements(tensor); ++i) {
    const double magnitude = std::abs(load_element(tensor.bytes.data(), tensor.dtype, i));
    greatest = std::isfinite(magnitude) ? std::max(greatest, magnitude) : greatest;
  }
  return greatest;
}

Deviation deviation(const Tensor& actual, const Tensor& expected, double allowed) {
  Deviation result;
  result.allowed = allowed;
  for (std::size_t i = 0; i < elements(actual); ++i) {
    const double error = difference(load_element(actual.bytes.data(), actual.dtype, i),
                                    load_element(expected.bytes.data(), expected.dtype, i));
    result.max = std::max(result.max, error);
    result.mean += error / static_cast<double>(elements(actual));
  }
  return result;
}

Verdict verify(AttentionConfig config, const Inputs& inputs, const Outputs& outputs) {
  const DType dtype = config.dtype;
  config.dtype = DType::f64;
  config.kernel.reset();
  Inputs wide{widen(inputs.q), widen(inputs.k), widen(inputs.v)};
  Outputs expected = make_outputs(wide);
  run_on_host(Attention::create(config, Device::host()), &wide, &expected);
  return {deviation(outputs.o, expected.o, output_tolerance(dtype) * greatest_finite_magnitude(inputs.v)),
          deviation(outputs.lse, expected.lse,
                    lse_tolerance(dtype) * std::max(1.0, greatest_finite_magnitude(expected.lse)))};
}

nlohmann::json to_json(const Deviation& deviation) {
  return {
      {"max", deviation.max}, {"mean", deviation.mean}, {"allowed", deviation.allowed}, {"passes", deviation.passes()}};
}

void print_report_json(const RunOptions& options, const Inputs& inputs, const RunReport& report,
                       const std::optional<Verdict>& verdict) {
  nlohmann::json value = {{"input", options.input},
                          {"output", options.output},
                          {"dtype", to_string(inputs.q.dtype)},
                          {"q", inputs.q.shape},
                          {"k", inputs.k.shape},
                          {"v", inputs.v.shape},
                          {"device", to_string(report.place.device)},
                          {"device_text", report.place.text},
                          {"launch_ms", report.launch_ms}};
  const KernelInfo& kernel = report.kernel;
  value["kernel"] = {{"name", kernel.name},
                     {"spec", kernel.spec},
                     {"origin", kernel.origin},
                     {"compile_ms", kernel.compile_ms},
                     {"load_ms", kernel.load_ms},
                     {"registers", kernel.registers},
                     {"local_bytes", kernel.local_bytes},
                     {"shared_bytes", kernel.shared_bytes},
                     {"threads", kernel.threads}};
  if (verdict) {
    value["verify"] = {{"o", to_json(verdict->o)}, {"lse", to_json(verdict->lse)}};
  }
  print_json(value);
}

std::string shape_text(const Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape, ", "));
}

void print_deviation(const char* name, const Deviation& deviation) {
  fmt::print("verify   {:<3}  max error {:.3e}, mean {:.3e}, allowed {:.3e}: {}\n", name, deviation.max, deviation.mean,
             deviation.allowed, deviation.passes() ? "ok" : "FAILED");
}

void print_report(const RunOptions& options, const Inputs& inputs, const RunReport& report,
                  const std::optional<Verdict>& verdict) {
  const KernelInfo& kernel = report.kernel;
  fmt::print("input    {}: {} q {} k {} v {}{}\n", options.input, to_string(inputs.q.dtype), shape_text(inputs.q),
             shape_text(inputs.k), shape_text(inputs.v), options.causal ? ", causal" : "");
  fmt::print("device   {}\n", report.place.text);
  fmt::print("kernel   {} ({})\n", kernel.name, kernel.origin);
  if (report.place.device.kind() == Device::Kind::host) {
    fmt::print("time     {:.3f} ms\n", report.launch_ms);
  } else {
    fmt::print("         {}\n", kernel.spec);
    fmt::print("         {} threads, {} registers, {} bytes local, {} shared\n", kernel.threads, kernel.registers,
               kernel.local_bytes, format_bytes(kernel.shared_bytes));
    fmt::print("compile  {:.1f} ms\nload     {:.2f} ms\nlaunch   {:.3f} ms\n", kernel.compile_ms, kernel.load_ms,
               report.launch_ms);
  }
  if (verdict) {
    print_deviation("o", verdict->o);
    print_deviation("lse", verdict->lse);
  }
}

int run(const RunOptions& options) {
  Inputs inputs = read_inputs(options.input);
  const AttentionConfig config = make_config(options, inputs);
  const Place place = find_place(options.device, config);
  Outputs outputs = make_outputs(inputs);
  RunReport report = run_attention(config, place, &inputs, &outputs);
  report.place = place;
  std::optional<Verdict> verdict;
  if (options.verify) {
    verdict = verify(config, inputs, outputs);
  }
  if (options.json) {
    print_report_json(options, inputs, report, verdict);
  } else {
    print_report(options, inputs, report, verdict);
  }
  if (verdict && !verdict->passes()) {
    throw Error(ErrorCode::internal,
                fmt::format("the result is further from float64 than allowed; {} was not written", options.output));
  }
  tools::write_safetensors(options.output, {{"o", outputs.o}, {"lse", outputs.lse}});
  if (!options.json) {
    fmt::print("output   {}: o {}, lse {}\n", options.output, shape_text(outputs.o), shape_text(outputs.lse));
  }
  return kSuccess;
}

}  // namespace

void add_run(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("run", "Attention of the tensors q, k, v in a safetensors file");
  const auto options = std::make_shared<RunOptions>();
  command->add_option("--input", options->input, "File with q, k and v: [b, h, s, d] or [b, s, d]; F16, BF16, F32, F64")
      ->required();
  command->add_option("--output", options->output, "File to write o and lse to")->required();
  command->add_option("--device", options->device, "auto (a GPU if there is one, else host), host, cuda or cuda:N");
  command->add_flag("--causal", options->causal, "Mask what lies behind the diagonal");
  add_causal_align_option(*command, &options->causal_align);
  command->add_option("--scale", options->scale, "Factor of the scores (default: 1/sqrt(d_qk))");
  command->add_flag("--verify", options->verify, "Compare with float64 on the host, and fail beyond rounding error");
  command->add_flag("--json", options->json, "Print JSON");
  add_kernel_options(*command, &options->kernel);
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace fa::cli
