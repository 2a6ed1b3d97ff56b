#include "bench_graph.hpp"

#include <string>
#include <utility>
#include <vector>

#include "compile/compiler.hpp"
#include "plan/arch.hpp"
#include "render/source.hpp"

namespace fa::cli {
namespace {

constexpr unsigned kThreads = 256;
constexpr std::size_t kCopiedPieces = 4 * kThreads;  // of 16 bytes, by a block
constexpr std::size_t kReadPieces = 8 * kThreads;

const char* const kCopy = R"(
struct alignas(16) Piece { unsigned word[4]; };
struct Params { const Piece* source; Piece* target; long long pieces; };
extern "C" __global__ void __launch_bounds__(256) fa_copy(const __grid_constant__ Params params) {
  const long long first = blockIdx.x * 1024ll + threadIdx.x;
  Piece pieces[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) if (first + 256 * i < params.pieces) pieces[i] = params.source[first + 256 * i];
#pragma unroll
  for (int i = 0; i < 4; ++i) if (first + 256 * i < params.pieces) params.target[first + 256 * i] = pieces[i];
}
)";

// A block reads 2048 pieces of one region. The sum is written where it has one value of 2^32, so that no load is dead.
const char* const kRead = R"(
struct alignas(16) Piece { unsigned word[4]; };
struct Params { const Piece* data[4]; long long pieces[4]; unsigned* sum; };
extern "C" __global__ void __launch_bounds__(256) fa_read(const __grid_constant__ Params params) {
  long long block = blockIdx.x;
  unsigned sum = 0;
#pragma unroll
  for (int region = 0; region < 4; ++region) {
    const long long all = params.pieces[region], blocks = (all + 2047) / 2048;
    if (block >= 0 && block < blocks) {
      const long long first = block * 2048 + threadIdx.x;
      Piece pieces[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        pieces[i] = first + 256 * i < all ? params.data[region][first + 256 * i] : Piece{};
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum ^= pieces[i].word[0] ^ pieces[i].word[1] ^ pieces[i].word[2] ^ pieces[i].word[3];
      }
    }
    block -= blocks;
  }
  if (sum == 0x9e3779b9u) *params.sum = sum;
}
)";

driver::LoadedKernel compile_kernel(const Gpu& gpu, const char* name, const char* text) {
  render::Source source;
  source.kernel_name = name;
  source.target = plan::to_string(gpu.info().arch);
  source.unit = text;
  CUcontext context = nullptr;
  driver::check(driver::api().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  return {compile::compile(source, gpu.info().arch).bytes, name, 0, context};
}

}  // namespace

CallGraph::CallGraph(const Gpu& gpu, int calls, const std::function<void(int)>& call) : gpu_(gpu), calls_(calls) {
  const driver::Api& api = driver::api();
  driver::check(api.cuStreamBeginCapture(gpu.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
  for (int i = 0; i < calls; ++i) call(i);
  driver::check(api.cuStreamEndCapture(gpu.stream(), &graph_), "cuStreamEndCapture");
  driver::check(api.cuGraphInstantiateWithFlags(&executable_, graph_, 0), "cuGraphInstantiateWithFlags");
}

CallGraph::CallGraph(CallGraph&& other) noexcept
    : gpu_(other.gpu_),
      calls_(other.calls_),
      graph_(std::exchange(other.graph_, nullptr)),
      executable_(std::exchange(other.executable_, nullptr)) {}

CallGraph::~CallGraph() {
  if (executable_ != nullptr) driver::api().cuGraphExecDestroy(executable_);
  if (graph_ != nullptr) driver::api().cuGraphDestroy(graph_);
}

double CallGraph::time(int launches) const {
  Event start, end;
  start.record(gpu_.stream());
  for (int i = 0; i < launches; ++i) {
    driver::check(driver::api().cuGraphLaunch(executable_, gpu_.stream()), "cuGraphLaunch");
  }
  end.record(gpu_.stream());
  end.synchronize();
  return end.milliseconds_since(start) * 1000 / (calls_ * launches);
}

CopyKernel::CopyKernel(const Gpu& gpu) : kernel_(compile_kernel(gpu, "fa_copy", kCopy)) {}

void CopyKernel::launch(const void* source, void* target, std::size_t bytes, Stream stream) const {
  struct {
    const void* source;
    void* target;
    long long pieces;
  } params{source, target, static_cast<long long>(bytes / 16)};
  const auto grid = static_cast<unsigned>((bytes / 16 + kCopiedPieces - 1) / kCopiedPieces);
  driver::launch(kernel_.function(), grid, kThreads, 0, stream, &params);
}

ReadKernel::ReadKernel(const Gpu& gpu) : kernel_(compile_kernel(gpu, "fa_read", kRead)), sum_(sizeof(unsigned)) {}

void ReadKernel::launch(const std::array<Region, 4>& regions, Stream stream) const {
  struct {
    const void* data[4];
    long long pieces[4];
    void* sum;
  } params{{}, {}, sum_.data()};
  std::size_t blocks = 0;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const std::size_t pieces = regions[i].bytes / 16;
    params.data[i] = regions[i].data;
    params.pieces[i] = static_cast<long long>(pieces);
    blocks += (pieces + kReadPieces - 1) / kReadPieces;
  }
  driver::launch(kernel_.function(), static_cast<unsigned>(blocks), kThreads, 0, stream, &params);
}

}  // namespace fa::cli
