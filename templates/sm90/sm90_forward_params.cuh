#ifndef FA_TEMPLATES_SM90_SM90_FORWARD_PARAMS_CUH_
#define FA_TEMPLATES_SM90_SM90_FORWARD_PARAMS_CUH_

#include <common/forward_params.cuh>
#include <common/types.cuh>
#include <common/variant_params.cuh>

namespace fa::kernel {

/// A packed batch's map ends with the sequence that is copied: its rows are the axis [kBoundedRows], of which row r of
/// a sequence of s is number kBoundedRows - s + r, so that what lies behind the end lies outside of the tensor. Two
/// more axes of one element a box, with coordinates of first row + s and kBoundedRows, bring the address back to the
/// sequence: a step of the one is a row, of the other kBoundedStep bytes less a row, and kBoundedRows steps of
/// kBoundedStep are 2^65, nothing in addresses of 64 bits.
inline constexpr int kBoundedRows = 1 << 30;
inline constexpr int64_t kBoundedStep = int64_t{1} << 35;

/// A map of pages has the same axes, whose tensor ends with the last key that is needed of a page. One that begins with
/// the first key that is needed, row f of a page, has row r at r - f, with coordinates f and 0 on the two axes. The
/// axis of heads goes on over the pages: their distance is a whole number of heads (PagedParams).

/// Launch parameters of the Hopper forward. The maps describe the tensors in boxes of 64 columns with the 128-byte
/// swizzle, innermost axis first.
template <class Base>
struct Sm90ForwardParamsWith {
  TensorMap map_q;  // [d_qk, group, s_q, h_kv, b], a box of tile_m packed rows
  TensorMap map_k;  // [d_qk, s_kv, h_kv, b], a box of tile_n keys; varlen: [d_qk, kBoundedRows, h_kv, ends, wraps];
                    // pages: the same, of the heads of all pages, a box of rows that divides page and tile; in wide
                    // boxes: [64, 8, d_qk / 64, page / 8, heads of all pages], a box of all columns of so many rows
  TensorMap map_v;  // [d_v, s_kv, h_kv, b], likewise
  TensorMap map_o;  // [d_v, group, s_q, h_kv, b], a box of 16 rows of one query head; varlen: [d_v, kBoundedRows, h_q,
                    // ends, wraps]
  Base base;
};
using Sm90ForwardParams = Sm90ForwardParamsWith<ForwardParams>;
using Sm90ForwardVariantParams = Sm90ForwardParamsWith<ForwardVariantParams>;

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_SM90_SM90_FORWARD_PARAMS_CUH_
