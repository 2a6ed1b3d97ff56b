#include <sstream>

#include "parallel/plan.hpp"

namespace fa::parallel {
namespace {

/// One line an operation.
class Describer {
 public:
  explicit Describer(const Plan& plan) : plan_(plan) {}

  std::string text() {
    for (const Op& op : plan_.ops) std::visit([this](const auto& which) { this->say(which); }, op);
    return std::move(out_).str();
  }

 private:
  std::string name(const Region& region) const {
    std::ostringstream text;
    const auto index = static_cast<std::size_t>(region.tensor);
    text << plan_.tensors[index].name;
    if (index >= kGivenCount) text << " #" << index;
    text << "[h " << region.head << "+" << region.heads << ", rows " << region.row << "+" << region.rows;
    if (region.row_step != 1) text << " by " << region.row_step;
    text << "]";
    return std::move(text).str();
  }

  void say_call(const char* what, const Call& call) {
    static constexpr const char* kMasks[] = {"no mask", "causal", "placed"};
    out_ << what << " " << name(call.q) << " over " << name(call.k) << ": " << kMasks[static_cast<int>(call.mask)];
    if (call.packed) out_ << ", " << call.blocks.size() << " sequences";
    if (call.mask == BlockMask::placed) {
      const Block& block = call.blocks.front();
      out_ << " at q " << block.q << " by " << block.q_step << ", kv " << block.kv << " by " << block.kv_step;
    }
    out_ << "\n";
  }

  void say(const Copy& op) { out_ << "copy " << name(op.from) << " to " << name(op.to) << "\n"; }
  void say(const Clear& op) { out_ << "clear " << name(op.to) << "\n"; }
  void say(const Sum& op) {
    out_ << "sum";
    for (const Region& from : op.from) out_ << " " << name(from);
    out_ << " to " << name(op.to) << "\n";
  }
  void say(const AddSink& op) { out_ << "add sinks to " << name(op.o) << "\n"; }
  void say(const Exchange& op) {
    out_ << "exchange " << op.number;
    if (op.lanes != 1) out_ << " behind " << (op.lanes == 3 ? "both lanes" : "lane 1");
    out_ << ":";
    for (const PlanTransfer& transfer : op.transfers) {
      out_ << (transfer.sends ? " to " : " from ") << transfer.peer << " " << name(transfer.region) << ";";
    }
    out_ << "\n";
  }
  void say(const Wait& op) { out_ << "wait " << op.number << "\n"; }
  void say(const Forward& op) { say_call(op.accumulate ? "forward, adding," : "forward", op.call); }
  void say(const Backward& op) { say_call("backward", op.call); }
  void say(const SinkGradient& op) { out_ << "gradient of sinks to " << name(op.dsink) << "\n"; }
  void say(const Fork&) { out_ << "two lanes\n"; }
  void say(const Lane& op) { out_ << "lane " << op.number << ":\n"; }
  void say(const Join&) { out_ << "one lane\n"; }
  void say(const TakeSink& op) { out_ << "copy " << name(op.from) << " to dsink\n"; }

  const Plan& plan_;
  std::ostringstream out_;
};

}  // namespace

std::string to_string(const Plan& plan) {
  return Describer(plan).text();
}

}  // namespace fa::parallel
