// What the warp-wide instructions and conversions compute, against the layouts of the PTX ISA.

#include "emulator/instructions.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "emulator/emulator.hpp"
#include "emulator/shared_memory.hpp"
#include "reference/convert.hpp"

namespace emulator {
namespace {

using Body = std::function<void()>;

void run(const Body& body) {
  Memory memory;
  launch([](const void* erased) { (*static_cast<const Body*>(erased))(); }, &body, memory, {1, 32, 4096, 1, 1});
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Matrices {
  float a[16][16], b[16][8], d[16][8];

  explicit Matrices(bool small_mantissa) {
    std::mt19937 engine(5);
    const auto next = [&] {
      const float value = static_cast<float>(static_cast<int>(engine() % 2001) - 1000) / 256;
      return small_mantissa ? fa::reference::decode_bf16(fa::reference::encode_bf16(value)) : value;
    };
    for (auto& row : a) {
      for (float& x : row) x = next();
    }
    for (auto& row : b) {
      for (float& x : row) x = next();
    }
    for (auto& row : d) {
      for (float& x : row) x = next();
    }
  }

  double product(int row, int column, int depth) const {
    double sum = d[row][column];
    for (int k = 0; k < depth; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
    return sum;
  }
};

template <Half kHalf>
std::uint32_t pack(float low, float high) {
  const auto encode = [](float x) { return kHalf == Half::bf16 ? convert_bf16(x) : convert_f16(x); };
  return encode(low) | static_cast<std::uint32_t>(encode(high)) << 16;
}

void expect_product(const Matrices& m, const float (&d)[4], int g, int t, int depth) {
  EXPECT_NEAR(d[0], m.product(g, 2 * t, depth), 1e-4);
  EXPECT_NEAR(d[1], m.product(g, 2 * t + 1, depth), 1e-4);
  EXPECT_NEAR(d[2], m.product(g + 8, 2 * t, depth), 1e-4);
  EXPECT_NEAR(d[3], m.product(g + 8, 2 * t + 1, depth), 1e-4);
}

template <Half kHalf>
void check_mma() {
  const Matrices m(true);
  run([&] {
    const int g = thread_index() / 4;
    const int t = thread_index() % 4;
    float d[4] = {m.d[g][2 * t], m.d[g][2 * t + 1], m.d[g + 8][2 * t], m.d[g + 8][2 * t + 1]};
    float d8[4] = {d[0], d[1], d[2], d[3]};
    const std::uint32_t a[4] = {
        pack<kHalf>(m.a[g][2 * t], m.a[g][2 * t + 1]), pack<kHalf>(m.a[g + 8][2 * t], m.a[g + 8][2 * t + 1]),
        pack<kHalf>(m.a[g][2 * t + 8], m.a[g][2 * t + 9]), pack<kHalf>(m.a[g + 8][2 * t + 8], m.a[g + 8][2 * t + 9])};
    const std::uint32_t b0 = pack<kHalf>(m.b[2 * t][g], m.b[2 * t + 1][g]);
    const std::uint32_t b1 = pack<kHalf>(m.b[2 * t + 8][g], m.b[2 * t + 9][g]);
    mma_m16n8k16<kHalf>(d, a, b0, b1, Site::current());
    expect_product(m, d, g, t, 16);
    mma_m16n8k8<kHalf>(d8, a[0], a[1], b0, Site::current());
    expect_product(m, d8, g, t, 8);
  });
}

TEST(Mma, Bf16) {
  check_mma<Half::bf16>();
}
TEST(Mma, F16) {
  check_mma<Half::f16>();
}

TEST(Mma, Tf32IgnoresTheLowBits) {
  const Matrices m(false);
  run([&] {
    const int g = thread_index() / 4;
    const int t = thread_index() % 4;
    const auto dirty = [](float x) { return std::bit_cast<std::uint32_t>(x) | 0x1fffu; };
    float d[4] = {m.d[g][2 * t], m.d[g][2 * t + 1], m.d[g + 8][2 * t], m.d[g + 8][2 * t + 1]};
    const std::uint32_t a[4] = {dirty(m.a[g][t]), dirty(m.a[g + 8][t]), dirty(m.a[g][t + 4]), dirty(m.a[g + 8][t + 4])};
    mma_m16n8k8_tf32(d, a, dirty(m.b[t][g]), dirty(m.b[t + 4][g]), Site::current());
    expect_product(m, d, g, t, 8);
  });
}

/// Element (row, column) of matrix i is 256 i + 16 row + column.
void fill_matrices() {
  const int lane = thread_index();
  for (int column = 0; column < 8; ++column) {
    const auto value = static_cast<std::uint16_t>(256 * (lane / 8) + 16 * (lane % 8) + column);
    store_shared(SharedMemory::kBase + static_cast<std::uint32_t>(16 * lane + 2 * column), &value, 2, "st",
                 Site::current());
  }
  bar_warp_sync(Site::current());
}

TEST(Ldmatrix, RowsAndTransposes) {
  run([] {
    fill_matrices();
    const std::uint32_t row = SharedMemory::kBase + static_cast<std::uint32_t>(16 * thread_index());
    const auto g = static_cast<std::uint32_t>(thread_index() / 4);
    const auto t = static_cast<std::uint32_t>(thread_index() % 4);
    std::uint32_t r[4];
    ldmatrix_x4(r, row, Site::current());
    for (std::uint32_t i = 0; i < 4; ++i) {
      EXPECT_EQ(r[i] & 0xffff, 256 * i + 16 * g + 2 * t);
      EXPECT_EQ(r[i] >> 16, 256 * i + 16 * g + 2 * t + 1);
    }
    ldmatrix_x4_trans(r, row, Site::current());
    for (std::uint32_t i = 0; i < 4; ++i) {
      EXPECT_EQ(r[i] & 0xffff, 256 * i + 16 * (2 * t) + g);
      EXPECT_EQ(r[i] >> 16, 256 * i + 16 * (2 * t + 1) + g);
    }
  });
}

TEST(Ldmatrix, TwoMatricesUseHalfOfTheAddresses) {
  run([] {
    fill_matrices();
    const std::uint32_t row =
        thread_index() < 16 ? SharedMemory::kBase + static_cast<std::uint32_t>(16 * thread_index()) : 3u;
    std::uint32_t r[2];
    ldmatrix_x2(r, row, Site::current());
    EXPECT_EQ(r[1] & 0xffff, 256u + 16 * static_cast<std::uint32_t>(thread_index() / 4) +
                                 2 * static_cast<std::uint32_t>(thread_index() % 4));
    ldmatrix_x2_trans(r, row, Site::current());
    EXPECT_EQ(r[1] & 0xffff, 256u + 16 * 2 * static_cast<std::uint32_t>(thread_index() % 4) +
                                 static_cast<std::uint32_t>(thread_index() / 4));
  });
}

std::uint16_t shared_half(std::uint32_t index) {
  std::uint16_t value = 0;
  load_shared(SharedMemory::kBase + 2 * index, &value, 2, "ld.shared.b16", Site::current());
  return value;
}

// Element (r, c) of matrix i is 256 i + 16 r + c; each lane holds (g, 2t) and (g, 2t + 1).
TEST(Stmatrix, StoresMatricesOrTheirTransposes) {
  run([] {
    const auto thread = static_cast<std::uint32_t>(thread_index());
    std::uint32_t r[4];
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t first = 256 * i + 16 * (thread / 4) + 2 * (thread % 4);
      r[i] = first | (first + 1) << 16;
    }
    const std::uint32_t row = SharedMemory::kBase + 16 * thread;
    const auto expect = [&](bool transposed, std::uint32_t matrices) {
      bar_warp_sync(Site::current());
      for (std::uint32_t i = 0; i < 2 * matrices; ++i) {
        const std::uint32_t at = 32 * i + thread;
        const std::uint32_t down = at / 8 % 8;
        const std::uint32_t across = at % 8;
        EXPECT_EQ(shared_half(at), 256 * (at / 64) + (transposed ? 16 * across + down : 16 * down + across)) << at;
      }
      bar_warp_sync(Site::current());
    };
    stmatrix_x4_trans(row, r, Site::current());
    expect(true, 4);
    stmatrix_x4(row, r, Site::current());
    expect(false, 4);
    std::uint32_t exchanged[2] = {r[1], r[0]};
    stmatrix_x2(thread < 16 ? row ^ 128u : 3u, exchanged, Site::current());  // half of the addresses are not looked at
    expect(false, 2);
  });
}

TEST(Warp, ShuffleAndVote) {
  run([] {
    EXPECT_EQ(shfl_bfly(static_cast<float>(thread_index()), 5, Site::current()),
              static_cast<float>(thread_index() ^ 5));
    EXPECT_TRUE(vote_any(thread_index() == 17, Site::current()));
    EXPECT_FALSE(vote_any(false, Site::current()));
  });
}

TEST(Math, Ex2AndLg2) {
  EXPECT_EQ(ex2(0.f), 1.f);
  EXPECT_EQ(ex2(-kInfinity), 0.f);
  EXPECT_EQ(ex2(-127.f), 0.f) << "subnormals are flushed";
  EXPECT_EQ(ex2(-126.f), 0x1p-126f);
  EXPECT_EQ(lg2(0.f), -kInfinity);
  EXPECT_EQ(lg2(8.f), 3.f);
}

TEST(Math, ConversionsRoundToNearestEven) {
  EXPECT_EQ(convert_bf16(1.f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(convert_bf16(1.f + 3 * 0x1p-8f), 0x3f82);
  EXPECT_EQ(convert_f16(1.f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(convert_f16(65520.f), 0x7c00);
  EXPECT_EQ(convert_f16(std::nanf("")), 0x7fff);
  EXPECT_EQ(convert_bf16(std::nanf("")), 0x7fff);
}

}  // namespace
}  // namespace emulator
