#include "run_inputs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "expression/parse.hpp"
#include "options.hpp"
#include "run_scales.hpp"
#include "support/text.hpp"

namespace fa::cli {
namespace {

using tools::Tensor;

std::optional<Tensor> read_optional(const tools::SafetensorsFile& file, const char* name) {
  return file.contains(name) ? std::optional(file.read(name)) : std::nullopt;
}

/// Lengths, summed up.
std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths) {
  if (lengths.empty()) return {};
  std::vector<std::int32_t> sums{0};
  for (const std::int32_t length : lengths) {
    if (length < 0 || length > std::numeric_limits<std::int32_t>::max() - sums.back()) {
      support::throw_invalid("--lengths", length, "lengths from 0 on, of less than 2^31 rows");
    }
    sums.push_back(sums.back() + length);
  }
  return sums;
}

/// Tensors of the file that functions name are captures, declared by their dtype unless --capture does.
void read_captures(const tools::SafetensorsFile& file, RunOptions* options, RunInputs* inputs) {
  VariantOptions& variant = options->variant;
  for (const tools::StoredTensor& stored : file.tensors()) {
    const std::string& name = stored.name;
    const bool built_in = (name == "slope" && variant.alibi) || (name == "bias" && !variant.bias.empty()) ||
                          (name == "doc" && variant.documents) || (name == "tree" && variant.tree);
    const bool named = expression::is_free_name(name) && (expression::mentions("score", variant.score, name) ||
                                                          expression::mentions("mask", variant.mask, name));
    if (!built_in && !named) continue;
    inputs->captures[name] = file.read(name);
    const bool declared =
        std::ranges::any_of(variant.captures, [&](const std::string& text) { return text.starts_with(name + ":"); });
    if (named && !declared) variant.captures.push_back(name + ":" + to_string(inputs->captures[name].dtype));
  }
  if (variant.sink) inputs->sink = file.read("sink");
}

/// A tensor of int32 with `rank` axes.
Tensor read_numbers(const tools::SafetensorsFile& file, const char* name, std::size_t rank) {
  Tensor tensor = file.read(name);
  if (tensor.dtype != DType::i32 || tensor.shape.size() != rank) {
    support::throw_invalid(name, fmt::format("{} of rank {}", to_string(tensor.dtype), tensor.shape.size()),
                           fmt::format("I32 of rank {}", rank));
  }
  return tensor;
}

/// A file with a block table holds pools of pages, one with lengths alone a contiguous cache.
std::optional<RunCache> read_cache(const tools::SafetensorsFile& file, const RunOptions& options,
                                   const RunInputs& inputs) {
  const bool paged = file.contains("block_table");
  if (!paged && !file.contains("seqused_kv")) {
    if (options.pages_nhd) {
      support::throw_invalid("--pages", "nhd", "hnd, where the input has no block_table or seqused_kv");
    }
    return std::nullopt;
  }
  RunCache cache{options.pages_nhd, std::nullopt, read_numbers(file, "seqused_kv", 1)};
  if (paged) cache.block_table = read_numbers(file, "block_table", 2);
  const std::int64_t requests = options.lengths.empty() ? inputs.q.shape.empty() ? 0 : inputs.q.shape[0]
                                                        : static_cast<std::int64_t>(options.lengths.size());
  const auto check_count = [&](const char* name, const Tensor& tensor) {
    if (tensor.shape[0] != requests) {
      support::throw_invalid(name, tensor.shape[0], fmt::format("a number for each of {} requests", requests));
    }
  };
  check_count("seqused_kv", cache.seqused_kv);
  const auto read_optional_numbers = [&](const char* name, std::optional<Tensor>* tensor) {
    if (!file.contains(name)) return;
    *tensor = read_numbers(file, name, 1);
    check_count(name, **tensor);
  };
  read_optional_numbers("seq_begin", &cache.seq_begin);
  read_optional_numbers("batch_index", &cache.batch_index);
  for (const auto& [name, pool] : {std::pair{"k", &inputs.k}, std::pair{"v", inputs.v ? &*inputs.v : nullptr}}) {
    if (pool == nullptr || pool->shape.size() == 4) continue;
    support::throw_invalid(name, fmt::format("a tensor of rank {}", pool->shape.size()),
                           "pages or rows of rank 4, where there is a block_table or seqused_kv (see --pages)");
  }
  if (inputs.q.shape.size() != (options.lengths.empty() ? 4U : 3U)) {
    support::throw_invalid("q", fmt::format("a tensor of rank {}", inputs.q.shape.size()),
                           "[b, h, s, d], or with --lengths [total, h, d]");
  }
  if (!options.lengths_kv.empty()) support::throw_invalid("--lengths-kv", "given", "none: seqused_kv has them");
  if (inputs.dout) support::throw_invalid("dout", "given", "none: there are no gradients over a KV cache");
  return cache;
}

/// Before anything is made of their shapes.
void check_tensors(const RunInputs& inputs) {
  if (inputs.packed() && inputs.q.shape.size() != 3) {
    support::throw_invalid("q", fmt::format("a tensor of rank {}", inputs.q.shape.size()), "[total, h, d]");
  }
  if (inputs.q.shape.size() != 3 && inputs.q.shape.size() != 4) {
    support::throw_invalid("q", fmt::format("a tensor of rank {}", inputs.q.shape.size()), "[b, h, s, d] or [b, s, d]");
  }
  if (inputs.v && inputs.v->shape.empty()) {
    support::throw_invalid("v", "a scalar", "[b, h, s, d] or [b, s, d]");
  }
  if (inputs.dlse && !inputs.dout) {
    support::throw_invalid("dout", "nothing", "a tensor of the shape of o, where there is dlse");
  }
  const auto has_no_gradients = [&](const char* of) {
    if (inputs.dout) support::throw_invalid("dout", "given", fmt::format("none: there are no gradients {}", of));
  };
  if (inputs.value_in_key > inputs.q.shape.back()) {
    support::throw_invalid("--value-in-key", inputs.value_in_key,
                           fmt::format("at most the columns of q and k, {}", inputs.q.shape.back()));
  }
  if (inputs.value_in_key > 0) has_no_gradients("with --value-in-key");
  if (has_codes(inputs.q.dtype) || has_codes(inputs.k.dtype) || (inputs.v && has_codes(inputs.v->dtype))) {
    has_no_gradients("of 8 bits");
  }
}

/// The only one that a file may be without.
std::optional<Tensor> read_v(const tools::SafetensorsFile& file, int value_in_key) {
  if (value_in_key == 0) return file.read("v");
  if (file.contains("v")) {
    support::throw_invalid("v", "given", "none with --value-in-key: V is the first columns of k");
  }
  return std::nullopt;
}

RunDump dump_of(const RunOptions& options) {
  if (options.dump_p.size() != 2) {
    support::throw_invalid("--dump-p", fmt::format("{} numbers", options.dump_p.size()), "two: batch entry and head");
  }
  return {options.dump_p[0], options.dump_p[1]};
}

/// Columns of u4x2 that share a scale and an offset, by the shape of these. 0 where no shape tells, which a call
/// refuses.
int group_size_of(const RunInputs& inputs) {
  const auto of = [](const Tensor& codes, const std::optional<Tensor>& pairs) {
    if (codes.dtype != DType::u4x2 || codes.shape.empty() || !pairs || pairs->shape.size() != 4) return 0;
    for (const int group : {32, 64, 128}) {  // of two columns a byte, with two numbers
      if (pairs->shape.back() == 4 * codes.shape.back() / group) return group;
    }
    return 0;
  };
  const int of_k = of(inputs.k, inputs.scales.k);
  return of_k == 0 && inputs.v ? of(*inputs.v, inputs.scales.v) : of_k;
}

}  // namespace

RunInputs read_inputs(RunOptions* options) {
  const tools::SafetensorsFile file = tools::SafetensorsFile::open(options->input);
  RunInputs inputs{file.read("q"), file.read("k"), read_v(file, options->value_in_key), read_optional(file, "dout"),
                   read_optional(file, "dlse")};
  inputs.value_in_key = options->value_in_key;
  read_captures(file, options, &inputs);
  const std::vector<std::int32_t>& lengths_kv = options->lengths_kv.empty() ? options->lengths : options->lengths_kv;
  if (lengths_kv.size() != options->lengths.size()) {
    support::throw_invalid("--lengths-kv", lengths_kv.size(),
                           fmt::format("as many lengths as --lengths has, {}", options->lengths.size()));
  }
  inputs.cumulative_q = cumulative(options->lengths);
  inputs.cumulative_kv = cumulative(lengths_kv);
  inputs.dropout = options->dropout_state;
  if (!options->dump_p.empty()) inputs.dump = dump_of(*options);
  inputs.cache = read_cache(file, *options, inputs);
  check_tensors(inputs);
  read_scales(file, *options, &inputs);
  if (options->verify) read_originals(file, &inputs);
  return inputs;
}

AttentionConfig make_config(const RunOptions& options, const RunInputs& inputs) {
  const auto head_dim = [](std::int64_t columns) {
    return static_cast<int>(std::min<std::int64_t>(columns, std::numeric_limits<int>::max()));
  };
  AttentionConfig config;
  config.head_dim = head_dim(inputs.q.shape.back());
  config.value_in_key = inputs.value_in_key;
  if (inputs.v) config.head_dim_v = head_dim(inputs.d_v());
  config.dtype = inputs.q.dtype;
  config.o_dtype = options.o_dtype;
  config.key_scales = options.key_scales || inputs.scales.of_keys;
  config.value_scales = options.value_scales || inputs.scales.of_values;
  config.precise = options.precise;
  if (!has_codes(config.dtype)) {  // else what q is of, k and v are of
    if (has_codes(inputs.k.dtype)) config.k_dtype = inputs.k.dtype;
    if (inputs.v && has_codes(inputs.v->dtype)) config.v_dtype = inputs.v->dtype;
    config.group_size = group_size_of(inputs);
  }
  config.scale = options.scale;
  config.causal = options.causal;
  config.causal_align = options.causal_align;
  config.varlen = inputs.packed();
  config.zero_padding = inputs.packed() && output_dtype(config) != DType::e4m3;  // what is written is whole
  config.dropout = options.dropout;
  if (inputs.cache) {
    config.page_size = inputs.cache->block_table ? inputs.k.shape[inputs.cache->nhd ? 1 : 2] : kContiguous;
    config.check_sequences = true;  // who writes a file may be wrong
  }
  config.kernel = if_given(options.kernel);
  config.debug = options.debug;
  config.statistics = options.statistics;
  apply(options.variant, &config);
  return config;
}

void check_captures(const AttentionConfig& config, const RunOptions& options, const RunInputs& inputs) {
  const auto check = [&](const std::vector<Capture>& captures) {
    for (const Capture& capture : captures) {
      if (inputs.captures.contains(capture.name)) continue;
      support::throw_invalid(fmt::format("captures[{}]", capture.name), "nothing",
                             fmt::format("a tensor of this name in {}", options.input));
    }
  };
  check(config.score.captures);
  check(config.mask.captures);
}

}  // namespace fa::cli
