// A process that forks while it uses the store.

#include <array>
#include <chrono>
#include <stdexcept>

#include "support.hpp"

namespace fa::cache {
namespace {

using testing::builder;
using testing::Listener;
using testing::make_key;
using testing::start_child;
using testing::TemporaryDirectory;
using testing::wait_for;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST(Fork, AChildDoesNotKeepTheLockOfItsParent) {
  const TemporaryDirectory directory;
  const Key key = make_key();
  const std::filesystem::path done = directory / "done";
  pid_t child = 0;
  Store store({directory / "cache", nullptr});
  EXPECT_THROW(store.get(key,
                         [&]() -> Entry {
                           child = start_child([&] {
                             testing::wait_for_gate(done);
                             return 0;
                           });
                           throw std::runtime_error("failed after a fork");
                         }),
               std::runtime_error);
  Listener listener;
  Store next({directory / "cache", listener.callback(), 5s});
  const auto begin = Clock::now();
  EXPECT_EQ(next.get(key, builder(key)).origin, Origin::built);
  EXPECT_LT(Clock::now() - begin, 4s);
  EXPECT_TRUE(listener.messages().empty());
  testing::open_gate(done);
  EXPECT_EQ(wait_for(child), 0);
}

}  // namespace
}  // namespace fa::cache
