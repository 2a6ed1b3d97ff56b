#ifndef FA_SRC_API_HOST_ATTENTION_HPP_
#define FA_SRC_API_HOST_ATTENTION_HPP_

#include <fa/attention.hpp>

#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "reference/backward.hpp"
#include "reference/evaluator.hpp"
#include "reference/forward.hpp"

namespace fa::api {

/// Both operations of an Attention on the host device, by the reference.
class HostAttention {
 public:
  /// `config` and `functions` outlive it.
  HostAttention(const AttentionConfig& config, const Functions& functions, double scale)
      : config_(config), functions_(functions), scale_(scale) {}

  /// Throw fa::Error(invalid_argument) for lengths of a packed batch that do not fit.
  void forward(const ForwardCall& call, const VariantCall& variant) const;
  void backward(const BackwardCall& call, const VariantCall& variant) const;
  KernelInfo info(Operation operation) const;

  /// What these are calls of the reference with. `fetch` reads what is in memory of a GPU; nullptr: the host can.
  reference::ForwardArgs forward_args(const ForwardCall& call, const VariantCall& variant,
                                      const reference::Fetch* fetch = nullptr) const;
  reference::BackwardArgs backward_args(const BackwardCall& call, const VariantCall& variant,
                                        const reference::Fetch* fetch = nullptr) const;

 private:
  void run(const ForwardCall& call, const reference::ForwardArgs& args) const;
  template <class Call, class Args>
  void set_common(const Call& call, const VariantCall& variant, const reference::Fetch* fetch, Args* args) const;

  const AttentionConfig& config_;
  const Functions& functions_;
  double scale_;
};

}  // namespace fa::api

#endif  // FA_SRC_API_HOST_ATTENTION_HPP_
