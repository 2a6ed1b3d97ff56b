#include "parallel/shared_places.hpp"

#include <algorithm>
#include <utility>
#include <variant>

#include "parallel/errors.hpp"

namespace fa::parallel {
namespace {

constexpr std::int64_t kAlignment = 256;

/// A region begins behind the heads in front of it.
std::int64_t place_of(const Plan& plan, const SharedLayout& layout, const Region& region, ElementSizes sizes) {
  const auto index = static_cast<std::size_t>(region.tensor);
  const PlanTensor& tensor = plan.tensors[index];
  return layout.offsets[index] + region.head * tensor.b * tensor.rows * tensor.columns * sizes.of(tensor.element);
}

/// Calls visit(transfer) for each one of a plan, in order.
template <class Visit>
void for_each_transfer(const Plan& plan, const Visit& visit) {
  for (const Op& op : plan.ops) {
    const auto* const exchange = std::get_if<Exchange>(&op);
    if (exchange == nullptr) continue;
    for (const PlanTransfer& transfer : exchange->transfers) visit(transfer);
  }
}

}  // namespace

SharedLayout shared_layout(const Plan& plan, ElementSizes sizes) {
  SharedLayout layout;
  layout.offsets.assign(plan.tensors.size(), SharedLayout::kNowhere);
  for (const bool sent : {false, true}) {
    for_each_transfer(plan, [&](const PlanTransfer& transfer) {
      const auto index = static_cast<std::size_t>(transfer.region.tensor);
      if (transfer.sends != sent || index < kGivenCount || layout.offsets[index] != SharedLayout::kNowhere) return;
      const PlanTensor& tensor = plan.tensors[index];
      layout.offsets[index] = layout.bytes;
      layout.bytes += (tensor.elements() * sizes.of(tensor.element) + kAlignment - 1) / kAlignment * kAlignment;
    });
  }
  return layout;
}

SharedPlaces shared_places(const Plan& own, const std::vector<Plan>& plans, int rank, ElementSizes sizes) {
  std::vector<SharedLayout> layouts;
  SharedPlaces places;
  for (const Plan& plan : plans) {
    layouts.push_back(shared_layout(plan, sizes));
    places.bytes = std::max(places.bytes, layouts.back().bytes);
  }
  std::vector<std::vector<std::int64_t>> received(plans.size());  // by peer: where it takes what this rank sends
  for (std::size_t peer = 0; peer < plans.size(); ++peer) {
    for_each_transfer(plans[peer], [&](const PlanTransfer& transfer) {
      if (transfer.sends || transfer.peer != rank) return;
      received[peer].push_back(place_of(plans[peer], layouts[peer], transfer.region, sizes));
    });
  }
  std::vector<std::size_t> next(plans.size(), 0);
  for_each_transfer(own, [&](const PlanTransfer& transfer) {
    if (!transfer.sends) return;
    const auto peer = static_cast<std::size_t>(transfer.peer);
    if (next[peer] >= received[peer].size()) throw_internal("a tensor is sent that nobody receives");
    places.sends.push_back(received[peer][next[peer]++]);
  });
  places.own = shared_layout(own, sizes);
  return places;
}

}  // namespace fa::parallel
