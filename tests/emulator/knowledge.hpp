#ifndef FA_TESTS_EMULATOR_KNOWLEDGE_HPP_
#define FA_TESTS_EMULATOR_KNOWLEDGE_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulator {

/// A vector clock: up to which tick somebody knows of every agent of a block, in that what the agent did is ordered
/// before what he does. Agents are the threads, then the warps' products (wgmma), then the barriers' copies (mbarrier).
struct Clock {
  std::uint32_t floor = 0;  ///< everything that threads did before this tick is known
  std::vector<std::uint32_t> entries;

  std::uint32_t at(std::size_t agent) const { return agent < entries.size() ? entries[agent] : 0; }

  void raise(std::size_t agent, std::uint32_t tick) {
    if (agent >= entries.size()) entries.resize(agent + 1);
    entries[agent] = std::max(entries[agent], tick);
  }

  void join(const Clock& other) {
    floor = std::max(floor, other.floor);
    if (entries.size() < other.entries.size()) entries.resize(other.entries.size());
    for (std::size_t i = 0; i < other.entries.size(); ++i) entries[i] = std::max(entries[i], other.entries[i]);
  }
};

/// What is ordered before a thread's next access: for the thread itself, and for the asynchronous proxy (the copy
/// engine and wgmma), which sees ordinary stores only through a fence. Null: nothing beyond block and warp barriers.
struct Knowledge {
  std::shared_ptr<const Clock> known;
  std::shared_ptr<const Clock> fenced;
};

/// What a barrier has gathered and hands on.
struct Gathered {
  Clock known;
  Clock fenced;

  Knowledge share() const {
    return {std::make_shared<const Clock>(known),
            fenced.floor == 0 && fenced.entries.empty() ? nullptr : std::make_shared<const Clock>(fenced)};
  }
};

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_KNOWLEDGE_HPP_
