#ifndef FA_SRC_API_HOST_ATTENTION_HPP_
#define FA_SRC_API_HOST_ATTENTION_HPP_

#include <fa/attention.hpp>

#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
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

 private:
  void run(const ForwardCall& call, const reference::ForwardArgs& args) const;
  template <class Call, class Args>
  void set_common(const Call& call, const VariantCall& variant, Args* args) const;

  const AttentionConfig& config_;
  const Functions& functions_;
  double scale_;
};

}  // namespace fa::api

#endif  // FA_SRC_API_HOST_ATTENTION_HPP_
