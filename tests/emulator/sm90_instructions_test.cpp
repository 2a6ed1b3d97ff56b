// The asynchronous instructions of Hopper: what they compute, and the rules of their use.

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
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

constexpr std::uint32_t kShared = SharedMemory::kBase;
constexpr std::uint32_t kBarrier = kShared + 32768;
constexpr int kSharedBytes = 32768 + 1024;

Site here(const Site& site = Site::current()) {
  return site;
}

void call(const void* body) {
  (*static_cast<const Body*>(body))();
}

void run(const Body& body, int threads, std::uint64_t seed, Memory& memory) {
  launch(call, &body, memory, {1, threads, kSharedBytes, seed, 1});
}

void run(const Body& body, int threads = 128, std::uint64_t seed = 1) {
  Memory memory;
  run(body, threads, seed, memory);
}

/// The fault of every one of some seeds, which must be of one kind.
void expect_fault(FaultKind kind, Memory& memory, const Body& body, int threads = 128) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    try {
      run(body, threads, seed, memory);
      ADD_FAILURE() << "no fault under seed " << seed;
    } catch (const Fault& fault) {
      EXPECT_EQ(fault.kind, kind) << fault.what();
    }
  }
}

/// Which of the two it is depends on who comes first.
void expect_overwritten_or_race(const Body& body) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    try {
      run(body, 128, seed);
      ADD_FAILURE() << "no fault under seed " << seed;
    } catch (const Fault& fault) {
      EXPECT_TRUE(fault.kind == FaultKind::source_overwritten || fault.kind == FaultKind::shared_race) << fault.what();
    }
  }
}

void expect_fault(FaultKind kind, const Body& body, int threads = 128) {
  Memory memory;
  expect_fault(kind, memory, body, threads);
}

void store_word(std::uint32_t offset, std::uint32_t value) {
  store_shared(kShared + offset, &value, 4, "st.shared.b32", here());
}

std::uint32_t load_word(std::uint32_t offset) {
  std::uint32_t value = 0;
  load_shared(kShared + offset, &value, 4, "ld.shared.b32", here());
  return value;
}

void make_barrier(int count) {
  if (thread_index() == 0) {
    mbarrier_init(kBarrier, count, here());
    fence_mbarrier_init();
  }
  bar_sync(here());
}

// mbarriers.

TEST(Mbarrier, PhasesAlternateAndOrderAccesses) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    EXPECT_NO_THROW(run(
        [] {
          make_barrier(32);
          mbarrier_wait(kBarrier, 1, here());  // nothing has completed: passes at once
          bar_sync(here());
          if (thread_index() < 32) {
            store_word(static_cast<std::uint32_t>(4 * thread_index()), 7);
            mbarrier_arrive(kBarrier, here());
          } else {
            mbarrier_wait(kBarrier, 0, here());
            EXPECT_EQ(load_word(static_cast<std::uint32_t>(4 * (thread_index() % 32))), 7u);
          }
        },
        128, seed));
  }
}

TEST(Mbarrier, ATestTellsWhetherAPhaseIsComplete) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    EXPECT_NO_THROW(run(
        [] {
          make_barrier(1);
          if (thread_index() == 0) {
            EXPECT_TRUE(mbarrier_test(kBarrier, 1, here()));
            EXPECT_FALSE(mbarrier_test(kBarrier, 0, here()));
          }
          bar_sync(here());
          if (thread_index() == 0) mbarrier_arrive(kBarrier, here());
          if (thread_index() == 33) {
            while (!mbarrier_test(kBarrier, 0, here())) continue;
          }
        },
        128, seed));
  }
}

TEST(Mbarrier, ATestOrdersNothing) {
  expect_fault(FaultKind::shared_race, [] {
    make_barrier(1);
    if (thread_index() == 0) {
      store_word(0, 1);
      mbarrier_arrive(kBarrier, here());
    }
    if (thread_index() != 33) return;
    while (!mbarrier_test(kBarrier, 0, here())) continue;
    load_word(0);
  });
}

TEST(Mbarrier, OnlyThoseWhoWaitedAreOrdered) {
  expect_fault(FaultKind::shared_race, [] {
    make_barrier(1);
    if (thread_index() == 0) {
      store_word(0, 1);
      mbarrier_arrive(kBarrier, here());
    }
    if (thread_index() == 33) mbarrier_wait(kBarrier, 0, here());
    if (thread_index() < 32) return;
    shfl_bfly_b32(0, 1, here());
    if (thread_index() == 34) load_word(0);
  });
}

TEST(Mbarrier, Misuse) {
  expect_fault(FaultKind::barrier_misuse, [] { mbarrier_arrive(kBarrier, here()); });
  expect_fault(FaultKind::barrier_misuse, [] { mbarrier_wait(kBarrier, 0, here()); });
  expect_fault(FaultKind::barrier_misuse, [] { mbarrier_test(kBarrier, 0, here()); });
  expect_fault(FaultKind::barrier_misuse, [] {
    make_barrier(1);
    make_barrier(1);
  });
  expect_fault(FaultKind::barrier_misuse, [] {
    make_barrier(1);
    if (thread_index() != 0) return;
    mbarrier_arrive_expect_tx(kBarrier, 16, here());
    mbarrier_arrive(kBarrier, here());
  });
  expect_fault(FaultKind::barrier_misuse, [] {
    if (thread_index() == 0) mbarrier_init(kBarrier, 0, here());
  });
  expect_fault(FaultKind::barrier_misuse, [] {
    make_barrier(1);
    const std::uint32_t value = 0;
    if (thread_index() == 5) store_shared(kBarrier + 4, &value, 4, "st.shared.b32", here());
  });
  expect_fault(FaultKind::misaligned, [] {
    if (thread_index() == 0) mbarrier_init(kBarrier + 4, 1, here());
  });
  expect_fault(
      FaultKind::shared_race,
      [] {
        if (thread_index() == 0) mbarrier_init(kBarrier, 1, here());
        shfl_bfly_b32(0, 1, here());
        if (thread_index() == 1) mbarrier_arrive(kBarrier, here());
      },
      32);
}

TEST(Mbarrier, AHangTellsTheStateOfTheBarrier) {
  try {
    run([] {
      make_barrier(2);
      if (thread_index() == 0) mbarrier_arrive_expect_tx(kBarrier, 512, here());
      if (thread_index() == 64) mbarrier_wait(kBarrier, 0, here());
    });
    ADD_FAILURE() << "no fault";
  } catch (const Fault& fault) {
    EXPECT_EQ(fault.kind, FaultKind::deadlock);
    const std::string text = fault.what();
    EXPECT_NE(text.find("phase 0 lacks 1 of 2 arrivals and 512 bytes"), std::string::npos) << text;
    EXPECT_NE(text.find("warp 2 waits"), std::string::npos) << text;
  }
}

// Named barriers and registers.

TEST(NamedBarrier, ArriversDoNotWait) {
  EXPECT_NO_THROW(run(
      [] {
        if (thread_index() < 64) {
          store_word(static_cast<std::uint32_t>(4 * thread_index()), 3);
          bar_arrive(2, 128, here());
        } else {
          bar_sync(2, 128, here());
          EXPECT_EQ(load_word(static_cast<std::uint32_t>(4 * (thread_index() - 64))), 3u);
        }
      },
      192 - 64));
}

TEST(NamedBarrier, Misuse) {
  expect_fault(FaultKind::barrier_misuse, [] { bar_sync(2, thread_index() < 64 ? 128 : 96, here()); });
  expect_fault(FaultKind::barrier_misuse, [] { bar_sync(16, 128, here()); });
  expect_fault(FaultKind::barrier_misuse, [] { bar_sync(1, 100, here()); });
  expect_fault(FaultKind::barrier_misuse, [] {
    if (thread_index() >= 32) return;
    bar_arrive(1, 128, here());
    bar_arrive(1, 128, here());
  });
  expect_fault(FaultKind::deadlock, [] {
    if (thread_index() < 96) bar_sync(1, 128, here());
  });
}

TEST(Registers, AreHandedFromWarpgroupToWarpgroup) {
  const auto change = [](int giving, int taking) {
    return [=] { set_max_registers(thread_index() < 128 ? giving : taking, thread_index() >= 128, here()); };
  };
  EXPECT_NO_THROW(run(change(24, 240), 384));
  expect_fault(FaultKind::deadlock, change(24, 248), 384);
  expect_fault(FaultKind::register_pool, change(28, 240), 384);
  expect_fault(FaultKind::register_pool, change(176, 240), 384);
  expect_fault(
      FaultKind::register_pool, [] { set_max_registers(thread_index() < 32 ? 40 : 24, false, here()); }, 512);
  expect_fault(FaultKind::register_pool, [] {
    if (thread_index() >= 32) set_max_registers(24, false, here());
  });
}

// The copy engine.

/// A [3, 20, 72] tensor of 16-bit elements that count from 1; a box has 64 columns and 8 rows.
struct Tensor {
  std::vector<std::uint16_t> values;
  Memory memory;
  TensorShape shape;
  alignas(64) unsigned char map[128];

  Tensor() : values(3 * 20 * 72) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(i + 1);
    shape.base = memory.add_input("tensor", std::as_bytes(std::span(values)));
    shape.dims = {72, 20, 3, 1};
    shape.strides = {144, 20 * 144, 3 * 20 * 144};
    shape.box = {64, 8, 1, 1};
    encode_tensor_map(map, shape);
  }

  void load(int column, int row, int slice, std::uint32_t target = kShared) const {
    const int at[4] = {column, row, slice, 0};
    tma_load(target, map, kBarrier, 4, at, here());
  }
  std::uint16_t expected(int column, int row, int slice) const {
    const bool inside = column >= 0 && column < 72 && row >= 0 && row < 20;
    return inside ? values[static_cast<std::size_t>((slice * 20 + row) * 72 + column)] : std::uint16_t{0};
  }
};

TEST(TensorCopy, SwizzlesAndFillsWithZeros) {
  Tensor tensor;
  for (const auto& [column, row] : {std::array{0, 0}, std::array{64, 16}, std::array{-8, -3}}) {
    run(
        [&, column = column, row = row] {
          make_barrier(1);
          if (thread_index() == 0) {
            mbarrier_arrive_expect_tx(kBarrier, 1024, here());
            tensor.load(column, row, 1);
          }
          mbarrier_wait(kBarrier, 0, here());
          for (int i = thread_index(); i < 8 * 64; i += 128) {
            const int r = i / 64;
            const int c = i % 64;
            std::uint16_t value = 0;
            load_shared(kShared + static_cast<std::uint32_t>(r * 128 + ((c / 8) ^ r) * 16 + c % 8 * 2), &value, 2,
                        "ld.shared.b16", here());
            EXPECT_EQ(value, tensor.expected(column + c, row + r, 1)) << r << ' ' << c;
          }
        },
        128, 1, tensor.memory);
  }
}

TEST(TensorCopy, Rules) {
  Tensor tensor;
  const auto by_one = [&](const std::function<void()>& body) {
    return [&tensor, body] {
      make_barrier(1);
      if (thread_index() == 0) body();
    };
  };
  const auto expect = [&](FaultKind kind, const std::function<void()>& body) {
    expect_fault(kind, tensor.memory, by_one(body));
  };
  const auto announce = [](int bytes) { mbarrier_arrive_expect_tx(kBarrier, bytes, here()); };
  expect(FaultKind::shared_in_flight, [&] {
    announce(1024);
    tensor.load(0, 0, 0);
    load_word(0);
  });
  expect(FaultKind::shared_in_flight, [&] {
    announce(1024);
    tensor.load(0, 0, 0);
    store_word(4, 1);
  });
  expect(FaultKind::shared_in_flight, [&] {
    announce(2048);
    tensor.load(0, 0, 0);
    tensor.load(0, 8, 0);
    mbarrier_wait(kBarrier, 0, here());
  });
  expect(FaultKind::deadlock, [&] {
    announce(1040);
    tensor.load(0, 0, 0);
    mbarrier_wait(kBarrier, 0, here());
  });
  expect(FaultKind::copies_at_exit, [&] {
    announce(1024);
    tensor.load(0, 0, 0);
  });
  expect(FaultKind::misaligned, [&] { tensor.load(0, 0, 0, kShared + 64); });
  expect(FaultKind::shared_out_of_bounds, [&] { tensor.load(0, 0, 0, kShared + kSharedBytes - 512); });
  expect(FaultKind::barrier_misuse, [&] { tensor.load(0, 0, 0, kBarrier); });
  expect(FaultKind::unfenced, [&] {
    store_word(0, 1);
    tensor.load(0, 0, 0);
  });
  expect(FaultKind::bad_descriptor, [&] {
    const int at[5] = {};
    tma_load(kShared, tensor.map, kBarrier, 5, at, here());
  });
  expect_fault(FaultKind::unfenced, tensor.memory, [&] {
    if (thread_index() != 0) return;
    mbarrier_init(kBarrier, 1, here());
    tensor.load(0, 0, 0);
  });
  TensorShape larger = tensor.shape;
  larger.dims[2] = 4;
  Tensor past;
  past.shape = larger;
  past.shape.base = tensor.shape.base;
  encode_tensor_map(past.map, past.shape);
  expect(FaultKind::global_out_of_bounds, [&] { past.load(0, 0, 3); });
}

TEST(TensorCopy, AStoreNeedsAFenceBeforeTheCopyAndReadersABarrier) {
  Tensor tensor;
  const Body body = [&] {
    make_barrier(1);
    store_word(static_cast<std::uint32_t>(4 * thread_index()), 1);
    fence_proxy_async();
    bar_sync(here());
    if (thread_index() == 0) {
      mbarrier_arrive_expect_tx(kBarrier, 1024, here());
      tensor.load(0, 0, 0);
      mbarrier_wait(kBarrier, 0, here());
    }
  };
  EXPECT_NO_THROW(run(body, 128, 1, tensor.memory));
  expect_fault(FaultKind::shared_race, tensor.memory, [&] {
    make_barrier(1);
    if (thread_index() == 0) {
      mbarrier_arrive_expect_tx(kBarrier, 1024, here());
      tensor.load(0, 0, 0);
    }
    mbarrier_wait(kBarrier, 0, here());
    load_word(static_cast<std::uint32_t>(4 * thread_index()));
    bar_warp_sync(here());
    if (thread_index() == 0) {
      mbarrier_arrive_expect_tx(kBarrier, 1024, here());
      tensor.load(0, 0, 0);
      mbarrier_wait(kBarrier, 1, here());
    }
  });
}

// Copies and additions without a tensor map.

constexpr int kFloats = 64;

/// Two regions of 64 floats: `input` counts from 1, which can only be read; of `sums` the first half has been written.
struct Floats {
  std::vector<float> values = std::vector<float>(kFloats);
  Memory memory;
  const float* input;
  float* sums;

  Floats() {
    for (int i = 0; i < kFloats; ++i) values[static_cast<std::size_t>(i)] = static_cast<float>(i + 1);
    input = reinterpret_cast<const float*>(memory.add_input("input", std::as_bytes(std::span(values))));
    sums = reinterpret_cast<float*>(memory.add_output("sums", kFloats * sizeof(float)));
    memory.write(sums, reinterpret_cast<const std::byte*>(values.data()), kFloats / 2 * sizeof(float));
  }
};

Body by_first_thread(const std::function<void()>& body) {
  return [body] {
    make_barrier(1);
    if (thread_index() == 0) body();
  };
}

TEST(BulkCopy, BytesLandInTheirOrder) {
  Floats floats;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    run(
        [&] {
          make_barrier(1);
          if (thread_index() == 0) {
            mbarrier_arrive_expect_tx(kBarrier, 144, here());
            bulk_load(kShared + 16, floats.input + 4, 144, kBarrier, here());
          }
          mbarrier_wait(kBarrier, 0, here());
          if (thread_index() >= 36) return;
          EXPECT_EQ(std::bit_cast<float>(load_word(16 + 4 * static_cast<std::uint32_t>(thread_index()))),
                    static_cast<float>(thread_index() + 5));
        },
        128, seed, floats.memory);
  }
}

TEST(BulkCopy, Rules) {
  Floats floats;
  const auto expect = [&](FaultKind kind, const std::function<void()>& body) {
    expect_fault(kind, floats.memory, by_first_thread(body));
  };
  const auto load = [&](std::uint32_t shared, int first, int bytes) {
    bulk_load(shared, floats.input + first, bytes, kBarrier, here());
  };
  const auto announce = [](int bytes) { mbarrier_arrive_expect_tx(kBarrier, bytes, here()); };
  expect(FaultKind::misaligned, [&] { load(kShared + 8, 0, 32); });
  expect(FaultKind::misaligned, [&] { load(kShared, 2, 32); });
  expect(FaultKind::misaligned, [&] { load(kShared, 0, 24); });
  expect(FaultKind::misaligned, [&] { load(kShared, 0, 0); });
  expect(FaultKind::misaligned, [&] { load(kShared, 0, -16); });
  expect(FaultKind::global_out_of_bounds, [&] { load(kShared, kFloats - 4, 32); });
  expect(FaultKind::global_uninitialised,
         [&] { bulk_load(kShared, floats.sums + kFloats / 2 - 4, 32, kBarrier, here()); });
  expect(FaultKind::shared_out_of_bounds, [&] { load(kShared + kSharedBytes - 16, 0, 32); });
  expect(FaultKind::barrier_misuse, [&] { load(kBarrier, 0, 16); });
  expect(FaultKind::shared_in_flight, [&] {
    announce(32);
    load(kShared, 0, 32);
    load_word(16);
  });
  expect(FaultKind::unfenced, [&] {
    store_word(16, 1);
    load(kShared, 0, 32);
  });
  expect(FaultKind::deadlock, [&] {
    announce(48);
    load(kShared, 0, 32);
    mbarrier_wait(kBarrier, 0, here());
  });
  expect(FaultKind::copies_at_exit, [&] {
    announce(32);
    load(kShared, 0, 32);
  });
  expect_fault(FaultKind::shared_race, floats.memory, [&] {
    make_barrier(1);
    if (thread_index() == 0) {
      announce(32);
      load(kShared, 0, 32);
    }
    mbarrier_wait(kBarrier, 0, here());
    load_word(0);
    shfl_bfly_b32(0, 1, here());
    if (thread_index() == 0) load(kShared, 0, 32);
  });
}

/// 1 in every one of the first 32 words, for the copy engine too.
void store_ones() {
  if (thread_index() < 32)
    store_word(4 * static_cast<std::uint32_t>(thread_index()), std::bit_cast<std::uint32_t>(1.f));
  fence_proxy_async();
  bar_sync(here());
}

void add_ones(const Floats& floats, int first, int count) {
  bulk_add_f32(floats.sums + first, kShared, 4 * count, here());
  tma_commit();
}

TEST(BulkAdd, AddsSometimeBeforeTheEnd) {
  int late = 0;
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    Floats floats;
    run(
        [&] {
          store_ones();
          if (thread_index() != 0) return;
          add_ones(floats, 0, 32);
          add_ones(floats, 4, 8);
          tma_wait(true);
          late += floats.sums[0] == 1.f;
          store_word(0, 0);  // the source may be overwritten
        },
        128, seed, floats.memory);
    for (int i = 0; i < 32; ++i) {
      EXPECT_EQ(floats.sums[i], static_cast<float>(i + 1 + (i >= 4 && i < 12 ? 2 : 1))) << i << ", seed " << seed;
    }
  }
  EXPECT_GT(late, 0) << "wait_group.read does not wait for the addition";
  EXPECT_LT(late, 16);
}

TEST(BulkAdd, IsThereAfterTheWait) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    Floats floats;
    run(
        [&] {
          store_ones();
          if (thread_index() != 0) return;
          add_ones(floats, 0, 32);
          tma_wait(false);
          EXPECT_EQ(floats.sums[31], 33.f);
        },
        128, seed, floats.memory);
  }
}

TEST(BulkAdd, Rules) {
  Floats floats;
  const auto expect = [&](FaultKind kind, const std::function<void()>& body) {
    expect_fault(kind, floats.memory, [body] {
      store_ones();
      if (thread_index() == 0) body();
    });
  };
  expect(FaultKind::misaligned, [&] { add_ones(floats, 1, 4); });
  expect(FaultKind::misaligned, [&] { bulk_add_f32(floats.sums, kShared + 4, 16, here()); });
  expect(FaultKind::misaligned, [&] { add_ones(floats, 0, 3); });
  expect(FaultKind::misaligned, [&] { add_ones(floats, 0, 0); });
  expect(FaultKind::misaligned, [&] { add_ones(floats, 0, -4); });
  expect(FaultKind::global_out_of_bounds, [&] { add_ones(floats, kFloats, 4); });
  expect(FaultKind::global_uninitialised, [&] { add_ones(floats, kFloats / 2, 4); });
  expect(FaultKind::global_not_writable, [&] { bulk_add_f32(const_cast<float*>(floats.input), kShared, 16, here()); });
  expect(FaultKind::shared_uninitialised, [&] { bulk_add_f32(floats.sums, kShared + 64, 80, here()); });
  expect(FaultKind::shared_out_of_bounds, [&] { bulk_add_f32(floats.sums, kShared + kSharedBytes, 16, here()); });
  expect(FaultKind::copies_at_exit, [&] { add_ones(floats, 0, 4); });
  expect(FaultKind::copies_at_exit, [&] {
    bulk_add_f32(floats.sums, kShared, 16, here());
    tma_wait(false);  // of nothing that was committed
  });
  expect(FaultKind::source_overwritten, [&] {
    add_ones(floats, 0, 4);
    store_word(12, 0);
  });
  expect(FaultKind::source_overwritten, [&] {
    bulk_add_f32(floats.sums, kShared, 16, here());
    tma_wait(true);
    store_word(12, 0);
  });
  expect(FaultKind::unfenced, [&] {
    store_word(12, 0);
    add_ones(floats, 0, 4);
  });
}

TEST(BulkAdd, OtherThreadsNeedABarrier) {
  Floats floats;
  expect_fault(FaultKind::shared_race, floats.memory, [&] {
    if (thread_index() < 32) store_word(4 * static_cast<std::uint32_t>(thread_index()), 0);
    fence_proxy_async();
    shfl_bfly_b32(0, 1, here());
    if (thread_index() == 0) add_ones(floats, 0, 32);
  });
  expect_fault(FaultKind::shared_race, floats.memory, [&] {
    store_ones();
    if (thread_index() == 0) {
      add_ones(floats, 0, 32);
      tma_wait(true);
    }
    shfl_bfly_b32(0, 1, here());
    if (thread_index() == 1) store_word(4, 0);
  });
}

TEST(TensorStore, DropsWhatIsOutsideAndArrivesByTheWait) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    Tensor tensor;
    const std::size_t bytes = tensor.values.size() * 2;
    const std::byte* stored = tensor.memory.add_output("stored", bytes);
    tensor.shape.base = stored;
    encode_tensor_map(tensor.map, tensor.shape);
    run(
        [&] {
          for (int i = thread_index(); i < 8 * 32; i += 128) {
            store_word(4 * static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i / 4));  // the chunk's number
          }
          fence_proxy_async();
          bar_sync(here());
          if (thread_index() != 0) return;
          const int at[4] = {64, 16, 2, 0};
          tma_store(tensor.map, kShared, 4, at, here());
          tma_commit();
          tma_wait(false);
          for (int row = 16; row < 20; ++row) {
            std::uint32_t word = 0;
            std::memcpy(&word, stored + ((2 * 20 + row) * 72 + 64) * 2, 4);
            EXPECT_EQ(word, static_cast<std::uint32_t>(8 * (row - 16) + (row - 16))) << row;
          }
        },
        128, seed, tensor.memory);
    EXPECT_TRUE(tensor.memory.written(stored + bytes - 16, 16));
    EXPECT_FALSE(tensor.memory.written(stored + bytes - 17, 1));
  }
}

TEST(TensorStore, MayNotBeginBeforeTheTensor) {
  const Tensor tensor;
  expect_fault(FaultKind::bad_descriptor, [&] {
    if (thread_index() != 0) return;
    const int at[4] = {0, -16, 0, 0};
    tma_store(tensor.map, kShared, 4, at, here());
  });
}

TEST(TensorMap, RefusesWhatTheDriverRefuses) {
  const Tensor tensor;
  const auto refused = [&](const std::function<void(TensorShape&)>& change) {
    TensorShape shape = tensor.shape;
    change(shape);
    unsigned char map[128];
    EXPECT_THROW(encode_tensor_map(map, shape), std::invalid_argument);
  };
  refused([](TensorShape& s) { s.base = static_cast<const std::byte*>(s.base) + 8; });
  refused([](TensorShape& s) { s.strides[0] = 136; });
  refused([](TensorShape& s) { s.strides[2] = std::uint64_t{1} << 40; });
  refused([](TensorShape& s) { s.box[1] = 257; });
  refused([](TensorShape& s) { s.box[0] = 72; });
  refused([](TensorShape& s) { s.box[0] = 4; });
  refused([](TensorShape& s) { s.dims[1] = 0; });
  refused([](TensorShape& s) { s.dims.clear(); });
}

TEST(Stmatrix, RowsAreAlignedAndWritten) {
  const auto store = [](std::uint32_t offset) {
    const std::uint32_t r[4] = {};
    stmatrix_x4_trans(kShared + static_cast<std::uint32_t>(16 * (thread_index() % 32)) + offset, r, here());
  };
  expect_fault(
      FaultKind::misaligned, [=] { store(8); }, 32);
  expect_fault(
      FaultKind::shared_out_of_bounds, [=] { store(kSharedBytes - 64); }, 32);
  expect_fault(
      FaultKind::shared_race, [=] { store(0); }, 64);
  expect_fault(
      FaultKind::shared_race,
      [=] {
        store(0);
        load_word((16 * static_cast<std::uint32_t>(thread_index()) + 16) % 512);
      },
      32);
}

// wgmma.

constexpr std::uint32_t kA = kShared;
constexpr std::uint32_t kB = kShared + 8192;

float a_value(int row, int k) {
  return static_cast<float>((row * 7 + k * 3) % 11 - 5);
}
float b_value(int k, int n) {
  return static_cast<float>((k * 5 + n * 2) % 13 - 6);
}

std::uint64_t descriptor(std::uint32_t address, std::uint32_t leading, std::uint32_t stride) {
  return std::uint64_t{1} << 62 | std::uint64_t{stride / 16} << 32 | std::uint64_t{leading / 16} << 16 | address / 16;
}

void store_half(std::uint32_t address, float value) {
  const std::uint16_t bits = convert_bf16(value);
  store_shared(swizzled(address & ~15u, Swizzle::bytes_128) | (address & 15u), &bits, 2, "st.shared.b16", here());
}

/// A [64, 16] K-major; B [16, n] N-major in slabs of 64 columns, or K-major.
void store_operands(int n, bool transposed) {
  for (int i = thread_index(); i < 64 * 16; i += 128) {
    store_half(kA + static_cast<std::uint32_t>(i / 16 * 128 + i % 16 * 2), a_value(i / 16, i % 16));
  }
  for (int i = thread_index(); i < 16 * n; i += 128) {
    const int k = i / n;
    const int column = i % n;
    const int offset = transposed ? column / 64 * 2048 + k * 128 + column % 64 * 2 : column * 128 + k * 2;
    store_half(kB + static_cast<std::uint32_t>(offset), b_value(k, column));
  }
}

void expect_product(const float* d, int n, float factor) {
  for (int r = 0; r < n / 2; ++r) {
    const int row = thread_index() / 32 * 16 + thread_index() % 32 / 4 + r / 2 % 2 * 8;
    const int column = r / 4 * 8 + thread_index() % 4 * 2 + r % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) sum += a_value(row, k) * b_value(k, column);
    ASSERT_EQ(d[r], factor * sum) << row << ' ' << column;
  }
}

std::uint64_t b_descriptor(bool transposed) {
  return descriptor(kB, transposed ? 2048 : 16, 1024);
}

WgmmaOperands shared_operands(float* d, int n, bool transposed, bool accumulate) {
  return {d, nullptr, descriptor(kA, 16, 1024), b_descriptor(transposed), n, Half::bf16, transposed, accumulate};
}

void publish_operands(int n, bool transposed) {
  store_operands(n, transposed);
  fence_proxy_async();
  bar_sync(here());
}

TEST(Wgmma, BothMajorsEveryWidth) {
  for (int n = 8; n <= 128; n += 40) {
    for (const bool transposed : {false, true}) {
      run([=] {
        publish_operands(n, transposed);
        float d[128];
        wgmma_fence(here());
        wgmma(shared_operands(d, n, transposed, false), here());
        wgmma(shared_operands(d, n, transposed, true), here());
        wgmma_commit(here());
        wgmma_wait(0, here());
        expect_product(d, n, 2);
      });
    }
  }
}

TEST(Wgmma, AFromRegisters) {
  run([] {
    publish_operands(72, true);
    const int row = thread_index() / 32 * 16 + thread_index() % 32 / 4;
    const int k = thread_index() % 4 * 2;
    std::uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
      const int r = row + i % 2 * 8;
      const int c = k + i / 2 * 8;
      a[i] = convert_bf16(a_value(r, c)) | static_cast<std::uint32_t>(convert_bf16(a_value(r, c + 1))) << 16;
    }
    float d[36] = {};
    WgmmaOperands operands = shared_operands(d, 72, true, true);
    operands.a_registers = a;
    wgmma_fence(here());
    wgmma(operands, here());
    wgmma_commit(here());
    wgmma_wait(0, here());
    expect_product(d, 72, 1);
  });
}

/// Runs `body(d)` after the operands (n = 16) have been published.
Body with_operands(const std::function<void(float*)>& body) {
  return [body] {
    publish_operands(16, true);
    float d[8] = {};
    body(d);
  };
}

void issue(float* d, bool accumulate = false) {
  wgmma_fence(here());
  wgmma(shared_operands(d, 16, true, accumulate), here());
  wgmma_commit(here());
}

TEST(Wgmma, Protocol) {
  expect_fault(FaultKind::unfenced,
               with_operands([](float* d) { wgmma(shared_operands(d, 16, true, false), here()); }));
  expect_fault(FaultKind::register_in_flight, with_operands([](float* d) {
                 issue(d);
                 check_register(d[0], "add", here());
               }));
  expect_fault(FaultKind::register_in_flight, with_operands([](float* d) {
                 issue(d);
                 wgmma_tie(d, 8, here());
               }));
  expect_fault(FaultKind::register_in_flight, with_operands([](float* d) {
                 issue(d);
                 d[3] *= 2;
                 wgmma_wait(0, here());
               }));
  expect_fault(FaultKind::register_in_flight, with_operands([](float* d) {
                 wgmma_fence(here());
                 wgmma(shared_operands(d, 16, true, false), here());
                 wgmma_wait(0, here());  // nothing was committed
                 wgmma_tie(d, 8, here());
               }));
  expect_fault(FaultKind::register_in_flight, with_operands([](float* d) {
                 std::uint32_t a[4] = {};
                 WgmmaOperands operands = shared_operands(d, 16, true, false);
                 operands.a_registers = a;
                 wgmma_fence(here());
                 wgmma(operands, here());
                 wgmma_commit(here());
                 a[2] = 1;
                 wgmma_wait(0, here());
               }));
  expect_fault(FaultKind::copies_at_exit, with_operands([](float* d) { issue(d); }));
}

TEST(Wgmma, OnlyTheLatestGroupsMayRun) {
  EXPECT_NO_THROW(run(with_operands([](float* d) {
    float other[8];
    issue(d);
    issue(other);
    wgmma_wait(1, here());
    expect_product(d, 16, 1);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(other[0]), kPoison[0]);
    wgmma_wait(0, here());
    expect_product(other, 16, 1);
  })));
}

TEST(Wgmma, TheWholeWarpgroupTakesPart) {
  expect_fault(FaultKind::deadlock, with_operands([](float* d) {
                 if (thread_index() >= 96) return;
                 issue(d);
                 wgmma_wait(0, here());
               }));
  expect_fault(FaultKind::divergence, with_operands([](float* d) {
                 WgmmaOperands operands = shared_operands(d, 16, true, false);
                 operands.accumulate = thread_index() >= 64;
                 wgmma_fence(here());
                 wgmma(operands, here());
                 wgmma_commit(here());
                 wgmma_wait(0, here());
               }));
  expect_fault(FaultKind::divergence, with_operands([](float* d) {
                 WgmmaOperands operands = shared_operands(d, 16, true, false);
                 if (thread_index() % 32 == 7) operands.b += 2;
                 wgmma_fence(here());
                 wgmma(operands, here());
               }));
}

TEST(Wgmma, Descriptors) {
  const auto expect_bad = [](const std::function<void(WgmmaOperands&)>& change) {
    expect_fault(FaultKind::bad_descriptor, with_operands([change](float* d) {
                   WgmmaOperands operands = shared_operands(d, 16, true, false);
                   change(operands);
                   wgmma_fence(here());
                   wgmma(operands, here());
                 }));
  };
  expect_bad([](WgmmaOperands& o) { o.a ^= std::uint64_t{3} << 62; });
  expect_bad([](WgmmaOperands& o) { o.a |= std::uint64_t{1} << 49; });
  expect_bad([](WgmmaOperands& o) { o.b |= std::uint64_t{1} << 47; });
  expect_bad([](WgmmaOperands& o) { o.b += 128 / 16; });
  expect_bad([](WgmmaOperands& o) { o.b += std::uint64_t{8} << 32; });
}

TEST(Wgmma, SharedMemoryIsWatched) {
  expect_fault(FaultKind::unfenced, [] {
    store_operands(16, true);
    bar_sync(here());
    float d[8];
    issue(d);
  });
  expect_overwritten_or_race([] {
    publish_operands(16, true);
    if (thread_index() == 0) store_half(kA, 1);
    fence_proxy_async();
    bar_warp_sync(here());
    float d[8];
    issue(d);
    wgmma_wait(0, here());
  });
  expect_fault(FaultKind::shared_uninitialised, with_operands([](float* d) {
                 WgmmaOperands operands = shared_operands(d, 16, true, false);
                 operands.b += 2048 / 16;
                 wgmma_fence(here());
                 wgmma(operands, here());
               }));
  expect_fault(FaultKind::source_overwritten, with_operands([](float* d) {
                 issue(d);
                 if (thread_index() == 3) store_half(kB, 1);
                 wgmma_wait(0, here());
               }));
  expect_overwritten_or_race([] {
    publish_operands(16, true);
    float d[8];
    issue(d);
    wgmma_wait(0, here());
    bar_sync(1, 128, here());
    issue(d);
    wgmma_wait(0, here());
    bar_warp_sync(here());
    bar_arrive(2, 128, here());
    if (thread_index() == 3) store_half(kB, 1);
  });
}

}  // namespace
}  // namespace emulator
