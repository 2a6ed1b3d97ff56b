#include "hostile_tensors.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include <fa/error.hpp>

#include "expect_error.hpp"

namespace fa::test {
namespace {

constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

std::size_t bytes_of(const TensorView& view) {
  return static_cast<std::size_t>(view.elements()) * size_of(view.dtype);
}

/// Whose message names both, in any order.
void expect_both_named(const std::string& a, const std::string& b, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << a << " over " << b;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    for (const std::string& name : {a, b}) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << name << ": " << error.what();
    }
  }
}

/// Where something of a call lies.
struct Place {
  std::string name;
  std::byte* data;
  std::size_t bytes;
};

std::byte* aligned_down(std::byte* data, std::size_t to) {
  return data - reinterpret_cast<std::uintptr_t>(data) % to;
}

}  // namespace

std::byte* HostileTensors::bytes() {
  return reinterpret_cast<std::byte*>(memory_.emplace_back(kBytes / sizeof(double), 0).data()) + kBytes / 2;
}

TensorView HostileTensors::tensor(DType dtype, std::initializer_list<std::int64_t> shape) {
  const TensorView view(static_cast<void*>(bytes()), dtype, shape);
  const auto count = static_cast<std::size_t>(view.elements());
  EXPECT_LE(bytes_of(view), kBytes / 4);
  if (dtype == DType::f32) std::fill_n(static_cast<float*>(view.data), count, 1.0F);
  if (dtype == DType::f16) std::fill_n(static_cast<std::uint16_t*>(view.data), count, std::uint16_t{0x3C00});
  return view;
}

void HostileTensors::check_fields(const Named& named, const Call& call) {
  for (const Slot& slot : named.tensors) {
    const TensorView good = *slot.view;
    const auto refused = [&](const std::function<void(TensorView&)>& spoil) {
      spoil(*slot.view);
      expect_invalid(slot.name, call);
      *slot.view = good;
    };
    const auto element = static_cast<std::int64_t>(size_of(good.dtype));
    const std::int64_t far = ((std::int64_t{1} << 60) + 1) / element;  // the last byte is farther than 2^60
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(good.rank); ++axis) {
      for (const std::int64_t stride :
           {kMin, kMin + 1, -(std::int64_t{1} << 62), -far, far, std::int64_t{1} << 61, std::int64_t{1} << 62, kMax}) {
        if (good.shape[axis] > 1) refused([&](TensorView& view) { view.strides[axis] = stride; });
      }
      for (const std::int64_t size : {kMin, std::int64_t{-1}, std::int64_t{1} << 61, kMax}) {
        refused([&](TensorView& view) { view.shape[axis] = size; });
      }
    }
    for (const int rank : {std::numeric_limits<int>::min(), -1, 5, 1'000'000}) {
      refused([&](TensorView& view) { view.rank = rank; });
    }
    refused([](TensorView& view) { view.dtype = static_cast<DType>(99); });
    refused([](TensorView& view) { view.data = nullptr; });
    if (element > 1) refused([](TensorView& view) { view.data = static_cast<std::byte*>(view.data) + 1; });
    if (slot.written) refused([](TensorView& view) { view.read_only = true; });
    if (slot.written) refused([](TensorView& view) { view.strides[0] = 0; });
  }
  for (const Array& array : named.arrays) {
    array.set(array.data + 1);
    expect_invalid(array.name, call);
    array.set(array.data);
  }
}

void HostileTensors::check_apart(const Named& named, const Call& call) {
  std::vector<Place> all;
  for (const Slot& slot : named.tensors) {
    all.push_back({slot.name, static_cast<std::byte*>(slot.view->data), bytes_of(*slot.view)});
  }
  for (const Array& array : named.arrays) {
    all.push_back({array.name, const_cast<std::byte*>(array.data), array.bytes});
  }
  for (const Memory& memory : named.memory) {
    all.push_back({memory.name, static_cast<std::byte*>(*memory.data), *memory.size});
  }
  for (const Slot& written : named.tensors) {
    for (const Place& other : all) {
      if (!written.written || other.name == written.name) continue;
      const TensorView good = *written.view;
      const std::size_t element = size_of(good.dtype);
      // The first element of one is the last of the other.
      written.view->data = aligned_down(other.data + other.bytes - 1, element);
      expect_both_named(written.name, other.name, call);
      written.view->data = aligned_down(other.data + other.bytes + element - 1, element);
      EXPECT_NO_THROW(call()) << written.name << " behind " << other.name;
      *written.view = good;
    }
  }
  for (const Memory& memory : named.memory) {
    for (const Place& other : all) {
      if (other.name == memory.name) continue;
      const auto [data, size] = std::pair(*memory.data, *memory.size);
      *memory.data = other.data - size + 1;
      expect_both_named(memory.name, other.name, call);
      *memory.data = other.data + other.bytes - 1;
      expect_both_named(memory.name, other.name, call);
      *memory.data = other.data - size;
      EXPECT_NO_THROW(call()) << memory.name << " in front of " << other.name;
      *memory.data = other.data + other.bytes;
      EXPECT_NO_THROW(call()) << memory.name << " behind " << other.name;
      *memory.data = data;
    }
    const auto [data, size] = std::pair(*memory.data, *memory.size);
    *memory.data = all.front().data;
    *memory.size = std::numeric_limits<std::size_t>::max();
    expect_both_named(memory.name, all.front().name, call);
    *memory.data = data;
    *memory.size = size;
  }
}

}  // namespace fa::test
