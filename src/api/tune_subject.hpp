#ifndef FA_SRC_API_TUNE_SUBJECT_HPP_
#define FA_SRC_API_TUNE_SUBJECT_HPP_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "driver/driver.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"
#include "tune/tuner.hpp"

namespace fa::api {

/// The tensors of a call on scratch memory, as views of rank 4 (lse: 3); of a forward only q, k, v, o and lse.
struct TuneTensors {
  TensorView q, k, v, o, lse, dout, dq, dk, dv;
};

/// Candidates, and how to run them.
struct Contest {
  std::vector<plan::KernelSpec> specs;  ///< the default first
  /// Compiles and loads a candidate; called by several threads. Throws why it cannot run.
  std::function<void(std::size_t)> make;
  /// Queues a call of a candidate that was made.
  std::function<void(std::size_t, const TuneTensors&, Stream, Workspace)> launch;
  std::size_t workspace = 0;  ///< bytes that a launch needs
};

/// Runs candidates on memory and a stream of its own, all of which it gives back. A time is that of one call with an L2
/// cache full of something else.
class GpuSubject final : public tune::Subject {
 public:
  /// Waits for what is queued on `stream`, so that it is not measured too. Throws fa::Error: cuda, out_of_memory when
  /// the tensors would take more than half of the memory that is free.
  GpuSubject(const Contest& contest, const plan::Problem& problem, bool backward, const driver::ContextRef& context,
             Stream stream);
  ~GpuSubject() override;
  GpuSubject(const GpuSubject&) = delete;
  GpuSubject& operator=(const GpuSubject&) = delete;

  std::string prepare(std::size_t candidate) override;
  std::string check(std::size_t candidate) override;
  double time(std::size_t candidate) override;

 private:
  /// A tensor that candidates write, with what the default wrote at some places.
  struct Output {
    CUdeviceptr data = 0;
    std::size_t bytes = 0;
    DType dtype = DType::f32;
    double allowed = 0;  ///< error, relative to the greatest magnitude that the default wrote
    std::vector<float> expected = {};
  };
  CUdeviceptr allocate(std::size_t bytes);
  CUdeviceptr random_tensor(std::size_t elements);
  void add_output(const TensorView& view, std::size_t elements, double allowed);
  void fill(CUdeviceptr data, std::size_t bytes, const void* pattern, std::size_t pattern_bytes);
  std::vector<float> sample(const Output& output);
  double time_once(std::size_t candidate);
  void synchronize();
  void release() noexcept;

  const Contest& contest_;
  const plan::Problem problem_;
  driver::ContextScope scope_;
  driver::RelaxedCapture relaxed_;
  CUstream stream_ = nullptr;
  CUevent start_ = nullptr;
  CUevent end_ = nullptr;
  std::vector<CUdeviceptr> allocations_;
  TuneTensors tensors_;
  std::vector<Output> outputs_;
  Workspace workspace_;
  CUdeviceptr flush_ = 0;
  std::size_t flush_bytes_ = 0;
  std::vector<int> repeats_;  ///< runs that make one time, by candidate: more of short ones
};

}  // namespace fa::api

#endif  // FA_SRC_API_TUNE_SUBJECT_HPP_
