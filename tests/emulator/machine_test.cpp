// The rules of the machine, one small kernel each.

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <vector>

#include "emulator/emulator.hpp"
#include "emulator/instructions.hpp"
#include "emulator/shared_memory.hpp"

namespace emulator {
namespace {

constexpr std::uint32_t kShared = SharedMemory::kBase;

using Body = std::function<void()>;

void call(const void* body) {
  (*static_cast<const Body*>(body))();
}

/// Runs `body` as every thread of a launch.
void run(const Body& body, Memory& memory, const LaunchOptions& options) {
  launch(call, &body, memory, options);
}

void run(const Body& body, int threads = 64, std::uint64_t seed = 1) {
  Memory memory;
  run(body, memory, {1, threads, 4096, seed, 1});
}

Fault fault_of(const Body& body, int threads = 64) {
  std::set<FaultKind> kinds;
  Fault last(FaultKind::deadlock, 0, 0, "", 0, Site(), "no fault was raised");
  for (const std::uint64_t seed : {1, 2, 3, 4}) {
    try {
      run(body, threads, seed);
      ADD_FAILURE() << "no fault under seed " << seed;
    } catch (const Fault& fault) {
      kinds.insert(fault.kind);
      last = fault;
    }
  }
  EXPECT_EQ(kinds.size(), 1u) << last.what();
  return last;
}

void store(std::uint32_t offset, std::uint32_t value, const Site& site = Site::current()) {
  store_shared(kShared + offset, &value, 4, "st.shared.b32", site);
}

std::uint32_t load(std::uint32_t offset, const Site& site = Site::current()) {
  std::uint32_t value = 0;
  load_shared(kShared + offset, &value, 4, "ld.shared.b32", site);
  return value;
}

std::uint32_t slot(int thread) {
  return static_cast<std::uint32_t>(thread) * 4;
}

// Shared memory.

TEST(SharedMemoryRules, BarrierMakesWritesVisible) {
  EXPECT_NO_THROW(run([] {
    store(slot(thread_index()), static_cast<std::uint32_t>(thread_index()));
    bar_sync(Site::current());
    EXPECT_EQ(load(slot(63 - thread_index())), static_cast<std::uint32_t>(63 - thread_index()));
    bar_sync(Site::current());
    store(slot(63 - thread_index()), 0);
  }));
}

TEST(SharedMemoryRules, WarpBarrierIsEnoughWithinAWarp) {
  EXPECT_NO_THROW(run([] {
    store(slot(thread_index()), static_cast<std::uint32_t>(thread_index()));
    bar_warp_sync(Site::current());
    EXPECT_EQ(load(slot(thread_index() ^ 1)), static_cast<std::uint32_t>(thread_index() ^ 1));
    bar_warp_sync(Site::current());
    store(slot(thread_index() ^ 1), 0);
  }));
}

TEST(SharedMemoryRules, WarpBarrierIsNotEnoughAcrossWarps) {
  const Fault fault = fault_of([] {
    store(slot(thread_index()), 0);
    bar_warp_sync(Site::current());
    load(slot(thread_index() ^ 32));
  });
  EXPECT_TRUE(fault.kind == FaultKind::shared_race || fault.kind == FaultKind::shared_uninitialised) << fault.what();
}

TEST(SharedMemoryRules, ShuffleIsNoBarrier) {
  const Fault fault = fault_of([] {
    store(slot(thread_index()), 0);
    shfl_bfly(0, 1, Site::current());
    load(slot(thread_index() ^ 1));
  });
  EXPECT_EQ(fault.kind, FaultKind::shared_race) << fault.what();
}

TEST(SharedMemoryRules, WriteAfterReadIsARace) {
  const Fault fault = fault_of([] {
    store(slot(thread_index()), 0);
    bar_sync(Site::current());
    load(slot(thread_index() ^ 1));
    shfl_bfly(0, 1, Site::current());
    store(slot(thread_index()), 1);
  });
  EXPECT_EQ(fault.kind, FaultKind::shared_race) << fault.what();
}

TEST(SharedMemoryRules, AThreadMayUpdateItsOwnBytes) {
  EXPECT_NO_THROW(run([] {
    const std::uint32_t own = slot(thread_index());
    store(own, 1);
    store(own, load(own) + 1);
    bar_sync(Site::current());
    store(own, load(own) + 1);
    EXPECT_EQ(load(own), 3u);
  }));
}

TEST(SharedMemoryRules, TwoWritersAreARace) {
  EXPECT_EQ(fault_of([] { store(0, 7); }).kind, FaultKind::shared_race);
}

std::uint32_t add(std::uint32_t offset, std::uint32_t value, const Site& site = Site::current()) {
  return add_shared(kShared + offset, value, "atom.shared.add.u32", site);
}

TEST(SharedMemoryRules, AtomicsOfAllThreadsAddUp) {
  EXPECT_NO_THROW(run([] {
    if (thread_index() == 0) store(0, 5);
    bar_sync(Site::current());
    EXPECT_LE(add(0, 2), 5u + 2 * 63);
    bar_sync(Site::current());
    EXPECT_EQ(load(0), 5u + 2 * 64);
    bar_sync(Site::current());
    if (thread_index() == 40) store(0, 0);
  }));
}

TEST(SharedMemoryRules, AtomicsAreNoBarrier) {
  const auto kind_of = [](const std::function<void()>& body) { return fault_of(body).kind; };
  EXPECT_EQ(kind_of([] { add(0, 1); }), FaultKind::shared_uninitialised);
  const auto behind_zero = [&](const std::function<void()>& body) {
    return kind_of([&] {
      if (thread_index() == 0) store(0, 0);
      bar_sync(Site::current());
      body();
    });
  };
  EXPECT_EQ(behind_zero([] {
              add(0, 1);
              load(0);
            }),
            FaultKind::shared_race);
  EXPECT_EQ(behind_zero([] {
              load(0);
              bar_warp_sync(Site::current());
              add(0, 1);
            }),
            FaultKind::shared_race);
  EXPECT_EQ(behind_zero([] {
              add(0, 1);
              if (thread_index() == 63) store(0, 1);
            }),
            FaultKind::shared_race);
}

TEST(SharedMemoryRules, ReadersOfManyWarpsAreRemembered) {
  const Fault fault = fault_of([] {
    if (thread_index() == 0) store(0, 1);
    bar_sync(Site::current());
    if (thread_index() % 32 != 5) load(0);
    bar_warp_sync(Site::current());
    if (thread_index() == 5) store(0, 2);
  });
  EXPECT_EQ(fault.kind, FaultKind::shared_race) << fault.what();
}

TEST(SharedMemoryRules, UninitialisedOutOfBoundsAndMisaligned) {
  EXPECT_EQ(fault_of([] { load(slot(thread_index())); }).kind, FaultKind::shared_uninitialised);
  EXPECT_EQ(fault_of([] { store(4096 - 4 * 63 + slot(thread_index()), 0); }).kind, FaultKind::shared_out_of_bounds);
  EXPECT_EQ(fault_of([] { store(slot(thread_index()) + 2, 0); }).kind, FaultKind::misaligned);
  const Fault below = fault_of([] {
    const std::uint32_t value = 0;
    store_shared(kShared - 4, &value, 4, "st.shared.b32", Site::current());
  });
  EXPECT_EQ(below.kind, FaultKind::shared_out_of_bounds);
}

// Convergence.

TEST(Convergence, DifferentInstructionsNameBoth) {
  const Fault fault = fault_of([] {
    if (thread_index() % 32 < 16) {
      shfl_bfly(0, 1, Site::current());
    } else {
      vote_any(true, Site::current());
    }
  });
  EXPECT_EQ(fault.kind, FaultKind::divergence);
  EXPECT_NE(std::string(fault.what()).find("shfl.sync.bfly"), std::string::npos) << fault.what();
  EXPECT_NE(std::string(fault.what()).find("vote.sync.any"), std::string::npos) << fault.what();
}

TEST(Convergence, DifferentSitesOfOneInstruction) {
  const Fault fault = fault_of([] {
    if (thread_index() % 32 == 3) {
      bar_warp_sync(Site::current());
    } else {
      bar_warp_sync(Site::current());
    }
  });
  EXPECT_EQ(fault.kind, FaultKind::divergence);
}

TEST(Convergence, AnExitedLaneIsMissed) {
  const Fault fault = fault_of([] {
    if (thread_index() == 40) return;
    shfl_bfly(0, 1, Site::current());
  });
  EXPECT_EQ(fault.kind, FaultKind::divergence);
  EXPECT_EQ(fault.thread / 32, 1) << fault.what();
}

TEST(Convergence, ABarrierThatAWarpNeverReaches) {
  const Fault fault = fault_of([] {
    if (thread_index() < 32) bar_sync(Site::current());
  });
  EXPECT_EQ(fault.kind, FaultKind::deadlock);
  EXPECT_NE(std::string(fault.what()).find("warp 0 waits at bar.sync"), std::string::npos) << fault.what();
  EXPECT_NE(std::string(fault.what()).find("warp 1 has exited"), std::string::npos) << fault.what();
}

TEST(Convergence, WarpsMayWaitAtDifferentSites) {
  EXPECT_NO_THROW(run([] {
    if (thread_index() < 32) {
      bar_sync(Site::current());
    } else {
      bar_sync(Site::current());
    }
  }));
}

TEST(Convergence, OneWarpMayLeaveEarly) {
  EXPECT_NO_THROW(run([] {
    if (thread_index() >= 32) shfl_bfly(0, 1, Site::current());
  }));
}

// Asynchronous copies.

struct alignas(16) Source {
  std::array<std::uint32_t, 256> words{};
};

Fault copy_fault_of(const std::function<void(const Source&)>& body) {
  Source source;
  Memory memory;
  memory.add("source", &source, sizeof source, Memory::kReadable | Memory::kWritable);
  try {
    run([&] { body(source); }, memory, {1, 64, 4096, 1, 1});
  } catch (const Fault& fault) {
    return fault;
  }
  ADD_FAILURE() << "no fault";
  return {FaultKind::deadlock, 0, 0, "", 0, Site(), ""};
}

void copy(const Source& source, int thread, int shift = 0) {
  cp_async_16(kShared + 16 * static_cast<std::uint32_t>(thread), source.words.data() + 4 * thread + shift, true,
              Site::current());
}

TEST(AsyncCopies, ReadingBeforeTheWait) {
  const Fault fault = copy_fault_of([](const Source& source) {
    copy(source, thread_index());
    cp_async_commit();
    load(16 * static_cast<std::uint32_t>(thread_index()));
  });
  EXPECT_EQ(fault.kind, FaultKind::shared_in_flight) << fault.what();
}

TEST(AsyncCopies, AWaitCountsCommittedGroupsOnly) {
  const Fault fault = copy_fault_of([](const Source& source) {
    copy(source, thread_index());
    cp_async_wait(0);
    load(16 * static_cast<std::uint32_t>(thread_index()));
  });
  EXPECT_EQ(fault.kind, FaultKind::shared_in_flight) << fault.what();
}

TEST(AsyncCopies, TheLatestGroupsMayStayInFlight) {
  const Fault fault = copy_fault_of([](const Source& source) {
    copy(source, thread_index());
    cp_async_commit();
    cp_async_commit();
    cp_async_wait(1);
    load(16 * static_cast<std::uint32_t>(thread_index()));  // arrived: an older group
    cp_async_wait(0);
    bar_sync(Site::current());
    copy(source, thread_index());
    cp_async_commit();
    cp_async_wait(1);
    load(16 * static_cast<std::uint32_t>(thread_index()));
  });
  EXPECT_EQ(fault.kind, FaultKind::shared_in_flight) << fault.what();
}

TEST(AsyncCopies, OthersNeedABarrierAfterTheWait) {
  const Fault fault = copy_fault_of([](const Source& source) {
    copy(source, thread_index());
    cp_async_commit();
    bar_sync(Site::current());
    cp_async_wait(0);
    bar_warp_sync(Site::current());
    load(16 * static_cast<std::uint32_t>(thread_index() ^ 32));
  });
  EXPECT_TRUE(fault.kind == FaultKind::shared_race || fault.kind == FaultKind::shared_in_flight) << fault.what();
}

TEST(AsyncCopies, RefillingWhatOthersStillRead) {
  const Fault fault = copy_fault_of([](const Source& source) {
    copy(source, thread_index());
    cp_async_commit();
    cp_async_wait(0);
    bar_sync(Site::current());
    load(16 * static_cast<std::uint32_t>(thread_index() ^ 1));
    bar_warp_sync(Site::current());
    load(16 * static_cast<std::uint32_t>(thread_index() ^ 1));
    copy(source, thread_index());
    cp_async_commit();
    cp_async_wait(0);
  });
  EXPECT_EQ(fault.kind, FaultKind::shared_race) << fault.what();
}

TEST(AsyncCopies, ExitWithCopiesInFlight) {
  const Fault fault = copy_fault_of([](const Source& source) { copy(source, thread_index()); });
  EXPECT_EQ(fault.kind, FaultKind::copies_at_exit) << fault.what();
}

TEST(AsyncCopies, MisalignedSource) {
  const Fault fault = copy_fault_of([](const Source& source) { copy(source, thread_index(), 1); });
  EXPECT_EQ(fault.kind, FaultKind::misaligned) << fault.what();
}

TEST(AsyncCopies, StoringToTheirSourceBeforeTheWait) {
  const Fault fault = copy_fault_of([](const Source& source) {
    if (thread_index() == 0) copy(source, 0);
    check_global_store(&source.words[1], 4, "st.global", Site::current());
  });
  EXPECT_EQ(fault.kind, FaultKind::source_overwritten) << fault.what();
}

TEST(AsyncCopies, StoringToTheirSourceAfterTheWait) {
  Source source;
  Memory memory;
  memory.add("source", &source, sizeof source, Memory::kReadable | Memory::kWritable);
  EXPECT_NO_THROW(run(
      [&] {
        copy(source, thread_index());
        cp_async_commit();
        cp_async_wait(0);
        check_global_store(&source.words[static_cast<std::size_t>(4 * thread_index())], 16, "st.global.v4.b32",
                           Site::current());
      },
      memory, {1, 32, 4096, 1, 1}));
}

TEST(AsyncCopies, ReadTheirSourceAtAnyMomentUpToTheWait) {
  std::set<std::uint32_t> seen;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Source source;
    Memory memory;
    memory.add("source", &source, sizeof source, Memory::kReadable | Memory::kWritable);
    run(
        [&] {
          if (thread_index() != 0) return;
          copy(source, 0);
          source.words[0] = 1;
          cp_async_commit();
          cp_async_wait(0);
          seen.insert(load(0));
        },
        memory, {1, 32, 64, seed, 1});
  }
  EXPECT_EQ(seen, (std::set<std::uint32_t>{0, 1}));
}

// Global memory.

TEST(GlobalMemoryRules, RegionsAndFlags) {
  alignas(16) std::array<std::uint32_t, 8> words{};
  const auto fault_kind = [&](std::uint8_t flags, const std::function<void(std::uint32_t*)>& body) {
    Memory memory;
    memory.add("words", words.data(), 16, flags);
    try {
      run([&] { body(words.data()); }, memory, {1, 32, 0, 1, 1});
    } catch (const Fault& fault) {
      return fault.kind;
    }
    ADD_FAILURE() << "no fault";
    return FaultKind::deadlock;
  };
  const auto load_word = [](const void* at) { check_global_load(at, 4, "ld.global", Site::current()); };
  const auto store_word = [](const void* at) { check_global_store(at, 4, "st.global", Site::current()); };
  EXPECT_EQ(fault_kind(3, [&](std::uint32_t* at) { load_word(at + 4); }), FaultKind::global_out_of_bounds);
  EXPECT_EQ(fault_kind(3, [&](std::uint32_t* at) { store_word(at - 1); }), FaultKind::global_out_of_bounds);
  EXPECT_EQ(fault_kind(Memory::kWritable, [&](std::uint32_t* at) { load_word(at); }), FaultKind::global_uninitialised);
  EXPECT_EQ(fault_kind(Memory::kReadable, [&](std::uint32_t* at) { store_word(at); }), FaultKind::global_not_writable);
  EXPECT_EQ(fault_kind(3, [&](std::uint32_t* at) { load_word(reinterpret_cast<char*>(at) + 2); }),
            FaultKind::misaligned);
}

/// A launch beside the kernel before it; `input` can be read, `output` has been written and can be again.
std::optional<FaultKind> early_fault(const std::function<void(const float* input, float* output)>& body,
                                     bool early = true, bool inputs = false) {
  alignas(16) std::array<float, 4> input{1, 2, 3, 4};
  alignas(16) std::array<float, 4> output{};
  Memory memory;
  memory.add("input", input.data(), sizeof input, Memory::kReadable);
  memory.add("output", output.data(), sizeof output, Memory::kReadable | Memory::kWritable);
  try {
    run([&] { body(input.data(), output.data()); }, memory,
        {.grid = 2, .threads = 32, .seed = 1, .workers = 1, .early = early, .early_inputs = inputs});
  } catch (const Fault& fault) {
    return fault.kind;
  }
  return std::nullopt;
}

/// Two blocks that run at the same time, and a word that both may write.
std::optional<FaultKind> signal_fault(const std::function<void(std::int32_t* word)>& body) {
  alignas(16) std::array<std::int32_t, 4> words{};
  Memory memory;
  memory.add("words", words.data(), sizeof words, Memory::kReadable | Memory::kWritable);
  try {
    run(
        [&] {
          if (thread_index() == 0) body(words.data());
        },
        memory, {.grid = 2, .threads = 32, .seed = 1, .workers = 2});
  } catch (const Fault& fault) {
    return fault.kind;
  }
  return std::nullopt;
}

TEST(Signals, ReachABlockThatWaits) {
  int seen = 0;
  EXPECT_EQ(signal_fault([&](std::int32_t* word) {
              if (block_index() == 0) {
                check_global_store(word + 1, 4, "st.global", Site::current());
                word[1] = 7;
                signal_global(word, 1, Site::current());
              } else {
                await_global(word, 1, Site::current());
                seen = word[1];
              }
            }),
            std::nullopt);
  EXPECT_EQ(seen, 7);
}

TEST(Signals, LastClustersStartFirstAndRestWhereTheyWait) {
  constexpr int kBlocks = 3;
  std::array<std::int32_t, 4> turn{};
  Memory memory;
  memory.add("turn", turn.data(), sizeof turn, Memory::kReadable | Memory::kWritable);
  std::mutex mutex;
  std::vector<int> started, done;
  run(
      [&] {
        if (thread_index() != 0) return;
        const auto note = [&](std::vector<int>& list) {
          const std::lock_guard lock(mutex);
          list.push_back(block_index());
        };
        note(started);
        await_global(turn.data(), block_index(), Site::current());
        note(done);
        signal_global(turn.data(), block_index() + 1, Site::current());
      },
      memory, {.grid = kBlocks, .threads = 32, .seed = 1, .last_first = true});
  EXPECT_EQ(started, (std::vector{2, 1, 0}));
  EXPECT_EQ(done, (std::vector{0, 1, 2}));
}

TEST(Signals, RiseAtOnePlace) {
  EXPECT_EQ(signal_fault([](std::int32_t* word) {
              word += block_index();
              signal_global(word, 2, Site::current());
              EXPECT_TRUE(test_global(word, 2, Site::current()));
              EXPECT_FALSE(test_global(word, 1, Site::current()));
              signal_global(word, 1, Site::current());
            }),
            FaultKind::out_of_turn);
}

TEST(Signals, WhoWaitsForABlockWithAFaultGivesUp) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(signal_fault([](std::int32_t* word) {
              if (block_index() == 1) await_global(word, 1, Site::current());
              check_global_store(word + 4, 4, "st.global", Site::current());
            }),
            FaultKind::global_out_of_bounds);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(EarlyLaunches, OnlyInputsAreReadBeforeTheWait) {
  const auto load_word = [](const float* at) { check_global_load(at, 4, "ld.global", Site::current()); };
  const auto store_word = [](float* at) { check_global_store(at, 4, "st.global", Site::current()); };
  const float one[1] = {1};
  const auto add = [&](float* at) { red_add_f32(at, one, 1, "red.global.add.f32", Site::current()); };
  const std::vector<std::function<void(float*)>> accesses{load_word, store_word, add};
  EXPECT_EQ(early_fault([&](const float* input, float* output) {
              load_word(input);
              griddepcontrol_wait();
              for (const auto& access : accesses) access(output);
            }),
            std::nullopt);
  for (const auto& access : accesses) {
    const auto first = [&](const float*, float* output) {
      access(output);
      griddepcontrol_wait();
    };
    EXPECT_EQ(early_fault(first), FaultKind::too_early);
    EXPECT_EQ(early_fault(first, false), std::nullopt) << "launched in order";
  }
}

TEST(EarlyLaunches, InputsMayBeWhatTheKernelBeforeWrites) {
  const auto before = [](const float* input, float*) {
    check_global_load(input, 4, "ld.global", Site::current());
    griddepcontrol_wait();
  };
  const auto behind = [](const float* input, float*) {
    griddepcontrol_wait();
    check_global_load(input, 4, "ld.global", Site::current());
  };
  EXPECT_EQ(early_fault(before), std::nullopt);
  EXPECT_EQ(early_fault(before, true, true), FaultKind::too_early);
  EXPECT_EQ(early_fault(before, false, true), std::nullopt) << "launched in order";
  EXPECT_EQ(early_fault(behind, true, true), std::nullopt);
}

TEST(EarlyLaunches, AGuessMayBeReadAheadOfTheWait) {
  const auto guess = [](const float* input) {
    return load_ahead(reinterpret_cast<const std::int32_t*>(input), Site::current());
  };
  const auto first = [&](const float* input, float*) {
    guess(input);
    griddepcontrol_wait();
    EXPECT_EQ(guess(input), *reinterpret_cast<const std::int32_t*>(input));
  };
  EXPECT_EQ(early_fault(first, true, true), std::nullopt);
  EXPECT_EQ(early_fault(first, false, true), std::nullopt) << "launched in order";
}

TEST(EarlyLaunches, EveryThreadWaitsForItself) {
  EXPECT_EQ(early_fault([](const float*, float* output) {
              if (thread_index() == 0) griddepcontrol_wait();
              bar_sync(Site::current());
              check_global_store(output, 4, "st.global", Site::current());
            }),
            FaultKind::too_early);
}

TEST(EarlyLaunches, EveryBlockWaits) {
  EXPECT_EQ(early_fault([](const float*, float*) {
              if (block_index() == 0) griddepcontrol_wait();
            }),
            FaultKind::too_early);
  EXPECT_EQ(early_fault([](const float*, float*) {
              if (thread_index() == 5) griddepcontrol_wait();
            }),
            std::nullopt);
}

TEST(GlobalMemoryRules, AdditionsOfManyBlocksAllCount) {
  alignas(16) std::array<float, 4> sums{1, 2, 3, 4};
  Memory memory;
  memory.add("sums", sums.data(), sizeof sums, 3);
  const float values[4] = {1, 0, 0.5f, 0};
  run([&] { red_add_f32(sums.data(), values, 4, "red.global.add.v4.f32", Site::current()); }, memory,
      {64, 64, 0, 1, 2});
  EXPECT_EQ(sums, (std::array<float, 4>{1 + 64 * 64, 2, 3 + 64 * 32, 4}));

  const auto fault_kind = [&](std::uint8_t flags, int offset) {
    Memory flagged;
    flagged.add("sums", sums.data(), sizeof sums, flags);
    try {
      run([&] { red_add_f32(sums.data() + offset, values, 2, "red", Site::current()); }, flagged, {1, 32, 0, 1, 1});
    } catch (const Fault& fault) {
      return fault.kind;
    }
    ADD_FAILURE() << "no fault";
    return FaultKind::deadlock;
  };
  EXPECT_EQ(fault_kind(Memory::kWritable, 0), FaultKind::global_uninitialised);
  EXPECT_EQ(fault_kind(Memory::kReadable, 0), FaultKind::global_not_writable);
  EXPECT_EQ(fault_kind(3, 1), FaultKind::misaligned);
  EXPECT_EQ(fault_kind(3, 4), FaultKind::global_out_of_bounds);
}

// Schedules.

std::vector<int> order_of_threads(std::uint64_t seed) {
  std::vector<int> order;
  run(
      [&] {
        order.push_back(thread_index());
        bar_sync(Site::current());
        order.push_back(thread_index());
      },
      64, seed);
  return order;
}

TEST(Schedule, FollowsTheSeed) {
  EXPECT_EQ(order_of_threads(1), order_of_threads(1));
  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 0; seed < 8; ++seed) orders.insert(order_of_threads(seed));
  EXPECT_GE(orders.size(), 6u);
}

TEST(Schedule, BlocksSpreadOverWorkers) {
  Memory memory;
  std::mutex mutex;
  std::multiset<int> blocks;
  run(
      [&] {
        bar_sync(Site::current());
        if (thread_index() != 0) return;
        const std::lock_guard lock(mutex);
        blocks.insert(block_index());
      },
      memory, {100, 64, 0, 1, 2});
  EXPECT_EQ(blocks.size(), 100u);
  EXPECT_EQ(std::set<int>(blocks.begin(), blocks.end()).size(), 100u);
}

TEST(Schedule, TheLaunchIsValidated) {
  Memory memory;
  const Body nothing = [] {};
  EXPECT_THROW(run(nothing, memory, {0, 32, 0, 1, 1}), std::invalid_argument);
  EXPECT_THROW(run(nothing, memory, {1, 33, 0, 1, 1}), std::invalid_argument);
  EXPECT_THROW(run(nothing, memory, {1, 32, 228 << 10, 1, 1}), std::invalid_argument);
}

}  // namespace
}  // namespace emulator
