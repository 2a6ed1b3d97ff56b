#ifndef FA_TEMPLATES_SM90_SM90_WALKS_CUH_
#define FA_TEMPLATES_SM90_SM90_WALKS_CUH_

#include <common/constants.cuh>
#include <common/paged.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_schedule.cuh>

namespace fa::sm90 {

/// How the warps that load walk over the splits of a request over a cache. All of them do so at once, from before the
/// wait for the kernel in front on. `begin(query)` is called as soon as memory may be read, `body` with what it
/// returns. Called by whole warps.
template <class Traits>
struct Walks : Schedule<Traits> {
  using Base = Schedule<Traits>;
  using Query = typename Base::Query;
  using Base::kVarlen, Base::params, Base::rounds, Base::has_tile, Base::tile_index, Base::take_tile, Base::look,
      Base::row_of_q;

  FA_DEVICE explicit Walks(const Schedule<Traits>& base) : Schedule<Traits>(base) {}

  /// The first tile is found by the length that memory holds ahead of the wait, which is looked at again behind it:
  /// where it is new, the tile is found once more. Requests begin at their first key: calls with seq_begin are sm80's.
  template <class Begin, class Body>
  FA_DEVICE void for_each_round(const Begin& begin, const Body& body) const {
    const Rounds own = rounds();
    bool guessed = true;
    FA_UNROLL_BY(1)
    for (int round = own.begin; has_tile(own, round); ++round) {
      Query query;
      take_tile(query, tile_index(round));
      query.ahead = {!has_tile(own, round + 1), 0};
      const int32_t* const length = params.sequences.used_kv + query.tile.batch;
      int keys = ptx::ld_ahead_global(length);
      int begun;
      FA_UNROLL_BY(1)
      for (int trip = 0; trip < 2; ++trip) {
        query.sequence = kernel::request_between(params, {0, params.s_q}, keys);
        this->template look<false, true>(query);
        query.ahead.q_row = row_of_q(query);
        ptx::compute_ahead(query.ahead.q_row);
        if (guessed) ptx::griddepcontrol_wait();
        query.pages.table_row = kernel::table_row_of(params.paged, query.tile.batch);  // which may be new
        begun = begin(query);
        if (!guessed) break;
        guessed = false;
        const int guess = keys;
        keys = ptx::ld_ahead_global(length);
        if (!ptx::vote_any(keys != guess)) break;
      }
      body(query, begun);
    }
    if (guessed) ptx::griddepcontrol_wait();
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_WALKS_CUH_
