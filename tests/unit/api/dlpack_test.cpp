#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include <fa/dlpack.hpp>

namespace {

// The layout that DLPack 1.x documents, declared by hand: fa's header must work without DLPack's.
enum DLDeviceType : std::int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLVulkan = 7, kDLCUDAManaged = 13 };
enum DLDataTypeCode : std::uint8_t { kDLInt = 0, kDLFloat = 2, kDLBfloat = 4 };

struct DLDevice {
  DLDeviceType device_type;
  std::int32_t device_id;
};

struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

struct DLPackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor dl_tensor;
};

class DlpackTest : public testing::Test {
 protected:
  DLTensor tensor(DLDataType dtype) { return {memory_.data(), {kDLCPU, 0}, 4, dtype, shape_.data(), nullptr, 0}; }

  std::array<std::int64_t, 5> shape_{2, 3, 4, 8, 1};
  std::array<std::int64_t, 4> strides_{96, 8, 24, 1};
  std::vector<std::byte> memory_ = std::vector<std::byte>(4096);
};

template <typename Call>
void expect_error(fa::ErrorCode code, const char* argument, Call&& call) {
  try {
    call();
    FAIL() << "nothing was thrown";
  } catch (const fa::Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_EQ(error.field("argument"), argument) << error.what();
  }
}

TEST_F(DlpackTest, NullStridesAreRowMajor) {
  const fa::TensorView view = fa::from_dlpack(tensor({kDLBfloat, 16, 1}));
  EXPECT_EQ(view.dtype, fa::DType::bf16);
  EXPECT_EQ(view.rank, 4);
  EXPECT_EQ(view.shape, (std::array<std::int64_t, 4>{2, 3, 4, 8}));
  EXPECT_EQ(view.strides, (std::array<std::int64_t, 4>{96, 32, 8, 1}));
  EXPECT_EQ(view.data, memory_.data());
  EXPECT_FALSE(view.read_only);
}

TEST_F(DlpackTest, StridesAndByteOffsetAreHonoured) {
  DLTensor source = tensor({kDLFloat, 32, 1});
  source.strides = strides_.data();
  source.byte_offset = 64;
  const fa::TensorView view = fa::from_dlpack(source);
  EXPECT_EQ(view.strides, strides_);
  EXPECT_EQ(view.data, memory_.data() + 64);
}

TEST_F(DlpackTest, EveryFloatingTypeMaps) {
  EXPECT_EQ(fa::from_dlpack(tensor({kDLFloat, 16, 1})).dtype, fa::DType::f16);
  EXPECT_EQ(fa::from_dlpack(tensor({kDLFloat, 32, 1})).dtype, fa::DType::f32);
  EXPECT_EQ(fa::from_dlpack(tensor({kDLFloat, 64, 1})).dtype, fa::DType::f64);
}

TEST_F(DlpackTest, OtherElementTypesAreRefused) {
  for (const DLDataType dtype : {DLDataType{kDLInt, 64, 1}, DLDataType{kDLFloat, 8, 1}, DLDataType{kDLFloat, 16, 2},
                                 DLDataType{kDLBfloat, 32, 1}}) {
    expect_error(fa::ErrorCode::invalid_argument, "dtype", [&] { fa::from_dlpack(tensor(dtype)); });
  }
}

TEST_F(DlpackTest, BadRanksAndShapesAreRefused) {
  DLTensor source = tensor({kDLFloat, 16, 1});
  source.ndim = 5;
  expect_error(fa::ErrorCode::invalid_argument, "ndim", [&] { fa::from_dlpack(source); });
  source.ndim = 0;
  expect_error(fa::ErrorCode::invalid_argument, "ndim", [&] { fa::from_dlpack(source); });
  source.ndim = 4;
  shape_[1] = -1;
  expect_error(fa::ErrorCode::invalid_argument, "shape[1]", [&] { fa::from_dlpack(source); });
}

TEST_F(DlpackTest, EmptyTensorsKeepTheirNullPointer) {
  DLTensor source = tensor({kDLFloat, 16, 1});
  source.data = nullptr;
  shape_[2] = 0;
  EXPECT_EQ(fa::from_dlpack(source).data, nullptr);
}

TEST_F(DlpackTest, ManagedTensors) {
  const DLManagedTensor managed{tensor({kDLFloat, 16, 1}), nullptr, nullptr};
  EXPECT_EQ(fa::from_dlpack(managed).data, memory_.data());
  DLManagedTensorVersioned versioned{{1, 1}, nullptr, nullptr, 1, tensor({kDLFloat, 16, 1})};
  EXPECT_TRUE(fa::from_dlpack(versioned).read_only);
  versioned.version.major = 2;
  expect_error(fa::ErrorCode::unsupported, "version.major", [&] { fa::from_dlpack(versioned); });
}

TEST_F(DlpackTest, Devices) {
  DLTensor source = tensor({kDLFloat, 16, 1});
  EXPECT_EQ(fa::device_of(source), fa::Device::host());
  source.device = {kDLCUDAHost, 0};
  EXPECT_EQ(fa::device_of(source), fa::Device::host());
  source.device = {kDLCUDA, 3};
  EXPECT_EQ(fa::device_of(source), fa::Device::cuda(3));
  source.device = {kDLCUDAManaged, 1};
  EXPECT_EQ(fa::device_of(DLManagedTensor{source, nullptr, nullptr}), fa::Device::cuda(1));
  source.device = {kDLVulkan, 0};
  expect_error(fa::ErrorCode::unsupported, "device_type", [&] { (void)fa::device_of(source); });
}

}  // namespace
