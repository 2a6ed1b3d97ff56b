#include "api/held_tiles.hpp"

#include <algorithm>
#include <atomic>
#include <bit>

#include "api/ready_table.hpp"
#include "plan/mask_tiles.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

/// What a place in memory holds.
struct Held {
  explicit Held(std::uint64_t of) : tag(of) {}
  Held(Held&& other) noexcept : tag(other.tag.load()) {}

  mutable std::atomic<std::uint64_t> tag;
};

/// By address. Never destroyed: calls may come as late as static objects are.
ReadyTable<Held>& table() {
  static auto* const instance = new ReadyTable<Held>;
  return *instance;
}

std::uint64_t code_of(const void* data) noexcept {
  return reinterpret_cast<std::uintptr_t>(data);
}

}  // namespace

GivenTiles given_tiles(const MaskTiles& tiles, const AttentionConfig& config, const Functions& functions,
                       const VariantCall& variant) noexcept {
  GivenTiles given{tiles};
  if (tiles.data == nullptr) return given;
  for (std::size_t i = 0; i < variant.count; ++i) {
    const expression::CapturedView& captured = variant.captures[i];
    const std::string& name = functions.program.captures[i].name;
    const bool of_mask = std::ranges::find(config.mask.captures, name, &Capture::name) != config.mask.captures.end();
    if (!of_mask || captured.view.defined()) continue;
    given.numbers = plan::mix_tag(given.numbers, std::bit_cast<std::uint64_t>(captured.scalar));
  }
  return given;
}

std::uint64_t held(const void* data) noexcept {
  const Held* const known = table().find(code_of(data));
  return known == nullptr ? 0 : known->tag.load(std::memory_order_acquire);
}

void expect_held(const MaskTiles& tiles, std::uint64_t tag) {
  if (!tiles.filled) return;
  const std::uint64_t found = held(tiles.data);
  if (found == tag) return;
  support::throw_invalid("tiles",
                         found == 0 ? "filled, and no call has filled this memory"
                                    : "filled, by a call of another shape, mask, kernel or operation",
                         "memory that a call like this one has filled; tensors of other strides or alignment may be "
                         "served by a kernel of other tiles");
}

void set_held(const void* data, std::uint64_t tag) {
  const Held* known = table().find(code_of(data));
  if (known == nullptr) known = &table().put_first(code_of(data), Held(tag));
  known->tag.store(tag, std::memory_order_release);
}

}  // namespace fa::api
