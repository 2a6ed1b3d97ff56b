#ifndef FA_TESTS_UNIT_API_HOSTILE_TENSORS_HPP_
#define FA_TESTS_UNIT_API_HOSTILE_TENSORS_HPP_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include <fa/tensor.hpp>

namespace fa::test {

/// What one call names, each with memory of its own: tensors, arrays of numbers, and memory that is not a tensor. Every
/// field of each is spoilt in turn, and each that is written is moved onto every other.
class HostileTensors : public testing::Test {
 protected:
  using Call = std::function<void()>;

  struct Slot {
    std::string name;
    TensorView* view = nullptr;
    bool written = false;
  };
  struct Array {
    template <class T>
    Array(std::string label, const T** of, std::size_t count)
        : name(std::move(label)),
          data(reinterpret_cast<const std::byte*>(*of)),
          bytes(count * sizeof(T)),
          set([of](const void* to) { *of = static_cast<const T*>(to); }) {}

    std::string name;
    const std::byte* data;
    std::size_t bytes;
    std::function<void(const void*)> set;
  };
  struct Memory {
    std::string name;
    void** data = nullptr;
    std::size_t* size = nullptr;
  };
  struct Named {
    std::vector<Slot> tensors;
    std::vector<Array> arrays = {};
    std::vector<Memory> memory = {};
  };

  static constexpr std::size_t kBytes =
      8192;  ///< of each: half of it in front of its first element, and a quarter for it

  std::byte* bytes();

  /// Of ones; of 8 bits and less, and of i32, of zeros.
  TensorView tensor(DType dtype, std::initializer_list<std::int64_t> shape);
  TensorView tensor(std::initializer_list<std::int64_t> shape) { return tensor(DType::f32, shape); }
  template <class T>
  const T* array(std::initializer_list<T> values) {
    return static_cast<const T*>(std::memcpy(bytes(), values.begin(), values.size() * sizeof(T)));
  }

  /// Each wrong field of each tensor and array is refused by its name.
  static void check_fields(const Named& named, const Call& call);

  /// What is written, or is given as memory, shares no byte with anything else, and may touch it.
  static void check_apart(const Named& named, const Call& call);

 private:
  std::deque<std::vector<double>> memory_;
};

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_API_HOSTILE_TENSORS_HPP_
