// Transfers over NCCL by puts into windows, with stand-ins of NCCL and of the driver: what is asked of them and in
// which order. Nothing is computed or moved.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "fake_nccl/over_nccl.hpp"

namespace fa {
namespace {

using test::at;

class NcclWindows : public test::OverNccl {
 protected:
  void SetUp() override {
    OverNccl::SetUp();
    if (!IsSkipped()) library_->version = 23007;
  }

  std::vector<fake_nccl::Call> calls(const std::string& what) {
    std::vector<fake_nccl::Call> found;
    const std::scoped_lock lock(comm_.mutex);
    for (const fake_nccl::Call& call : comm_.calls) {
      if (call.what == what) found.push_back(call);
    }
    return found;
  }

  std::vector<fake_driver::StreamCall> stream_calls(const std::string& what) {
    std::vector<fake_driver::StreamCall> found;
    for (const fake_driver::StreamCall& call : stream_calls_()) {
      if (call.what == what) found.push_back(call);
    }
    return found;
  }

  std::string refused(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      const std::string argument(error.field("argument"));
      return argument.empty() ? error.what() : argument;
    }
    return "";
  }
};

std::byte* byte_of(const void* memory, std::size_t offset) {
  return static_cast<std::byte*>(const_cast<void*>(memory)) + offset;
}

// Words: of two ranks, what each writes to the other, "ready" of both peers and then "arrived" of both.
TEST_F(NcclWindows, APutWaitsForTheWordOfItsReceiver) {
  const auto communicator = use({.watch = false});
  ASSERT_TRUE(communicator->shares_memory());
  void* const memory = communicator->share(1 << 20);
  const std::vector<fake_nccl::Call> windows = calls("register");
  ASSERT_EQ(windows.size(), 2U) << "of words, and of what is shared";
  EXPECT_EQ(windows[1].data, memory);
  EXPECT_EQ(windows[1].count, std::size_t{1} << 20);
  EXPECT_EQ(windows[1].type, 1) << "symmetric";
  const void* const words = windows[0].data;
  for (std::size_t turn = 1; turn <= 2; ++turn) {
    stream_calls_().clear();
    comm_.calls.clear();
    const Communicator::Transfer transfers[] = {
        {true, 1, byte_of(memory, 4096), 100, DType::bf16, byte_of(memory, 512)},
        {false, 1, byte_of(memory, 8192), 7, DType::f32, byte_of(memory, 8192)}};
    communicator->exchange(transfers, reinterpret_cast<Stream>(at(9)));
    const auto& on_stream = stream_calls_();
    std::vector<std::string> order;
    for (const fake_driver::StreamCall& call : on_stream) order.push_back(call.what);
    EXPECT_EQ(order, (std::vector<std::string>{"record", "wait", "write value", "write value", "wait value",
                                               "wait value", "record"}));
    // Of peer 1: ready is word 1, arrived word 3, and those that go out are four words on.
    EXPECT_EQ(on_stream[2].event, byte_of(words, 8 * (4 + 1)));
    EXPECT_EQ(on_stream[3].event, byte_of(words, 8 * (4 + 3)));
    EXPECT_EQ(on_stream[4].event, byte_of(words, 8 * 1));
    EXPECT_EQ(on_stream[5].event, byte_of(words, 8 * 3));
    for (int i = 2; i < 6; ++i) EXPECT_EQ(on_stream[static_cast<std::size_t>(i)].bytes, turn) << "the count";
    const std::vector<fake_nccl::Call> puts = calls("put");
    ASSERT_EQ(puts.size(), 3U);
    EXPECT_EQ(puts[0].data, byte_of(words, 8 * (4 + 1)));
    EXPECT_EQ(puts[0].offset, 8U * 0) << "rank 0 is ready";
    EXPECT_EQ(puts[1].data, byte_of(memory, 4096));
    EXPECT_EQ(puts[1].count, 200U) << "bytes";
    EXPECT_EQ(puts[1].window, memory);
    EXPECT_EQ(puts[1].offset, 512U);
    EXPECT_EQ(puts[2].data, byte_of(words, 8 * (4 + 3))) << "behind the data";
    EXPECT_EQ(puts[2].offset, 8U * 2) << "what rank 0 sends has arrived";
    for (const fake_nccl::Call& put : puts) EXPECT_EQ(put.stream, on_stream[1].stream) << "the transfers' own";
    EXPECT_EQ(count("end"), 2) << "ready words, and what waits for those of others";
  }
  communicator->unshare(memory);
  EXPECT_EQ(calls("deregister").size(), 1U);
  EXPECT_EQ(comm_.allocations, 1);
}

// K and V are copied to where puts take them from, unless they lie in shared memory.
TEST_F(NcclWindows, ARingPuts) {
  ContextParallel parallel = ContextParallel::create(config(Scheme::ring), use({.watch = false}));
  const auto x = [](std::uintptr_t page, std::int64_t heads) {
    return TensorView(at(page), DType::bf16, {1, heads, 16384, 128});
  };
  const TensorView lse(at(5), DType::f32, {1, 8, 16384});
  parallel.prepare({1, 8, 2, 32768, 32768}, true);
  launches_().clear();
  comm_.calls.clear();
  stream_calls_().clear();
  parallel.forward({x(1, 8), x(2, 2), x(3, 2)}, {x(4, 8), lse}, reinterpret_cast<Stream>(at(9)));
  EXPECT_EQ(std::ranges::count(kernels(), std::string("fa_sm90_forward")), 2);
  EXPECT_EQ(count("send") + count("receive"), 0);
  EXPECT_EQ(count("put"), 4) << "two words, K and V";
  const std::vector<fake_driver::StreamCall> copies = stream_calls("copy");
  ASSERT_EQ(copies.size(), 2U);
  EXPECT_EQ(copies[0].bytes, 2U * 16384 * 128 * 2);
  EXPECT_EQ(std::ranges::count(kernels(), std::string("fa_parallel_pause")), 0) << "puts need no thread blocks";
  launches_().clear();
  comm_.calls.clear();
  parallel.backward({x(1, 8), x(2, 2), x(3, 2), x(4, 8), lse, x(6, 8)}, {x(7, 8), x(8, 2), x(9, 2)});
  EXPECT_EQ(count("put"), 3 * 2 + 6) << "words of three exchanges, K and V, and dK and dV of two heads";
  EXPECT_EQ(std::ranges::count(kernels(), std::string(fake_driver::kAllocation)), 0);
  EXPECT_EQ(calls("register").size(), 0U) << "prepared";
}

TEST_F(NcclWindows, SharedKeysAreNotCopied) {
  const auto communicator = use({.watch = false});
  ContextParallel parallel = ContextParallel::create(config(Scheme::ring), communicator);
  constexpr std::size_t kBytes = 2 * 4096 * 128 * 2;
  void* const keys = communicator->share(kBytes);
  void* const values = communicator->share(kBytes);
  const auto view = [](void* data) { return TensorView(data, DType::bf16, {1, 2, 4096, 128}); };
  for (const bool both : {true, false}) {
    comm_.calls.clear();
    stream_calls_().clear();
    const TensorView v = both ? view(values) : tensor(3, 2);
    parallel.forward({tensor(1, 8), view(keys), v}, {tensor(4, 8)});
    EXPECT_EQ(stream_calls("copy").size(), both ? 0U : 2U);
    const std::vector<fake_nccl::Call> puts = calls("put");
    ASSERT_EQ(puts.size(), 4U);
    EXPECT_EQ(puts[1].data == keys, both) << "behind the word";
    EXPECT_EQ(puts[1].count, kBytes);
    EXPECT_NE(puts[1].window, keys) << "where others receive";
  }
  // A tensor that reaches beyond what is shared is copied.
  stream_calls_().clear();
  parallel.forward({tensor(1, 8), view(byte_of(keys, 256)), view(values)}, {tensor(4, 8)});
  EXPECT_EQ(stream_calls("copy").size(), 2U);
  communicator->unshare(keys);
  communicator->unshare(values);
}

// What is put lies in windows, in every scheme, wherever the caller's tensors are.
TEST_F(NcclWindows, EverySchemePuts) {
  for (const Scheme scheme : {Scheme::ring, Scheme::all_gather, Scheme::ulysses}) {
    for (const bool rows_first : {false, true}) {
      comm_.calls.clear();
      {
        ContextParallel parallel = ContextParallel::create(config(scheme), use({.watch = false}));
        const auto x = [&](std::uintptr_t page, std::int64_t heads) {
          return rows_first ? TensorView(at(page), DType::bf16, {1, 4096, heads, 128}).swap_axes(1, 2)
                            : tensor(page, heads);
        };
        const TensorView lse(at(5), DType::f32, {1, 8, 4096});
        parallel.forward({x(1, 8), x(2, 2), x(3, 2)}, {x(4, 8), lse});
        parallel.backward({x(1, 8), x(2, 2), x(3, 2), x(4, 8), lse, x(6, 8)}, {x(7, 8), x(8, 2), x(9, 2)});
      }
      EXPECT_EQ(count("send") + count("receive"), 0) << to_string(scheme);
      const std::vector<fake_nccl::Call> windows = calls("register");
      for (const fake_nccl::Call& put : calls("put")) {
        const auto window = std::ranges::find(windows, put.window, &fake_nccl::Call::data);
        ASSERT_NE(window, windows.end());
        EXPECT_LE(put.offset + put.count, window->count) << to_string(scheme);
        const bool lies = std::ranges::any_of(windows, [&](const fake_nccl::Call& each) {
          return put.data >= each.data && byte_of(put.data, put.count) <= byte_of(each.data, each.count);
        });
        EXPECT_TRUE(lies) << to_string(scheme);
      }
      EXPECT_EQ(calls("deregister").size(), windows.size()) << "all that was registered";
      EXPECT_EQ(comm_.allocations, 0);
    }
  }
}

// Graphs hold no waits for counts: their transfers are messages, from and to the same memory.
TEST_F(NcclWindows, CapturedCallsSendMessages) {
  ContextParallel parallel = ContextParallel::create(config(Scheme::ring), use({.watch = false}));
  parallel.prepare({1, 8, 2, 8192, 8192}, false);
  comm_.calls.clear();
  stream_calls_().clear();
  *capturing_ = true;
  parallel.forward({tensor(1, 8), tensor(2, 2), tensor(3, 2)}, {tensor(4, 8)});
  *capturing_ = false;
  EXPECT_EQ(count("put"), 0);
  EXPECT_EQ(count("send"), 2);
  EXPECT_EQ(count("receive"), 2);
  EXPECT_EQ(stream_calls("copy").size(), 2U);
}

TEST_F(NcclWindows, AreUsedWhereRanksReachEachOther) {
  EXPECT_FALSE(use({.watch = false, .transfers = NcclTransfers::messages})->shares_memory());
  comm_.lsa_teams = 2;
  EXPECT_FALSE(use({.watch = false})->shares_memory());
  EXPECT_EQ(refused([&] { use({.transfers = NcclTransfers::puts}); }), "transfers");
  comm_.lsa_teams = 1;
  comm_.host_rma = false;
  EXPECT_FALSE(use({.watch = false})->shares_memory());
  comm_.host_rma = true;
  comm_.size = 9;
  EXPECT_FALSE(use({.watch = false})->shares_memory());
  comm_.size = 8;
  EXPECT_TRUE(use({.watch = false, .transfers = NcclTransfers::puts})->shares_memory());
  const auto messages = use({.watch = false, .transfers = NcclTransfers::messages});
  EXPECT_EQ(refused([&] { messages->share(16); }), "share");
}

TEST_F(NcclWindows, RefusePlacesElsewhere) {
  const auto communicator = use({.watch = false});
  void* const memory = communicator->share(4096);
  comm_.calls.clear();
  const auto exchange = [&](void* data, void* place) {
    const Communicator::Transfer transfers[] = {{true, 1, memory, 16, DType::f32, memory},
                                                {true, 1, data, 16, DType::f32, place}};
    return refused([&] { communicator->exchange(transfers, nullptr); });
  };
  EXPECT_EQ(exchange(at(1), memory), "data");
  EXPECT_EQ(exchange(memory, nullptr), "place");
  EXPECT_EQ(exchange(memory, at(1)), "place");
  EXPECT_EQ(exchange(memory, byte_of(memory, 4096 - 60)), "place");
  EXPECT_EQ(count("put"), 0) << "nothing is queued";
  EXPECT_EQ(exchange(memory, byte_of(memory, 4096 - 64)), "");
}

// A rank that fails ends the waits of its stream, which NCCL could not, and gives back nothing that others write to.
TEST_F(NcclWindows, AnAbortEndsWaits) {
  {
    const auto communicator = use({.timeout = std::chrono::milliseconds(100)});
    void* const memory = communicator->share(4096);
    *done_ = false;
    const Communicator::Transfer transfers[] = {{false, 1, memory, 16, DType::f32, memory}};
    stream_calls_().clear();
    launches_().clear();
    communicator->exchange(transfers, nullptr);
    *reached_ = stream_calls_().front().event;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (comm_.aborts == 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(comm_.aborts, 1);
    EXPECT_THROW(communicator->synchronize(nullptr), Error);
    EXPECT_THROW(communicator->share(16), Error);
    communicator->unshare(memory);
  }
  EXPECT_GE(std::ranges::count(kernels(), std::string(fake_driver::kMemset)), 1) << "words, of which all are enough";
  EXPECT_EQ(calls("deregister").size(), 0U);
  EXPECT_EQ(comm_.after_abort, 0);
}

TEST_F(NcclWindows, AFailedCallLeavesNoMemory) {
  const auto communicator = use({.watch = false});
  comm_.register_result = 3;
  EXPECT_THROW(communicator->share(4096), Error);
  EXPECT_EQ(comm_.allocations, 0);
  comm_.register_result = 0;
  void* const memory = communicator->share(4096);
  comm_.put_result = 3;
  const Communicator::Transfer transfers[] = {{true, 1, memory, 16, DType::f32, memory}};
  EXPECT_THROW(communicator->exchange(transfers, nullptr), Error);
  EXPECT_EQ(comm_.aborts, 1);
}

}  // namespace
}  // namespace fa
