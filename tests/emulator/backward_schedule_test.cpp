#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <utility>

#include <common/backward_schedule.cuh>

// The kernels' own text, compiled for the host.
namespace emulator {
namespace {

using fa::kernel::BackwardParams;
using fa::kernel::Section;
using fa::kernel::section_of_tile;

constexpr int kNone = std::numeric_limits<int>::max();

/// Every tile of every head once, those of a section from the first key on, and no head in two sections.
void expect_all_tiles(int heads, int blocks, int heads_in_flight, int last_section) {
  SCOPED_TRACE(::testing::Message() << heads << " heads, " << blocks << " tiles, " << heads_in_flight
                                    << " in flight, last " << last_section);
  BackwardParams params{};
  params.heads_in_flight = heads_in_flight;
  params.last_section = last_section;
  std::set<std::pair<int, int>> tiles;
  int section_before = 0, end_before = 0, block_before = 0;
  for (int index = 0; index < heads * blocks; ++index) {
    const Section section = section_of_tile(params, index, blocks, heads);
    const int head = section.first_head + section.place % section.heads;
    const int block = section.place / section.heads;
    EXPECT_TRUE(tiles.insert({head, block}).second) << "head " << head << ", tile " << block << " again";
    EXPECT_LT(head, heads);
    EXPECT_LT(block, blocks);
    EXPECT_LE(section.index, last_section);
    if (section.index != section_before) {
      EXPECT_EQ(section.index, section_before + 1);
      EXPECT_EQ(section.first_head, end_before);
      EXPECT_EQ(block, 0);
    } else {
      EXPECT_GE(block, block_before) << "longest first";
    }
    section_before = section.index;
    end_before = section.first_head + section.heads;
    block_before = block;
  }
  EXPECT_EQ(end_before, heads);
}

TEST(BackwardSchedule, SectionsHaveEachTileOnce) {
  for (const int heads : {1, 2, 5, 8, 13, 64}) {
    for (const int blocks : {1, 3, 32}) {
      for (const int in_flight : {1, 2, 4, 5, 64}) {
        for (int last = 0; last <= heads / in_flight; ++last) {
          if (last * in_flight < heads) expect_all_tiles(heads, blocks, in_flight, last);
        }
        expect_all_tiles(heads, blocks, in_flight, kNone);
      }
    }
  }
}

TEST(BackwardSchedule, TheLastSectionHasAllHeadsThatAreLeft) {
  BackwardParams params{};
  params.heads_in_flight = 2;
  params.last_section = 3;
  const Section before = section_of_tile(params, 3 * 2 * 10 - 1, 10, 20);
  EXPECT_EQ(before.index, 2);
  EXPECT_EQ(before.heads, 2);
  const Section last = section_of_tile(params, 20 * 10 - 1, 10, 20);
  EXPECT_EQ(last.index, 3);
  EXPECT_EQ(last.first_head, 6);
  EXPECT_EQ(last.heads, 14);
  EXPECT_EQ(last.place, 14 * 10 - 1);
}

}  // namespace
}  // namespace emulator
