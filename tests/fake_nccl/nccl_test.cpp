// Context parallelism over NCCL, with stand-ins of NCCL and of the driver: what is asked of them and in which order.
// Nothing is computed or moved.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "fake_nccl/over_nccl.hpp"

namespace fa {
namespace {

using test::at;
using test::OverNccl;

// A group begins behind the caller's stream, which waits for its end.
TEST_F(OverNccl, GroupsAreOrderedByEvents) {
  const auto communicator = use({.watch = false});
  EXPECT_EQ(communicator->size(), 2);
  const auto stream = reinterpret_cast<Stream>(at(9));
  const Communicator::Transfer transfers[] = {{true, 1, at(1), 100, DType::bf16}, {false, 1, at(2), 7, DType::f32}};
  const std::uint64_t group = communicator->exchange(transfers, stream);
  communicator->wait(group, stream);
  const auto& calls = stream_calls_();
  ASSERT_EQ(calls.size(), 4U);
  EXPECT_EQ(calls[0].what, "record");
  EXPECT_EQ(calls[0].stream, stream);
  EXPECT_EQ(calls[1].what, "wait");
  EXPECT_EQ(calls[1].event, calls[0].event);
  const void* const own = calls[1].stream;
  EXPECT_NE(own, stream);
  EXPECT_EQ(calls[2].what, "record");
  EXPECT_EQ(calls[2].stream, own);
  EXPECT_EQ(calls[3].what, "wait");
  EXPECT_EQ(calls[3].stream, stream);
  EXPECT_EQ(calls[3].event, calls[2].event);
  ASSERT_EQ(comm_.calls.size(), 4U);
  EXPECT_EQ(comm_.calls[1].what, "send");
  EXPECT_EQ(comm_.calls[1].count, 100U);
  EXPECT_EQ(comm_.calls[1].type, 9);
  EXPECT_EQ(comm_.calls[1].stream, own);
  EXPECT_EQ(comm_.calls[2].what, "receive");
  EXPECT_EQ(comm_.calls[2].type, 7);
  EXPECT_EQ(comm_.calls[3].what, "end");
}

TEST_F(OverNccl, ARingIsTwoKernelsAndOneGroup) {
  ContextParallel parallel = ContextParallel::create(config(Scheme::ring), use({.watch = false}));
  const std::int64_t rows = 4096;
  const TensorView o = tensor(4, 8), lse(at(5), DType::f32, {1, 8, rows});
  parallel.prepare({1, 8, 2, 2 * rows, 2 * rows}, true);
  launches_().clear();
  comm_.calls.clear();
  parallel.forward({tensor(1, 8), tensor(2, 2), tensor(3, 2)}, {o, lse});
  const auto forwards = [&] { return std::ranges::count(kernels(), std::string("fa_sm90_forward")); };
  EXPECT_EQ(forwards(), 2);
  EXPECT_EQ(count("end"), 1);
  EXPECT_EQ(count("send"), 2);
  EXPECT_EQ(count("receive"), 2);
  // K and V go from where the caller has them.
  EXPECT_EQ(comm_.calls[1].data, at(2));
  EXPECT_EQ(comm_.calls[1].count, 2U * rows * 128);
  launches_().clear();
  comm_.calls.clear();
  parallel.backward({tensor(1, 8), tensor(2, 2), tensor(3, 2), o, lse, tensor(6, 8)},
                    {tensor(7, 8), tensor(8, 2), tensor(9, 2)});
  // Of its own keys, and of each of the two KV heads of the other rank's.
  EXPECT_EQ(std::ranges::count(kernels(), std::string("fa_sm90_backward")), 3);
  EXPECT_EQ(count("end"), 3);  // K and V; dK and dV go home, a head at a time
  EXPECT_EQ(count("send"), 6);
  // dQ, and dK and dV of each head.
  EXPECT_EQ(std::ranges::count(kernels(), std::string("fa_merge_states")), 5);
  EXPECT_EQ(std::ranges::count(kernels(), std::string(fake_driver::kAllocation)), 0)
      << "prepared calls allocate nothing";
}

TEST_F(OverNccl, EverySchemeIsQueued) {
  for (const Scheme scheme : {Scheme::ring, Scheme::all_gather, Scheme::ulysses, Scheme::automatic}) {
    for (const bool rows_first : {false, true}) {
      ContextParallel parallel = ContextParallel::create(config(scheme), use({.watch = false}));
      const auto x = [&](std::uintptr_t page, std::int64_t heads) {
        return rows_first ? TensorView(at(page), DType::bf16, {1, 4096, heads, 128}).swap_axes(1, 2)
                          : tensor(page, heads);
      };
      launches_().clear();
      comm_.calls.clear();
      const TensorView lse(at(5), DType::f32, {1, 8, 4096});
      parallel.forward({x(1, 8), x(2, 2), x(3, 2)}, {x(4, 8), lse});
      parallel.backward({x(1, 8), x(2, 2), x(3, 2), x(4, 8), lse, x(6, 8)}, {x(7, 8), x(8, 2), x(9, 2)});
      EXPECT_GE(std::ranges::count(kernels(), std::string("fa_sm90_forward")), 1) << to_string(scheme);
      EXPECT_GE(std::ranges::count(kernels(), std::string("fa_sm90_backward")), 1) << to_string(scheme);
      EXPECT_GE(count("send"), 4) << to_string(scheme);
      EXPECT_EQ(count("send"), count("receive"));
    }
  }
}

TEST_F(OverNccl, PackedBatches) {
  ContextParallelConfig packed = config(Scheme::ring);
  packed.attention.varlen = true;
  ContextParallel parallel = ContextParallel::create(packed, use({.watch = false}));
  const std::vector<std::int64_t> lengths{4096, 512, 3584};
  const auto x = [&](std::uintptr_t page, std::int64_t heads) {
    return TensorView(at(page), DType::bf16, {4096, heads, 128});
  };
  const TensorView lse(at(5), DType::f32, {8, 4096});
  launches_().clear();
  parallel.forward({x(1, 8), x(2, 2), x(3, 2)}, {x(4, 8), lse}, nullptr, lengths);
  EXPECT_EQ(std::ranges::count(kernels(), std::string("fa_sm90_forward")), 2) << "a call for all sequences";
  // Prepared, such calls can be captured.
  ContextParallel other = ContextParallel::create(packed, use({.watch = false}));
  other.prepare({.h_q = 8, .h_kv = 2}, true, lengths);
  *capturing_ = true;
  other.forward({x(1, 8), x(2, 2), x(3, 2)}, {x(4, 8), lse}, nullptr, lengths);
  *capturing_ = false;
  parallel.backward({x(1, 8), x(2, 2), x(3, 2), x(4, 8), lse, x(6, 8)}, {x(7, 8), x(8, 2), x(9, 2)}, nullptr, lengths);
}

// What is not prepared cannot be captured.
TEST_F(OverNccl, CapturesTakePreparedCalls) {
  ContextParallel parallel = ContextParallel::create(config(Scheme::ring), use({.watch = false}));
  const auto forward = [&] { parallel.forward({tensor(1, 8), tensor(2, 2), tensor(3, 2)}, {tensor(4, 8)}); };
  *capturing_ = true;
  EXPECT_THROW(forward(), Error);
  EXPECT_EQ(count("end"), 0);
  *capturing_ = false;
  parallel.prepare({1, 8, 2, 8192, 8192}, false);
  *capturing_ = true;
  launches_().clear();
  forward();
  EXPECT_EQ(count("end"), 1);
  EXPECT_EQ(std::ranges::count(kernels(), std::string(fake_driver::kAllocation)), 0);
  *capturing_ = false;
}

// Plans of sizes that did not come lately go, but for those of graphs.
TEST_F(OverNccl, PlansOfManySizesAreNotAllKept) {
  ContextParallelConfig packed = config(Scheme::ring);
  packed.attention.varlen = true;
  ContextParallel parallel = ContextParallel::create(packed, use({.watch = false}));
  const auto lengths = [](std::int64_t which) { return std::vector<std::int64_t>{8192 - 4 * which, 4 * which}; };
  const auto forward = [&](std::int64_t which, bool captured) {
    const auto x = [](std::uintptr_t page, std::int64_t heads) {
      return TensorView(at(page), DType::bf16, {4096, heads, 128});
    };
    const std::vector<std::int64_t> given = lengths(which);
    *capturing_ = captured;
    parallel.forward({x(1, 8), x(2, 2), x(3, 2)}, {x(4, 8), TensorView(at(5), DType::f32, {8, 4096})}, nullptr, given);
  };
  for (int i = 1; i <= 64; ++i) parallel.prepare({.h_q = 8, .h_kv = 2}, false, lengths(i));
  forward(1, true);  // all are there still
  *capturing_ = false;
  for (int i = 65; i <= 200; ++i) parallel.prepare({.h_q = 8, .h_kv = 2}, false, lengths(i));
  forward(1, true);
  forward(200, true);
  forward(185, true);
  EXPECT_THROW(forward(2, true), Error);
  EXPECT_THROW(forward(100, true), Error);
  forward(2, false);
  forward(2, true);
  *capturing_ = false;
}

// With sinks, and with one KV head of several requests, whose K and V lie as transfers take them.
TEST_F(OverNccl, CapturesWithSinksAndOneHead) {
  ContextParallelConfig with_sink = config(Scheme::ring);
  with_sink.attention.sink = true;
  ContextParallel parallel = ContextParallel::create(with_sink, use({.watch = false}));
  parallel.prepare({2, 8, 1, 8192, 8192}, true);
  const auto x = [&](std::uintptr_t page, std::int64_t heads) {
    return TensorView(at(page), DType::bf16, {2, heads, 4096, 128});
  };
  const TensorView lse(at(5), DType::f32, {2, 8, 4096}), sink(at(10), DType::f32, {8}), dsink(at(11), DType::f32, {8});
  ForwardInputs in{x(1, 8), x(2, 1), x(3, 1)};
  in.sink = sink;
  BackwardInputs back{x(1, 8), x(2, 1), x(3, 1), x(4, 8), lse, x(6, 8)};
  back.sink = sink;
  BackwardOutputs out{x(7, 8), x(8, 1), x(9, 1)};
  out.dsink = dsink;
  *capturing_ = true;
  launches_().clear();
  parallel.forward(in, {x(4, 8), lse});
  parallel.backward(back, out);
  *capturing_ = false;
  EXPECT_EQ(std::ranges::count(kernels(), std::string(fake_driver::kAllocation)), 0);
  EXPECT_EQ(std::ranges::count(kernels(), std::string("fa_backward_sink")), 1);
}

// Kernels leave multiprocessors to transfers: 16 of 132 if that is asked for, where they can.
TEST_F(OverNccl, TransfersHaveRoom) {
  ContextParallelConfig roomy = config(Scheme::ring);
  roomy.reserved_multiprocessors = 16;
  for (const bool deterministic : {false, true}) {
    roomy.attention.deterministic = deterministic;
    ContextParallel parallel = ContextParallel::create(roomy, use({.watch = false}));
    const TensorView o = tensor(4, 8), lse(at(5), DType::f32, {1, 8, 4096});
    launches_().clear();
    parallel.forward({tensor(1, 8), tensor(2, 2), tensor(3, 2)}, {o, lse});
    parallel.backward({tensor(1, 8), tensor(2, 2), tensor(3, 2), o, lse, tensor(6, 8)},
                      {tensor(7, 8), tensor(8, 2), tensor(9, 2)});
    for (const fake_driver::Launch& launch : launches_()) {
      const bool takes_bound =
          launch.kernel == "fa_sm90_forward" || (launch.kernel == "fa_sm90_backward" && !deterministic);
      EXPECT_TRUE(!takes_bound || launch.grid <= 116U) << launch.kernel << " " << launch.grid;
    }
    EXPECT_EQ(std::ranges::count(kernels(), std::string("fa_sm90_backward")), 3) << "deterministic ones take no bound";
  }
  // What the caller asks for is not overruled, whatever calls before found.
  roomy.attention.deterministic = true;
  ContextParallel parallel = ContextParallel::create(roomy, use({.watch = false}));
  const TensorView lse(at(5), DType::f32, {1, 8, 4096});
  parallel.backward({tensor(1, 8), tensor(2, 2), tensor(3, 2), tensor(4, 8), lse, tensor(6, 8)},
                    {tensor(7, 8), tensor(8, 2), tensor(9, 2)});
  BackwardInputs inputs{tensor(1, 8), tensor(2, 2), tensor(3, 2), tensor(4, 8), lse, tensor(6, 8)};
  inputs.max_multiprocessors = 8;
  EXPECT_THROW(parallel.backward(inputs, {tensor(7, 8), tensor(8, 2), tensor(9, 2)}), Error);
}

// What NCCL's blocks delay is a small part of a call: beside transfers it has more thread blocks than multiprocessors.
// A forward that would fill the GPU lets transfers start first.
TEST_F(OverNccl, CallsBesideTransfersHaveMoreBlocks) {
  for (const int reserved : {0, 16}) {
    ContextParallelConfig some = config(Scheme::ring);
    some.reserved_multiprocessors = reserved;
    ContextParallel parallel = ContextParallel::create(some, use({.watch = false}));
    const auto x = [](std::uintptr_t page, std::int64_t heads) {
      return TensorView(at(page), DType::bf16, {1, heads, 16384, 128});
    };
    const TensorView lse(at(5), DType::f32, {1, 8, 16384});
    parallel.prepare({1, 8, 2, 32768, 32768}, true);
    launches_().clear();
    parallel.forward({x(1, 8), x(2, 2), x(3, 2)}, {x(4, 8), lse});
    EXPECT_EQ(std::ranges::count(kernels(), std::string("fa_parallel_pause")), 1)
        << "before the kernel beside transfers";
    for (const fake_driver::Launch& launch : launches_()) {
      if (launch.kernel == "fa_sm90_forward") {
        EXPECT_LE(launch.grid, 132U) << "the first has a counter of tiles, the last runs beside nothing";
      }
    }
    launches_().clear();
    parallel.backward({x(1, 8), x(2, 2), x(3, 2), x(4, 8), lse, x(6, 8)}, {x(7, 8), x(8, 2), x(9, 2)});
    unsigned greatest = 0;
    for (const fake_driver::Launch& launch : launches_()) {
      if (launch.kernel == "fa_sm90_backward") greatest = std::max(greatest, launch.grid);
    }
    EXPECT_EQ(greatest > 132U, reserved == 0) << greatest;
    EXPECT_LE(greatest, 16 * 132U);
  }
}

// Packed batches of long sequences: calls of a step run side by side, on the caller's stream and on another one that
// begins behind it and that it waits for.
TEST_F(OverNccl, CallsOfAStepTakeTurnsOfTwoStreams) {
  for (const bool captured : {false, true}) {
    ContextParallelConfig packed = config(Scheme::ring);
    packed.attention.varlen = true;
    ContextParallel parallel = ContextParallel::create(packed, use({.watch = false}));
    const auto x = [](std::uintptr_t page, std::int64_t heads = 8) {
      return TensorView(at(page), DType::bf16, {65536, heads, 128});
    };
    const TensorView lse(at(5), DType::f32, {32, 65536});
    const std::vector<std::int64_t> lengths{65536, 32768, 32768};
    parallel.prepare({.h_q = 32, .h_kv = 8}, true, lengths);
    const auto stream = reinterpret_cast<Stream>(at(9));
    *capturing_ = captured;
    for (const bool backward : {false, true}) {
      launches_().clear();
      stream_calls_().clear();
      comm_.calls.clear();
      if (backward) {
        parallel.backward({x(1, 32), x(2), x(3), x(4, 32), lse, x(6, 32)}, {x(7, 32), x(8), x(9)}, stream, lengths);
      } else {
        parallel.forward({x(1, 32), x(2), x(3)}, {x(4, 32), lse}, stream, lengths);
      }
      std::vector<const void*> turns;
      for (const fake_driver::Launch& launch : launches_()) {
        if (launch.kernel == "fa_sm90_forward" || launch.kernel == "fa_sm90_backward") turns.push_back(launch.stream);
      }
      ASSERT_EQ(turns.size(), 4U);
      const void* const other = turns[1];
      EXPECT_NE(other, nullptr);
      EXPECT_NE(other, stream);
      EXPECT_EQ(turns, (std::vector<const void*>{stream, other, stream, other}));
      EXPECT_EQ(count("end"), backward ? 3 : 1) << "K and V; dK and dV go home, of some heads at a time";
      EXPECT_EQ(std::ranges::count(kernels(), std::string(fake_driver::kAllocation)), 0);
      const auto follows = [&](const void* waiting, const void* waited) {  // by the event that was recorded last
        std::map<const void*, const void*> recorded;
        bool found = false;
        for (const fake_driver::StreamCall& call : stream_calls_()) {
          if (call.what == "record") recorded[call.event] = call.stream;
          found = found || (call.what == "wait" && call.stream == waiting && recorded[call.event] == waited);
        }
        return found;
      };
      EXPECT_TRUE(follows(other, stream));
      EXPECT_TRUE(follows(stream, other));
    }
    *capturing_ = false;
  }
}

// Functions and windows have places, stripes too.
TEST_F(OverNccl, PlacedCallsAreQueued) {
  for (const ShardLayout layout : {ShardLayout::zigzag, ShardLayout::striped, ShardLayout::contiguous}) {
    for (const bool window : {false, true}) {
      ContextParallelConfig placed = config(Scheme::ring);
      if (window) placed.attention.window_left = 1000;
      if (!window) placed.attention.score = functions::alibi();
      ContextParallel parallel = ContextParallel::create(placed, use({.watch = false}), layout);
      const TensorView o = tensor(4, 8), lse(at(5), DType::f32, {1, 8, 4096});
      ForwardInputs inputs{tensor(1, 8), tensor(2, 2), tensor(3, 2)};
      if (!window) inputs.captures.add({"slope", TensorView(at(10), DType::f32, {8})});
      launches_().clear();
      parallel.forward(inputs, {o, lse});
      EXPECT_GE(std::ranges::count(kernels(), std::string("fa_sm90_forward")), 1);
    }
  }
}

}  // namespace
}  // namespace fa
