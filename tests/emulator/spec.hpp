#ifndef FA_TESTS_EMULATOR_SPEC_HPP_
#define FA_TESTS_EMULATOR_SPEC_HPP_

#include <string>

#include "plan/kernel_spec.hpp"
#include "render/source.hpp"

namespace emulator {

/// A kernel of either family. Those of sm90 have `q_buffers`.
struct Spec : fa::plan::KernelSpec {
  int q_buffers = 0;        ///< query tiles in flight
  int softmax_chunks = 1;   ///< pieces of a KV tile that the softmax works on one after the other
  bool take_turns = false;  ///< the warpgroups feed the tensor cores one after the other

  Spec() = default;
  Spec(const fa::plan::KernelSpec& spec) : KernelSpec(spec) {}  // NOLINT: a Spec with nothing of its own

  bool sm90() const { return q_buffers > 0; }
  friend bool operator==(const Spec&, const Spec&) = default;
};

std::string canonical(const Spec& spec);
fa::render::Source render(const Spec& spec);
int shared_bytes(const Spec& spec);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_SPEC_HPP_
