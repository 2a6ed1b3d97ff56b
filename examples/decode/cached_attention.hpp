#ifndef FA_EXAMPLES_DECODE_CACHED_ATTENTION_HPP_
#define FA_EXAMPLES_DECODE_CACHED_ATTENTION_HPP_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "memory.hpp"
#include "model.hpp"

namespace decode {

/// How many requests there may be at a time, and how large their cache is.
struct CacheShape {
  std::int64_t requests = 1;
  std::int64_t pages = 0;             ///< of the pool of each layer
  std::int64_t page_size = 16;        ///< positions
  std::int64_t pages_of_request = 0;  ///< at most
  std::int64_t rows = 1;              ///< new rows of a request in one call, at most
  fa::Invariance invariance = fa::Invariance::none;
};

/// Attention of every layer over a KV cache in pages, on the GPU if there is one, else on the host.
///
/// Lengths and table say what each request is. Their values change from call to call, their places do not, so that a
/// GPU replays one captured graph for each layer in all calls of one row a request.
class CachedAttention {
 public:
  explicit CachedAttention(const CacheShape& shape);

  std::string device() const { return fa::to_string(attention_->device()); }
  const CacheShape& shape() const { return shape_; }

  /// Page `index` of a request.
  std::int32_t& page(std::int64_t request, std::int64_t index) {
    return table_[static_cast<std::size_t>(request * shape_.pages_of_request + index)];
  }
  /// Positions of a request, its new rows counted; 0: there is none.
  std::int32_t& length(std::int64_t request) { return lengths_[static_cast<std::size_t>(request)]; }

  /// Writes k and v of qkv [requests * rows, kQkvWidth] into the cache of a layer, with their rotary embedding, and
  /// returns o [requests * rows, kWidth], valid until the next call. The last `rows` positions of each request are new.
  const float* run(std::int64_t layer, const Matrix& qkv, std::int64_t rows);

 private:
  fa::AttentionConfig config() const;
  std::unique_ptr<fa::Attention> prepared(fa::Device device, std::size_t* workspace) const;
  void queue(std::int64_t layer, std::int64_t rows, fa::Stream stream);
  fa::TensorView pool(std::int64_t layer, bool values);
  void place(std::int64_t rows);

  CacheShape shape_;
  std::shared_ptr<Gpu> gpu_;
  std::size_t workspace_bytes_ = 0;
  std::unique_ptr<fa::Attention> attention_;
  Shared<float> pools_;  ///< of each layer, K and then V: [pages, page_size, kKvHeads, kHeadDim]
  Shared<std::int32_t> table_, lengths_;
  Shared<std::int32_t> slots_, positions_;  ///< of new rows: where they go, and where they stand
  Shared<float> qkv_, o_;
  Shared<char> workspace_;
  std::vector<Replayed> steps_;  ///< of one row a request, for each layer
};

}  // namespace decode

#endif  // FA_EXAMPLES_DECODE_CACHED_ATTENTION_HPP_
