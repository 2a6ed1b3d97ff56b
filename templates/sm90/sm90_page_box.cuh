#ifndef FA_TEMPLATES_SM90_SM90_PAGE_BOX_CUH_
#define FA_TEMPLATES_SM90_SM90_PAGE_BOX_CUH_

#include <common/constants.cuh>
#include <common/paged.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_forward_params.cuh>

namespace fa::sm90 {

/// A box of a page: where it begins on the axes of the map [d, rows, heads of all pages, ends, wraps].
struct PageBox {
  int row;
  int head;
  int end;
  int wrap;
};

/// The first of this lane's kBoxRows rows of KV tile n.
template <int kTileN, int kBoxRows>
FA_DEVICE int first_of_box(int n) {
  return n * kTileN + ptx::thread_index() % kernel::kWarpSize * kBoxRows;
}

/// The page of this lane's box of KV tile n, in which some key is needed; -1 of others.
template <int kTileN, int kBoxRows, bool kGuessed = false, int kPageSize>
FA_DEVICE int page_of_box(const kernel::PagedKeys<kPageSize>& keys, int n) {
  const int first = first_of_box<kTileN, kBoxRows>(n);
  const int needed = first < keys.begin ? keys.begin : first;
  const bool loads = ptx::thread_index() % kernel::kWarpSize < kTileN / kBoxRows;
  return loads && needed < first + kBoxRows ? keys.template page_of<kGuessed>(needed) : -1;
}

/// The box of this lane's kBoxRows rows of KV tile n, in page `page` of it. Rows that no query needs lie outside of the
/// map, which makes them zeros: it ends with the last key, or begins with the first.
template <int kTileN, int kBoxRows, int kPageSize>
FA_DEVICE PageBox page_box(const kernel::PagedKeys<kPageSize>& keys, int heads_a_page, int kv_head, int n, int page) {
  const int first = first_of_box<kTileN, kBoxRows>(n);
  const int needed = first < keys.begin ? keys.begin : first;
  if (!keys.has(needed, page)) return {kernel::kBoundedRows, 0, 0, kernel::kBoundedRows};  // all zeros
  const int head = page * heads_a_page + kv_head;
  const int row = keys.row_in_page(first);
  if (first < keys.begin) return {first - keys.begin, head, row + keys.begin - first, 0};
  const int behind = row + keys.end - first;  // the last key, in the page
  const int end = kPageSize < 0 || behind < kPageSize ? behind : kPageSize;
  return {kernel::kBoundedRows - end + row, head, end, kernel::kBoundedRows};
}

/// A box of all columns of a page: where it begins on the axes of the map [64, 8 rows, d / 64, rows / 8, heads of all
/// pages].
struct WideBox {
  int rows;
  int head;
};

/// This lane's of KV tile n, in whole rows of its page. No page, no head: all zeros.
template <int kTileN, int kBoxRows, int kPageSize>
FA_DEVICE WideBox wide_box(const kernel::PagedKeys<kPageSize>& keys, int heads_a_page, int kv_head, int n, int page) {
  const int first = first_of_box<kTileN, kBoxRows>(n);
  return {keys.row_in_page(first) / 8, keys.has(first, page) ? page * heads_a_page + kv_head : -1};
}

template <bool kWide, int kTileN, int kBoxRows, int kPageSize>
FA_DEVICE auto any_box(const kernel::PagedKeys<kPageSize>& keys, int heads_a_page, int kv_head, int n, int page) {
  if constexpr (kWide) {
    return wide_box<kTileN, kBoxRows>(keys, heads_a_page, kv_head, n, page);
  } else {
    return page_box<kTileN, kBoxRows>(keys, heads_a_page, kv_head, n, page);
  }
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_PAGE_BOX_CUH_
