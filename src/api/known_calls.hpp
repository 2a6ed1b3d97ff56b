#ifndef FA_SRC_API_KNOWN_CALLS_HPP_
#define FA_SRC_API_KNOWN_CALLS_HPP_

#include <array>
#include <cstddef>
#include <cstdint>

#include <fa/attention.hpp>

#include "api/call_memo.hpp"
#include "api/call_memory.hpp"
#include "api/device_operation.hpp"
#include "api/operations.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"

namespace fa::api {

/// A number for calls that differ by nothing but where their tensors lie. Others may have it too.
std::uint64_t code_of(const ForwardInputs& inputs, const ForwardOutputs& outputs) noexcept;
std::uint64_t code_of(const BackwardInputs& inputs, const BackwardOutputs& outputs) noexcept;

/// Whether two calls differ by nothing but where their tensors lie, at the same distance from multiples of 16 bytes,
/// and the numbers of dropout. What is refused of the one for its own sake is refused of the other.
bool are_alike(const ForwardInputs& known, const ForwardOutputs& to, const ForwardInputs& inputs,
               const ForwardOutputs& outputs) noexcept;
bool are_alike(const BackwardInputs& known, const BackwardOutputs& to, const BackwardInputs& inputs,
               const BackwardOutputs& outputs) noexcept;

/// Calls of one operation on a GPU that came lately, checked and planned. A call like one of them is held to what
/// addresses may break, and launched. Threads may share it.
template <class Op>
class KnownCalls {
 public:
  using Inputs = typename Op::Inputs;
  using Outputs = typename Op::Outputs;
  using Planned = typename DeviceOperation<Op>::Planned;

  /// Whether the calls of a configuration queue nothing but their plans, and look at nothing else.
  static bool fit(const AttentionConfig& config) noexcept;

  /// All of them outlive it.
  KnownCalls(const AttentionConfig& config, const Functions& functions, const driver::ContextRef& context,
             const DeviceOperation<Op>& operation)
      : config_(config), functions_(functions), context_(context), operation_(operation) {}

  /// Runs a call that is like one that is known; false: there is none. Throws what any call throws.
  bool run(std::uint64_t code, const Inputs& inputs, const Outputs& outputs, Stream stream, const Workspace& workspace);

  /// Whether `run` would.
  bool knows(const Inputs& inputs, const Outputs& outputs) noexcept;

  /// Keeps a call that was run, with what its checks and its plan have found, if it comes again and again.
  void keep(std::uint64_t code, const Inputs& inputs, const Outputs& outputs, const typename Op::Tensors& tensors,
            const GivenTiles& tiles, const Planned& planned) noexcept;

 private:
  struct Entry {
    Inputs inputs;  ///< as they were given
    Outputs outputs;
    typename Op::Tensors tensors;  ///< as they were checked
    std::array<expression::CapturedView, Captures::kMax> captures;
    std::array<std::uint8_t, Captures::kMax> given_as;  ///< of each capture, its place among those that are given
    std::uint64_t numbers;                              ///< GivenTiles::numbers
    CallSpans spans;
    Planned planned;
  };

  typename CallMemo<Entry>::Held find(std::uint64_t code, const Inputs& inputs, const Outputs& outputs) noexcept;
  void launch(const Entry& known, const Inputs& inputs, const typename Op::Tensors& tensors, Stream stream,
              const Workspace& workspace) const;

  const AttentionConfig& config_;
  const Functions& functions_;
  const driver::ContextRef& context_;
  const DeviceOperation<Op>& operation_;
  CallMemo<Entry> memo_;
};

/// Whether an Attention on a GPU has a call like this one at hand. For tests: no call is served in another way.
struct KnownCallsAccess {
  static bool knows(const Attention& attention, const ForwardInputs& inputs, const ForwardOutputs& outputs);
  static bool knows(const Attention& attention, const BackwardInputs& inputs, const BackwardOutputs& outputs);
};

extern template class KnownCalls<ForwardOperation>;
extern template class KnownCalls<BackwardOperation>;

}  // namespace fa::api

#endif  // FA_SRC_API_KNOWN_CALLS_HPP_
