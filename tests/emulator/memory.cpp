#include "emulator/memory.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include <fmt/format.h>

namespace emulator {
namespace {

constexpr std::size_t kGuardBytes = std::size_t{1} << 20;  // never touched, so it costs address space only
constexpr std::size_t kAlignment = 256;                    // what a device allocation has

}  // namespace

std::byte* Memory::add_input(const std::string& name, std::span<const std::byte> contents) {
  std::byte* base = allocate(name, contents.size(), kReadable);
  std::copy(contents.begin(), contents.end(), base);
  return base;
}

std::byte* Memory::add_output(const std::string& name, std::size_t bytes) {
  std::byte* base = allocate(name, bytes, kWritable);
  std::memset(base, 0xff, bytes);  // NaN in every element type
  return base;
}

void Memory::add(const std::string& name, void* base, std::size_t bytes, std::uint8_t flags) {
  Region region{name, static_cast<std::byte*>(base), bytes, std::make_unique<std::uint8_t[]>(bytes)};
  std::fill_n(region.flags.get(), bytes, flags);
  regions_.push_back(std::move(region));
}

std::byte* Memory::allocate(const std::string& name, std::size_t bytes, std::uint8_t flags) {
  storage_.push_back(std::unique_ptr<std::byte[]>(new std::byte[bytes + 2 * kGuardBytes + kAlignment]));
  const auto start = reinterpret_cast<std::uintptr_t>(storage_.back().get() + kGuardBytes);
  std::byte* base = storage_.back().get() + kGuardBytes + (kAlignment - start % kAlignment) % kAlignment;
  add(name, base, bytes, flags);
  return base;
}

void Memory::set_flags(const void* address, std::size_t bytes, std::uint8_t flags) {
  const Region* region = find(address, bytes);
  if (region == nullptr) throw std::out_of_range("set_flags: " + describe(address));
  std::fill_n(region->flags.get() + (static_cast<const std::byte*>(address) - region->base), bytes, flags);
}

void Memory::track(const void* base) {
  const auto region = std::ranges::find(regions_, base, [](const Region& of) -> const void* { return of.base; });
  if (region == regions_.end()) throw std::out_of_range("track: " + describe(base));
  region->stamps = std::make_unique<Stamp[]>(region->bytes);
}

void Memory::end_launch() {
  const std::lock_guard lock(mutex_);
  epochs_.clear();
  known_.clear();
  told_.clear();
  for (Region& region : regions_) {
    if (region.stamps != nullptr) std::fill_n(region.stamps.get(), region.bytes, Stamp{});
  }
}

Memory::Stamp Memory::stamp_of(int block) {
  const std::lock_guard lock(mutex_);
  return {block, epochs_[block]};
}

bool Memory::may_read(int block, const Stamp& stamp) {
  if (stamp.block < 0 || stamp.block == block) return true;
  const std::lock_guard lock(mutex_);
  const Known& known = known_[block];
  const auto found = known.find(stamp.block);
  return found != known.end() && stamp.epoch < found->second;
}

void Memory::tell(int block, const void* address) {
  known_[block][block] = ++epochs_[block];
  Known& told = told_[address];
  const auto add = [](const Known& from, Known& to) {
    for (const auto& [writer, epoch] : from) to[writer] = std::max(to[writer], epoch);
  };
  add(told, known_[block]);
  add(known_[block], told);
}

void Memory::write(const void* address, const std::byte* from, std::size_t bytes) {
  const Region* region = find(address, bytes);
  if (region == nullptr) throw std::out_of_range("write: " + describe(address));
  const std::ptrdiff_t at = static_cast<const std::byte*>(address) - region->base;
  std::copy_n(from, bytes, region->base + at);
  std::for_each_n(region->flags.get() + at, bytes, [](std::uint8_t& flag) { flag |= kReadable; });
}

bool Memory::written(const void* address, std::size_t bytes) const {
  const Region* region = find(address, bytes);
  if (region == nullptr) return false;
  const std::uint8_t* flags = region->flags.get() + (static_cast<const std::byte*>(address) - region->base);
  return std::all_of(flags, flags + bytes, [](std::uint8_t flag) { return (flag & kReadable) != 0; });
}

std::string Memory::describe(const void* address) const {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  std::string nearest = "no region is registered";
  std::uintptr_t smallest = std::numeric_limits<std::uintptr_t>::max();
  for (const Region& region : regions_) {
    const auto begin = reinterpret_cast<std::uintptr_t>(region.base);
    const std::uintptr_t end = begin + region.bytes;
    if (at >= begin && at < end)
      return fmt::format("byte {} of `{}` ({} bytes)", at - begin, region.name, region.bytes);
    const std::uintptr_t distance = at < begin ? begin - at : at - end;
    if (distance >= smallest) continue;
    smallest = distance;
    nearest = fmt::format("{} bytes {} `{}` ({} bytes)", distance, at < begin ? "before" : "past the end of",
                          region.name, region.bytes);
  }
  return nearest;
}

}  // namespace emulator
