#include "plan/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <fa/paged.hpp>

#include "plan/planner.hpp"
#include "plan/workspace.hpp"

namespace fa::plan {
namespace {

Problem decode(std::int64_t b, std::int64_t s_kv) {
  Problem problem;
  problem.arch = parse_arch("sm_90a");
  problem.d_qk = problem.d_v = 128;
  problem.causal = true;
  problem.page_size = 16;
  problem.b = b;
  problem.h_q = 32;
  problem.h_kv = 8;
  problem.s_q = 1;
  problem.s_kv = s_kv;
  problem.given_schedule = true;  // else blocks find their parts of a few by themselves
  return problem;
}

KernelSpec kernel_of(const Problem& problem) {
  return plan_forward(problem, {}).kernel;
}

TEST(Schedule, IsOfLongRequestsOverPages) {
  EXPECT_TRUE(choose(decode(4, 8192), {}).scheduled);
  EXPECT_TRUE(kernel_of(decode(4, 8192)).scheduled());
  EXPECT_FALSE(choose(decode(4, 256), {}).scheduled);
  EXPECT_FALSE(choose(decode(4, 8192), {{"scheduled", 0}}).scheduled);
  EXPECT_TRUE(choose(decode(4, 256), {{"scheduled", 1}}).scheduled);
  Problem problem = decode(4, 8192);
  problem.page_size = 0;
  EXPECT_FALSE(choose(problem, {{"scheduled", 1}}).scheduled);
  problem = decode(4, 8192);
  Variants window;
  window.left_window = true;
  problem.variants = &window;
  problem.window_left = 100;
  EXPECT_FALSE(choose(problem, {}).scheduled) << "no row sees many keys";
}

/// A contiguous cache is shared out as pages are, in kernels that differ from theirs in where rows lie.
TEST(Schedule, IsOfContiguousCachesToo) {
  for (const std::int64_t b : {4, 200}) {
    for (const bool given : {false, true}) {
      Problem pages = decode(b, 8192), rows = pages;
      pages.given_schedule = rows.given_schedule = given;
      rows.page_size = static_cast<int>(kContiguous);
      EXPECT_EQ(choose(rows, {}).scheduled, choose(pages, {}).scheduled);
      EXPECT_EQ(choose(rows, {}).own_parts, choose(pages, {}).own_parts);
      KernelSpec kernel = kernel_of(rows);
      EXPECT_NE(canonical(kernel).find(" page_size=-1"), std::string::npos) << canonical(kernel);
      kernel.page_size = 16;
      EXPECT_EQ(kernel, kernel_of(pages));
      EXPECT_EQ(schedule_spec(kernel), schedule_spec(kernel_of(rows)));
    }
  }
  Problem few = decode(4, 256);
  few.page_size = static_cast<int>(kContiguous);
  EXPECT_FALSE(choose(few, {}).scheduled);
}

/// Where a block a multiprocessor has few KV tiles, latency counts, and a fourth buffer hides more of it. Long parts
/// have two blocks with three buffers each: one computes while the other waits.
TEST(Schedule, ShortPartsHaveABlockOfFourBuffers) {
  for (const std::int64_t page_size : {std::int64_t{16}, kContiguous}) {
    const auto stages = [&](std::int64_t b, std::int64_t s_kv) {
      Problem problem = decode(b, s_kv);
      problem.page_size = static_cast<int>(page_size);
      problem.given_schedule = false;
      const KernelSpec spec = plan_forward(problem, {Family::sm80}).kernel;
      EXPECT_EQ(spec.min_blocks, spec.stages == 4 ? 1 : 2);
      return spec.stages;
    };
    EXPECT_EQ(stages(1, 1024), 4);
    EXPECT_EQ(stages(1, 8192), 4);
    EXPECT_EQ(stages(1, 16384), 4);
    EXPECT_EQ(stages(1, 32768), 3);
    EXPECT_EQ(stages(1, 131072), 3);
    EXPECT_EQ(stages(2, 8192), 4);
    EXPECT_EQ(stages(2, 16384), 3);
    EXPECT_EQ(stages(8, 8192), 3) << "many heads";
  }
}

// Equal limits, another number of requests or longer ones: the grid is that of the multiprocessors.
TEST(Schedule, PartsAreAsManyAsFitTheGpu) {
  for (const std::int64_t b : {2, 64, 4000}) {
    const Problem problem = decode(b, 131072);
    const KernelSpec spec = kernel_of(problem);
    EXPECT_EQ(schedule_shape(problem, spec, 132).parts, 132 * spec.min_blocks);
  }
  const Problem few = decode(2, 512);
  const KernelSpec spec = kernel_of(few);
  EXPECT_EQ(schedule_shape(few, spec, 1000).parts, 2 * 8 * (512 / spec.tile_n / kernel::kFewestTiles));
}

TEST(Schedule, SegmentsCoverTheSlots) {
  for (const std::int64_t b : {2, 2047, 2048, 2049, 16384, 1000000}) {
    const Problem problem = decode(b, 8192);
    const ScheduleShape shape = schedule_shape(problem, kernel_of(problem), 132);
    EXPECT_EQ(shape.slots, b);
    EXPECT_EQ(shape.segments == 1, b <= 2048);
    EXPECT_LE(shape.segments, kernel::kMostSegments);
    EXPECT_EQ(shape.segment_slots % 1024, 0);
    EXPECT_GE(shape.segments * shape.segment_slots, b);
  }
}

// Two for each part, whatever the batch: of as many rows as an item has at most.
TEST(Schedule, PartialResultsAreBoundedByParts) {
  for (const std::int64_t b : {2, 4000}) {
    const Problem problem = decode(b, 131072);
    const KernelSpec spec = kernel_of(problem);
    const ScheduleShape shape = schedule_shape(problem, spec, 132);
    EXPECT_EQ(partial_rows(problem, spec, shape), 2 * shape.parts * 4);
    const ForwardNeeds own = forward_needs(problem, spec, 132, false), given = forward_needs(problem, spec, 132, true);
    const Choice choice = choose(problem, {});
    const std::size_t partials = static_cast<std::size_t>(2 * shape.parts * 4) * (128 + 3) * sizeof(float);
    EXPECT_GE(forward_workspace(problem, choice, given).bytes(), partials);
    EXPECT_LE(forward_workspace(problem, choice, given).bytes(), partials + 512);
    EXPECT_GE(forward_workspace(problem, choice, own).bytes(), partials + shape.bytes());
  }
  Problem few = decode(2, 131072);
  few.given_schedule = false;
  const KernelSpec spec = kernel_of(few);
  ASSERT_TRUE(spec.own_parts());
  const int parts = schedule_shape(few, spec, 132).parts;
  EXPECT_EQ(forward_needs(few, spec, 132, false).schedule, 2 * static_cast<std::size_t>(parts) * sizeof(std::uint64_t))
      << "a flag for each partial result";
  EXPECT_EQ(forward_needs(few, spec, 132, false).partial_rows, 2 * parts * 4);
}

/// Parts that blocks find by themselves: one a multiprocessor as long as there are no more query tiles, where that is
/// faster.
TEST(Schedule, FewTilesHaveAMultiprocessorEach) {
  const auto parts_of = [](std::int64_t b, int d, std::int64_t group) {
    Problem few = decode(b, 8192);
    few.given_schedule = false;
    few.d_qk = few.d_v = d;
    few.h_q = 8 * group;
    const KernelSpec spec = kernel_of(few);
    EXPECT_TRUE(spec.own_parts());
    return schedule_shape(few, spec, 132).parts;
  };
  EXPECT_EQ(parts_of(16, 64, 4), 132) << "128 query tiles";
  EXPECT_EQ(parts_of(17, 64, 4), 264);
  EXPECT_EQ(parts_of(16, 128, 4), 264) << "merges of few rows";
  EXPECT_EQ(parts_of(16, 128, 16), 132);
  EXPECT_EQ(parts_of(17, 128, 16), 264);
  EXPECT_EQ(parts_of(17, 256, 4), 132) << "one block a multiprocessor, however many tiles";
}

TEST(Schedule, TagsTellLimitsApart) {
  const Problem problem = decode(64, 8192);
  const KernelSpec spec = kernel_of(problem);
  const auto tag = [](const Problem& of, const KernelSpec& by, int multiprocessors) {
    return schedule_tag(of, by, schedule_shape(of, by, multiprocessors));
  };
  const std::uint64_t first = tag(problem, spec, 132);
  EXPECT_EQ(tag(problem, spec, 132), first);
  EXPECT_NE(first, 0U);
  EXPECT_NE(tag(decode(65, 8192), spec, 132), first);
  EXPECT_NE(tag(decode(64, 8191), spec, 132), first);
  EXPECT_NE(tag(problem, spec, 114), first);
  KernelSpec other = spec;
  other.tile_n = 32;
  EXPECT_NE(tag(problem, other, 132), first);
  Problem uncausal = problem;
  uncausal.causal = false;
  EXPECT_NE(tag(uncausal, spec, 132), first);
}

/// Every KV tile of every item and head is in one part; the parts that share an item are named alike by all of them.
TEST(Schedule, PartsOfTheHostAreAPartition) {
  const Problem problem = decode(7, 8192);
  const KernelSpec spec = kernel_of(problem);
  const std::vector<std::int32_t> keys{8192, 0, 1, 700, 64, 5000, 129};
  for (const int parts : {1, 3, 132, 264, 1000}) {
    const HostSchedule schedule = schedule_on_host(problem, spec, {{}, {}, keys, {}}, parts);
    ASSERT_EQ(schedule.items.size(), 7U);
    ASSERT_EQ(schedule.starts.size(), static_cast<std::size_t>(parts) + 1);
    const auto place = [](const kernel::PartStart& start) {
      return (std::int64_t{start.head} * 7 + start.item) * 100000 + start.tile;
    };
    EXPECT_EQ(place(schedule.starts.front()), 0);
    EXPECT_EQ(place(schedule.starts.back()), std::int64_t{8} * 7 * 100000);
    for (std::size_t p = 0; p < static_cast<std::size_t>(parts); ++p) {
      const kernel::PartStart& start = schedule.starts[p];
      EXPECT_LE(place(start), place(schedule.starts[p + 1]));
      if (start.tile == 0) continue;
      const auto first = static_cast<std::size_t>(start.first_part), last = static_cast<std::size_t>(start.last_part);
      ASSERT_TRUE(first < p && p <= last) << p;
      const std::int64_t item = place(start) - start.tile;
      EXPECT_TRUE(place(schedule.starts[first]) <= item && place(schedule.starts[first + 1]) > item) << p;
      EXPECT_TRUE(place(schedule.starts[last]) < item + 100000 && place(schedule.starts[last + 1]) >= item + 100000);
    }
  }
}

/// Of a part the most items, and parts that start within one.
std::pair<int, int> most_items(const HostSchedule& of) {
  int most = 0, cuts = 0;
  for (std::size_t p = 0; p + 1 < of.starts.size(); ++p) {
    const kernel::PartStart &start = of.starts[p], &end = of.starts[p + 1];
    const int count = static_cast<int>(of.items.size());
    most = std::max(most, (end.head - start.head) * count + end.item - start.item + (end.tile > 0 ? 1 : 0));
    cuts += start.tile > 0 ? 1 : 0;
  }
  return {most, cuts};
}

/// Equal requests of latent attention are not cut where parts of whole ones, or whole parts of one, are hardly longer.
TEST(Schedule, PartsOfLatentAttentionHaveWholeItems) {
  const auto schedule = [](int heads, std::int64_t b, int parts, const std::vector<std::int32_t>& keys) {
    Problem problem = decode(b, 40000);
    problem.h_q = heads;
    problem.h_kv = 1;
    problem.d_qk = 576;
    problem.d_v = 512;
    problem.value_in_key = true;
    problem.page_size = 64;
    const KernelSpec spec = kernel_of(problem);
    EXPECT_GT(schedule_spec(spec).as<Schedule>().whole_items, 0);
    return schedule_on_host(problem, spec, {{}, {}, keys, {}}, parts);
  };
  const std::vector<std::int32_t> equal(128, 4096), few(64, 4096), longer(128, 32768);
  EXPECT_EQ(most_items(schedule(128, 128, 66, equal)), std::pair(2, 0));
  EXPECT_EQ(most_items(schedule(16, 128, 132, equal)), std::pair(1, 0));
  EXPECT_EQ(most_items(schedule(16, 64, 132, few)), std::pair(1, 64));
  EXPECT_EQ(schedule(16, 64, 132, few).starts[1].tile, 32) << "a half, though the item costs the first more";
  EXPECT_GT(most_items(schedule(128, 128, 66, longer)).second, 60) << "even shares are shorter";
  std::vector<std::int32_t> ragged = equal;
  ragged[5] = 700;
  EXPECT_GT(most_items(schedule(128, 128, 66, ragged)).second, 50);
}

/// Nor are those of caches in fewer bits, where blocks of neighbouring heads keep pace.
TEST(Schedule, PartsOfStoredCachesHaveWholeItems) {
  for (const DType stored : {DType::u4x2, DType::e4m3}) {
    Problem problem = decode(64, 8192);
    const std::vector<std::int32_t> equal(64, 8192);
    EXPECT_GT(most_items(schedule_on_host(problem, kernel_of(problem), {{}, {}, equal, {}}, 264)).second, 100)
        << "16 bits by the Hopper forward";
    problem.k_dtype = problem.v_dtype = stored;
    problem.group_size = stored == DType::u4x2 ? 64 : 0;
    const KernelSpec spec = kernel_of(problem);
    ASSERT_TRUE(spec.is<Sm80Forward>() && spec.stored());
    EXPECT_GT(schedule_spec(spec).as<Schedule>().whole_items, 0);
    EXPECT_EQ(most_items(schedule_on_host(problem, spec, {{}, {}, equal, {}}, 264)), std::pair(2, 0));
    std::vector<std::int32_t> ragged = equal;
    ragged[5] = 700;
    EXPECT_GT(most_items(schedule_on_host(problem, spec, {{}, {}, ragged, {}}, 264)).second, 100);
  }
}

/// Blocks then read the same keys of neighbouring heads at a time. Else parts run on from one head into the next.
TEST(Schedule, PartsCutHeadsAlikeWhereEachHasAsMany) {
  const std::vector<std::int32_t> keys = {8192, 300, 5000, 0, 777};
  const Problem problem = decode(5, 8192);
  const KernelSpec spec = kernel_of(problem);
  const auto cuts_heads_alike = [&](int parts) {
    const std::vector<kernel::PartStart> starts = schedule_on_host(problem, spec, {{}, {}, keys, {}}, parts).starts;
    const int heads = static_cast<int>(problem.h_kv), of_head = parts / heads;
    for (int p = 0; p < of_head * heads; ++p) {
      const auto at = static_cast<std::size_t>(p);
      const kernel::PartStart &start = starts[at], &first = starts[at % static_cast<std::size_t>(of_head)];
      if (start.item != first.item || start.tile != first.tile || start.head - first.head != p / of_head) return false;
    }
    return true;
  };
  EXPECT_TRUE(cuts_heads_alike(32));
  EXPECT_TRUE(cuts_heads_alike(128));
  EXPECT_FALSE(cuts_heads_alike(33));
  EXPECT_FALSE(cuts_heads_alike(132));
}

TEST(Schedule, KernelFollowsFromTheForwards) {
  const Problem problem = decode(7, 8192);
  const KernelSpec spec = kernel_of(problem), schedule = schedule_spec(spec);
  EXPECT_EQ(kernel_name(schedule), "fa_schedule");
  EXPECT_EQ(schedule.tile_m, spec.tile_m);
  EXPECT_EQ(schedule.tile_n, spec.tile_n);
  EXPECT_EQ(schedule.warps, 32);
  EXPECT_FALSE(schedule.variants.any());
}

}  // namespace
}  // namespace fa::plan
