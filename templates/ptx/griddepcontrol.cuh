#ifndef FA_TEMPLATES_PTX_GRIDDEPCONTROL_CUH_
#define FA_TEMPLATES_PTX_GRIDDEPCONTROL_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

// PTX ISA, "griddepcontrol" (compute capability 9.0): a kernel that was launched early may start as soon as every block
// of the one before it in the stream has allowed it, or has ended. Both do nothing in a kernel that was launched in
// order.
namespace fa::ptx {

/// griddepcontrol.wait: until the kernel before this one is complete and what it wrote can be seen. Who launches early
/// relies on every block: a kernel whose blocks all wait is complete only after all kernels before it are.
FA_DEVICE void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Makes the compiler compute `x` before what follows, a wait above all, and not where it is used. Of a pointer: to
/// global memory.
FA_DEVICE void compute_ahead(int& x) {
  asm volatile("" : "+r"(x));
}
template <class T>
FA_DEVICE void compute_ahead(T*& x) {
  asm volatile("" : "+l"(x));
  __builtin_assume(__isGlobal(x));
}
FA_DEVICE void compute_ahead(int64_t& x) {
  asm volatile("" : "+l"(x));
}

/// griddepcontrol.launch_dependents: this block allows the next kernel to start; one thread is enough. Says nothing of
/// what has been written.
FA_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_GRIDDEPCONTROL_CUH_
