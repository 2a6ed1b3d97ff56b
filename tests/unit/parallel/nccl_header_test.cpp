// What fa_parallel declares of NCCL, against NCCL's own header where there is one.

#include <gtest/gtest.h>

#include "parallel/nccl_api.hpp"

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

namespace fa::parallel {
namespace {

static_assert(static_cast<int>(ncclSuccess) == Nccl::kSuccess);
static_assert(static_cast<int>(ncclInvalidArgument) == Nccl::kInvalidArgument);
static_assert(static_cast<int>(ncclRemoteError) == Nccl::kRemoteError);
static_assert(static_cast<int>(ncclInProgress) == Nccl::kInProgress);
static_assert(static_cast<int>(ncclInt8) == Nccl::kInt8);
static_assert(static_cast<int>(ncclInt32) == Nccl::kInt32);
static_assert(static_cast<int>(ncclHalf) == Nccl::kHalf);
static_assert(static_cast<int>(ncclFloat) == Nccl::kFloat);
static_assert(static_cast<int>(ncclDouble) == Nccl::kDouble);
static_assert(static_cast<int>(ncclBfloat16) == Nccl::kBfloat16);
static_assert(std::is_same_v<ncclComm_t, Nccl::Comm>);
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int));
static_assert(std::is_same_v<decltype(&ncclSend),
                             ncclResult_t (*)(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)>);
static_assert(std::is_same_v<decltype(&ncclRecv),
                             ncclResult_t (*)(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)>);
static_assert(std::is_same_v<decltype(&ncclCommGetAsyncError), ncclResult_t (*)(ncclComm_t, ncclResult_t*)>);
static_assert(std::is_same_v<decltype(&ncclCommAbort), ncclResult_t (*)(ncclComm_t)>);
static_assert(std::is_same_v<cudaStream_t, Stream>);
#if NCCL_VERSION_CODE >= 23007
static_assert(NCCL_WIN_COLL_SYMMETRIC == Nccl::kSymmetric && std::is_same_v<ncclWindow_t, Nccl::Window>);
static_assert(
    std::is_same_v<decltype(&ncclPutSignal), ncclResult_t (*)(const void*, size_t, ncclDataType_t, int, ncclWindow_t,
                                                              size_t, int, int, unsigned, ncclComm_t, cudaStream_t)>);
static_assert(
    std::is_same_v<decltype(&ncclCommWindowRegister), ncclResult_t (*)(ncclComm_t, void*, size_t, ncclWindow_t*, int)>);
#endif

TEST(NcclHeader, SaysWhatIsDeclared) {
  EXPECT_GE(NCCL_VERSION_CODE, 21800) << "an older header than the library takes";
}

}  // namespace
}  // namespace fa::parallel
#else
TEST(NcclHeader, SaysWhatIsDeclared) {
  GTEST_SKIP() << "no nccl.h";
}
#endif
