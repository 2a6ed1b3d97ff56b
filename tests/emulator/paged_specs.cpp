#include "emulator/paged_specs.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

#include "api/problem.hpp"
#include "emulator/specs.hpp"
#include "plan/schedule.hpp"

#include "plan/fixed.hpp"
#include "plan/sm90_forward.hpp"
#include "plan/sm90_wide_forward.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;

constexpr int kContiguous = static_cast<int>(fa::kContiguous);

// What a shape has; else its queries are dense, its rows aligned and so on.
enum Flag : unsigned {
  kPacked = 1,
  kCausal = 2,
  kUnaligned = 4,
  kPackGqa = 8,
  kQInRegisters = 16,
  kTwoBodies = 32,
  kPairs = 64,  // of warps
  kScheduled = 128,
  kTwos = 256,  // groups of warps that share rows
  kFours = 512,
  kInKey = 1024,  // V is the first columns of K
  kSplitWarps = 2048,
  kWide = 4096,  // of the Hopper forward for wide heads
  kOwnParts = 8192,
  kBounded = 16384,    // blocks go on from tile to tile
  kTwoBlocks = 32768,  // share a multiprocessor
  kTuring = 65536,     // for compute capability 7.5
  kSplit = 131072,     // blocks have equal parts of each request
  kCluster = 262144,   // of four blocks, which merge them
  kMulticast = 524288,
  kConverts = 1048576,   // of a compute capability that converts e4m3
  kDynamic = 2097152,    // query tiles come from a counter
  kWideBoxes = 4194304,  // of all columns of a page's rows
};

struct Shape {
  int page_size;
  DType dtype;
  int d_qk, d_v, tile_m, warps, tile_n, stages;
  unsigned flags;
  const char* choice = "";           ///< of fa::test::variant_choices()
  int q_buffers = 0;                 ///< of an sm90 kernel
  int k_storage = 0, v_storage = 0;  ///< storage_of what K and V are stored as
  const char* others = "";           ///< fields that overrides alone set

  bool has(Flag flag) const { return (flags & flag) != 0; }
};

constexpr Shape kShapes[] = {
    {16, DType::f16, 40, 40, 32, 2, 32, 1, kPacked | kCausal},
    {8, DType::bf16, 64, 64, 64, 2, 48, 2, 0},
    {3, DType::f32, 24, 64, 16, 1, 16, 1, kPacked | kCausal | kTwoBodies},
    {1, DType::bf16, 64, 64, 32, 1, 32, 2, kPacked | kCausal | kPackGqa | kQInRegisters},
    {12, DType::f16, 8, 64, 32, 2, 32, 1, kCausal | kPackGqa},
    {40, DType::bf16, 72, 40, 32, 2, 16, 3, kPacked | kUnaligned},
    {64, DType::bf16, 40, 48, 64, 4, 32, 1, kPacked | kCausal | kPairs},
    {256, DType::f16, 64, 64, 32, 2, 64, 2, kPacked | kCausal | kPackGqa | kUnaligned | kTwoBodies | kPairs},
    {256, DType::f32, 16, 8, 32, 2, 32, 1, kCausal},
    {64, DType::f16, 128, 128, 32, 2, 64, 1, kCausal | kPackGqa},
    {16, DType::bf16, 24, 24, 32, 2, 32, 1, kPacked | kCausal, "softcap_bias"},
    {3, DType::f16, 16, 16, 32, 2, 32, 1, 0, "documents"},
    {12, DType::bf16, 16, 16, 32, 2, 32, 1, kPacked | kCausal | kPackGqa, "everything"},
    {8, DType::f32, 16, 8, 32, 2, 32, 1, kCausal | kPackGqa, "window_sink"},
    {64, DType::bf16, 16, 16, 32, 2, 32, 2, kPacked | kTwoBodies, "chunked"},
    {1, DType::f16, 16, 16, 32, 2, 32, 1, kPacked | kPackGqa, "by_head"},
    {40, DType::f16, 16, 16, 32, 2, 32, 1, kPacked, "key_bias"},
    {16, DType::bf16, 16, 16, 32, 2, 32, 1, kPacked | kTwoBodies, "two_sided"},
    {256, DType::f32, 8, 8, 32, 2, 32, 1, kCausal, "table"},
    {8, DType::bf16, 64, 64, 32, 2, 16, 1, kPacked | kCausal | kPackGqa | kScheduled},
    {1, DType::f16, 24, 40, 16, 1, 16, 2, kCausal | kScheduled},
    {3, DType::f32, 16, 24, 32, 2, 16, 1, kPacked | kCausal | kScheduled},
    {16, DType::bf16, 64, 64, 64, 4, 32, 1, kPacked | kCausal | kPairs | kScheduled},
    {64, DType::f16, 40, 40, 32, 2, 16, 1, kPackGqa | kUnaligned | kTwoBodies | kScheduled},
    {16, DType::bf16, 32, 32, 32, 2, 16, 2, kPackGqa | kQInRegisters | kScheduled},
    {12, DType::bf16, 16, 16, 32, 2, 16, 1, kPacked | kCausal | kPackGqa | kScheduled, "everything"},
    {8, DType::f32, 16, 8, 32, 2, 16, 1, kCausal | kPackGqa | kScheduled, "window_sink"},
    {64, DType::bf16, 16, 16, 32, 2, 16, 2, kPacked | kTwoBodies | kScheduled, "chunked"},
    {16, DType::bf16, 16, 16, 32, 2, 16, 1, kPacked | kTwoBodies | kScheduled, "two_sided"},
    {3, DType::f16, 16, 16, 32, 2, 16, 1, kScheduled, "documents"},
    {16, DType::bf16, 16, 16, 32, 2, 32, 1, kPacked | kPackGqa, "tree"},
    {8, DType::f16, 16, 16, 32, 2, 16, 2, kTwoBodies | kScheduled, "tree"},
    {12, DType::bf16, 16, 16, 32, 2, 16, 1, kPacked | kScheduled, "prefix"},
    {64, DType::bf16, 72, 64, 32, 4, 32, 2, kPacked | kCausal | kPackGqa | kFours | kInKey},
    {8, DType::f16, 40, 24, 32, 8, 32, 3, kCausal | kPackGqa | kFours | kInKey | kScheduled},
    {1, DType::f32, 24, 16, 16, 2, 16, 2, kPacked | kTwos | kInKey},
    {3, DType::f16, 16, 40, 64, 8, 64, 1, kPacked | kCausal | kFours},
    {12, DType::f32, 72, 72, 32, 4, 32, 1, kCausal | kTwos | kUnaligned},
    {16, DType::bf16, 40, 72, 16, 4, 32, 1, kPackGqa | kFours | kScheduled},
    {40, DType::bf16, 16, 16, 32, 4, 32, 2, kPacked | kCausal | kPackGqa | kFours | kInKey | kScheduled, "everything"},
    {64, DType::bf16, 576, 512, 16, 4, 32, 2, kPackGqa | kFours | kInKey | kScheduled},
    {16, DType::bf16, 64, 64, 32, 2, 32, 1, kPacked | kCausal, "", 0, 1, 1},
    {8, DType::f16, 48, 80, 32, 2, 48, 2, kCausal | kPackGqa | kQInRegisters, "", 0, 1, 2},
    {3, DType::bf16, 80, 16, 16, 1, 16, 2, kPacked | kCausal | kScheduled, "", 0, 2, 0},
    {64, DType::f16, 32, 32, 64, 2, 32, 1, kPackGqa | kUnaligned | kTwoBodies, "", 0, 0, 1},
    {12, DType::bf16, 16, 16, 32, 2, 32, 1, kPacked | kCausal | kPackGqa, "everything", 0, 2, 1},
    {8, DType::f16, 64, 64, 32, 2, 32, 1, kPacked | kCausal | kScheduled, "window_sink", 0, 2, 2},
    {16, DType::bf16, 64, 64, 16, 4, 64, 2, kCausal | kPackGqa | kQInRegisters | kScheduled | kSplitWarps},
    {8, DType::f16, 40, 48, 32, 2, 32, 1, kPacked | kCausal | kSplitWarps},
    {12, DType::bf16, 32, 32, 16, 4, 64, 2, kPackGqa | kQInRegisters | kScheduled | kSplitWarps, "", 0, 1, 1},
    {64, DType::f16, 16, 64, 16, 4, 64, 1, kPacked | kUnaligned | kTwoBodies | kSplitWarps, "window_sink", 0, 2, 0},
    {16, DType::bf16, 64, 64, 32, 2, 32, 1, kPacked | kCausal, "", 0, 32, 32},
    {8, DType::f16, 96, 160, 32, 2, 48, 2, kCausal | kPackGqa | kQInRegisters, "", 0, 32, 32},
    {12, DType::bf16, 128, 256, 16, 4, 64, 2, kPackGqa | kQInRegisters | kScheduled | kSplitWarps, "", 0, 128, 128},
    {3, DType::f16, 64, 32, 32, 2, 32, 2, kPacked | kCausal | kUnaligned | kTwoBodies, "window_sink", 0, 64, 1},
    {64, DType::f16, 48, 64, 16, 4, 64, 2, kCausal | kPackGqa | kOwnParts | kSplitWarps, "", 0, 2, 64},
    {8, DType::f16, 96, 160, 16, 4, 64, 2, kCausal | kPackGqa | kScheduled | kSplitWarps, "window_sink", 0, 32, 32},
    {16, DType::bf16, 256, 64, 16, 2, 64, 2, kPacked | kCausal | kQInRegisters | kSplitWarps, "", 0, 32, 1},
    {1, DType::bf16, 32, 32, 32, 1, 32, 1, kPackGqa | kScheduled, "", 0, 32, 0},
    {16, DType::bf16, 64, 64, 16, 4, 64, 3, kCausal | kPackGqa | kOwnParts | kSplitWarps},
    {8, DType::f16, 40, 64, 32, 2, 16, 1, kPacked | kCausal | kPackGqa | kOwnParts},
    {3, DType::f16, 24, 40, 32, 2, 16, 2, kOwnParts | kUnaligned},
    {12, DType::bf16, 32, 32, 16, 4, 64, 2, kPackGqa | kQInRegisters | kOwnParts | kSplitWarps, "", 0, 1, 1},
    {16, DType::bf16, 16, 16, 32, 2, 16, 1, kPacked | kTwoBodies | kOwnParts, "two_sided"},
    {8, DType::f16, 64, 64, 16, 4, 64, 2, kCausal | kPackGqa | kOwnParts | kSplitWarps, "window_sink"},
    {16, DType::f16, 40, 40, 32, 2, 32, 1, kPacked | kCausal | kPackGqa | kBounded},
    {64, DType::bf16, 40, 24, 32, 4, 32, 2, kPacked | kCausal | kPackGqa | kFours | kInKey | kBounded},
    {8, DType::f16, 48, 80, 32, 2, 48, 2, kCausal | kBounded, "", 0, 1, 2},
    {16, DType::bf16, 576, 512, 16, 4, 32, 2, kCausal | kPackGqa | kFours | kInKey | kScheduled, "", 0, 3},
    {3, DType::f16, 576, 512, 32, 4, 32, 2, kPacked | kCausal | kPackGqa | kFours | kInKey, "", 0, 3},
    {16, DType::f16, 40, 40, 32, 2, 32, 1, kPacked | kCausal | kTuring},
    {3, DType::f32, 24, 64, 16, 1, 16, 1, kPacked | kCausal | kTwoBodies | kTuring},
    {8, DType::f16, 64, 64, 32, 2, 16, 2, kPacked | kCausal | kPackGqa | kScheduled | kTuring},
    {1, DType::f16, 64, 64, 16, 4, 64, 2, kCausal | kPackGqa | kOwnParts | kSplitWarps | kTuring},
    {12, DType::f16, 16, 16, 32, 2, 32, 1, kPacked | kCausal | kPackGqa | kTuring, "everything"},
    {64, DType::f16, 40, 24, 32, 4, 32, 2, kPackGqa | kFours | kInKey | kScheduled | kTuring},
    {16, DType::bf16, 576, 512, 64, 12, 64, 2, kCausal | kInKey | kScheduled | kWide | kMulticast},
    {64, DType::f16, 264, 72, 64, 12, 64, 1, kPacked | kCausal | kScheduled | kWide | kMulticast},
    {16, DType::bf16, 576, 512, 64, 12, 64, 2, kCausal | kPackGqa | kInKey | kSplit | kWide},
    {64, DType::f16, 264, 72, 64, 12, 64, 1, kCausal | kSplit | kWide},
    {kContiguous, DType::f32, 16, 24, 32, 2, 16, 1, kPacked | kCausal | kScheduled | kTuring},
    {8, DType::bf16, 64, 64, 128, 12, 48, 2, kPacked | kCausal, "", 2},
    {16, DType::f16, 40, 128, 64, 8, 80, 3, kCausal | kPackGqa, "", 1},
    {24, DType::bf16, 64, 48, 192, 16, 32, 3, kPacked, "", 2},
    {64, DType::f16, 64, 64, 256, 20, 48, 3, kCausal, "", 2},
    {256, DType::bf16, 128, 64, 64, 8, 64, 2, kPacked | kCausal | kPackGqa, "", 1},
    {40, DType::f16, 72, 40, 128, 12, 32, 2, 0, "", 2},
    {8, DType::bf16, 64, 128, 128, 12, 48, 2, kPacked | kCausal | kWideBoxes, "", 2},
    {16, DType::f16, 128, 64, 192, 16, 80, 2, kCausal | kDynamic | kWideBoxes, "", 2},
    {40, DType::bf16, 64, 64, 128, 12, 80, 2, kPacked | kWideBoxes, "", 2},
    {64, DType::f16, 64, 256, 128, 12, 64, 2, kCausal | kWideBoxes, "", 1},
    {16, DType::bf16, 128, 128, 64, 8, 32, 2, kPacked | kCausal | kPackGqa | kOwnParts | kTwoBlocks | kWideBoxes, "",
     1},
    {64, DType::f16, 128, 64, 64, 8, 32, 2, kCausal | kPackGqa | kSplit | kWideBoxes, "", 1},
    {16, DType::bf16, 64, 64, 128, 12, 48, 2, kPacked | kCausal, "softcap_bias", 2},
    {24, DType::bf16, 192, 128, 128, 12, 48, 2, kPacked | kCausal | kWideBoxes, "softcap_bias", 1},
    {16, DType::f16, 64, 64, 64, 8, 32, 2, kCausal | kPackGqa, "window_sink", 1},
    {8, DType::bf16, 64, 64, 128, 12, 64, 2, kPacked, "window", 2},
    {8, DType::f16, 64, 64, 128, 12, 32, 2, kPacked | kCausal, "by_head", 2},
    {16, DType::bf16, 64, 64, 64, 8, 32, 2, kPacked | kPackGqa, "tree", 1},
    {16, DType::bf16, 64, 64, 64, 8, 32, 2, kPacked | kCausal | kPackGqa | kScheduled | kTwoBlocks, "", 1},
    {8, DType::f16, 40, 128, 64, 8, 48, 2, kCausal | kScheduled, "", 1},
    {64, DType::bf16, 128, 64, 64, 8, 64, 2, kPackGqa | kScheduled | kTwoBlocks, "", 1},
    {16, DType::f16, 64, 64, 64, 8, 32, 2, kPacked | kCausal | kPackGqa | kScheduled, "window_sink", 1},
    {24, DType::bf16, 32, 32, 64, 8, 48, 3, kPacked | kCausal | kScheduled, "softcap_bias", 1},
    {8, DType::bf16, 64, 64, 64, 8, 32, 2, kPacked | kPackGqa | kScheduled, "tree", 1},
    {16, DType::f16, 64, 64, 64, 8, 32, 2, kCausal | kPackGqa | kOwnParts | kTwoBlocks, "", 1},
    {8, DType::bf16, 40, 128, 64, 8, 32, 3, kPacked | kCausal | kPackGqa | kOwnParts, "", 1},
    {64, DType::bf16, 64, 40, 64, 8, 64, 2, kOwnParts | kTwoBlocks, "", 1},
    {8, DType::f16, 64, 64, 64, 8, 48, 2, kPacked | kCausal | kPackGqa | kOwnParts, "window_sink", 1},
    {16, DType::bf16, 64, 64, 64, 8, 32, 2, kCausal | kPackGqa | kSplit | kTwoBlocks, "", 1},
    {8, DType::f16, 40, 128, 64, 8, 48, 2, kCausal | kSplit, "", 1},
    {16, DType::f16, 64, 64, 64, 8, 64, 2, kPackGqa | kSplit | kTwoBlocks, "window_sink", 1},
    {8, DType::bf16, 72, 128, 64, 8, 48, 2, kCausal | kPackGqa | kSplit | kCluster, "", 1},
    {16, DType::f16, 64, 64, 64, 8, 64, 2, kPackGqa | kSplit | kCluster | kTwoBlocks, "window_sink", 1},
    {64, DType::bf16, 576, 512, 64, 12, 64, 2, kCausal | kPackGqa | kInKey | kScheduled | kWide},
    {16, DType::f16, 320, 256, 64, 12, 64, 2, kPacked | kCausal | kPackGqa | kInKey | kScheduled | kWide},
    {8, DType::bf16, 264, 72, 64, 12, 64, 2, kPacked | kCausal | kWide},
    {24, DType::f16, 72, 264, 64, 12, 64, 1, kPackGqa | kScheduled | kWide},
    {16, DType::bf16, 512, 512, 64, 12, 64, 1, kPacked | kCausal | kPackGqa | kScheduled | kWide},
    {16, DType::bf16, 272, 128, 64, 12, 64, 2, kCausal | kPackGqa | kInKey | kScheduled | kWide, "window_sink"},
    {kContiguous, DType::bf16, 64, 64, 16, 4, 64, 3, kCausal | kPackGqa | kOwnParts | kSplitWarps},
    {kContiguous, DType::f16, 40, 64, 32, 2, 48, 2, kPacked | kCausal | kPackGqa | kScheduled},
    {kContiguous, DType::bf16, 16, 64, 16, 4, 64, 2, kPackGqa | kScheduled | kSplitWarps, "window_sink"},
    {kContiguous, DType::f16, 24, 40, 32, 2, 16, 1, kUnaligned | kTwoBodies | kScheduled},
    {kContiguous, DType::bf16, 32, 32, 16, 4, 64, 2, kPackGqa | kScheduled | kSplitWarps, "", 0, 1, 2},
    {kContiguous, DType::bf16, 64, 128, 16, 2, 64, 2, kCausal | kPackGqa | kQInRegisters | kSplitWarps, "", 0, 64, 64},
    {16, DType::bf16, 64, 64, 32, 2, 32, 1, kPacked | kCausal | kConverts, "", 0, 1, 1},
    {8, DType::f16, 48, 80, 32, 2, 48, 2, kCausal | kPackGqa | kQInRegisters | kConverts, "", 0, 1, 2},
    {12, DType::bf16, 80, 32, 16, 4, 64, 2, kPackGqa | kScheduled | kSplitWarps | kConverts, "", 0, 1, 1},
    {64, DType::bf16, 16, 64, 16, 4, 64, 3, kCausal | kPackGqa | kOwnParts | kSplitWarps | kConverts, "", 0, 2, 1},
    {3, DType::f16, 64, 32, 32, 2, 64, 2, kPacked | kCausal | kSplitWarps | kConverts, "window_sink", 0, 1, 0},
    {16, DType::f16, 32, 64, 16, 4, 64, 2, kUnaligned | kSplitWarps | kConverts, "", 0, 32, 0},
    {kContiguous, DType::bf16, 128, 64, 16, 4, 64, 2, kPackGqa | kScheduled | kQInRegisters | kSplitWarps | kConverts,
     "", 0, 1, 1},
    {kContiguous, DType::bf16, 64, 64, 16, 4, 128, 2, kPackGqa | kQInRegisters | kSplitWarps | kConverts, "", 0, 32,
     32},
    // Tiles of 8 rows, and keys of a warp in several pages.
    {8, DType::bf16, 128, 128, 8, 4, 128, 2, kCausal | kPackGqa | kScheduled | kSplitWarps | kConverts, "", 0, 1, 1},
    {16, DType::bf16, 64, 64, 8, 4, 128, 3, kPackGqa | kScheduled | kQInRegisters | kSplitWarps, "", 0, 32, 32},
    {12, DType::f16, 32, 64, 8, 4, 128, 2, kCausal | kPackGqa | kSplitWarps | kConverts, "window_sink", 0, 2, 1},
    {kContiguous, DType::bf16, 64, 128, 8, 4, 64, 2, kCausal | kPackGqa | kScheduled | kSplitWarps, "", 0, 1, 128},
    {16, DType::f16, 48, 64, 8, 4, 64, 2, kCausal | kPackGqa | kOwnParts | kSplitWarps, "", 0, 2, 0},
    {16, DType::bf16, 32, 160, 8, 4, 64, 2, kCausal | kPackGqa | kScheduled | kSplitWarps, "", 0, 0, 32},
    {kContiguous, DType::f32, 16, 24, 32, 2, 16, 1, kPacked | kCausal},
    {kContiguous, DType::f16, 40, 24, 32, 4, 32, 2, kPackGqa | kFours | kInKey | kScheduled},
    {kContiguous, DType::bf16, 576, 512, 16, 4, 32, 2, kCausal | kPackGqa | kFours | kInKey | kScheduled, "", 0, 3},
    {kContiguous, DType::bf16, 64, 64, 128, 12, 48, 2, kPacked | kCausal, "", 2},
    {kContiguous, DType::f16, 40, 64, 64, 8, 80, 3, kCausal | kPackGqa, "", 1},
    {kContiguous, DType::f16, 64, 64, 64, 8, 64, 2, kCausal | kPackGqa | kScheduled | kTwoBlocks, "", 1},
    {kContiguous, DType::bf16, 64, 64, 64, 8, 32, 2, kCausal | kPackGqa | kOwnParts | kTwoBlocks, "", 1},
    {kContiguous, DType::bf16, 64, 64, 64, 8, 32, 3, kPackGqa | kSplit, "", 1},
    {kContiguous, DType::bf16, 264, 72, 64, 12, 64, 2, kPacked | kCausal | kPackGqa | kScheduled | kWide},
    {8, DType::bf16, 64, 64, 64, 8, 32, 2, kCausal | kPackGqa | kOwnParts, "", 1, 0, 0, "evict_first=1"},
    {8, DType::bf16, 64, 48, 128, 12, 48, 2, kPacked | kCausal | kDynamic, "", 2},
    {16, DType::f16, 64, 64, 64, 8, 32, 2, kCausal | kPackGqa | kDynamic, "window_sink", 1},
    {64, DType::bf16, 40, 64, 192, 16, 32, 3, kPacked | kDynamic, "", 2},
    {kContiguous, DType::f16, 64, 40, 64, 8, 48, 3, kPacked | kCausal | kPackGqa | kDynamic, "", 1},
};

void take_sm90(KernelSpec& spec, const Shape& shape) {
  auto& own = spec.own.emplace<fa::plan::Sm90Forward>();
  spec.arch = {9, 0, 'a'};
  spec.min_blocks = shape.has(kTwoBlocks) ? 2 : 1;
  own.scheduled = shape.has(kScheduled);
  own.own_parts = shape.has(kOwnParts);
  own.dynamic = shape.has(kDynamic);
  own.wide_boxes = shape.has(kWideBoxes);
  own.q_buffers = shape.q_buffers;
  own.exact_max = (own.scheduled || own.own_parts || spec.split) && *shape.choice == '\0' && shape.d_v != 128;
  own.split_blocks = shape.has(kCluster) ? 4 : 1;
  own.softmax_chunks = 2;
  own.take_turns = spec.tile_m > 64 && spec.tile_m < 256;
}

void take_wide(KernelSpec& spec, const Shape& shape) {
  spec.own = fa::plan::Sm90WideForward{
      .scheduled = shape.has(kScheduled), .value_in_key = shape.has(kInKey), .multicast = shape.has(kMulticast)};
  spec.arch = {9, 0, 'a'};
  if (const std::string refusal = fa::plan::sm90_wide_forward_refusal(spec); !refusal.empty())
    throw std::logic_error(refusal);
}

PagedKernel to_kernel(const Shape& shape) {
  PagedKernel kernel;
  KernelSpec& spec = kernel.spec;
  spec.arch = shape.has(kTuring)     ? fa::plan::Arch{7, 5, '\0'}
              : shape.has(kConverts) ? fa::plan::Arch{8, 9, '\0'}
                                     : fa::plan::Arch{8, 0, '\0'};
  spec.dtype = shape.dtype;
  spec.d_qk = shape.d_qk;
  spec.d_v = shape.d_v;
  spec.tile_m = shape.tile_m;
  spec.warps = shape.warps;
  spec.tile_n = shape.tile_n;
  spec.stages = shape.stages;
  spec.page_size = shape.page_size;
  spec.varlen = shape.has(kPacked);
  spec.causal = shape.has(kCausal);
  spec.pack_gqa = shape.has(kPackGqa);
  spec.split = shape.has(kSplit);
  spec.bounded = shape.has(kBounded);
  spec.aligned = !shape.has(kUnaligned);
  spec.as<fa::plan::Sm80Forward>().q_in_registers = shape.has(kQInRegisters);
  spec.as<fa::plan::Sm80Forward>().loop_bodies = shape.has(kTwoBodies) ? 2 : 1;
  spec.as<fa::plan::Sm80Forward>().scheduled = shape.has(kScheduled);
  spec.as<fa::plan::Sm80Forward>().k_storage = shape.k_storage;
  spec.as<fa::plan::Sm80Forward>().v_storage = shape.v_storage;
  spec.as<fa::plan::Sm80Forward>().split_warps = shape.has(kSplitWarps);
  spec.as<fa::plan::Sm80Forward>().own_parts = shape.has(kOwnParts);
  spec.warps_n = shape.has(kFours) ? 4 : shape.has(kPairs) || shape.has(kTwos) ? 2 : 0;
  spec.as<fa::plan::Sm80Forward>().value_in_key = shape.has(kInKey);
  if (shape.q_buffers != 0) take_sm90(spec, shape);
  if (shape.has(kWide)) take_wide(spec, shape);
  fa::plan::read_override({"", shape.others}, fa::plan::Op::forward, "others").set_others(spec);
  if (*shape.choice == '\0') return kernel;
  const std::vector<fa::test::VariantChoice> choices = fa::test::variant_choices(false);
  const auto found = std::ranges::find(choices, shape.choice, &fa::test::VariantChoice::name);
  if (found == choices.end()) throw std::out_of_range(shape.choice);
  kernel.choice = *found;
  fa::test::AttentionCase attention;
  attention.causal = spec.causal;
  const fa::test::VariantCase variant(attention, kernel.choice);
  spec.variants = variant.functions.variants;
  if (variant.config.window_right >= 0) spec.causal = true;  // behind the diagonal
  return kernel;
}

}  // namespace

const std::vector<PagedKernel>& paged_kernels() {
  static const std::vector<PagedKernel> kernels = [] {
    std::vector<PagedKernel> result;
    for (const Shape& shape : kShapes) {
      result.push_back(to_kernel(shape));
      KernelSpec& spec = result.back().spec;
      if (shape.q_buffers != 0) spec.as<fa::plan::Sm90Forward>().own_ends = fa::plan::sm90_forward_own_ends(spec);
    }
    return result;
  }();
  return kernels;
}

const PagedKernel& paged_kernel(const std::string& choice, fa::plan::Family family) {
  const auto found = std::ranges::find_if(paged_kernels(), [&](const PagedKernel& kernel) {
    return kernel.choice.name == choice && kernel.spec.family() == family && !kernel.spec.scheduled() &&
           !kernel.spec.own_parts() && !kernel.spec.split;
  });
  if (found == paged_kernels().end()) throw std::out_of_range("no such choice: " + choice);
  return *found;
}

void set_storage(const KernelSpec& spec, fa::test::PagedCase& c) {
  if (const auto* const wide = std::get_if<fa::plan::Sm90WideForward>(&spec.own)) c.value_in_key = wide->value_in_key;
  if (spec.family() != fa::plan::Family::sm80) return;
  const auto dtype_of = [&](int storage) {
    constexpr std::optional<DType> kStored[] = {std::nullopt, DType::e4m3, DType::i8, DType::e4m3};
    if (fa::plan::is_u4(storage)) c.group_size = storage;
    return fa::plan::is_u4(storage) ? std::optional(DType::u4x2) : kStored[storage];
  };
  c.k_dtype = dtype_of(spec.as<fa::plan::Sm80Forward>().k_storage);
  c.v_dtype = dtype_of(spec.as<fa::plan::Sm80Forward>().v_storage);
  c.value_in_key = spec.as<fa::plan::Sm80Forward>().value_in_key;
}

KernelSpec sm90_paged() {
  return to_kernel({8, DType::bf16, 64, 64, 64, 8, 32, 2, kPacked | kCausal, "", 2}).spec;
}

KernelSpec sm90_paged_dynamic() {
  return to_kernel({8, DType::bf16, 64, 64, 64, 8, 32, 2, kPacked | kCausal | kDynamic, "", 2}).spec;
}

KernelSpec sm90_wide_boxes() {
  return to_kernel({16, DType::bf16, 64, 128, 128, 12, 48, 2, kPacked | kCausal | kWideBoxes, "", 2}).spec;
}

KernelSpec sm90_paged_own_ends() {
  const auto found = std::ranges::find_if(paged_kernels(), [](const PagedKernel& kernel) {
    const auto* const own = std::get_if<fa::plan::Sm90Forward>(&kernel.spec.own);
    return own != nullptr && own->own_ends && kernel.spec.causal && !kernel.spec.pack_gqa;
  });
  if (found == paged_kernels().end()) throw std::out_of_range("no such kernel");
  return found->spec;
}

KernelSpec sm90_wide_scheduled() {
  return to_kernel(
             {16, DType::bf16, 272, 128, 64, 12, 64, 2, kPacked | kCausal | kPackGqa | kInKey | kScheduled | kWide})
      .spec;
}

KernelSpec sm90_wide_multicast() {
  return to_kernel({16, DType::bf16, 272, 256, 64, 12, 64, 2, kCausal | kInKey | kScheduled | kWide | kMulticast}).spec;
}

KernelSpec sm90_scheduled() {
  return to_kernel({8, DType::bf16, 64, 64, 64, 8, 32, 2, kPacked | kCausal | kScheduled | kTwoBlocks, "", 1}).spec;
}

KernelSpec sm90_own_parts() {
  return to_kernel({8, DType::bf16, 64, 64, 64, 8, 32, 2, kPacked | kCausal | kOwnParts | kTwoBlocks, "", 1}).spec;
}

KernelSpec sm90_splits_request() {
  return to_kernel({8, DType::bf16, 64, 64, 64, 8, 32, 2, kCausal | kSplit | kTwoBlocks, "", 1}).spec;
}

KernelSpec sm80_paged() {
  return to_kernel({8, DType::bf16, 64, 64, 32, 2, 32, 1, kPacked | kCausal}).spec;
}

KernelSpec sm80_scheduled() {
  return to_kernel({8, DType::bf16, 64, 64, 32, 2, 32, 1, kPacked | kCausal | kScheduled}).spec;
}

KernelSpec sm80_contiguous() {
  return to_kernel({kContiguous, DType::bf16, 64, 64, 32, 2, 32, 1, kPacked | kCausal | kScheduled}).spec;
}

KernelSpec sm90_contiguous() {
  return to_kernel({kContiguous, DType::bf16, 64, 64, 64, 8, 32, 2, kPacked | kCausal, "", 2}).spec;
}

KernelSpec sm80_own_parts() {
  return to_kernel({8, DType::bf16, 64, 64, 32, 2, 32, 1, kPacked | kCausal | kOwnParts}).spec;
}

KernelSpec sm80_latent() {
  return to_kernel({3, DType::f16, 576, 512, 32, 4, 32, 2, kPacked | kCausal | kPackGqa | kFours | kInKey, "", 0, 3})
      .spec;
}

KernelSpec sm80_u4() {
  return to_kernel({8, DType::bf16, 64, 64, 32, 2, 32, 1, kPacked | kCausal, "", 0, 32, 32}).spec;
}

KernelSpec sm80_u4_in_place() {
  return to_kernel(
             {16, DType::bf16, 64, 64, 16, 4, 64, 2, kCausal | kPackGqa | kScheduled | kSplitWarps, "", 0, 32, 32})
      .spec;
}

KernelSpec sm80_own_keys() {
  return to_kernel(
             {12, DType::bf16, 64, 64, 16, 4, 64, 2, kPackGqa | kScheduled | kSplitWarps | kConverts, "", 0, 1, 1})
      .spec;
}

KernelSpec sm80_half_tile() {
  return to_kernel({8, DType::bf16, 64, 64, 8, 4, 128, 2, kPackGqa | kScheduled | kSplitWarps | kConverts, "", 0, 1, 1})
      .spec;
}

KernelSpec sm80_half_tile_contiguous() {
  return to_kernel({kContiguous, DType::bf16, 64, 128, 8, 4, 64, 2, kCausal | kPackGqa | kScheduled | kSplitWarps, "",
                    0, 1, 128})
      .spec;
}

KernelSpec sm80_u4_half_tile() {
  return to_kernel({16, DType::bf16, 64, 64, 8, 4, 128, 3, kPackGqa | kScheduled | kQInRegisters | kSplitWarps, "", 0,
                    32, 32})
      .spec;
}

KernelSpec sm80_scheduled_early() {
  KernelSpec spec = sm80_scheduled();
  spec.arch = {9, 0, 'a'};
  return spec;
}

std::vector<KernelSpec> all_paged_specs() {
  std::vector<KernelSpec> specs{sm80_paged(), sm90_paged(), sm90_paged_dynamic(), sm90_wide_boxes()};
  for (const PagedKernel& kernel : paged_kernels()) specs.push_back(kernel.spec);
  specs.push_back(sm80_scheduled());
  specs.push_back(sm80_own_parts());
  specs.push_back(sm80_contiguous());
  specs.push_back(sm90_contiguous());
  specs.push_back(sm80_u4());
  specs.push_back(sm80_u4_in_place());
  specs.push_back(sm80_own_keys());
  specs.push_back(sm80_half_tile());
  specs.push_back(sm90_wide_scheduled());
  specs.push_back(sm90_wide_multicast());
  specs.push_back(sm90_scheduled());
  specs.push_back(sm90_own_parts());
  specs.push_back(sm90_splits_request());
  specs.push_back(sm80_scheduled_early());
  std::set<std::string> seen;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].split && seen.insert(canonical(combine_spec(specs[i]))).second)
      specs.push_back(combine_spec(specs[i]));
    if (!specs[i].scheduled()) continue;
    const KernelSpec schedule = fa::plan::schedule_spec(specs[i]);
    if (seen.insert(canonical(schedule)).second) specs.push_back(schedule);
  }
  return specs;
}

fa::plan::Problem problem_of(const KernelSpec& spec, const fa::test::PagedCase& c, const fa::test::PagedData& data,
                             const fa::test::VariantCase& variant) {
  fa::AttentionShape shape{.b = c.b(),
                           .h_q = c.attention.h_q,
                           .h_kv = c.attention.h_kv,
                           .s_q = data.q.view().shape[2],
                           .s_kv = data.max_pages * data.page_rows,
                           .aligned = spec.aligned,
                           .bounded = spec.bounded};
  if (c.packed) {
    shape.total_q = shape.s_q;
    if (data.max_s_q != 0) shape.s_q = data.max_s_q;
  }
  if (data.max_s_kv != 0) shape.s_kv = std::min(shape.s_kv, data.max_s_kv);
  return fa::api::make_problem(variant.config, shape, spec.arch, &variant.functions.variants);
}

}  // namespace emulator
