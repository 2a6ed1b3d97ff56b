#include "api/execute.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>

#include "api/scratch.hpp"
#include "driver/nvtx.hpp"
#include "plan/mask_tiles.hpp"

namespace fa::api {

void execute(plan::CallPlan& call, const plan::Problem& problem, const Ready& ready, const GivenTiles& tiles,
             Stream stream, const Workspace& workspace) {
  const driver::NvtxRange range(ready.info.spec.c_str());
  const plan::WorkspaceLayout& layout = call.workspace;
  const bool given = tiles.data != nullptr;
  check_tiles(tiles, layout.list_bytes());
  const std::uint64_t tag = given ? plan::mix_tag(plan::lists_tag(problem, ready.specs), tiles.numbers) : 0;
  expect_held(tiles, tag);
  const std::size_t needed = given ? layout.other_bytes() : layout.bytes();
  std::optional<Scratch> scratch;
  if (needed != 0) scratch.emplace(workspace, needed, stream);
  auto* const base = static_cast<std::byte*>(scratch ? scratch->data() : workspace.data);
  call.bind(layout.addresses(base, given ? static_cast<std::byte*>(tiles.data) : base + layout.other_bytes()));
  call.encode_maps(driver::encode_tensor_map);
  const bool fills = given && !tiles.filled;
  if (fills) set_held(tiles.data, 0);
  if (call.cleared != 0) {
    driver::check(driver::api().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(base), 0, call.cleared, stream),
                  "cuMemsetD8Async");
  }
  for (const plan::Step& step : call.steps()) {
    const ReadyKernel& kernel = ready.kernels[step.role];
    const unsigned shared = std::max(kernel.shared_bytes, static_cast<unsigned>(step.shared));
    driver::launch(kernel.loaded->function(), static_cast<unsigned>(step.grid), kernel.threads, shared, stream,
                   step.params, step.early ? driver::Start::early : driver::Start::in_order, step.place);
  }
  if (fills) set_held(tiles.data, tag);
  if (scratch) scratch->release();
}

}  // namespace fa::api
