#ifndef FA_TOOLS_FA_RUN_SCALES_HPP_
#define FA_TOOLS_FA_RUN_SCALES_HPP_

#include <cstdint>
#include <optional>
#include <vector>

#include "run_inputs.hpp"
#include "run_tensors.hpp"
#include "tools/safetensors.hpp"

namespace fa::cli {

/// Reads q_scale, k_scale, v_scale and row_bias, as far as the file has them and no function names them. Axes of 1, and
/// a number alone, become what the call takes. Shapes that fit nothing are left as they are, for the call to refuse.
void read_scales(const tools::SafetensorsFile& file, const RunOptions& options, RunInputs* inputs);

/// Reads q_original, k_original and v_original. Throws fa::Error(invalid_argument) for those of other shapes or types.
void read_originals(const tools::SafetensorsFile& file, RunInputs* inputs);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_RUN_SCALES_HPP_
