#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "commands.hpp"
#include "compile/compiler.hpp"
#include "disassemble.hpp"
#include "options.hpp"
#include "plan/arch.hpp"
#include "plan_options.hpp"
#include "render/source.hpp"

namespace fa::cli {
namespace {

struct RenderOptions {
  std::string arch;
  PlanPoint point;
  PlanOptions plan;
  bool combine = false;
  bool mask_tiles = false;
  bool unit_only = false;
  bool ptx = false;
  bool sass = false;
};

/// Whether kernels of `op` are what was asked for.
bool wanted(plan::Op op, const RenderOptions& options) {
  if (options.mask_tiles) return op == plan::Op::mask_rows || op == plan::Op::mask_keys;
  return options.combine ? op == plan::Op::combine : op == plan::Op::forward || op == plan::Op::backward;
}

plan::KernelSpec choose_kernel(const RenderOptions& options) {
  PlanPoint point = options.point;
  point.arch = options.arch.empty() ? default_arch() : plan::parse_target(options.arch);
  const std::vector<plan::Alternatives> kernels = plan_kernels(options.plan, point);
  for (const plan::Alternatives& specs : kernels) {
    if (wanted(specs.front().op(), options)) return specs.front();
  }
  if (options.mask_tiles) {
    throw Error(ErrorCode::invalid_argument,
                "--mask-tiles: this problem has no lists of tiles; dense ones with --mask do",
                {{"argument", "--mask-tiles"}});
  }
  throw Error(ErrorCode::invalid_argument,
              "--combine: the keys of this problem are not split; --splits N splits those of a forward",
              {{"argument", "--combine"}});
}

/// The kernel's source, or with --ptx and --sass what becomes of it.
std::string text_of(const plan::KernelSpec& spec, const RenderOptions& options) {
  const render::Source source = render::render(spec);
  if (!options.ptx && !options.sass) return options.unit_only ? source.unit : render::flatten(source);
  std::string text;
  if (options.ptx) text += compile::compile_to_ptx(source, spec.arch);
  if (options.sass) text += disassemble(compile::compile(source, spec.arch).bytes);
  return text;
}

void render_kernel(const RenderOptions& options) {
  const std::string text = text_of(choose_kernel(options), options);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

}  // namespace

void add_render(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("render", "Print the source of a kernel, as one file for nvcc -std=c++20");
  const auto options = std::make_shared<RenderOptions>();
  command->add_option("--arch", options->arch, "Target, as sm_90a (default: the GPU's, else sm_90a)");
  add_dtype_option(*command, &options->point.dtype);
  command->add_option("--head-dim", options->point.head_dim, "d_qk (default: 128)");
  command->add_flag("--causal", options->point.causal, "With a causal mask");
  command->add_flag("--combine", options->combine, "The kernel that merges split keys instead of the attention kernel");
  command->add_flag("--mask-tiles", options->mask_tiles, "The kernel before it that lists the tiles of a mask function")
      ->excludes("--combine");
  CLI::Option* const unit =
      command->add_flag("--unit-only", options->unit_only, "Only the rendered unit, without the headers it includes");
  command->add_flag("--ptx", options->ptx, "Instead: the PTX that NVRTC makes of it")->excludes(unit);
  command->add_flag("--sass", options->sass, "Instead, or behind the PTX: its machine code, by nvdisasm or cuobjdump")
      ->excludes(unit);
  add_plan_options(*command, &options->plan);
  command->callback([options, exit_code] {
    render_kernel(*options);
    *exit_code = kSuccess;
  });
}

}  // namespace fa::cli
