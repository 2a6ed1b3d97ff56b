// Blocks of a cluster: what they do to each other, and the rules of it; and products with A transposed.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/emulator.hpp"
#include "emulator/instructions.hpp"
#include "emulator/shared_memory.hpp"
#include "emulator/tensor_map.hpp"

namespace emulator {
namespace {

using Body = std::function<void()>;

constexpr std::uint32_t kSource = 4096;  // offsets
constexpr std::uint32_t kBarriers = 32768;
constexpr int kSharedBytes = 32768 + 1024;
constexpr int kBytes = 512;  // of a copy

Site here(const Site& site = Site::current()) {
  return site;
}

void call(const void* body) {
  (*static_cast<const Body*>(body))();
}

void run(const Body& body, std::uint64_t seed = 1, int threads = 128, int cluster = 2, int grid = 2) {
  Memory memory;
  launch(call, &body, memory, {grid, threads, kSharedBytes, seed, 1, cluster});
}

constexpr std::uint64_t kSeeds = 12;

void expect_no_fault(const Body& body, int threads = 128, int cluster = 2) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) EXPECT_NO_THROW(run(body, seed, threads, cluster, cluster));
}

/// Under every seed, with `text` in its message.
void expect_fault(FaultKind kind, const std::string& text, const Body& body) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    try {
      run(body, seed);
      ADD_FAILURE() << "no fault under seed " << seed;
    } catch (const Fault& fault) {
      EXPECT_EQ(fault.kind, kind) << fault.what();
      EXPECT_NE(std::string(fault.what()).find(text), std::string::npos) << fault.what();
    }
  }
}

/// An address in this block's shared memory.
std::uint32_t own(std::uint32_t offset = 0) {
  return dynamic_shared() + offset;
}

std::uint32_t barrier() {
  return own(kBarriers);
}

std::uint32_t other_barrier() {
  return own(kBarriers + 8);
}

void store_word(std::uint32_t offset, std::uint32_t value) {
  store_shared(own(offset), &value, 4, "st.shared.b32", here());
}

std::uint32_t load_word(std::uint32_t offset) {
  std::uint32_t value = 0;
  load_shared(own(offset), &value, 4, "ld.shared.b32", here());
  return value;
}

std::uint32_t peer(std::uint32_t address) {
  return map_shared(address, 1 - cluster_rank(), here());
}

bool is(int rank, int thread) {
  return cluster_rank() == rank && thread_index() == thread;
}

/// Two barriers in every block, which all blocks may use.
void make_barriers(int count, int other_count = 1) {
  if (thread_index() == 0) {
    mbarrier_init(barrier(), count, here());
    mbarrier_init(other_barrier(), other_count, here());
    fence_mbarrier_init();
  }
  cluster_sync(here());
}

// Addresses and barriers.

TEST(Cluster, BlocksKnowTheirRanks) {
  for (const int cluster : {1, 2, 4}) {
    run(
        [=] {
          EXPECT_EQ(cluster_rank(), block_index() % cluster);
          EXPECT_EQ(block_count(), 8);
          EXPECT_LT(thread_index(), 128);
          store_word(static_cast<std::uint32_t>(4 * thread_index()), 0);
          cluster_sync(here());
        },
        1, 128, cluster, 8);
  }
}

std::uint32_t load_of_peer(std::uint32_t offset) {
  std::uint32_t value[4] = {};
  load_shared_cluster(peer(own(offset)), value, 16, "ld.shared::cluster.v4.b32", here());
  return value[0];
}

TEST(Cluster, LoadsFromAnotherBlock) {
  expect_no_fault([] {
    const auto offset = static_cast<std::uint32_t>(16 * thread_index());
    for (std::uint32_t i = 0; i < 4; ++i) store_word(offset + 4 * i, static_cast<std::uint32_t>(block_index()));
    cluster_sync(here());
    EXPECT_EQ(load_of_peer(offset), static_cast<std::uint32_t>(block_index() ^ 1));
    cluster_sync(here());
    store_word(offset, 0);
  });
  expect_fault(FaultKind::shared_race, "no barrier is in between", [] {
    const auto offset = static_cast<std::uint32_t>(16 * thread_index());
    for (std::uint32_t i = 0; i < 4; ++i) store_word(offset + 4 * i, 1);
    cluster_sync(here());
    load_of_peer(offset);
    bar_sync(here());  // of a block alone
    store_word(offset, 2);
    cluster_sync(here());
  });
  expect_fault(FaultKind::exited_block, "block", [] {
    for (std::uint32_t i = 0; i < 4; ++i) store_word(static_cast<std::uint32_t>(16 * thread_index()) + 4 * i, 1);
    cluster_sync(here());
    if (cluster_rank() == 1) load_of_peer(static_cast<std::uint32_t>(16 * thread_index()));
  });
}

TEST(Cluster, RelaxedBarriersLetBlocksExitAndHandOnNothing) {
  const auto fill = [] {
    for (std::uint32_t i = 0; i < 4; ++i) store_word(static_cast<std::uint32_t>(16 * thread_index()) + 4 * i, 1);
  };
  const auto read = [] { load_of_peer(static_cast<std::uint32_t>(16 * thread_index())); };
  expect_no_fault([=] {
    fill();
    cluster_sync(here());
    read();
    cluster_sync_relaxed(here());
  });
  expect_fault(FaultKind::shared_race, "no barrier is in between", [=] {
    fill();
    cluster_sync_relaxed(here());
    read();
    cluster_sync(here());
  });
  expect_fault(FaultKind::shared_race, "no barrier is in between", [=] {
    fill();
    cluster_sync(here());
    read();
    cluster_sync_relaxed(here());
    fill();
    cluster_sync(here());
  });
}

TEST(Cluster, AddressesCarryTheRank) {
  for (const int cluster : {1, 2, 4}) {
    run([] { EXPECT_EQ(own(), 0x400u | static_cast<std::uint32_t>(cluster_rank()) << 24); }, 1, 128, cluster, 4);
  }
  expect_no_fault([] {
    store_word(static_cast<std::uint32_t>(4 * thread_index()), static_cast<std::uint32_t>(cluster_rank()));
    EXPECT_EQ(load_word(static_cast<std::uint32_t>(4 * thread_index())), static_cast<std::uint32_t>(cluster_rank()));
  });
  const auto load = [](std::uint32_t address) {
    std::uint32_t value = 0;
    load_shared(address, &value, 4, "ld.shared.b32", here());
  };
  // Those of the other block are not the own block's.
  expect_fault(FaultKind::shared_out_of_bounds, "dynamic shared memory is [0x1000400, 0x1008800)", [=] {
    store_word(static_cast<std::uint32_t>(4 * thread_index()), 0);
    if (is(1, 0)) load(without_rank(own()));
  });
  expect_fault(FaultKind::shared_out_of_bounds, "dynamic shared memory is [0x400, 0x8800)", [=] {
    store_word(static_cast<std::uint32_t>(4 * thread_index()), 0);
    if (is(0, 0)) load(own() | 1u << kRankShift);
  });
}

TEST(Cluster, LaunchesWantWholeClusters) {
  const Body nothing = [] {};
  EXPECT_THROW(run(nothing, 1, 128, 2, 3), std::invalid_argument);
  EXPECT_THROW(run(nothing, 1, 128, 0, 2), std::invalid_argument);
  EXPECT_THROW(run(nothing, 1, 96, 2, 2), std::invalid_argument);
  EXPECT_THROW(run(nothing, 1, 640, 4, 4), std::invalid_argument);
  EXPECT_NO_THROW(run(nothing, 1, 512, 2, 2));
}

TEST(Cluster, BlocksHaveTheirOwnMemoryBarriersAndRegisters) {
  expect_no_fault(
      [] {
        const auto block = static_cast<std::uint32_t>(block_index());
        set_max_registers(thread_index() < 128 ? 24 : 240, thread_index() >= 128, here());
        store_word(static_cast<std::uint32_t>(4 * thread_index()), block);
        bar_sync(here());
        EXPECT_EQ(load_word(static_cast<std::uint32_t>(4 * ((thread_index() + 1) % 384))), block);
        bar_sync(1, 384, here());
        if (cluster_rank() == 0) bar_sync(2, 384, here());
      },
      384);
}

TEST(Cluster, MappedAddressesAreForFewInstructions) {
  const std::string text = "a shared::cluster address, and this instruction takes those of its own block";
  const auto refused = [&](const std::function<void(std::uint32_t)>& use) {
    expect_fault(FaultKind::shared_out_of_bounds, text, [&] {
      make_barriers(1);
      if (is(0, 0)) use(peer(own()));
      cluster_sync(here());
    });
    expect_fault(FaultKind::shared_out_of_bounds, text, [&] {  // also where it is the own block's
      make_barriers(1);
      if (is(0, 0)) use(map_shared(own(), 0, here()));
      cluster_sync(here());
    });
  };
  refused([](std::uint32_t at) { load_shared(at, &at, 4, "ld.shared.b32", here()); });
  refused([](std::uint32_t at) { store_shared(at, &at, 4, "st.shared.b32", here()); });
  refused([](std::uint32_t at) { mbarrier_init(at, 1, here()); });
  refused([](std::uint32_t at) { mbarrier_arrive(at + kBarriers, here()); });
  refused([](std::uint32_t at) { mbarrier_wait_cluster(at + kBarriers, 0, here()); });
  refused([](std::uint32_t at) { cp_async_16(at, nullptr, false, here()); });
  refused([](std::uint32_t at) { map_shared(at, 1, here()); });
  refused([](std::uint32_t at) { bulk_copy_to_cluster(at, at, 16, at + kBarriers, here()); });
  expect_fault(FaultKind::shared_out_of_bounds, "block 2 of a cluster of 2", [] { map_shared(own(), 2, here()); });
}

TEST(ClusterBarrier, OrdersAccesses) {
  const auto body = [](bool ordered) {
    return [ordered] {
      if (is(1, 77)) store_word(kSource, 4);
      cluster_sync(here());
      if (is(1, 0)) store_word(kSource, 5);
      if (ordered) cluster_sync(here());
      const std::uint32_t value = is(1, 77) ? load_word(kSource) : 5;
      EXPECT_TRUE(!ordered || value == 5);
    };
  };
  expect_no_fault(body(true));
  expect_fault(FaultKind::shared_race, "of block 1", body(false));
}

TEST(ClusterBarrier, DoesNotWaitForThreadsThatHaveExited) {
  expect_no_fault([] {
    cluster_sync(here());
    if (thread_index() < 32) return;
    cluster_sync(here());
  });
}

TEST(ClusterBarrier, AHangNamesTheBlocks) {
  expect_fault(FaultKind::deadlock, "mbarrier at 0x1008400 of block 1: phase 0 lacks 1 of 1 arrivals", [] {
    make_barriers(1);
    if (is(1, 0)) mbarrier_wait_cluster(barrier(), 0, here());
    cluster_sync(here());
  });
  expect_fault(FaultKind::deadlock, "warp 2 of block 0 waits at barrier.cluster", [] {
    make_barriers(1);
    if (is(1, 0)) mbarrier_wait(barrier(), 0, here());
    cluster_sync(here());
  });
}

// Arrivals.

/// Block 1 reads its memory and tells block 0, which copies there.
Body copy_after_reads(bool arrives, bool waits_for_cluster) {
  return [=] {
    make_barriers(1, 1);
    for (int i = thread_index(); i < kBytes / 4; i += 128) store_word(static_cast<std::uint32_t>(4 * i), 1);
    for (int i = thread_index(); i < kBytes / 4; i += 128) store_word(kSource + static_cast<std::uint32_t>(4 * i), 2);
    fence_proxy_async();
    cluster_sync(here());
    if (is(1, 0)) {
      mbarrier_arrive_expect_tx(barrier(), kBytes, here());
      EXPECT_EQ(load_word(0), 1u);
      if (arrives) mbarrier_arrive_remote(peer(other_barrier()), here());
    }
    if (is(0, 64)) {
      if (arrives && waits_for_cluster) mbarrier_wait_cluster(other_barrier(), 0, here());
      if (arrives && !waits_for_cluster) mbarrier_wait(other_barrier(), 0, here());
      bulk_copy_to_cluster(peer(own()), own(kSource), kBytes, peer(barrier()), here());
    }
    if (cluster_rank() == 1) mbarrier_wait(barrier(), 0, here());
    cluster_sync(here());
  };
}

TEST(RemoteArrival, HandsOnWhatItsThreadKnows) {
  expect_no_fault(copy_after_reads(true, true));
  expect_fault(FaultKind::shared_race, "of block 1", copy_after_reads(true, false));
}

/// Who comes after the copy has begun finds it in flight.
void expect_race_or_in_flight(const Body& body) {
  int races = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    try {
      run(body, seed);
      ADD_FAILURE() << "no fault under seed " << seed;
    } catch (const Fault& fault) {
      EXPECT_TRUE(fault.kind == FaultKind::shared_race || fault.kind == FaultKind::shared_in_flight) << fault.what();
      if (fault.kind == FaultKind::shared_race) ++races;
    }
  }
  EXPECT_GT(races, 0);
}

TEST(RemoteArrival, WithoutItTheRaceIsNamed) {
  expect_race_or_in_flight(copy_after_reads(false, false));
}

/// Block 1 runs `use`, its thread 33 tells block 0, which copies over what was used.
Body copy_after(const Body& use, const Body& tell) {
  return [=] {
    make_barriers(1);
    store_word(static_cast<std::uint32_t>(4 * thread_index()), 1);
    store_word(kSource + static_cast<std::uint32_t>(4 * thread_index()), 2);
    fence_proxy_async();
    cluster_sync(here());
    if (cluster_rank() == 1) use();
    tell();
    if (is(0, 1)) bulk_copy_to_cluster(peer(own()), own(kSource), kBytes, peer(barrier()), here());
    if (is(1, 0)) mbarrier_arrive_expect_tx(barrier(), kBytes, here());
    if (cluster_rank() == 1) {
      mbarrier_wait(barrier(), 0, here());
      EXPECT_EQ(load_word(static_cast<std::uint32_t>(4 * thread_index())), 2u);
    }
    cluster_sync(here());
  };
}

void tell_remotely() {
  if (is(1, 33)) mbarrier_arrive_remote(peer(other_barrier()), here());
  if (is(0, 1)) mbarrier_wait_cluster(other_barrier(), 0, here());
}

TEST(RemoteArrival, HandsOnWhatTheBlockDidBeforeItsBarriers) {
  const Body read = [] {
    EXPECT_EQ(load_word(static_cast<std::uint32_t>(4 * thread_index())), 1u);
    bar_sync(here());
  };
  const Body read_apart = [] {
    load_word(static_cast<std::uint32_t>(4 * thread_index()));
    if (thread_index() / 32 == 1) bar_warp_sync(here());
  };
  const Body store = [] {
    store_word(static_cast<std::uint32_t>(4 * thread_index()), 5);
    fence_proxy_async();
    bar_sync(here());
  };
  const Body store_unfenced = [] {
    store_word(static_cast<std::uint32_t>(4 * thread_index()), 5);
    bar_sync(here());
  };
  for (const Body& tell : {Body(tell_remotely), Body([] { cluster_sync(here()); })}) {
    expect_no_fault(copy_after(read, tell));
    expect_no_fault(copy_after(store, tell));
    expect_fault(FaultKind::unfenced, "of block 1 stored here, and no fence.proxy.async is in between",
                 copy_after(store_unfenced, tell));
    // The copying block's fence is of its own memory.
    expect_fault(FaultKind::unfenced, "of block 1 stored here, and no fence.proxy.async is in between",
                 copy_after(store_unfenced, [tell] {
                   tell();
                   if (cluster_rank() == 0) fence_proxy_async();
                 }));
  }
  expect_race_or_in_flight(copy_after(read_apart, tell_remotely));
  expect_no_fault(copy_after(read_apart, [] { cluster_sync(here()); }));
  expect_race_or_in_flight(copy_after(read, [] {  // barriers of the copying block
    if (cluster_rank() == 0) bar_sync(here());
    if (cluster_rank() == 0) bar_sync(here());
  }));
}

TEST(RemoteArrival, CountsAsAnyOther) {
  expect_no_fault([] {
    make_barriers(2);
    if (thread_index() == 0) {
      mbarrier_arrive(barrier(), here());
      mbarrier_arrive_remote(peer(barrier()), here());
    }
    mbarrier_wait_cluster(barrier(), 0, here());
    cluster_sync(here());
  });
  expect_no_fault([] {  // an address that is not mapped is the own block's
    make_barriers(1);
    if (thread_index() == 0) mbarrier_arrive_remote(barrier(), here());
    if (thread_index() == 1) mbarrier_arrive_remote(map_shared(other_barrier(), cluster_rank(), here()), here());
    mbarrier_wait(barrier(), 0, here());
    mbarrier_wait(other_barrier(), 0, here());
  });
  expect_fault(FaultKind::barrier_misuse,
               "one arrival more than the count of the phase; mbarrier at 0x1008400 of block 1", [] {
                 make_barriers(1);
                 if (is(0, 0)) {
                   mbarrier_arrive_expect_tx_remote(peer(barrier()), 16, here());
                   mbarrier_arrive_remote(peer(barrier()), here());
                 }
                 cluster_sync(here());
               });
}

TEST(RemoteArrival, WantsAnInitialisationThatItKnowsOf) {
  const auto body = [](bool cluster) {
    return [cluster] {
      if (is(0, 0)) mbarrier_init(barrier(), 1, here());
      cluster_sync(here());
      if (is(1, 0)) {
        mbarrier_init(barrier(), 1, here());
        mbarrier_arrive_remote(peer(barrier()), here());
        mbarrier_wait_cluster(barrier(), 0, here());
      }
      if (is(0, 0)) {
        if (cluster) mbarrier_wait_cluster(barrier(), 0, here());
        if (!cluster) mbarrier_wait(barrier(), 0, here());
        mbarrier_arrive_remote(peer(barrier()), here());
      }
    };
  };
  expect_no_fault(body(true));
  expect_fault(FaultKind::shared_race, "thread 0 of block 1 initialised this mbarrier", body(false));
}

// Copies.

void fill_source(std::uint32_t first) {
  for (int i = thread_index(); i < kBytes / 4; i += 128) {
    store_word(kSource + static_cast<std::uint32_t>(4 * i), first + static_cast<std::uint32_t>(i));
  }
}

void expect_target(std::uint32_t first) {
  for (int i = thread_index(); i < kBytes / 4; i += 128) {
    EXPECT_EQ(load_word(static_cast<std::uint32_t>(4 * i)), first + static_cast<std::uint32_t>(i));
  }
}

void copy_to_peer() {
  bulk_copy_to_cluster(peer(own()), own(kSource), kBytes, peer(barrier()), here());
}

/// Each block copies to the other. `mistake` runs in all threads once the copies have been issued.
Body exchange(const Body& mistake, bool fences = true, bool waits = true, bool syncs = true) {
  return [=] {
    make_barriers(1);
    fill_source(static_cast<std::uint32_t>(1000 * cluster_rank()));
    if (fences) fence_proxy_async();
    bar_sync(here());
    if (thread_index() == 0) {
      mbarrier_arrive_expect_tx(barrier(), kBytes, here());
      copy_to_peer();
    }
    mistake();
    if (waits) mbarrier_wait(barrier(), 0, here());
    if (waits) expect_target(static_cast<std::uint32_t>(1000 * (1 - cluster_rank())));
    if (syncs) cluster_sync(here());
  };
}

TEST(ClusterCopy, Delivers) {
  expect_no_fault(exchange([] {}));
  expect_no_fault([] {  // bytes that are announced by the sender
    make_barriers(1);
    fill_source(7);
    fence_proxy_async();
    bar_sync(here());
    if (is(0, 0)) {
      mbarrier_arrive_expect_tx_remote(peer(barrier()), kBytes, here());
      copy_to_peer();
    }
    if (cluster_rank() == 1) {
      mbarrier_wait_cluster(barrier(), 0, here());
      expect_target(7);
    }
    cluster_sync(here());
  });
}

TEST(ClusterCopy, TargetsAreInFlightUntilTheirPhase) {
  expect_fault(FaultKind::shared_in_flight, "here", exchange([] { cluster_sync(here()), load_word(0); }));
  expect_fault(FaultKind::shared_in_flight, "here", exchange([] { cluster_sync(here()), store_word(0, 1); }));
}

TEST(ClusterCopy, WantsTheFenceOfTheSource) {
  expect_fault(FaultKind::unfenced, "stored here, and no fence.proxy.async is in between", exchange([] {}, false));
}

TEST(ClusterCopy, SourcesStayUntilTheTargetsPhase) {
  const std::string text = "may still read here: this thread does not know that its phase is complete";
  expect_fault(FaultKind::source_overwritten, text, exchange([] {
                 if (thread_index() == 0) store_word(kSource, 1);
               }));
  // The phase of the own barrier tells of the other direction.
  expect_fault(FaultKind::source_overwritten, text, exchange([] {
                 mbarrier_wait(barrier(), 0, here());
                 if (thread_index() == 0) store_word(kSource, 1);
               }));
  // The other block knows, and says so.
  expect_no_fault(exchange([] {
    mbarrier_wait(barrier(), 0, here());
    if (thread_index() == 5) mbarrier_arrive_remote(peer(other_barrier()), here());
    mbarrier_wait_cluster(other_barrier(), 0, here());
    store_word(kSource + static_cast<std::uint32_t>(4 * thread_index()), 1);
  }));
}

TEST(ClusterCopy, Misuse) {
  const auto refused = [](FaultKind kind, const std::string& text, const Body& copy) {
    expect_fault(kind, text, [&] {
      make_barriers(1);
      fill_source(0);
      fence_proxy_async();
      cluster_sync(here());
      if (is(0, 0)) copy();
      cluster_sync(here());
    });
  };
  refused(FaultKind::barrier_misuse, "an mbarrier of block 0 for a copy to block 1",
          [=] { bulk_copy_to_cluster(peer(own()), own(kSource), 16, barrier(), here()); });
  refused(FaultKind::misaligned, "16-byte",
          [=] { bulk_copy_to_cluster(peer(own(8)), own(kSource), 16, peer(barrier()), here()); });
  refused(FaultKind::misaligned, "16-byte",
          [=] { bulk_copy_to_cluster(peer(own()), own(kSource + 8), 16, peer(barrier()), here()); });
  refused(FaultKind::misaligned, "multiple of 16",
          [=] { bulk_copy_to_cluster(peer(own()), own(kSource), 24, peer(barrier()), here()); });
  refused(FaultKind::shared_out_of_bounds, "dynamic shared memory is [0x1000400, 0x1008800)",
          [=] { bulk_copy_to_cluster(peer(own(kSharedBytes - 16)), own(kSource), 32, peer(barrier()), here()); });
  refused(FaultKind::shared_out_of_bounds, "dynamic shared memory is [0x400, 0x8800)",
          [=] { bulk_copy_to_cluster(peer(own()), own(kSharedBytes - 16), 32, peer(barrier()), here()); });
  refused(FaultKind::barrier_misuse, "an mbarrier",
          [=] { bulk_copy_to_cluster(peer(barrier()), own(kSource), 16, peer(barrier()), here()); });
  refused(FaultKind::shared_uninitialised, "nobody has written",
          [=] { bulk_copy_to_cluster(peer(own()), own(kSource + kBytes), 16, peer(barrier()), here()); });
  expect_fault(FaultKind::unfenced, "no fence.mbarrier_init", [] {
    fill_source(0);
    fence_proxy_async();
    if (thread_index() == 0) mbarrier_init(barrier(), 1, here());
    cluster_sync(here());
    if (is(0, 0)) copy_to_peer();
    cluster_sync(here());
  });
}

// The end of a block.

TEST(ClusterExit, NobodyMayStillCome) {
  const Body arrives = [] {
    make_barriers(1);
    if (is(0, 0)) mbarrier_arrive_remote(peer(barrier()), here());
  };
  expect_fault(FaultKind::exited_block, "block", arrives);
  expect_no_fault([=] {
    arrives();
    cluster_sync(here());
  });
  expect_no_fault([=] {
    arrives();
    if (is(1, 9)) mbarrier_wait_cluster(barrier(), 0, here());
  });
}

TEST(ClusterExit, NoCopyMayStillBeUnderWay) {
  // The target has waited, but nobody has told the source.
  expect_fault(FaultKind::exited_block, "", exchange([] {}, true, true, false));
  expect_no_fault(exchange([] {}));
  expect_fault(FaultKind::exited_block, "", exchange([] {}, true, false, true));
}

TEST(ClusterExit, IsNamedWhenItHasHappened) {
  bool named = false;
  for (std::uint64_t seed = 0; seed < 4 * kSeeds; ++seed) {
    try {
      run(
          [] {
            make_barriers(1);
            if (cluster_rank() == 1) return;
            for (int i = 0; i < 512; ++i) shfl_bfly_b32(0, 1, here());
            if (is(0, 0)) mbarrier_arrive_remote(peer(barrier()), here());
          },
          seed);
      ADD_FAILURE() << "no fault under seed " << seed;
    } catch (const Fault& fault) {
      EXPECT_EQ(fault.kind, FaultKind::exited_block) << fault.what();
      const std::string text = "shared memory of a block that has exited: block 1";
      named = named || std::string(fault.what()).find(text) != std::string::npos;
    }
  }
  EXPECT_TRUE(named);
}

// wgmma with A transposed: A = [k, m]^T from slabs of 64 columns.

float a_value(int row, int k) {
  return static_cast<float>((row * 7 + k * 3) % 11 - 5);
}
float b_value(int k, int n) {
  return static_cast<float>((k * 5 + n * 2) % 13 - 6);
}

/// Of a place in this block's memory; without `masked` the rank is left in the address.
std::uint64_t descriptor(std::uint32_t offset, std::uint32_t leading, bool masked = true) {
  const std::uint32_t address = masked ? without_rank(own(offset)) : own(offset);
  return std::uint64_t{1} << 62 | std::uint64_t{1024 / 16} << 32 | std::uint64_t{leading / 16} << 16 | address / 16;
}

void store_half(Half half, std::uint32_t address, float value) {
  const std::uint16_t bits = half == Half::bf16 ? convert_bf16(value) : convert_f16(value);
  store_shared(swizzled(address & ~15u, Swizzle::bytes_128) | (address & 15u), &bits, 2, "st.shared.b16", here());
}

constexpr int kDepth = 64;
constexpr std::uint32_t kSlab = kDepth * 128;
constexpr std::uint32_t kB = 2 * kSlab;  // offset

/// [kDepth][columns] in slabs of 64 columns.
template <class Value>
void store_slabs(Half half, std::uint32_t tile, int columns, const Value& value) {
  for (int i = thread_index(); i < kDepth * columns; i += 128) {
    const int k = i / columns;
    const int column = i % columns;
    const int offset = column / 64 * static_cast<int>(kSlab) + k * 128 + column % 64 * 2;
    store_half(half, tile + static_cast<std::uint32_t>(offset), value(k, column));
  }
}

void expect_transposed_product(const float* d, int n, int slab) {
  for (int r = 0; r < n / 2; ++r) {
    const int row = thread_index() / 32 * 16 + thread_index() % 32 / 4 + r / 2 % 2 * 8;
    const int column = r / 4 * 8 + thread_index() % 4 * 2 + r % 2;
    float sum = 0;
    for (int k = 0; k < kDepth; ++k) sum += a_value(64 * slab + row, k) * b_value(k, column);
    ASSERT_EQ(d[r], sum) << row << ' ' << column;
  }
}

void multiply_transposed(Half half, int n, int slab, bool masked = true) {
  store_slabs(half, own(), 128, [](int k, int m) { return a_value(m, k); });
  store_slabs(half, own(kB), n, b_value);
  fence_proxy_async();
  bar_sync(here());
  float d[64];
  wgmma_fence(here());
  for (std::uint32_t step = 0; step < kDepth / 16; ++step) {
    const std::uint32_t rows = step * 16 * 128;
    const std::uint64_t a = descriptor(static_cast<std::uint32_t>(slab) * kSlab + rows, kSlab, masked);
    const std::uint64_t b = descriptor(kB + rows, kSlab, masked);
    wgmma({d, nullptr, a, b, n, half, true, step != 0, true}, here());
  }
  wgmma_commit(here());
  wgmma_wait(0, here());
  expect_transposed_product(d, n, slab);
}

TEST(WgmmaTransposedA, IsThePlainProduct) {
  for (const Half half : {Half::f16, Half::bf16}) {
    for (const int n : {16, 128}) {
      for (const int slab : {0, 1}) {
        run([=] { multiply_transposed(half, n, slab); }, 1, 128, 1, 1);
      }
    }
  }
}

TEST(WgmmaTransposedA, InBothBlocksOfACluster) {
  for (const int n : {64, 128}) {
    run([=] { multiply_transposed(Half::bf16, n, cluster_rank()); });
  }
}

/// Of an address with the rank in it, the rank lands in the leading byte offset, which several slabs need.
TEST(WgmmaDescriptor, HasNoRoomForTheRank) {
  const auto body = [](int rank, int n) {
    return [=] {
      if (cluster_rank() == rank) multiply_transposed(Half::bf16, n, 0, false);
    };
  };
  expect_fault(FaultKind::bad_descriptor, "slabs of 64 columns 8448 bytes apart", body(1, 128));
  expect_no_fault(body(0, 128));
  expect_no_fault(body(1, 64));
}

TEST(WgmmaTransposedA, ASlabBeginsAtAWholeRow) {
  expect_fault(FaultKind::bad_descriptor, "in the middle of a row", [] {
    float d[8];
    wgmma_fence(here());
    wgmma({d, nullptr, descriptor(32, 16), descriptor(kB, 16), 16, Half::bf16, true, false, true}, here());
  });
}

/// Block 1 multiplies, and its warps tell block 0, which copies over A.
Body copy_after_products(bool waits) {
  return [=] {
    make_barriers(1, 4);
    store_slabs(Half::bf16, own(), 64, [](int k, int m) { return a_value(m, k); });
    store_slabs(Half::bf16, own(kB), 16, b_value);
    fence_proxy_async();
    cluster_sync(here());
    if (cluster_rank() == 1) {
      float d[8];
      wgmma_fence(here());
      wgmma({d, nullptr, descriptor(0, 16), descriptor(kB, 16), 16, Half::bf16, true, false, true}, here());
      wgmma_commit(here());
      if (waits) wgmma_wait(0, here());
      if (thread_index() % 32 == 0) mbarrier_arrive_remote(peer(other_barrier()), here());
      if (thread_index() == 0) mbarrier_arrive_expect_tx(barrier(), kBytes, here());
      mbarrier_wait(barrier(), 0, here());
      wgmma_wait(0, here());
    }
    if (is(0, 1)) {
      mbarrier_wait_cluster(other_barrier(), 0, here());
      bulk_copy_to_cluster(peer(own()), own(kSource), kBytes, peer(barrier()), here());
    }
    cluster_sync(here());
  };
}

TEST(RemoteArrival, HandsOnWhichProductsAreOver) {
  expect_no_fault(copy_after_products(true));
  expect_fault(FaultKind::source_overwritten, "a product of warpgroup 0 of block 1", copy_after_products(false));
}

}  // namespace
}  // namespace emulator
