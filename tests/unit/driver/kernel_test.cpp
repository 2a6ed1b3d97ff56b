#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <fa/error.hpp>
#include <string>
#include <thread>

#include "compile/compiler.hpp"
#include "driver/driver.hpp"

namespace fa::driver {
namespace {

TEST(Launch, StartsEarlyWhereGraphsKnowOfIt) {
  EXPECT_EQ(start_with(Start::early, 12000), Start::in_order);
  EXPECT_EQ(start_with(Start::early, 12020), Start::in_order);
  EXPECT_EQ(start_with(Start::early, 12030), Start::early);
  EXPECT_EQ(start_with(Start::early, 13000), Start::early);
  EXPECT_EQ(start_with(Start::in_order, 13000), Start::in_order);
}

TEST(Launch, AnEarlyOneHasOneAttribute) {
  int place = 0;
  const auto stream = reinterpret_cast<CUstream>(&place);
  const EarlyLaunch early(264, 384, 200 * 1024, stream);
  const CUlaunchConfig& config = early.get();
  EXPECT_EQ(config.gridDimX, 264U);
  EXPECT_EQ(config.gridDimY, 1U);
  EXPECT_EQ(config.gridDimZ, 1U);
  EXPECT_EQ(config.blockDimX, 384U);
  EXPECT_EQ(config.blockDimY, 1U);
  EXPECT_EQ(config.blockDimZ, 1U);
  EXPECT_EQ(config.sharedMemBytes, 200U * 1024);
  EXPECT_EQ(config.hStream, stream);
  ASSERT_EQ(config.numAttrs, 1U);
  EXPECT_EQ(config.attrs->id, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
  EXPECT_EQ(config.attrs->value.programmaticStreamSerializationAllowed, 1);
}

struct Params {
  CUdeviceptr values;
  int factor;
};

/// values[i] = i * factor by way of dynamic shared memory.
const render::Source kSource{"fa_scale",
                             R"(
struct Params { int* values; int factor; };
extern __shared__ int scratch[];
extern "C" __global__ void fa_scale(const __grid_constant__ Params params) {
  __shared__ int fixed[64];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  fixed[threadIdx.x % 64] = params.factor;
  scratch[threadIdx.x] = i;
  __syncthreads();
  params.values[i] = scratch[threadIdx.x] * fixed[threadIdx.x % 64];
}
)",
                             {}};

constexpr unsigned kGrid = 4;
constexpr unsigned kThreads = 64;
constexpr int kShared = 64 * 1024;  // above what a kernel gets without opting in
constexpr std::size_t kCount = kGrid * kThreads;

/// Skips where there is no GPU or no NVRTC; otherwise offers a stream and a kernel on device 0.
class KernelTest : public testing::Test {
 protected:
  void SetUp() override {
    try {
      api();
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
    if (const auto info = compile::compiler_info(); !info.available) GTEST_SKIP() << info.problem;
    context_ = std::make_unique<ContextRef>(ContextRef::acquire(Device::cuda(0)));
    cubin_ = compile::compile(kSource, context_->info().arch);
    kernel_ = load();
    const ContextScope scope(context_->context());
    check(api().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    check(api().cuMemAlloc(&values_, kCount * sizeof(int)), "cuMemAlloc");
  }

  void TearDown() override {
    if (!context_) return;
    const ContextScope scope(context_->context());
    if (values_ != 0) api().cuMemFree(values_);
    if (stream_ != nullptr) api().cuStreamDestroy(stream_);
  }

  std::unique_ptr<LoadedKernel> load() const {
    return std::make_unique<LoadedKernel>(cubin_.bytes, kSource.kernel_name, kShared, context_->context());
  }

  void launch_scale(CUstream stream, int factor) const {
    Params params{values_, factor};
    launch(kernel_->function(), kGrid, kThreads, kShared, stream, &params);
  }

  void launch_early(CUstream stream, int factor) const {
    Params params{values_, factor};
    launch(kernel_->function(), kGrid, kThreads, kShared, stream, &params, Start::early);
  }

  void expect_scaled_by(int factor) const {
    const ContextScope scope(context_->context());
    check(api().cuCtxSynchronize(), "cuCtxSynchronize");
    std::array<int, kCount> result{};
    check(api().cuMemcpyDtoH(result.data(), values_, sizeof(result)), "cuMemcpyDtoH");
    for (std::size_t i = 0; i < kCount; ++i) ASSERT_EQ(result[i], static_cast<int>(i) * factor);
  }

  std::unique_ptr<ContextRef> context_;
  compile::Cubin cubin_;
  std::unique_ptr<LoadedKernel> kernel_;
  CUstream stream_ = nullptr;
  CUdeviceptr values_ = 0;
};

TEST_F(KernelTest, FactsAgreeWithTheCompilers) {
  EXPECT_EQ(kernel_->registers(), cubin_.facts.registers);
  EXPECT_EQ(kernel_->local_bytes(), cubin_.facts.local_bytes);
  EXPECT_EQ(kernel_->static_shared(), cubin_.facts.static_shared);
}

TEST_F(KernelTest, LeavesTheCurrentContextAlone) {
  check(api().cuCtxSetCurrent(nullptr), "cuCtxSetCurrent");
  load();
  EXPECT_EQ(current_context(), nullptr);
  EXPECT_EQ(ContextRef::acquire(Device::current()).info().ordinal, 0);
  EXPECT_EQ(current_context(), nullptr);
}

TEST_F(KernelTest, AStreamNeedsNoCurrentContext) {
  check(api().cuCtxSetCurrent(nullptr), "cuCtxSetCurrent");
  launch_scale(stream_, 3);
  expect_scaled_by(3);
}

TEST_F(KernelTest, TheDefaultStreamNeedsAScope) {
  const ContextScope scope(context_->context());
  launch_scale(nullptr, 4);
  expect_scaled_by(4);
}

TEST_F(KernelTest, ReplaysFromAGraph) {
  const ContextScope scope(context_->context());
  EXPECT_FALSE(is_capturing(stream_));
  check(api().cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  EXPECT_TRUE(is_capturing(stream_));
  launch_scale(stream_, 5);
  const CUdeviceptr scratch = allocate(1024, stream_);
  driver::free(scratch, stream_);
  CUgraph graph = nullptr;
  check(api().cuStreamEndCapture(stream_, &graph), "cuStreamEndCapture");
  CUgraphExec executable = nullptr;
  check(api().cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiateWithFlags");
  check(api().cuGraphLaunch(executable, stream_), "cuGraphLaunch");
  expect_scaled_by(5);
  api().cuGraphExecDestroy(executable);
  api().cuGraphDestroy(graph);
}

/// A kernel that never allows it starts its successor at its end.
TEST_F(KernelTest, EarlyLaunchesRunAndReplay) {
  const ContextScope scope(context_->context());
  launch_scale(stream_, 2);
  launch_early(stream_, 7);
  expect_scaled_by(7);
  check(api().cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  launch_scale(stream_, 3);
  launch_early(stream_, 8);
  CUgraph graph = nullptr;
  check(api().cuStreamEndCapture(stream_, &graph), "cuStreamEndCapture");
  CUgraphExec executable = nullptr;
  check(api().cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiateWithFlags");
  check(api().cuGraphLaunch(executable, stream_), "cuGraphLaunch");
  expect_scaled_by(8);
  api().cuGraphExecDestroy(executable);
  api().cuGraphDestroy(graph);
}

TEST_F(KernelTest, LoadingElsewhereDoesNotBreakACapture) {
  const ContextScope scope(context_->context());
  check(api().cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  std::string problem;
  std::thread([&] {
    try {
      load();  // and unload
    } catch (const Error& error) {
      problem = error.what();
    }
  }).join();
  EXPECT_NO_THROW(load()) << "on the capturing thread";
  launch_scale(stream_, 6);
  CUgraph graph = nullptr;
  EXPECT_EQ(api().cuStreamEndCapture(stream_, &graph), CUDA_SUCCESS);
  EXPECT_EQ(problem, "");
  if (graph != nullptr) api().cuGraphDestroy(graph);
}

TEST_F(KernelTest, DamagedBytesAreAnError) {
  std::vector<std::byte> damaged(cubin_.bytes.begin(), cubin_.bytes.begin() + 64);
  damaged.resize(cubin_.bytes.size());
  EXPECT_THROW(LoadedKernel(damaged, kSource.kernel_name, 0, context_->context()), Error);
  EXPECT_THROW(LoadedKernel(cubin_.bytes, "fa_absent", 0, context_->context()), Error);
}

TEST_F(KernelTest, TooMuchSharedMemoryIsAnError) {
  EXPECT_THROW(LoadedKernel(cubin_.bytes, kSource.kernel_name, 1 << 20, context_->context()), Error);
}

TEST_F(KernelTest, ADeviceThatIsNotThereIsNamed) {
  try {
    ContextRef::acquire(Device::cuda(4096));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.field("value"), "4096");
  }
}

TEST_F(KernelTest, AllocatesInStreamOrder) {
  const ContextScope scope(context_->context());
  EXPECT_EQ(allocate(0, stream_), 0U);
  const CUdeviceptr memory = allocate(1 << 20, stream_);
  EXPECT_NE(memory, 0U);
  check(api().cuMemsetD8Async(memory, 1, 1 << 20, stream_), "cuMemsetD8Async");
  driver::free(memory, stream_);
  check(api().cuStreamSynchronize(stream_), "cuStreamSynchronize");
  try {
    allocate(std::size_t{1} << 46, stream_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
  }
}

TEST_F(KernelTest, DevicesAreListed) {
  const auto devices = list_devices();
  ASSERT_FALSE(devices.empty());
  EXPECT_EQ(devices[0].name, context_->info().name);
  EXPECT_GT(devices[0].multiprocessors, 0);
  EXPECT_GT(devices[0].memory, std::size_t{1} << 30);
  EXPECT_EQ(devices[0].arch.suffix, devices[0].arch.major >= 9 ? 'a' : '\0');
}

}  // namespace
}  // namespace fa::driver
