#ifndef FA_TESTS_GPU_CAPTURED_GRAPH_HPP_
#define FA_TESTS_GPU_CAPTURED_GRAPH_HPP_

#include "driver/driver.hpp"

namespace fa::test {

/// What a function queues in a stream, captured into a graph.
class CapturedGraph {
 public:
  template <class Queue>
  CapturedGraph(CUstream stream, const Queue& queue) {
    driver::check(driver::api().cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
    queue();
    driver::check(driver::api().cuStreamEndCapture(stream, &graph_), "cuStreamEndCapture");
    driver::check(driver::api().cuGraphInstantiateWithFlags(&executable_, graph_, 0), "cuGraphInstantiateWithFlags");
  }
  ~CapturedGraph() {
    driver::api().cuGraphExecDestroy(executable_);
    driver::api().cuGraphDestroy(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  void replay(CUstream stream) const {
    driver::check(driver::api().cuGraphLaunch(executable_, stream), "cuGraphLaunch");
  }

 private:
  CUgraph graph_ = nullptr;
  CUgraphExec executable_ = nullptr;
};

}  // namespace fa::test

#endif  // FA_TESTS_GPU_CAPTURED_GRAPH_HPP_
