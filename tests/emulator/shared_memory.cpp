#include "emulator/shared_memory.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace emulator {
namespace {

/// Of a write that somebody does not know of.
Conflict::Kind unless_in_flight(const Stamp& write, Conflict::Kind kind) {
  return write.kind == Stamp::thread || write.kind == Stamp::atomic ? kind : Conflict::in_flight;
}

}  // namespace

bool Observer::knows_thread(int other, std::uint32_t tick) const {
  if (tick < floor || other == thread) return true;
  if (other / 32 == warp && tick < warp_floor) return true;
  return known != nullptr && known->at(static_cast<std::size_t>(other)) >= tick;
}

bool Observer::knows(const Stamp& write) const {
  switch (write.kind) {
    case Stamp::nobody:
      return true;
    case Stamp::thread:
      return knows_thread(write.who, write.tick);
    case Stamp::landed:
      return known != nullptr && known->at(first_barrier + write.who) >= write.tick;
    case Stamp::atomic:
      return write.tick < floor;
    case Stamp::copying:
    case Stamp::tensor_copy:
      break;
  }
  return false;
}

bool Observer::lacks_fence(const Stamp& write) const {
  if (!async || write.kind != Stamp::thread) return false;
  return fenced == nullptr || (write.tick >= fenced->floor && fenced->at(write.who) < write.tick);
}

bool Observer::knows(const Reader& read) const {
  if (read.kind == Reader::product) {
    for (int w = 4 * read.who; w < 4 * read.who + 4; ++w) {
      const std::uint32_t waited = w == warp          ? products
                                   : known != nullptr ? known->at(first_product + static_cast<std::size_t>(w))
                                                      : 0;
      if (waited < read.tick) return false;
    }
    return true;
  }
  if (read.tick == Reader::kInFlight) return false;
  if (read.kind == Reader::cluster_copy) return known != nullptr && known->at(first_barrier + read.who) >= read.tick;
  if (read.tick < floor || (read.who == warp && read.tick < warp_floor)) return true;
  const int first = 32 * read.who;
  for (std::uint32_t lanes = read.lanes; lanes != 0; lanes &= lanes - 1) {
    const int other = first + std::countr_zero(lanes);
    if (other == thread) continue;
    if (known == nullptr || known->at(static_cast<std::size_t>(other)) < read.tick) return false;
  }
  return true;
}

SharedMemory::SharedMemory(int bytes, int rank)
    : base_(kBase | static_cast<std::uint32_t>(rank) << kRankShift),
      bytes_(static_cast<std::uint32_t>(bytes)),
      data_((bytes_ + kPiece - 1) / kPiece * kPiece),
      pieces_(data_.size() / kPiece) {}

void SharedMemory::reset() {
  std::memset(data_.data(), 0xff, data_.size());
  std::fill(pieces_.begin(), pieces_.end(), Piece{});
  sets_.clear();
  free_sets_.clear();
  barriers_.clear();
}

Conflict SharedMemory::check_read(const Cell& cell, const Observer& observer) {
  const Stamp& write = cell.write;
  if (write.kind == Stamp::nobody) return {Conflict::uninitialised, {}, {}};
  if (!observer.knows(write)) {
    return {unless_in_flight(write, Conflict::write_then_read), write, {}};
  }
  if (observer.lacks_fence(write)) return {Conflict::unfenced, write, {}};
  return {};
}

Conflict SharedMemory::check_write(const Cell& cell, const Observer& observer) const {
  const Stamp& write = cell.write;
  if (!observer.knows(write)) {
    return {unless_in_flight(write, Conflict::write_then_write), write, {}};
  }
  if (observer.lacks_fence(write)) return {Conflict::unfenced, write, {}};
  return check_readers(cell, observer);
}

Conflict SharedMemory::check_readers(const Cell& cell, const Observer& observer) const {
  if (cell.read.empty()) return {};
  if (!observer.knows(cell.read)) return {Conflict::read_then_write, {}, cell.read};
  if (cell.others == 0) return {};
  for (const Reader& reader : sets_[cell.others - 1]) {
    if (!observer.knows(reader)) return {Conflict::read_then_write, {}, reader};
  }
  return {};
}

void SharedMemory::forget_readers(Cell& cell) {
  cell.read = {};
  if (cell.others == 0) return;
  sets_[cell.others - 1].clear();
  free_sets_.push_back(cell.others - 1);
  cell.others = 0;
}

/// Nobody but this observer, or only those whom it knows of, has read the cell.
bool SharedMemory::alone(const Cell& cell, const Observer& observer) const {
  return cell.read.empty() || (cell.others == 0 && observer.knows(cell.read));
}

/// Who is known to this reader is known to everybody who knows of this reader, and need not be remembered.
void SharedMemory::note_read(Cell& cell, const Observer& observer, const Reader& reader) {
  const auto same = [&](Reader& other) {
    if (other.kind != reader.kind || other.who != reader.who) return false;
    if (other.tick != reader.tick && reader.kind != Reader::product) return false;
    other.tick = std::max(other.tick, reader.tick);  // the products of a warpgroup end in their order
    other.lanes |= reader.lanes;
    return true;
  };
  if (cell.read.kind == Reader::product && same(cell.read)) return;
  if (alone(cell, observer)) {
    cell.read = reader;
    return;
  }
  if (same(cell.read)) return;
  if (cell.others == 0) {
    if (free_sets_.empty()) {
      sets_.emplace_back();
      free_sets_.push_back(static_cast<std::uint32_t>(sets_.size() - 1));
    }
    cell.others = free_sets_.back() + 1;
    free_sets_.pop_back();
  }
  std::vector<Reader>& set = sets_[cell.others - 1];
  if (std::any_of(set.begin(), set.end(), same)) return;
  std::erase_if(set, [&](const Reader& other) { return observer.knows(other); });
  if (observer.knows(cell.read)) {
    cell.read = reader;
  } else {
    set.push_back(reader);
  }
}

SharedMemory::Cell* SharedMemory::split(std::uint32_t piece) {
  if (cells_.empty()) cells_.resize(data_.size());
  Cell* cells = cells_.data() + static_cast<std::size_t>(piece) * kPiece;
  Piece& whole = pieces_[piece];
  if (whole.split) return cells;
  const std::vector<Reader> others = whole.cell.others == 0 ? std::vector<Reader>() : sets_[whole.cell.others - 1];
  for (std::uint32_t i = 0; i < kPiece; ++i) {
    cells[i] = {whole.cell.write, {}, 0};
    if ((whole.read_mask >> i & 1) == 0) continue;
    cells[i].read = whole.cell.read;
    if (others.empty()) continue;
    sets_.push_back(others);
    cells[i].others = static_cast<std::uint32_t>(sets_.size());
  }
  forget_readers(whole.cell);
  whole.split = true;
  return cells;
}

bool SharedMemory::holds_barrier(std::uint32_t offset, std::uint32_t bytes) const {
  if (offset >= barriers_end_ || offset + bytes <= barriers_begin_) return false;
  return std::any_of(barriers_.begin(), barriers_.end(),
                     [&](std::uint32_t barrier) { return offset < barrier + 8 && barrier < offset + bytes; });
}

Conflict SharedMemory::read(std::uint32_t address, std::uint32_t bytes, const Observer& observer,
                            const Reader& reader) {
  if (!inside(address, bytes)) return {Conflict::out_of_bounds, {}, {}};
  const std::uint32_t offset = address - base_;
  Piece& piece = pieces_[offset / kPiece];
  const auto mask = static_cast<std::uint16_t>(((1u << bytes) - 1) << offset % kPiece);
  if (!piece.split) {
    if (const Conflict conflict = check_read(piece.cell, observer)) {
      if (conflict.kind == Conflict::uninitialised && holds_barrier(offset, bytes)) {
        return {Conflict::barrier_object, {}, {}};
      }
      return conflict;
    }
    if (piece.read_mask != mask && alone(piece.cell, observer)) {
      piece.cell.read = reader;
      piece.read_mask = mask;
      return {};
    }
    if (piece.read_mask == mask) {
      note_read(piece.cell, observer, reader);
      return {};
    }
    if (piece.cell.others == 0 && piece.cell.read == reader) {
      piece.read_mask |= mask;
      return {};
    }
  }
  Cell* cells = split(offset / kPiece) + offset % kPiece;
  Cell before;
  for (std::uint32_t i = 0; i < bytes; ++i) {
    // Most are like the byte in front, and become like it.
    if (i > 0 && cells[i].others == 0 && cells[i - 1].others == 0 && cells[i] == before) {
      cells[i] = cells[i - 1];
      continue;
    }
    before = cells[i];
    if (const Conflict conflict = check_read(cells[i], observer)) return conflict;
    note_read(cells[i], observer, reader);
  }
  return {};
}

Conflict SharedMemory::write(std::uint32_t address, std::uint32_t bytes, const Observer& observer,
                             const Stamp& writer) {
  if (!inside(address, bytes)) return {Conflict::out_of_bounds, {}, {}};
  const std::uint32_t offset = address - base_;
  if (!barriers_.empty() && holds_barrier(offset, bytes)) return {Conflict::barrier_object, {}, {}};
  Piece& piece = pieces_[offset / kPiece];
  if (bytes == kPiece && !piece.split) {
    if (const Conflict conflict = check_write(piece.cell, observer)) return conflict;
  } else {
    Cell* cells = split(offset / kPiece) + offset % kPiece;
    for (std::uint32_t i = 0; i < bytes; ++i) {
      if (const Conflict conflict = check_write(cells[i], observer)) return conflict;
      forget_readers(cells[i]);
      cells[i].write = writer;
    }
  }
  if (bytes == kPiece) {
    forget_readers(piece.cell);
    piece = {{writer, {}, 0}, 0, false};
  }
  return {};
}

Conflict SharedMemory::add(std::uint32_t address, const Observer& observer, Stamp writer) {
  constexpr std::uint32_t kBytes = 4;
  if (!inside(address, kBytes)) return {Conflict::out_of_bounds, {}, {}};
  const std::uint32_t offset = address - base_;
  if (!barriers_.empty() && holds_barrier(offset, kBytes)) return {Conflict::barrier_object, {}, {}};
  writer.kind = Stamp::atomic;
  Cell* cells = split(offset / kPiece) + offset % kPiece;
  for (std::uint32_t i = 0; i < kBytes; ++i) {
    if (cells[i].write.kind == Stamp::nobody) return {Conflict::uninitialised, {}, {}};
    const bool among = cells[i].write.kind == Stamp::atomic;
    const Conflict conflict = among ? check_readers(cells[i], observer) : check_write(cells[i], observer);
    if (conflict) return conflict;
    forget_readers(cells[i]);
    cells[i].write = writer;
  }
  return {};
}

Conflict SharedMemory::check(std::uint32_t address, const Observer& observer, Stamp& last) {
  if (!inside(address, kPiece)) return {Conflict::out_of_bounds, {}, {}};
  const std::uint32_t offset = address - base_;
  const Piece& piece = pieces_[offset / kPiece];
  const Cell* const cells = piece.split ? cells_.data() + offset : &piece.cell;
  for (std::uint32_t i = 0; i < (piece.split ? kPiece : 1); ++i) {
    if (cells[i].write == last && last.kind != Stamp::nobody) continue;
    if (const Conflict conflict = check_read(cells[i], observer)) return conflict;
    last = cells[i].write;
  }
  return {};
}

void SharedMemory::arrived(std::uint32_t address, std::uint32_t bytes, const Stamp& writer) {
  const std::uint32_t offset = address - base_;
  Piece& piece = pieces_[offset / kPiece];
  piece.cell.write = writer;
  for (std::uint32_t i = 0; piece.split && i < bytes; ++i) cells_[offset + i].write = writer;
}

void SharedMemory::finish_read(std::uint32_t address, const Reader& reader) {
  const auto finish = [&](Reader& other) {
    const bool own = other.kind == reader.kind && other.who == reader.who && other.lanes == reader.lanes;
    if (own && other.tick == Reader::kInFlight) other.tick = reader.tick;
  };
  const std::uint32_t offset = address - base_;
  Piece& piece = pieces_[offset / kPiece];
  Cell* cells = piece.split ? cells_.data() + offset : &piece.cell;
  for (std::uint32_t i = 0; i < (piece.split ? kPiece : 1); ++i) {
    finish(cells[i].read);
    if (cells[i].others != 0)
      std::for_each(sets_[cells[i].others - 1].begin(), sets_[cells[i].others - 1].end(), finish);
  }
}

void SharedMemory::make_barrier(std::uint32_t address) {
  const std::uint32_t offset = address - base_;
  barriers_begin_ = barriers_.empty() ? offset : std::min(barriers_begin_, offset);
  barriers_end_ = barriers_.empty() ? offset + 8 : std::max(barriers_end_, offset + 8);
  barriers_.push_back(offset);
}

}  // namespace emulator
