#ifndef FA_TOOLS_FA_BENCH_GRAPH_HPP_
#define FA_TOOLS_FA_BENCH_GRAPH_HPP_

#include <array>
#include <cstddef>
#include <functional>

#include <fa/device.hpp>

#include "driver/driver.hpp"
#include "gpu.hpp"

namespace fa::cli {

/// Calls in a graph: what the CPU does for a call is not timed.
class CallGraph {
 public:
  /// `call` queues call number i on the stream of `gpu`, which outlives the graph.
  CallGraph(const Gpu& gpu, int calls, const std::function<void(int)>& call);
  CallGraph(CallGraph&& other) noexcept;
  CallGraph& operator=(CallGraph&&) = delete;
  ~CallGraph();

  /// Microseconds of a call, over `launches` of the graph.
  double time(int launches = 1) const;

 private:
  const Gpu& gpu_;
  int calls_;
  CUgraph graph_ = nullptr;
  CUgraphExec executable_ = nullptr;
};

/// A kernel that copies: 64 bytes a thread, as append reads them.
class CopyKernel {
 public:
  explicit CopyKernel(const Gpu& gpu);
  void launch(const void* source, void* target, std::size_t bytes, Stream stream) const;

 private:
  driver::LoadedKernel kernel_;
};

/// A kernel that reads, 128 bytes a thread, and writes nothing: what no other kernel that reads as much can beat.
class ReadKernel {
 public:
  /// 16-byte aligned, in whole 16 bytes.
  struct Region {
    const void* data = nullptr;
    std::size_t bytes = 0;
  };
  explicit ReadKernel(const Gpu& gpu);
  void launch(const std::array<Region, 4>& regions, Stream stream) const;

 private:
  driver::LoadedKernel kernel_;
  DeviceBuffer sum_;
};

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_GRAPH_HPP_
