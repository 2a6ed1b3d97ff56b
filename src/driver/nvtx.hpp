#ifndef FA_SRC_DRIVER_NVTX_HPP_
#define FA_SRC_DRIVER_NVTX_HPP_

namespace fa::driver {

/// A range of NVTX's domain "fa", from here to the end of its life in this thread: what profilers show above the
/// kernels that are queued meanwhile. Costs a look at a pointer where no profiler is attached.
class NvtxRange {
 public:
  /// `name` is read during the call.
  explicit NvtxRange(const char* name) noexcept;
  ~NvtxRange();
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace fa::driver

#endif  // FA_SRC_DRIVER_NVTX_HPP_
