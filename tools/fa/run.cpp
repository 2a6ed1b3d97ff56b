#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "choice.hpp"
#include "commands.hpp"
#include "gpu.hpp"
#include "options.hpp"
#include "output.hpp"
#include "plan/arch.hpp"
#include "run_inputs.hpp"
#include "run_tensors.hpp"
#include "run_verify.hpp"
#include "support/text.hpp"
#include "terminal.hpp"
#include "tools/safetensors.hpp"
#include "variant_options.hpp"

namespace fa::cli {
namespace {

using tools::Tensor;

/// Where it runs, and why there.
struct Place {
  Device device = Device::host();
  std::string text;
  std::optional<support::Arch> arch = std::nullopt;  ///< of a GPU
};

/// What --verify has found: against float64 of codes times scales, and of the originals.
struct Checked {
  Verdict verdict;
  Verdict originals;
};

struct RunReport {
  Place place;
  KernelInfo kernel;
  std::optional<KernelInfo> backward_kernel;  ///< when gradients were asked for
  RunTimes milliseconds;
};

Place place_on(const driver::DeviceInfo& info) {
  return {Device::cuda(info.ordinal),
          fmt::format("cuda:{}, {}, {}", info.ordinal, info.name, plan::to_string(info.arch)), info.arch};
}

/// Whose rounding errors a result has: the host computes codes in f32, and GPUs before 8.9 multiply V of 8 bits as
/// bf16.
DType products_of(const AttentionConfig& config, const Place& place) {
  constexpr int kConvertsCodes = 89;
  const bool early = place.arch && place.arch->sm() < kConvertsCodes;
  if (config.v_dtype && config.v_dtype != DType::u4x2 && early) return DType::bf16;
  if (!has_codes(config.dtype) || place.arch) return config.dtype;
  return output_dtype(config) == DType::e4m3 ? DType::f32 : output_dtype(config);
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

/// The tensors of a call on the GPU.
struct DeviceTensors {
  DeviceTensors(RunInputs* inputs, RunOutputs* outputs)
      : q(&inputs->q), k(&inputs->k), o(&outputs->o), lse(&outputs->lse), scales(&inputs->scales) {
    if (inputs->v) v.emplace(&*inputs->v);
    if (inputs->dout) dout.emplace(&*inputs->dout);
    if (inputs->dlse) dlse.emplace(&*inputs->dlse);
    if (outputs->gradients) gradients.emplace(&*outputs->gradients);
    for (auto& [name, tensor] : outputs->statistics) statistics.try_emplace(name, &tensor);
    dump = outputs->dump;
    for (auto& [name, tensor] : inputs->captures) captures.try_emplace(name, &tensor);
    if (inputs->sink) sink.emplace(&*inputs->sink);
    if (inputs->cache) cache.emplace(&*inputs->cache);
  }

  void fetch_outputs() {
    o.fetch();
    lse.fetch();
    for (auto& [name, tensor] : statistics) tensor.fetch();
    if (!gradients) return;
    for (DeviceTensor* tensor : {&gradients->dq, &gradients->dk, &gradients->dv}) tensor->fetch();
    for (auto& [name, tensor] : gradients->captures) tensor.fetch();
    if (gradients->dsink) gradients->dsink->fetch();
  }

  struct Gradients {
    explicit Gradients(RunGradients* host) : dq(&host->dq), dk(&host->dk), dv(&host->dv) {
      for (auto& [name, tensor] : host->captures) captures.try_emplace(name, &tensor);
      if (host->dsink) dsink.emplace(&*host->dsink);
    }
    DeviceTensor dq, dk, dv;
    std::map<std::string, DeviceTensor> captures;
    std::optional<DeviceTensor> dsink;
  };

  struct Cache {
    explicit Cache(RunCache* host) : nhd(host->nhd), seqused_kv(&host->seqused_kv) {
      if (host->block_table) block_table.emplace(&*host->block_table);
      if (host->seq_begin) seq_begin.emplace(&*host->seq_begin);
      if (host->batch_index) batch_index.emplace(&*host->batch_index);
    }
    bool nhd;
    DeviceTensor seqused_kv;
    std::optional<DeviceTensor> block_table, seq_begin, batch_index;
  };

  struct Scales {
    explicit Scales(RunScales* host) {
      if (host->q) q.emplace(&*host->q);
      if (host->k) k.emplace(&*host->k);
      if (host->v) v.emplace(&*host->v);
      if (host->row_bias) row_bias.emplace(&*host->row_bias);
    }
    std::optional<DeviceTensor> q, k, v, row_bias;
  };

  DeviceTensor q, k, o, lse;
  std::optional<DeviceTensor> v, dout, dlse, sink;
  Scales scales;
  std::optional<Cache> cache;
  std::map<std::string, DeviceTensor> captures, statistics;
  std::optional<Gradients> gradients;
  std::optional<RunDump> dump;
};

/// Milliseconds that the work which `queue` queues takes on the GPU.
template <typename Queue>
double time_on_gpu(const Gpu& gpu, const Queue& queue) {
  Event start, end;
  start.record(gpu.stream());
  queue();
  end.record(gpu.stream());
  end.synchronize();
  return end.milliseconds_since(start);
}

RunReport run_on_gpu(const Gpu& gpu, const Attention& attention, RunInputs* inputs, RunOutputs* outputs) {
  DeviceTensors tensors(inputs, outputs);
  DeviceBuffer cu_q(inputs->cumulative_q.size() * sizeof(std::int32_t));
  DeviceBuffer cu_kv(inputs->cumulative_kv.size() * sizeof(std::int32_t));
  cu_q.upload(inputs->cumulative_q.data(), cu_q.size());
  cu_kv.upload(inputs->cumulative_kv.data(), cu_kv.size());
  const PackedSequences sequences =
      inputs->sequences(static_cast<const std::int32_t*>(cu_q.data()), static_cast<const std::int32_t*>(cu_kv.data()));
  const AttentionShape shape = shape_of(*inputs);
  RunReport report;
  report.kernel = attention.kernel_info(shape);
  const DeviceBuffer workspace(attention.workspace_size(shape));
  report.milliseconds.forward = time_on_gpu(gpu, [&] {
    attention.forward(
        forward_inputs(
            tensors, [](const DeviceTensor& tensor) { return tensor.view(); }, sequences, inputs->dropout),
        forward_outputs(tensors, [](const DeviceTensor& tensor) { return tensor.view(); }), gpu.stream(),
        {workspace.data(), workspace.size()});
  });
  if (inputs->dout) {
    report.backward_kernel = attention.backward_kernel_info(shape);
    const DeviceBuffer scratch(attention.backward_workspace_size(shape));
    report.milliseconds.backward = time_on_gpu(gpu, [&] {
      call_backward(attention, tensors, tensors, [](const DeviceTensor& tensor) { return tensor.view(); }, sequences,
                    inputs->dropout, gpu.stream(), {scratch.data(), scratch.size()});
    });
  }
  tensors.fetch_outputs();
  return report;
}

RunReport run_attention(const AttentionConfig& config, const Place& place, RunInputs* inputs, RunOutputs* outputs) {
  if (place.device.kind() != Device::Kind::host) {
    const Gpu gpu(place.device.ordinal());
    return run_on_gpu(gpu, Attention::create(config, gpu.device()), inputs, outputs);
  }
  const Attention attention = Attention::create(config, place.device);
  RunReport report;
  report.milliseconds = run_on_host(attention, inputs, outputs);
  report.kernel = attention.kernel_info(shape_of(*inputs));
  if (inputs->dout) {
    report.backward_kernel = attention.backward_kernel_info(shape_of(*inputs));
  }
  return report;
}

nlohmann::json to_json(const Deviation& deviation) {
  return {{"max", deviation.max},
          {"mean", deviation.mean},
          {"allowed", deviation.allowed},
          {"nans", deviation.nans},
          {"passes", deviation.passes()}};
}

nlohmann::json to_json(const KernelInfo& kernel) {
  return {{"name", kernel.name},
          {"spec", kernel.spec},
          {"origin", kernel.origin},
          {"compile_ms", kernel.compile_ms},
          {"load_ms", kernel.load_ms},
          {"registers", kernel.registers},
          {"local_bytes", kernel.local_bytes},
          {"shared_bytes", kernel.shared_bytes},
          {"threads", kernel.threads}};
}

nlohmann::json to_json_of_original(const Deviation& deviation) {
  return {
      {"max", deviation.max}, {"mean", deviation.mean}, {"relative_rms", deviation.relative}, {"nans", deviation.nans}};
}

void print_report_json(const RunOptions& options, const RunInputs& inputs, const RunOutputs& outputs,
                       const RunReport& report, const Checked& checked) {
  nlohmann::json value = {{"input", options.input},
                          {"output", options.output},
                          {"dtype", to_string(inputs.q.dtype)},
                          {"k_dtype", to_string(inputs.k.dtype)},
                          {"o_dtype", to_string(outputs.o.dtype)},
                          {"q", inputs.q.shape},
                          {"k", inputs.k.shape},
                          {"device", to_string(report.place.device)},
                          {"device_text", report.place.text},
                          {"launch_ms", report.milliseconds.forward},
                          {"kernel", to_json(report.kernel)}};
  if (inputs.v) {
    value["v"] = inputs.v->shape;
    value["v_dtype"] = to_string(inputs.v->dtype);
  } else {
    value["value_in_key"] = inputs.value_in_key;
  }
  if (report.backward_kernel) {
    value["backward"] = {{"launch_ms", report.milliseconds.backward}, {"kernel", to_json(*report.backward_kernel)}};
  }
  for (const auto& [name, deviation] : checked.verdict) {
    value["verify"][name] = to_json(deviation);
  }
  for (const auto& [name, deviation] : checked.originals) {
    value["original"][name] = to_json_of_original(deviation);
  }
  print_json(value);
}

std::string shape_text(const Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape, ", "));
}

void print_deviation(const std::string& name, const Deviation& deviation) {
  const std::string nans =
      deviation.nans == 0 ? "" : fmt::format(", {} of {} are NaN", deviation.nans, deviation.elements);
  fmt::print("verify   {:<3}  max error {:.3e}, mean {:.3e}, allowed {:.3e}{}: {}\n", name, deviation.max,
             deviation.mean, deviation.allowed, nans,
             deviation.passes()  ? "ok"
             : deviation.empty() ? "FAILED, nothing to compare"
                                 : "FAILED");
}

void print_kernel(const KernelInfo& kernel, bool host, double milliseconds) {
  fmt::print("kernel   {} ({})\n", kernel.name, kernel.origin);
  if (host) {
    fmt::print("time     {:.3f} ms\n", milliseconds);
    return;
  }
  fmt::print("         {}\n", kernel.spec);
  fmt::print("         {} threads, {} registers, {} bytes local, {} shared\n", kernel.threads, kernel.registers,
             kernel.local_bytes, format_bytes(kernel.shared_bytes));
  fmt::print("compile  {:.1f} ms\nload     {:.2f} ms\nlaunch   {:.3f} ms\n", kernel.compile_ms, kernel.load_ms,
             milliseconds);
}

/// " k [1, 2, 3, 64]", with its type where that is not q's.
std::string tensor_text(const char* name, const Tensor& tensor, DType of_q) {
  const std::string dtype = tensor.dtype == of_q ? "" : fmt::format(" {}", to_string(tensor.dtype));
  return fmt::format("{} {} {}", dtype, name, shape_text(tensor));
}

void print_original(const std::string& name, const Deviation& deviation) {
  const std::string nans =
      deviation.nans == 0 ? "" : fmt::format(", {} of {} are NaN", deviation.nans, deviation.elements);
  fmt::print("original {:<3}  max error {:.3e}, mean {:.3e}, relative rms {:.3e}{}\n", name, deviation.max,
             deviation.mean, deviation.relative, nans);
}

void print_report(const RunOptions& options, const RunInputs& inputs, const RunReport& report, const Checked& checked) {
  const bool host = report.place.device.kind() == Device::Kind::host;
  const DType dtype = inputs.q.dtype;
  fmt::print("input    {}: {} q {}{}{}{}{}\n", options.input, to_string(dtype), shape_text(inputs.q),
             tensor_text("k", inputs.k, dtype),
             inputs.v ? tensor_text("v", *inputs.v, dtype) : fmt::format(" with v in {} columns", inputs.value_in_key),
             inputs.dout ? ", with gradients" : "", options.causal ? ", causal" : "");
  fmt::print("device   {}\n", report.place.text);
  print_kernel(report.kernel, host, report.milliseconds.forward);
  if (report.backward_kernel) {
    print_kernel(*report.backward_kernel, host, report.milliseconds.backward);
  }
  for (const auto& [name, deviation] : checked.verdict) {
    print_deviation(name, deviation);
  }
  for (const auto& [name, deviation] : checked.originals) {
    print_original(name, deviation);
  }
}

std::map<std::string, Tensor> by_name(RunOutputs outputs) {
  std::map<std::string, Tensor> tensors = {{"o", std::move(outputs.o)}, {"lse", std::move(outputs.lse)}};
  for (auto& [name, tensor] : outputs.statistics) tensors[name] = std::move(tensor);
  if (outputs.gradients) {
    tensors["dq"] = std::move(outputs.gradients->dq);
    tensors["dk"] = std::move(outputs.gradients->dk);
    tensors["dv"] = std::move(outputs.gradients->dv);
    for (auto& [name, tensor] : outputs.gradients->captures) tensors["d" + name] = std::move(tensor);
    if (outputs.gradients->dsink) tensors["dsink"] = std::move(*outputs.gradients->dsink);
  }
  return tensors;
}

int run(RunOptions options) {
  check_output(options.output, {options.input}, options.force);
  RunInputs inputs = read_inputs(&options);
  const AttentionConfig config = make_config(options, inputs);
  check_captures(config, options, inputs);
  const Place place = find_place(options.device, config);
  RunOutputs outputs = make_outputs(config, inputs);
  RunReport report = run_attention(config, place, &inputs, &outputs);
  report.place = place;
  Checked checked;
  if (options.verify) {
    checked = {verify(config, inputs, outputs, products_of(config, place)), compare_originals(config, inputs, outputs)};
  }
  if (options.json) {
    print_report_json(options, inputs, outputs, report, checked);
  } else {
    print_report(options, inputs, report, checked);
  }
  if (!passes(checked.verdict)) {
    throw Error(ErrorCode::internal,
                fmt::format("the result is further from float64 than allowed; {} was not written", options.output));
  }
  const std::map<std::string, Tensor> written = by_name(std::move(outputs));
  tools::write_safetensors(options.output, written);
  if (!options.json) {
    std::string text;
    for (const auto& [name, tensor] : written) {
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, shape_text(tensor));
    }
    fmt::print("output   {}: {}\n", options.output, text);
  }
  return kSuccess;
}

/// Numbers that commas separate, each of them there: an empty text is no list.
void add_lengths(CLI::App& command, const std::string& name, std::vector<std::int32_t>* lengths,
                 const std::string& description) {
  const auto set = [name, lengths](const std::string& text) {
    lengths->clear();
    for (std::size_t begin = 0; begin <= text.size();) {
      const std::size_t end = std::min(text.find(',', begin), text.size());
      std::int32_t length = 0;
      const auto [rest, problem] = std::from_chars(text.data() + begin, text.data() + end, length);
      if (problem != std::errc() || rest != text.data() + end || length < 0) {
        support::throw_invalid(name, "'" + text + "'", "numbers from 0 on, separated by commas");
      }
      lengths->push_back(length);
      begin = end + 1;
    }
  };
  command.add_option_function<std::string>(name, set, description);
}

}  // namespace

void add_run(CLI::App& app, int* exit_code) {
  CLI::App* command =
      app.add_subcommand("run", "Attention of the tensors q, k, v in a safetensors file, and its gradients");
  const auto options = std::make_shared<RunOptions>();
  command
      ->add_option("--input", options->input,
                   "File with q, k and v: [b, h, s, d] or [b, s, d]; F16, BF16, F32, F64, or I8, F8_E4M3, F8_E5M2 "
                   "with q_scale, k_scale and v_scale. With dout (and perhaps dlse), the gradients of o (and lse), for "
                   "backward too. With I32 block_table [b, max_pages] and seqused_kv [b] (perhaps seq_begin, "
                   "batch_index), k and v are pages of a KV cache, of 16-bit q perhaps I8, F8_E4M3 or U8 (4 bits)")
      ->required();
  command->add_option("--output", options->output, "File to write o and lse to, statistics, and dq, dk and dv")
      ->required();
  command->add_option("--device", options->device, "auto (a GPU if there is one, else host), host, cuda or cuda:N");
  command->add_flag("--causal", options->causal, "Mask what lies behind the diagonal");
  add_causal_align_option(*command, &options->causal_align);
  command->add_option("--scale", options->scale, "Factor of the scores (default: 1/sqrt(d_qk))");
  add_lengths(*command, "--lengths", &options->lengths,
              "Packed sequences of these lengths, separated by commas: tensors are [total, h, d]");
  add_lengths(*command, "--lengths-kv", &options->lengths_kv, "Of k and v (default: those of q)");
  const Choices<bool> page_orders{{"hnd", false}, {"nhd", true}};
  add_choice(*command, "--pages", &options->pages_nhd, page_orders,
             "Axes of k and v where the input has a block_table: [pages, h_kv, page_size, d] (the default) or [pages, "
             "page_size, h_kv, d]; where it has seqused_kv alone: [rows, h_kv, s_max, d] or [rows, s_max, h_kv, d]");
  command
      ->add_option("--value-in-key", options->value_in_key,
                   "V is the first so many columns of K (multi-head latent attention), and the input has no v")
      ->check(whole_number(1));
  add_o_dtype_option(*command, &options->o_dtype);
  add_key_scales_options(*command, &options->key_scales, &options->value_scales, &options->precise);
  command->add_option("--dropout", options->dropout, "Probability with which an element of P is dropped");
  command->add_option("--seed", options->dropout_state.seed, "Seed of the dropout's mask")->check(whole_number());
  command->add_option("--offset", options->dropout_state.offset, "Offset of the dropout's mask")->check(whole_number());
  command->add_flag("--verify", options->verify,
                    "Compare with float64 on the host, of codes times scales, and fail beyond rounding error. With "
                    "q_original, k_original or v_original in the input, print the error against these apart");
  command->add_flag("--debug", options->debug,
                    "Kernels that check themselves, as FA_DEBUG_KERNELS=1, and name the first NaN or infinity");
  add_lengths(*command, "--dump-p", &options->dump_p,
              "B,H: write P of batch entry (or sequence) B and query head H, too, as p; with --debug");
  command->add_flag("--force", options->force, "Replace the input where it is the output too");
  command->add_flag("--json", options->json, "Print JSON");
  add_variant_options(*command, &options->variant);
  add_statistics_options(*command, &options->statistics);
  add_kernel_options(*command, &options->kernel);
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace fa::cli
