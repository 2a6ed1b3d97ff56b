// What becomes of ranks that are late or fail, of calls that NCCL refuses, and of libraries that are none.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "fake_nccl/over_nccl.hpp"

namespace fa {
namespace {

using Clock = std::chrono::steady_clock;
using test::at;

class NcclFailures : public test::OverNccl {};

// Late ranks: the bound ends what waits, in synchronize and by the thread that watches.
TEST_F(NcclFailures, ALateRankEndsSynchronize) {
  const auto communicator = use({.timeout = std::chrono::milliseconds(100), .watch = false});
  *done_ = false;
  communicator->exchange({}, nullptr);
  *reached_ = stream_calls_().front().event;  // where the group begins
  const auto begin = Clock::now();
  EXPECT_THROW(communicator->synchronize(nullptr), Error);
  EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(100));
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
  EXPECT_EQ(comm_.aborts, 1);
  EXPECT_THROW(communicator->check(), Error);
  EXPECT_THROW(communicator->exchange({}, nullptr), Error);
  EXPECT_EQ(comm_.aborts, 1) << "once";
}

// The caller's kernels are no ranks that are late, unless a graph may hide one.
TEST_F(NcclFailures, SynchronizeBoundsGroupsNotKernels) {
  const auto communicator = use({.timeout = std::chrono::milliseconds(100)});
  *done_ = false;
  communicator->exchange({}, nullptr);  // the device does not come to it before the kernels are done
  std::thread kernels([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    *done_ = true;
  });
  EXPECT_NO_THROW(communicator->synchronize(nullptr));
  kernels.join();
  EXPECT_EQ(comm_.aborts, 0);
  *capturing_ = true;
  communicator->exchange({}, nullptr);
  *capturing_ = false;
  *done_ = false;
  EXPECT_THROW(communicator->synchronize(nullptr), Error);
  EXPECT_EQ(comm_.aborts, 1);
}

TEST_F(NcclFailures, ACommunicatorThatCannotBeMadeLeavesNothing) {
  const int before = handles_->made;
  { const auto communicator = use(); }
  EXPECT_EQ(handles_->made, before);
  for (const int left : {0, 1, 7, 100}) {
    handles_->left = left;
    EXPECT_THROW(use(), Error);
    handles_->left = -1;
    EXPECT_EQ(handles_->made, before) << left;
  }
}

TEST_F(NcclFailures, ALateRankEndsByTheWatch) {
  const auto communicator = use({.timeout = std::chrono::milliseconds(100)});
  *done_ = false;
  communicator->exchange({}, nullptr);
  communicator->exchange({}, nullptr);
  // While the device is busy with what was queued before, nobody is late.
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  EXPECT_EQ(comm_.aborts, 0);
  *reached_ = stream_calls_().front().event;  // where the first group begins
  const auto until = Clock::now() + std::chrono::seconds(10);
  while (comm_.aborts == 0 && Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(comm_.aborts, 1);
  EXPECT_THROW(communicator->check(), Error);
}

TEST_F(NcclFailures, TheWatchEndsNothingThatIsDone) {
  const auto communicator = use({.timeout = std::chrono::milliseconds(50)});
  for (int i = 0; i < 100; ++i) communicator->wait(communicator->exchange({}, nullptr), nullptr);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  // Nor what was captured, whose events say nothing.
  *done_ = false;
  communicator->exchange({}, nullptr);
  *capturing_ = true;
  *reached_ = stream_calls_().back().event;
  for (int i = 0; i < 64; ++i) communicator->exchange({}, nullptr);  // in the place of those before
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(comm_.aborts, 0);
  *done_ = true;
  communicator->synchronize(nullptr);
}

TEST_F(NcclFailures, AnAsynchronousErrorEndsAll) {
  for (const bool watch : {false, true}) {
    comm_.aborts = 0;
    comm_.async_error = 0;
    const auto communicator = use({.watch = watch});
    communicator->exchange({}, nullptr);
    comm_.async_error = 6;
    try {
      communicator->check();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::cuda);
      EXPECT_NE(std::string(error.what()).find("remote process exited"), std::string::npos);
    }
    EXPECT_EQ(comm_.aborts, 1);
    comm_.async_error = 0;
  }
}

// Communicators that do not block say later that a group was queued.
TEST_F(NcclFailures, CommunicatorsThatDoNotBlock) {
  for (const bool watch : {false, true}) {
    comm_.aborts = 0;
    comm_.end_result = 0;
    comm_.polls_in_progress = 0;
    const auto communicator = use({.timeout = std::chrono::milliseconds(200), .watch = watch});
    comm_.end_result = 7;
    comm_.polls_in_progress = 5;
    communicator->exchange({}, nullptr);
    EXPECT_EQ(comm_.aborts, 0);
    comm_.polls_in_progress = 1 << 30;
    EXPECT_THROW(communicator->exchange({}, nullptr), Error);
    EXPECT_EQ(comm_.aborts, 1);
    EXPECT_EQ(comm_.after_abort, 0) << "a communicator that is gone was asked";
  }
  comm_.polls_in_progress = 0;
  comm_.end_result = 0;
}

TEST_F(NcclFailures, AGroupThatIsRefused) {
  const auto communicator = use({.watch = false});
  comm_.end_result = 3;
  EXPECT_THROW(communicator->exchange({}, nullptr), Error);
  EXPECT_EQ(comm_.aborts, 1);
}

// Whichever call of a group fails: NCCL's group is ended, the communicator is aborted once, and what NCCL says is told
// with the rank that it has said it to.
TEST_F(NcclFailures, ACallOfAGroupThatFails) {
  const Communicator::Transfer transfer{true, 1, at(1), 100, DType::bf16};
  for (std::atomic<int>* const result : {&comm_.start_result, &comm_.send_result, &comm_.end_result}) {
    comm_.aborts = 0;
    comm_.calls.clear();
    const auto communicator = use({.watch = false});
    *result = 6;
    try {
      communicator->exchange({&transfer, 1}, nullptr);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::cuda);
      EXPECT_EQ(std::string(error.field("problem")), "rank 0: remote process exited");
    }
    *result = 0;
    EXPECT_EQ(count("end"), 1);
    EXPECT_EQ(comm_.aborts, 1);
    EXPECT_THROW(communicator->exchange({&transfer, 1}, nullptr), Error);
    EXPECT_EQ(count("end"), 1) << "nothing is asked of what was aborted";
    EXPECT_EQ(comm_.after_abort, 0);
  }
}

// One rank hears of a failure from NCCL, and the others wait in vain: each has an error, with its own rank in it.
TEST_F(NcclFailures, EveryRankHasAnError) {
  fake_nccl::Communicator other;
  other.rank = 1;
  const NcclOptions options{.timeout = std::chrono::milliseconds(100)};
  const auto first = use(options), second = use_nccl(reinterpret_cast<ncclComm*>(&other), options);
  *done_ = false;
  first->exchange({}, nullptr);
  second->exchange({}, nullptr);
  *reached_ = stream_calls_().at(3).event;  // where the second rank's group begins
  comm_.async_error = 6;
  const auto problem_of = [](Communicator& communicator) -> std::string {
    const auto until = Clock::now() + std::chrono::seconds(10);
    try {
      while (Clock::now() < until) {
        communicator.check();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::cuda);
      return std::string(error.field("problem"));
    }
    return "nothing";
  };
  EXPECT_EQ(problem_of(*first), "rank 0: remote process exited");
  EXPECT_EQ(problem_of(*second), "rank 1 has waited for other ranks for 100 ms");
  EXPECT_EQ(comm_.aborts, 1);
  EXPECT_EQ(other.aborts, 1);
  // No attention of either is made, and no call is queued.
  for (const auto& communicator : {first, second}) {
    EXPECT_THROW(ContextParallel::create(config(Scheme::ring), communicator), Error);
    EXPECT_THROW(communicator->synchronize(nullptr), Error);
  }
}

// An attention whose communicator is aborted between two calls launches nothing more.
TEST_F(NcclFailures, AnAbortedCommunicatorServesNoCalls) {
  const auto communicator = use({.watch = false});
  ContextParallel parallel = ContextParallel::create(config(Scheme::ring), communicator);
  const auto forward = [&] { parallel.forward({tensor(1, 8), tensor(2, 2), tensor(3, 2)}, {tensor(4, 8)}); };
  forward();
  communicator->abort("the job is over");
  launches_().clear();
  comm_.calls.clear();
  for (const auto& call : std::vector<std::function<void()>>{forward, [&] { parallel.check_agreement(); }}) {
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::cuda);
      EXPECT_EQ(std::string(error.field("problem")), "the job is over");
    }
  }
  EXPECT_TRUE(launches_().empty());
  EXPECT_TRUE(comm_.calls.empty());
  EXPECT_EQ(comm_.after_abort, 0);
}

TEST_F(NcclFailures, BadCommunicators) {
  EXPECT_THROW(use_nccl(nullptr), Error);
  comm_.async_error = 5;
  EXPECT_THROW(use(), Error);
  comm_.async_error = 0;
  EXPECT_THROW(use({.timeout = std::chrono::milliseconds(0)}), Error);
}

TEST_F(NcclFailures, CommunicatorsThatNcclKnowsNothingOf) {
  const int before = handles_->made;
  comm_.device_result = 4;
  try {
    use();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(std::string(error.field("argument")), "comm");
  }
  comm_.device_result = 0;
  comm_.count_result = 4;
  EXPECT_THROW(use(), Error);
  EXPECT_EQ(handles_->made, before);
}

/// What use_nccl says of a library, which a process opens once.
std::string refusal(fake_nccl::Communicator& comm) {
  try {
    use_nccl(reinterpret_cast<ncclComm*>(&comm));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported || error.field("remedy").empty()) return "another error";
    return std::string(error.field("problem"));
  }
  return "";
}

/// In a process of their own, where NCCL has not been opened.
class Opening : public test::OverNccl {
 protected:
  void SetUp() override {
    OverNccl::SetUp();
    testing::GTEST_FLAG(death_test_style) = "threadsafe";
  }
  static void expect(bool right, const std::string& what) {
    if (right) return;
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
  }
};

// One that is too old is refused with its version, and one that is new enough serves the same process.
TEST_F(Opening, OldLibraries) {
  const auto test = [&] {
    library_->version = 21799;
    const std::string old = refusal(comm_);
    expect(old.find(" is NCCL 2.17, at least 2.18 is needed") != std::string::npos, old);
    library_->version = 21800;
    expect(refusal(comm_).empty(), "2.18 is refused");
    std::exit(0);
  };
  EXPECT_EXIT(test(), testing::ExitedWithCode(0), "");
}

TEST_F(Opening, LibrariesThatAreNone) {
  const auto test = [&] {
    setenv("FA_NCCL_PATH", "/nowhere/libnccl.so.2", 1);
    const std::string missing = refusal(comm_);
    expect(missing.find("/nowhere/libnccl.so.2") != std::string::npos, missing);
    setenv("FA_NCCL_PATH", FA_NO_NCCL, 1);
    const std::string other = refusal(comm_);
    expect(other.find("has no function ncclGetVersion") != std::string::npos, other);
    setenv("FA_NCCL_PATH", FA_FAKE_NCCL, 1);
    expect(refusal(comm_).empty(), "the right one is refused");
    std::exit(0);
  };
  EXPECT_EXIT(test(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace fa
