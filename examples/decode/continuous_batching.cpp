// Continuous batching: requests with prompts of their own join a running batch as soon as there is a place and pages
// for them, and leave it when they have what they want. Their pages go back to the pool, and to the next request. On a
// GPU all steps are replays of graphs that were captured once; the host runs the same loop.
//
//   fa_example_continuous_batching tests/data/char_model.safetensors
//
// Ends with 0 if every request has got the tokens that it gets alone, without a cache, and all pages are free again.

#include <algorithm>
#include <cstdio>
#include <deque>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cached_attention.hpp"
#include "model.hpp"

namespace {

using namespace decode;

constexpr std::int64_t kPlaces = 3, kPageSize = 8, kPages = 14, kPagesOfRequest = 10;

/// Pages of the pool that are free. Who joins reserves what it may come to need, so that nobody has to leave early.
class BlockAllocator {
 public:
  explicit BlockAllocator(std::int64_t pages) {
    for (std::int64_t page = pages; page-- > 0;) free_.push_back(static_cast<std::int32_t>(page));
  }

  bool reserve(std::int64_t pages) {
    if (reserved_ + pages > static_cast<std::int64_t>(free_.size())) return false;
    reserved_ += pages;
    return true;
  }
  std::int32_t take_reserved() {
    if (free_.empty() || reserved_ == 0) throw std::logic_error("a page was not reserved");
    --reserved_;
    const std::int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void give_back(std::int32_t page) { free_.push_back(page); }
  void cancel(std::int64_t pages) { reserved_ -= pages; }
  std::int64_t free() const { return static_cast<std::int64_t>(free_.size()); }

 private:
  std::vector<std::int32_t> free_;
  std::int64_t reserved_ = 0;
};

struct Request {
  std::vector<int> tokens;  ///< the prompt, then what was generated
  std::size_t prompt = 0;   ///< of these
  std::int64_t wanted = 0;
  std::size_t number = 0;

  std::int64_t pages() const { return (static_cast<std::int64_t>(prompt) + wanted + kPageSize - 1) / kPageSize; }
};

/// A place in the batch, with its request while there is one.
struct Place {
  bool taken = false;
  Request request;
  std::int64_t pages = 0;  ///< that it has
};

class Batch {
 public:
  Batch(const Model& model, std::deque<Request> waiting)
      : model_(model),
        waiting_(std::move(waiting)),
        attention_({.requests = kPlaces, .pages = kPages, .page_size = kPageSize, .pages_of_request = kPagesOfRequest}),
        free_(kPages),
        places_(kPlaces) {}

  /// Runs until everybody has left; the requests by number.
  std::vector<Request> run() {
    std::vector<Request> done(waiting_.size());
    for (join(); busy(); join()) {
      step();
      for (std::int64_t i = 0; i < kPlaces; ++i) {
        Request& request = places_[static_cast<std::size_t>(i)].request;
        const bool complete = request.tokens.size() == request.prompt + static_cast<std::size_t>(request.wanted);
        if (!places_[static_cast<std::size_t>(i)].taken || !complete) continue;
        done[request.number] = request;
        leave(i);
      }
    }
    return done;
  }

  std::int64_t steps() const { return steps_; }
  std::int64_t most_places() const { return most_places_; }
  std::int64_t pages_taken() const { return pages_taken_; }
  std::int64_t free_pages() const { return free_.free(); }
  std::string device() const { return attention_.device(); }

 private:
  std::int64_t taken() const {
    return std::count_if(places_.begin(), places_.end(), [](const Place& place) { return place.taken; });
  }
  bool busy() const { return taken() > 0; }

  /// In the order in which they came.
  void join() {
    for (Place& place : places_) {
      if (place.taken || waiting_.empty() || !free_.reserve(waiting_.front().pages())) continue;
      place = {.taken = true, .request = std::move(waiting_.front()), .pages = 0};
      waiting_.pop_front();
    }
    if (!busy() && !waiting_.empty()) throw std::runtime_error("a request needs more pages than there are");
    most_places_ = std::max(most_places_, taken());
  }

  void leave(std::int64_t i) {
    Place& place = places_[static_cast<std::size_t>(i)];
    for (std::int64_t index = 0; index < place.pages; ++index) {
      free_.give_back(std::exchange(attention_.page(i, index), -1));
    }
    free_.cancel(place.request.pages() - place.pages);
    attention_.length(i) = 0;
    place.taken = false;
  }

  /// One token of every request: of its prompt, or the one that it has generated last.
  void step() {
    std::vector<int> tokens(kPlaces, 0);
    for (std::int64_t i = 0; i < kPlaces; ++i) {
      Place& place = places_[static_cast<std::size_t>(i)];
      if (!place.taken) continue;
      const std::int32_t position = attention_.length(i)++;
      tokens[static_cast<std::size_t>(i)] = place.request.tokens[static_cast<std::size_t>(position)];
      if (position % kPageSize == 0) {
        attention_.page(i, place.pages++) = free_.take_reserved();
        ++pages_taken_;
      }
    }
    Matrix x = model_.embed(tokens.data(), kPlaces);
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      model_.finish_layer(layer, attention_.run(layer, model_.qkv(layer, x), 1), &x);
    }
    for (std::int64_t i = 0; i < kPlaces; ++i) {
      Place& place = places_[static_cast<std::size_t>(i)];
      const bool at_the_end = place.request.tokens.size() == static_cast<std::size_t>(attention_.length(i));
      if (place.taken && at_the_end) place.request.tokens.push_back(model_.next(x, i));
    }
    ++steps_;
  }

  const Model& model_;
  std::deque<Request> waiting_;
  CachedAttention attention_;
  BlockAllocator free_;
  std::vector<Place> places_;
  std::int64_t steps_ = 0, most_places_ = 0, pages_taken_ = 0;
};

std::deque<Request> make_requests(const Model& model) {
  const std::pair<const char*, std::int64_t> kWanted[] = {
      {"The harbour ", 30}, {"A question is a kind of ", 12}, {"When ", 44}, {"The woman on the pier ", 20},
      {"Nobody ", 9},       {"To pay attention is to ", 33},  {"She ", 25},
  };
  std::deque<Request> requests;
  for (const auto& [text, wanted] : kWanted) {
    std::vector<int> prompt = model.tokens_of(text);
    const std::size_t length = prompt.size();
    requests.push_back({std::move(prompt), length, wanted, requests.size()});
  }
  return requests;
}

int run(const char* path) {
  const Model model(path);
  Batch batch(model, make_requests(model));
  const std::vector<Request> done = batch.run();
  int wrong = 0;
  for (const Request& request : done) {
    const auto end_of_prompt = request.tokens.begin() + static_cast<std::ptrdiff_t>(request.prompt);
    const std::vector<int> prompt(request.tokens.begin(), end_of_prompt),
        generated(end_of_prompt, request.tokens.end());
    const bool equal = generated == generate_without_cache(model, prompt, request.wanted);
    std::printf("%s|%s%s\n", model.text_of(prompt).c_str(), model.text_of(generated).c_str(),
                equal ? "" : "  WRONG: alone it gets something else");
    wrong += equal ? 0 : 1;
  }
  std::printf("attention on %s: %zu requests in %lld steps, %lld at a time; %lld pages taken from a pool of %lld\n",
              batch.device().c_str(), done.size(), static_cast<long long>(batch.steps()),
              static_cast<long long>(batch.most_places()), static_cast<long long>(batch.pages_taken()),
              static_cast<long long>(kPages));
  const bool reused = batch.pages_taken() > kPages && batch.most_places() == kPlaces;
  return wrong == 0 && reused && batch.free_pages() == kPages ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s MODEL\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "%s\n", exception.what());
    return 1;
  }
}
