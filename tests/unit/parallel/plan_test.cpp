// Plans without tensors: what is computed, what is sent, and what lies in memory.

#include "parallel/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>

#include "parallel/config.hpp"
#include "parallel/layout.hpp"
#include "parallel/shared_places.hpp"
#include "support/thorough.hpp"
#include "unit/parallel/plan_cases.hpp"
#include "unit/parallel/plan_simulation.hpp"

namespace fa::parallel {
namespace {

using test::plan_cases;
using test::to_text;

const Call* call_of(const Op& op) {
  if (const auto* const forward = std::get_if<Forward>(&op)) return &forward->call;
  if (const auto* const backward = std::get_if<Backward>(&op)) return &backward->call;
  return nullptr;
}

std::vector<Plan> plans_of(const Problem& problem, bool backward) {
  std::vector<Plan> plans;
  for (int rank = 0; rank < problem.ranks; ++rank) {
    plans.push_back(backward ? backward_plan(problem, rank) : forward_plan(problem, rank));
  }
  return plans;
}

// Of any scheme: whatever way keys have taken, each score that no mask hides is computed by one call of one rank, and
// calls are told the places that their rows have.
TEST(Plan, EveryVisiblePairIsComputedOnce) {
  std::size_t n = 0;
  for (const int ranks : {1, 2, 3, 4, 6}) {
    for (const Problem& problem : plan_cases(ranks)) {
      if (!fa::test::tries_watched(n++)) continue;
      for (const bool backward : {false, true}) {
        test::PlanSimulation simulation(problem, plans_of(problem, backward));
        ASSERT_EQ(simulation.run(), "") << to_text(problem);
        for (std::size_t i = 0; i < problem.lengths_q.size(); ++i) {
          const auto sequence = static_cast<int>(i);
          for (std::int64_t row = 0; row < problem.lengths_q[i]; ++row) {
            const KeyRange seen = keys_of(problem, sequence, row);
            for (std::int64_t key = 0; key < problem.lengths_kv[i]; ++key) {
              const int expected = key >= seen.begin && key < seen.end ? 1 : 0;
              for (std::int64_t head = 0; head < problem.h_q; ++head) {
                ASSERT_EQ(simulation.count(sequence, head, row, key), expected) << to_text(problem);
              }
            }
          }
        }
      }
    }
  }
}

// Transfers between two ranks meet: as many, of as many elements, in one order. No rank waits for what nobody sends.
TEST(Plan, TransfersMeet) {
  for (const int ranks : {2, 3, 4, 6}) {
    for (const Problem& problem : plan_cases(ranks)) {
      for (const bool backward : {false, true}) {
        std::map<std::pair<int, int>, std::vector<std::int64_t>> sent, received;
        const std::vector<Plan> plans = plans_of(problem, backward);
        for (int rank = 0; rank < ranks; ++rank) {
          const Plan& plan = plans[static_cast<std::size_t>(rank)];
          for (const Op& op : plan.ops) {
            const auto* const exchange = std::get_if<Exchange>(&op);
            if (exchange == nullptr) continue;
            for (const PlanTransfer& transfer : exchange->transfers) {
              const PlanTensor& tensor = plan.tensors[static_cast<std::size_t>(transfer.region.tensor)];
              ASSERT_EQ(transfer.region.rows, tensor.rows) << "a transfer takes whole heads";
              const std::int64_t count = tensor.b * transfer.region.heads * tensor.rows * tensor.columns;
              const auto ends = transfer.sends ? std::pair{rank, transfer.peer} : std::pair{transfer.peer, rank};
              (transfer.sends ? sent : received)[ends].push_back(count);
            }
          }
        }
        ASSERT_EQ(sent, received) << to_text(problem);
      }
    }
  }
}

/// Rows that an operation writes or reads.
struct Access {
  Region region;
  bool writes = false;
};

std::vector<Access> accesses(const Op& op) {
  std::vector<Access> all;
  const auto reads = [&](const Region& region) {
    if (region.heads > 0) all.push_back({region, false});
  };
  const auto writes = [&](const Region& region) {
    if (region.heads > 0) all.push_back({region, true});
  };
  const auto read_keys = [&](const Call& call) {  // what lies between sequences of a packed call is not read
    for (const Block& block : call.blocks) {
      for (Region region : {call.k, call.v}) {
        region.row = block.key;
        region.rows = block.keys;
        reads(region);
      }
    }
  };
  if (const auto* const copy = std::get_if<Copy>(&op)) {
    reads(copy->from);
    writes(copy->to);
  } else if (const auto* const clear = std::get_if<Clear>(&op)) {
    writes(clear->to);
  } else if (const auto* const sum = std::get_if<Sum>(&op)) {
    for (const Region& from : sum->from) reads(from);
    writes(sum->to);
  } else if (const auto* const add = std::get_if<AddSink>(&op)) {
    writes(add->o);
    writes(add->lse);
  } else if (const auto* const forward = std::get_if<Forward>(&op)) {
    reads(forward->call.q);
    read_keys(forward->call);
    writes(forward->call.o);
    writes(forward->call.lse);
  } else if (const auto* const backward = std::get_if<Backward>(&op)) {
    read_keys(backward->call);
    for (const Region& region :
         {backward->call.q, backward->call.o, backward->call.lse, backward->dout, backward->dlse}) {
      reads(region);
    }
    for (const Region& region : {backward->dq, backward->dk, backward->dv}) writes(region);
  } else if (const auto* const gradient = std::get_if<SinkGradient>(&op)) {
    writes(gradient->dsink);
  } else if (const auto* const take = std::get_if<TakeSink>(&op)) {
    reads(take->from);
    writes(take->to);
  }
  return all;
}

bool meet(const Region& a, const Region& b) {
  return a.tensor == b.tensor && a.head < b.head + b.heads && b.head < a.head + a.heads &&
         a.row <= b.row + (b.rows - 1) * b.row_step && b.row <= a.row + (a.rows - 1) * a.row_step;
}

/// Lanes and transfers as three threads with vector clocks: two accesses of one place, of which one
/// writes, are ordered by a fork, a join, an exchange's lanes or a wait.
class Order {
 public:
  explicit Order(const Plan& plan) {
    for (const Op& op : plan.ops) {
      if (const auto* const lane = std::get_if<Lane>(&op)) lane_ = static_cast<std::size_t>(lane->number);
      if (std::holds_alternative<Fork>(op)) join(clocks_[1], clocks_[0]);
      if (std::holds_alternative<Join>(op)) {
        join(clocks_[0], clocks_[1]);
        lane_ = 0;
      }
      if (const auto* const wait = std::get_if<Wait>(&op)) {
        join(clocks_[lane_], done_.at(static_cast<std::size_t>(wait->number)));
      }
      if (const auto* const exchange = std::get_if<Exchange>(&op)) {
        for (const std::size_t lane : {0, 1}) {
          if ((exchange->lanes >> lane & 1) != 0) join(clocks_[kTransfers], clocks_[lane]);
        }
        std::vector<Access> all;
        for (const PlanTransfer& transfer : exchange->transfers) all.push_back({transfer.region, !transfer.sends});
        add(kTransfers, all);
        done_.push_back(clocks_[kTransfers]);
      } else {
        add(lane_, accesses(op));
      }
    }
    for (const Clock& clock : clocks_) ends_ = ends_ && is_behind(clocks_[0], clock);
  }

  bool is_safe() const { return is_safe_; }
  /// The caller's stream is behind everything.
  bool ends() const { return ends_; }

 private:
  using Clock = std::array<int, 3>;
  static constexpr std::size_t kTransfers = 2;
  struct Done {
    Access access;
    std::size_t thread = 0;
    int number = 0;
  };

  static void join(Clock& clock, const Clock& other) {
    for (std::size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
  }
  static bool is_behind(const Clock& clock, const Clock& other) {
    for (std::size_t i = 0; i < clock.size(); ++i) {
      if (clock[i] < other[i]) return false;
    }
    return true;
  }

  void add(std::size_t thread, const std::vector<Access>& all) {
    const int number = ++clocks_[thread][thread];
    for (const Access& access : all) {
      for (const Done& done : accesses_) {
        if (done.thread == thread || clocks_[thread][done.thread] >= done.number) continue;
        is_safe_ = is_safe_ && !((access.writes || done.access.writes) && meet(access.region, done.access.region));
      }
    }
    for (const Access& access : all) accesses_.push_back({access, thread, number});
  }

  std::size_t lane_ = 0;
  Clock clocks_[3]{};
  std::vector<Clock> done_;  ///< transfers, by exchange
  std::vector<Done> accesses_;
  bool is_safe_ = true, ends_ = true;
};

// Between an exchange and a wait for it nothing writes what is sent, and nothing touches what comes; no lane touches
// what the other one writes. At the end nothing is under way.
TEST(Plan, NothingTouchesWhatIsUnderWay) {
  std::size_t n = 0;
  for (const int ranks : {2, 4, 5}) {
    for (const Problem& problem : plan_cases(ranks)) {
      if (!fa::test::tries_watched(n++)) continue;
      for (const bool backward : {false, true}) {
        for (const Plan& plan : plans_of(problem, backward)) {
          const Order order(plan);
          ASSERT_TRUE(order.is_safe()) << to_text(problem) << to_string(plan);
          ASSERT_TRUE(order.ends()) << to_text(problem) << to_string(plan);
        }
      }
    }
  }
}

// What a rank writes to another's memory goes to where that one receives it, and tensors there do not meet.
TEST(Plan, PlacesAreThoseOfReceivers) {
  constexpr ElementSizes kSizes{2, 4};
  for (const int ranks : {2, 4, 5}) {
    for (const Problem& problem : plan_cases(ranks)) {
      Problem copying = problem;
      copying.dense_kv = copying.dense_rows = false;
      for (const bool backward : {false, true}) {
        const std::vector<Plan> plans = plans_of(copying, backward), own_plans = plans_of(problem, backward);
        std::map<std::pair<int, int>, std::vector<std::int64_t>> sent, received;
        for (int rank = 0; rank < ranks; ++rank) {
          // Some ranks have K and V in shared memory, others copy them.
          const Plan& plan = (rank % 2 == 0 ? own_plans : plans)[static_cast<std::size_t>(rank)];
          const SharedPlaces places = shared_places(plan, plans, rank, kSizes);
          std::size_t next = 0;
          for (const Op& op : plan.ops) {
            const auto* const exchange = std::get_if<Exchange>(&op);
            for (const PlanTransfer& transfer :
                 exchange == nullptr ? std::vector<PlanTransfer>{} : exchange->transfers) {
              if (transfer.sends) sent[{rank, transfer.peer}].push_back(places.sends.at(next++));
              const auto index = static_cast<std::size_t>(transfer.region.tensor);
              if (index < kGivenCount) continue;  // of the caller
              const PlanTensor& tensor = plan.tensors[index];
              const std::int64_t head = tensor.b * tensor.rows * tensor.columns * kSizes.of(tensor.element);
              const std::int64_t own = places.own.offsets[index] + transfer.region.head * head;
              if (!transfer.sends) received[{transfer.peer, rank}].push_back(own);
              ASSERT_LE(own + transfer.region.heads * head, places.bytes) << to_text(problem);
            }
          }
          ASSERT_EQ(next, places.sends.size());
          std::int64_t end = 0;
          std::map<std::int64_t, std::size_t> in_order;
          for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
            if (places.own.offsets[i] != SharedLayout::kNowhere) in_order[places.own.offsets[i]] = i;
          }
          for (const auto& [offset, index] : in_order) {
            ASSERT_GE(offset, end) << "tensors that meet";
            end = offset + plan.tensors[index].elements() * kSizes.of(plan.tensors[index].element);
          }
        }
        ASSERT_EQ(sent, received) << to_text(problem);
      }
    }
  }
}

// All that is read of scratch memory has been written; all outputs are written.
TEST(Plan, WhatIsReadHasBeenWritten) {
  for (const int ranks : {1, 2, 4, 5}) {
    for (const Problem& problem : plan_cases(ranks)) {
      for (const bool backward : {false, true}) {
        for (const Plan& plan : plans_of(problem, backward)) {
          std::vector<std::vector<bool>> written;
          for (const PlanTensor& tensor : plan.tensors) {
            written.emplace_back(static_cast<std::size_t>(tensor.heads * tensor.rows));
          }
          const auto mark = [&](int tensor, std::int64_t h, std::int64_t row) -> std::vector<bool>::reference {
            const auto t = static_cast<std::size_t>(tensor);
            return written[t][static_cast<std::size_t>(h * plan.tensors[t].rows + row)];
          };
          const auto each = [](const Region& region, const auto& visit) {
            for (std::int64_t h = region.head; h < region.head + region.heads; ++h) {
              for (std::int64_t i = 0; i < region.rows; ++i) visit(region.tensor, h, region.row + i * region.row_step);
            }
          };
          bool ok = true;
          const auto write = [&](int tensor, std::int64_t h, std::int64_t row) { mark(tensor, h, row) = true; };
          for (const Op& op : plan.ops) {
            if (const auto* const exchange = std::get_if<Exchange>(&op)) {
              for (const PlanTransfer& transfer : exchange->transfers) {
                if (!transfer.sends) each(transfer.region, write);
              }
            }
            for (const Access& access : accesses(op)) {
              if (!access.writes && access.region.tensor >= kGivenCount) {
                each(access.region,
                     [&](int tensor, std::int64_t h, std::int64_t row) { ok = ok && mark(tensor, h, row); });
              }
            }
            for (const Access& access : accesses(op)) {
              if (access.writes) each(access.region, write);
            }
            ASSERT_TRUE(ok) << to_text(problem) << to_string(plan);
          }
          for (const int output : {kO, kLse, kDq, kDk, kDv}) {
            const bool is_of = backward ? output >= kDq : output <= kLse;
            if (!is_of) continue;
            const PlanTensor& tensor = plan.tensors[static_cast<std::size_t>(output)];
            each({output, 0, tensor.heads, 0, tensor.rows, 1}, [&](int which, std::int64_t h, std::int64_t row) {
              ASSERT_TRUE(mark(which, h, row)) << tensor.name << " " << to_text(problem);
            });
          }
        }
      }
    }
  }
}

Problem of_ranks(int ranks, ShardLayout layout, std::int64_t s) {
  Problem problem;
  problem.ranks = ranks;
  problem.layout = layout;
  problem.h_q = 8;
  problem.h_kv = 2;
  problem.d_qk = problem.d_v = 64;
  problem.lengths_q = problem.lengths_kv = {s};
  problem.causal = true;
  problem.dense_kv = true;
  return problem;
}

double work_of(const Problem& problem, const Plan& plan) {
  double work = 0;
  for (const Op& op : plan.ops) {
    const Call* const call = call_of(op);
    if (call == nullptr) continue;
    for (const Block& block : call->blocks) work += scores_of(problem, block);
  }
  return work;
}

// Zigzag and stripes share causal attention out evenly, contiguous parts do not.
TEST(Plan, WorkIsBalanced) {
  for (const int ranks : {2, 4, 8}) {
    for (const ShardLayout layout : {ShardLayout::zigzag, ShardLayout::striped, ShardLayout::contiguous}) {
      const Problem problem = of_ranks(ranks, layout, 1024);
      double greatest = 0, all = 0;
      for (const Plan& plan : plans_of(problem, false)) {
        greatest = std::max(greatest, work_of(problem, plan));
        all += work_of(problem, plan);
      }
      EXPECT_EQ(all, 1024.0 * 1025 / 2);
      const double share = all / ranks / greatest;
      if (layout == ShardLayout::contiguous) {
        EXPECT_NEAR(share, ranks / (2.0 * ranks - 1), 0.01);
      } else {
        EXPECT_GT(share, 0.99);
      }
    }
  }
}

// A rank's step is one call, of equal work at every step.
TEST(Plan, ZigzagStepsAreOneCallEach) {
  const Problem problem = of_ranks(8, ShardLayout::zigzag, 1024);
  for (const Plan& plan : plans_of(problem, false)) {
    std::vector<double> steps;
    for (const Op& op : plan.ops) {
      if (const Call* const call = call_of(op)) steps.push_back(scores_of(problem, call->blocks.front()));
    }
    ASSERT_EQ(steps.size(), 8U);
    EXPECT_EQ(steps[0], 128.0 * 129 / 2);
    for (std::size_t i = 1; i < steps.size(); ++i) EXPECT_EQ(steps[i], 128.0 * 64);
  }
}

std::int64_t elements_sent(const Plan& plan) {
  std::int64_t elements = 0;
  for (const Op& op : plan.ops) {
    const auto* const exchange = std::get_if<Exchange>(&op);
    if (exchange == nullptr) continue;
    for (const PlanTransfer& transfer : exchange->transfers) {
      if (!transfer.sends) continue;
      const PlanTensor& tensor = plan.tensors[static_cast<std::size_t>(transfer.region.tensor)];
      elements += tensor.b * transfer.region.heads * tensor.rows * tensor.columns;
    }
  }
  return elements;
}

/// Scores of all heads.
double work_of_heads(const Problem& problem, const Plan& plan) {
  double work = 0;
  for (const Op& op : plan.ops) {
    const Call* const call = call_of(op);
    if (call == nullptr) continue;
    for (const Block& block : call->blocks) work += static_cast<double>(call->q.heads) * scores_of(problem, block);
  }
  return work;
}

/// Of each call its lane, its first KV head and whether it is of the rank's own keys.
struct Turn {
  int lane = 0;
  std::int64_t head = 0;
  bool own = false;
  std::size_t op = 0;
};
std::vector<Turn> turns_of(const Plan& plan) {
  std::vector<Turn> turns;
  int lane = 0;
  for (std::size_t i = 0; i < plan.ops.size(); ++i) {
    if (const auto* const next = std::get_if<Lane>(&plan.ops[i])) lane = next->number;
    if (std::holds_alternative<Join>(plan.ops[i])) lane = 0;
    if (const Call* const call = call_of(plan.ops[i])) turns.push_back({lane, call->k.head, call->k.tensor == kK, i});
  }
  return turns;
}

// Of the late heads a rank's own keys come behind all others. Calls alternate between the lanes, so that each begins
// where the one before it runs out of tiles, and what others have computed is on its way home before the last one.
TEST(Plan, OwnKeysOfLateHeadsComeLast) {
  for (const int ranks : {2, 3, 4, 8, 16}) {
    for (const ShardLayout layout : {ShardLayout::zigzag, ShardLayout::striped}) {
      Problem problem = of_ranks(ranks, layout, 1024 / 16 * ranks);
      problem.h_kv = 4;
      problem.late_heads = problem.late_gradient_heads = 1;
      Problem plain = problem;
      plain.late_heads = plain.late_gradient_heads = 0;
      for (const bool backward : {false, true}) {
        const std::vector<Plan> all = plans_of(problem, backward), before = plans_of(plain, backward);
        for (std::size_t rank = 0; rank < all.size(); ++rank) {
          const Plan& plan = all[rank];
          const std::vector<Turn> turns = turns_of(plan);
          ASSERT_EQ(turns.size(), 2U * static_cast<std::size_t>(ranks));
          for (std::size_t i = 0; i < turns.size(); ++i) {
            EXPECT_EQ(turns[i].lane, static_cast<int>(i % 2)) << to_string(plan);
            EXPECT_EQ(turns[i].head, i % 2 == 0 ? 0 : 3);
            EXPECT_EQ(turns[i].own, i == 0 || i + 1 == turns.size());
          }
          const auto last = plan.ops.begin() + static_cast<std::ptrdiff_t>(turns.back().op);
          const auto is_exchange = [](const Op& op) { return std::holds_alternative<Exchange>(op); };
          EXPECT_TRUE(std::none_of(last, plan.ops.end(), is_exchange)) << to_string(plan);
          EXPECT_EQ(elements_sent(plan), elements_sent(before[rank]));
          EXPECT_EQ(plan.kv_in_flight(), before[rank].kv_in_flight());
          EXPECT_DOUBLE_EQ(work_of_heads(problem, plan), work_of_heads(problem, before[rank]));
        }
      }
    }
  }
}

// Beside its shards a rank holds two shards of K and V at most.
TEST(Plan, MemoryOfKeysInFlight) {
  for (const int ranks : {2, 4, 8}) {
    for (const ShardLayout layout : {ShardLayout::zigzag, ShardLayout::striped, ShardLayout::contiguous}) {
      const Problem problem = of_ranks(ranks, layout, 512);
      const std::int64_t shard = problem.h_kv * 512 / ranks * 128;
      for (const bool backward : {false, true}) {
        for (const Plan& plan : plans_of(problem, backward)) EXPECT_LE(plan.kv_in_flight(), 2 * shard);
      }
      // Forward takes no other memory, where the caller's tensors lie as transfers take them.
      for (const Plan& plan : plans_of(problem, false)) {
        EXPECT_EQ(plan.scratch_elements(Element::own), plan.kv_in_flight());
      }
    }
  }
}

// A window of one part needs the part before it and its own.
TEST(Plan, WindowsSkipSteps) {
  for (const Scheme scheme : {Scheme::ring, Scheme::all_gather}) {
    Problem problem = of_ranks(8, ShardLayout::contiguous, 1024);
    problem.scheme = scheme;
    problem.window_left = 128;
    const std::int64_t shard = problem.h_kv * 128 * 128;
    for (int rank = 0; rank < 8; ++rank) {
      const Plan plan = forward_plan(problem, rank);
      EXPECT_EQ(elements_sent(plan), rank == 7 ? 0 : shard) << to_string(plan);
      const auto calls = std::ranges::count_if(plan.ops, [](const Op& op) { return call_of(op) != nullptr; });
      EXPECT_EQ(calls, rank == 0 || scheme == Scheme::all_gather ? 1 : 2);
    }
  }
}

// Query heads are not sent: K and V of the KV heads alone travel.
TEST(Plan, RingSendsKeysOfKeyHeadsAlone) {
  Problem problem = of_ranks(4, ShardLayout::zigzag, 512);
  const std::int64_t shard = problem.h_kv * 128 * 128;
  for (const Plan& plan : plans_of(problem, false)) EXPECT_EQ(elements_sent(plan), 3 * shard);
  for (const Plan& plan : plans_of(problem, true)) {  // with dK and dV, from the first that adds to them to home
    EXPECT_EQ(elements_sent(plan), 3 * shard + 3 * shard);
  }
}

TEST(Plan, BadInput) {
  const auto refused = [](const Problem& problem) -> std::string {
    try {
      check(problem);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return std::string(error.field("argument"));
    }
    return "";
  };
  const Problem good = of_ranks(4, ShardLayout::zigzag, 512);
  EXPECT_EQ(refused(good), "");
  Problem bad = good;
  bad.ulysses = 3;
  EXPECT_EQ(refused(bad), "ulysses");
  bad = good;
  bad.ulysses = 4;
  EXPECT_EQ(refused(bad), "h_kv");
  bad = good;
  bad.h_q = 7;
  EXPECT_EQ(refused(bad), "h_q");
  bad = good;
  bad.head_groups = 3;
  EXPECT_EQ(refused(bad), "head_groups");
  bad = good;
  bad.lengths_kv = {510};
  EXPECT_EQ(refused(bad), "s_kv");
}

}  // namespace
}  // namespace fa::parallel
