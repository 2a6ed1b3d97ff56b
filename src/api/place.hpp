#ifndef FA_SRC_API_PLACE_HPP_
#define FA_SRC_API_PLACE_HPP_

#include <optional>

#include <fa/attention.hpp>

namespace fa::api {

/// The place of a call of `shape`, with the sizes of its whole; nothing where the call is the whole. Throws fa::Error:
/// invalid_argument for one that leaves its whole, unsupported for one that the configuration's masks, dropout or
/// batches have no form for.
std::optional<ShardPlace> checked_place(const AttentionConfig& config, const AttentionShape& shape,
                                        const std::optional<ShardPlace>& given);

/// Throws fa::Error(unsupported) for a configuration whose calls have none but the default.
void check_has_places(const AttentionConfig& config);

/// What a call on a GPU has of them.
struct Shard {
  std::optional<ShardPlace> place = std::nullopt;
  int max_multiprocessors = 0;
};

template <class Call>
Shard shard_of(const Call& call) {
  return {call.place, call.max_multiprocessors};
}

/// Throws fa::Error(invalid_argument) for a schedule, which is one of all multiprocessors, where a call is bounded.
void check_unscheduled(int max_multiprocessors, const Schedule& schedule);

/// Throws fa::Error(invalid_argument).
int checked_multiprocessors(int given);

}  // namespace fa::api

#endif  // FA_SRC_API_PLACE_HPP_
