#include "api/variants.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "api/validate.hpp"
#include "api/views.hpp"
#include "expression/emit.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using expression::CapturedView;
using support::throw_invalid;

// With these, no sum of a row, a key and a window leaves 32 bits.
constexpr std::int64_t kMaxBoundedLength = std::int64_t{1} << 29;
constexpr std::int64_t kMaxPlacedLength = kMaxBoundedLength / 2;  // of a whole: chunks begin before the first key, too

std::string argument_of(std::string_view name) {
  return fmt::format("captures[{}]", name);
}

void check_declaration(const Capture& capture, bool of_mask, bool host) {
  const std::string argument = argument_of(capture.name);
  if (!expression::is_free_name(capture.name)) {
    throw_invalid(argument, "this name", "identifiers that mean nothing else in a function");
  }
  if (capture.dtype > DType::i32)
    throw_invalid(argument, static_cast<int>(capture.dtype), "f16, bf16, f32, f64 or i32");
  if (capture.dtype == DType::f64 && !host) throw_invalid(argument, "f64", "f16, bf16, f32 or i32 on a GPU");
  if (capture.requires_grad && of_mask)
    throw_invalid(argument, "requires_grad in a mask", "a score function's capture");
  if (capture.requires_grad && capture.dtype == DType::i32)
    throw_invalid(argument, "requires_grad of i32", "real numbers");
}

/// The captures of both functions, each once.
std::vector<expression::Capture> declared(const AttentionConfig& config, bool host) {
  std::vector<expression::Capture> result;
  const auto add = [&](const std::vector<Capture>& captures, bool of_mask) {
    const std::size_t before = of_mask ? result.size() : 0;
    for (std::size_t i = 0; i < captures.size(); ++i) {
      const Capture& capture = captures[i];
      check_declaration(capture, of_mask, host);
      const auto known = std::ranges::find(result, capture.name, &expression::Capture::name);
      if (known == result.end()) {
        result.push_back({capture.name, capture.dtype, -1, capture.requires_grad});
        continue;
      }
      const auto index = static_cast<std::size_t>(known - result.begin());
      if (index >= before || known->dtype != capture.dtype) {
        throw_invalid(argument_of(capture.name), "two declarations", "one, or one of the same dtype in each function");
      }
    }
  };
  add(config.score.captures, false);
  add(config.mask.captures, true);
  if (result.size() > Captures::kMax) {
    throw_invalid("captures", result.size(), fmt::format("at most {} of both functions", Captures::kMax));
  }
  return result;
}

void check_masks(const AttentionConfig& config) {
  if (config.window_left < -1) throw_invalid("window_left", config.window_left, "0 and more, or -1: unbounded");
  if (config.window_right < -1) throw_invalid("window_right", config.window_right, "0 and more, or -1: unbounded");
  if (config.chunk < 0) throw_invalid("chunk", config.chunk, "the keys of a chunk, or 0: none");
  if (config.causal && window_of(config.window_right) > 0) {
    throw_invalid("window_right", config.window_right, "0 or -1 where causal hides what lies behind the diagonal");
  }
}

void check_dtype(const Label& label, const TensorView& view, DType dtype) {
  if (view.dtype == dtype) return;
  throw_invalid(label.text(), to_string(view.dtype), fmt::format("dtype {}", to_string(dtype)));
}

/// A number takes the place of a scalar of the capture's dtype.
void check_number(const Label& label, double number, DType dtype) {
  if (dtype == DType::i32) {
    constexpr double kLow = std::numeric_limits<std::int32_t>::min();
    constexpr double kHigh = std::numeric_limits<std::int32_t>::max();
    if (number >= kLow && number <= kHigh && number == std::trunc(number)) return;
    throw_invalid(label.text(), number, "an integer of 32 bits");
  }
  if (dtype == DType::f64 || !std::isfinite(number)) return;
  if (std::abs(number) <= double{std::numeric_limits<float>::max()}) return;
  throw_invalid(label.text(), number, "a number within the range of float");
}

CapturedView checked_capture(const expression::Capture& capture, const Captures& given) {
  const Label label(capture.name, Label::Of::capture);
  const auto* const found =
      std::find_if(given.begin(), given.end(), [&](const Captured& c) { return c.name == capture.name; });
  if (found == given.end()) throw_invalid(label.text(), "nothing", "a tensor, or a number for a scalar");
  CapturedView result;
  result.scalar = found->number;
  if (!found->tensor.defined()) {
    if (capture.rank != 0) throw_invalid(label.text(), "a number", fmt::format("a tensor of rank {}", capture.rank));
    check_number(label, found->number, capture.dtype);
    return result;
  }
  result.view = found->tensor;
  check_memory(label, result.view);
  check_dtype(label, result.view, capture.dtype);
  if (capture.rank == 0 ? result.view.elements() != 1 : result.view.rank != capture.rank) {
    throw_invalid(label.text(), fmt::format("shape {}", shape_text(result.view)),
                  capture.rank == 0 ? std::string("one element") : fmt::format("rank {}", capture.rank));
  }
  return result;
}

/// Elements, which do not overlap, that fill a block of memory without gaps, so that it can be set to zero at once.
bool dense(const TensorView& view) {
  std::int64_t reach = 1;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.strides[axis] < 0) return false;
    reach += view.strides[axis] * (view.shape[axis] - 1);
  }
  return reach == view.elements();
}

void check_names(const Captures& given, const std::vector<expression::Capture>& declared) {
  for (const Captured& captured : given) {
    const auto same = [&](const auto& other) { return other.name == captured.name; };
    if (std::ranges::none_of(declared, same))
      throw_invalid(argument_of(captured.name), "given", "declared captures only");
    if (std::count_if(given.begin(), given.end(), same) > 1)
      throw_invalid(argument_of(captured.name), "given twice", "once");
  }
}

expression::Lengths lengths_of(const AttentionConfig& config, const AttentionShape& shape,
                               const std::optional<ShardPlace>& place) {
  if (place) return {place->whole_b, place->whole_h_q, place->whole_s_q, place->whole_s_kv};
  return {shape.b, shape.h_q, shape.s_q, shape.s_kv, config.varlen || config.page_size != 0};
}

/// The gradient that outputs give for a capture, held to the shape of the capture.
TensorView checked_gradient(const expression::Capture& capture, const CapturedView& captured,
                            const AttentionConfig& config, const BackwardOutputs& outputs) {
  const auto* const found = std::find_if(outputs.captures.begin(), outputs.captures.end(),
                                         [&](const Captured& c) { return c.name == capture.name; });
  if (found == outputs.captures.end()) return {};
  const Label label(capture.name, Label::Of::gradient);
  if (!capture.requires_grad) {
    throw_invalid(label.text(), "given", "captures that are declared with requires_grad");
  }
  const TensorView& view = found->tensor;
  if (!view.defined()) throw_invalid(label.text(), "a number", "a tensor");
  check_memory(label, view);
  check_dtype(label, view, config.dtype == DType::f64 ? DType::f64 : DType::f32);
  const bool fits =
      capture.rank == 0 ? view.elements() == 1 : view.rank == captured.view.rank && view.shape == captured.view.shape;
  if (!fits) {
    throw_invalid(label.text(), fmt::format("shape {}", shape_text(view)),
                  capture.rank == 0 ? std::string("one element") : fmt::format("shape {}", shape_text(captured.view)));
  }
  check_writable(label, view);
  if (view.elements() != 0 && !dense(view)) {
    throw_invalid(label.text(), fmt::format("strides [{}]", fmt::join(view.strides, ", ")), "elements without gaps");
  }
  return view;
}

// What compiles in seconds: each distinct element that functions read, or differentiate by, is code for every score.
constexpr std::size_t kMaxLoads = 32;
constexpr std::size_t kMaxGradientPlaces = 16;

/// Functions that a kernel would take minutes to compile for are refused.
void check_size_of_functions(const expression::Program& program) {
  std::vector<expression::NodeId> roots;
  if (program.score) roots.push_back(*program.score);
  if (program.mask) roots.push_back(*program.mask);
  const auto is_load = [&](expression::NodeId id) { return program.graph[id].op == expression::Op::load; };
  const auto loads = static_cast<std::size_t>(std::ranges::count_if(program.needed(roots), is_load));
  if (loads > kMaxLoads) {
    throw_invalid("captures", fmt::format("read at {} different places", loads),
                  fmt::format("at most {} places of score and mask on a GPU", kMaxLoads));
  }
  if (program.gradients.size() > kMaxGradientPlaces) {
    throw_invalid("captures", fmt::format("differentiated at {} different places", program.gradients.size()),
                  fmt::format("at most {} places with requires_grad on a GPU", kMaxGradientPlaces));
  }
}

}  // namespace

TensorView checked_of_heads(const char* argument, const AttentionConfig& config, const TensorView& view,
                            std::int64_t h_q) {
  check_memory(argument, view);
  check_dtype(argument, view, config.dtype == DType::f64 ? DType::f64 : DType::f32);
  if (view.rank != 1 || view.shape[0] != h_q) {
    throw_invalid(argument, fmt::format("shape {}", shape_text(view)), fmt::format("[h_q] = [{}]", h_q));
  }
  return view;
}

bool is_plain(const AttentionConfig& config) noexcept {
  return config.score.expression.empty() && config.mask.expression.empty() && window_of(config.window_left) < 0 &&
         window_of(config.window_right) < 0 && config.chunk == 0 && !config.sink;
}

Functions read_functions(const AttentionConfig& config, bool host) {
  check_masks(config);
  Functions functions;
  functions.program =
      expression::Program::parse(config.score.expression, config.mask.expression, declared(config, host));
  for (const expression::Capture& capture : functions.program.captures) {
    if (capture.rank < 0)
      throw_invalid(argument_of(capture.name), "declared and not used", "captures that a function uses");
    if (capture.requires_grad && config.deterministic && !host) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("{}: its gradient is a sum without a fixed order, which `deterministic` rules out; "
                              "accepted on the host device, or without one of the two",
                              argument_of(capture.name)),
                  {{"argument", argument_of(capture.name)}, {"value", "requires_grad"}, {"accepted", "false"}});
    }
  }
  if (!host) check_size_of_functions(functions.program);
  plan::Variants& variants = functions.variants;
  variants.left_window = window_of(config.window_left) >= 0;
  variants.chunked = config.chunk > 0;
  variants.sink = config.sink;
  variants.score = expression::without_spaces("score", config.score.expression);
  variants.mask = expression::without_spaces("mask", config.mask.expression);
  variants.captures = functions.program.captures;
  plan::describe_functions(functions.program, &variants);
  const bool positions = expression::has_positions(functions.program);
  functions.placed = variants;
  functions.placed.placed = positions || config.chunk > 0 || config.dropout > 0;
  functions.strided = functions.placed;
  functions.strided.strided = positions;
  plan::describe_functions(functions.program, &functions.strided);
  return functions;
}

namespace {

VariantCall check_inputs(const AttentionConfig& config, const Functions& functions, const AttentionShape& shape,
                         const std::optional<ShardPlace>& place, const TensorView& sink, const Captures& captures) {
  VariantCall call;
  const std::vector<expression::Capture>& wanted = functions.program.captures;
  check_names(captures, wanted);
  call.count = wanted.size();
  for (std::size_t i = 0; i < wanted.size(); ++i) call.captures[i] = checked_capture(wanted[i], captures);
  const expression::Lengths lengths = lengths_of(config, shape, place);
  if (!wanted.empty()) check_indices(functions.program, call.views(), lengths);
  if (config.sink) {
    if (!sink.defined()) throw_invalid("sink", "nothing", "a tensor [h_q], as the configuration says");
    call.sink = checked_of_heads("sink", config, sink, shape.h_q);
  } else if (sink.defined()) {
    throw_invalid("sink", "given", "nothing, unless AttentionConfig::sink is set");
  }
  const bool bounded = window_of(config.window_left) >= 0 || window_of(config.window_right) >= 0 || config.chunk > 0;
  const std::int64_t most = place ? kMaxPlacedLength : kMaxBoundedLength;
  if (bounded && std::max(lengths.s_q, lengths.s_kv) > most) {
    throw_invalid("s_q, s_kv", std::max(lengths.s_q, lengths.s_kv), fmt::format("at most {} with a window", most));
  }
  return call;
}

}  // namespace

VariantCall check_variants(const AttentionConfig& config, const Functions& functions, const AttentionShape& shape,
                           const std::optional<ShardPlace>& place, const ForwardInputs& inputs) {
  return check_inputs(config, functions, shape, place, inputs.sink, inputs.captures);
}

VariantCall check_variants(const AttentionConfig& config, const Functions& functions, const AttentionShape& shape,
                           const std::optional<ShardPlace>& place, const BackwardInputs& inputs,
                           const BackwardOutputs& outputs) {
  VariantCall call = check_inputs(config, functions, shape, place, inputs.sink, inputs.captures);
  const std::vector<expression::Capture>& wanted = functions.program.captures;
  check_names(outputs.captures, wanted);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    call.captures[i].gradient = checked_gradient(wanted[i], call.captures[i], config, outputs);
  }
  if (outputs.dsink.defined()) {
    if (!config.sink) throw_invalid("dsink", "given", "nothing, unless AttentionConfig::sink is set");
    call.dsink = checked_of_heads("dsink", config, outputs.dsink, shape.h_q);
    check_writable("dsink", call.dsink);
  }
  return call;
}

void check_tiles(const MaskTiles& tiles, std::size_t needed) {
  if (tiles.data == nullptr) {
    if (tiles.filled) throw_invalid("tiles", "filled, and a null pointer", "the memory that an earlier call was given");
    return;
  }
  if (needed == 0) throw_invalid("tiles", "given", "nothing, unless there is a mask function");
  if (reinterpret_cast<std::uintptr_t>(tiles.data) % 256 != 0)
    throw_invalid("tiles", tiles.data, "a multiple of 256 bytes");
  if (tiles.size >= needed) return;
  throw Error(ErrorCode::out_of_memory,
              fmt::format("tiles = {} bytes: accepted are {} or more for this shape", tiles.size, needed),
              {{"argument", "tiles"}, {"value", std::to_string(tiles.size)}, {"accepted", std::to_string(needed)}});
}

}  // namespace fa::api
