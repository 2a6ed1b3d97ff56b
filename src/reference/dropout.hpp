#ifndef FA_SRC_REFERENCE_DROPOUT_HPP_
#define FA_SRC_REFERENCE_DROPOUT_HPP_

#include <array>
#include <cstdint>

namespace fa::reference {

/// Philox4x32-7 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::uint64_t key) noexcept;

/// One call of the generator decides on 32 elements, each of which has a draw of 16 bits: the high byte from the call's
/// words, the low one common to all. Any four high bytes are 32 independent bits.
class Call {
 public:
  Call(std::array<std::uint32_t, 4> counter, std::uint64_t key) noexcept;

  /// Of the element at `place`, 16 * (row mod 32 >= 16) + 8 * (the parities of row and 16-key block differ) + 4 * (key
  /// mod 2) + 2 * (key mod 16 >= 8) + (row mod 16 >= 8).
  std::uint32_t draw(int place) const noexcept;

 private:
  std::array<std::uint32_t, 8> bits_;  // bit `place` of word i is bit 8 + i of a draw
  std::uint32_t common_;
};

/// Bits 8 to 11 of a call's draws from its words: sums of four bits of other elements each.
std::array<std::uint32_t, 4> added_bits(const std::array<std::uint32_t, 4>& words) noexcept;

/// Which elements of P dropout keeps, on the host: a pure function of seed, offset, batch, query head, row and key, and
/// bit for bit that of templates/common/dropout.cuh, which describes it.
class DropoutMask {
 public:
  /// Keeps everything.
  DropoutMask() = default;
  /// `probability` of being dropped, in [0, 1): rounded to a multiple of 2^-16.
  DropoutMask(double probability, std::uint64_t seed, std::uint64_t offset);

  bool active() const noexcept { return dropped_ != 0; }
  /// What a kept element is multiplied with: 1 / (1 - probability), of the rounded one.
  double scale() const noexcept { return scale_; }

  /// The mask of a part of the heads (numbered batch * h_q + query head), rows and keys, which it numbers from 0.
  DropoutMask part(std::int64_t first_head, std::int64_t first_row, std::int64_t first_key) const noexcept;

  /// keep[j] = 1 if the elements (row, first_key + j), j < count, of a head are kept, else 0. `head` is batch * h_q +
  /// query head.
  void row(std::int64_t head, std::int64_t row, std::int64_t first_key, std::int64_t count, std::uint8_t* keep) const;

 private:
  std::uint64_t seed_ = 0;
  std::uint64_t offset_ = 0;
  std::uint32_t dropped_ = 0;  // of 2^16 draws
  double scale_ = 1;
  std::int64_t first_row_ = 0;
  std::int64_t first_key_ = 0;
};

/// keep [b, h_q, s_q, s_kv], row-major.
void dropout_mask(const DropoutMask& mask, std::int64_t b, std::int64_t h_q, std::int64_t s_q, std::int64_t s_kv,
                  std::uint8_t* keep);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_DROPOUT_HPP_
