#ifndef FA_SRC_PARALLEL_PAUSE_HPP_
#define FA_SRC_PARALLEL_PAUSE_HPP_

#include <cuda.h>

namespace fa::parallel {

/// A kernel of one thread that waits. The GPU's front end goes on with other streams meanwhile, and what they have
/// queued gets multiprocessors before the kernel that follows the pause.
class Pause {
 public:
  Pause() = default;
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

  /// In the current context, outside of captures. A driver that cannot compile PTX has no pauses.
  void load();
  /// Some fifteen microseconds of `stream`, once it is loaded.
  void queue(CUstream stream) const;

 private:
  CUlibrary library_ = nullptr;
  CUfunction function_ = nullptr;
};

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_PAUSE_HPP_
