#ifndef FA_TOOLS_FA_VARIANT_OPTIONS_HPP_
#define FA_TOOLS_FA_VARIANT_OPTIONS_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include <fa/attention.hpp>

namespace CLI {
class App;
}

namespace fa::cli {

/// What a configuration computes besides plain attention, as command lines say it.
struct VariantOptions {
  std::string score;
  std::string mask;
  std::vector<std::string> captures;  ///< "slope:f32", "bias:bf16:grad"
  double softcap = 0;
  bool alibi = false;
  std::string bias;  ///< axes
  bool documents = false;
  bool tree = false;
  bool gradients = false;  ///< of what alibi and bias capture
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::int64_t chunk = 0;
  bool sink = false;
};

/// Adds --score, --mask, --window-left, ...
void add_variant_options(CLI::App& command, VariantOptions* options);

/// Whether backward computes the gradient of a capture.
bool wants_gradients(const VariantOptions& options);

/// "softcap=30+window_left=1023"; empty for none.
std::string text(const VariantOptions& options);

/// Lays the options over `config`. Throws fa::Error(invalid_argument) for a capture that no function names.
void apply(const VariantOptions& options, AttentionConfig* config);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_VARIANT_OPTIONS_HPP_
