#ifndef FA_TOOLS_FA_OPTIONS_HPP_
#define FA_TOOLS_FA_OPTIONS_HPP_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fa/attention.hpp>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace fa::cli {

/// Adds --kernel "sm90 tile_m=192", and an option for each field of its own: --tile-m and so on.
void add_kernel_options(CLI::App& command, KernelOverride* kernel);

/// Nothing when every field of `kernel` is open.
std::optional<KernelOverride> if_given(const KernelOverride& kernel);

/// "tile_m=64 warps=4": the fields that are not open.
std::string describe(const KernelOverride& kernel);

/// Every combination of "tile_m=64,128;warps=4,8" laid over `base`. Throws fa::Error(invalid_argument).
std::vector<KernelOverride> parse_sweep(std::string_view text, const KernelOverride& base);

/// Packed batches and dropout.
struct PackedOptions {
  bool varlen = false;
  float dropout = 0;
  bool zero_padding = false;

  void apply(AttentionConfig* config) const;
  /// "varlen+dropout=0.1"; "plain" for none.
  std::string text() const;
};

/// Adds --dropout; and with `varlen` --varlen and --zero-padding.
void add_packed_options(CLI::App& command, PackedOptions* packed, bool varlen = true);

/// Adds --causal-align.
void add_causal_align_option(CLI::App& command, CausalAlign* align);

/// Adds --k-dtype and --v-dtype.
void add_stored_options(CLI::App& command, std::optional<DType>* k_dtype, std::optional<DType>* v_dtype,
                        int* group_size);
void add_o_dtype_option(CLI::App& command, std::optional<DType>* o_dtype);
void add_key_scales_options(CLI::App& command, bool* key_scales, bool* value_scales, bool* precise);
/// Adds --max-logit, --max-logit-by-head, --entropy, --column-sums and --top-keys.
void add_statistics_options(CLI::App& command, Statistics* statistics);
/// Those that a backward is given gradients of.
void add_statistics_gradient_options(CLI::App& command, Statistics* statistics);

/// Adds --invariance.
void add_invariance_option(CLI::App& command, Invariance* invariance);
/// Adds --outputs all|dq|dkdv|...: the outputs that a backward call has.
CLI::Option* add_outputs_option(CLI::App& command, Gradients* gradients);

/// Adds an option that takes one element type, or a comma-separated list of them.
void add_dtype_option(CLI::App& command, DType* dtype);
void add_dtype_list_option(CLI::App& command, std::vector<DType>* dtypes);

/// Adds --causal no|yes|both; the values to go through.
void add_causal_list_option(CLI::App& command, std::vector<bool>* causal);

/// "host", "cuda", "cuda:1". Throws fa::Error(invalid_argument).
Device parse_device(std::string_view text);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_OPTIONS_HPP_
