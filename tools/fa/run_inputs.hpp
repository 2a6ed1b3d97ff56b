#ifndef FA_TOOLS_FA_RUN_INPUTS_HPP_
#define FA_TOOLS_FA_RUN_INPUTS_HPP_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "run_tensors.hpp"
#include "variant_options.hpp"

namespace fa::cli {

struct RunOptions {
  std::string input;
  std::string output;
  std::string device = "auto";
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  std::optional<float> scale;
  float dropout = 0;
  DropoutState dropout_state;
  std::vector<std::int32_t> lengths;
  std::vector<std::int32_t> lengths_kv;
  bool pages_nhd = false;
  int value_in_key = 0;
  std::optional<DType> o_dtype;
  bool key_scales = false;  ///< k_scale is of keys, where its shape may be that of heads too
  bool value_scales = false;
  bool precise = false;
  KernelOverride kernel;
  VariantOptions variant;
  Statistics statistics;
  bool debug = false;
  std::vector<std::int32_t> dump_p;
  bool verify = false;
  bool json = false;
  bool force = false;
};

/// What the input file holds. Captures that functions name are declared in `options`. Throws fa::Error.
RunInputs read_inputs(RunOptions* options);

AttentionConfig make_config(const RunOptions& options, const RunInputs& inputs);

/// Before anything is computed: what functions name is in the file. Throws fa::Error(invalid_argument).
void check_captures(const AttentionConfig& config, const RunOptions& options, const RunInputs& inputs);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_RUN_INPUTS_HPP_
