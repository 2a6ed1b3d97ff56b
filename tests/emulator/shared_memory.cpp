#include "emulator/shared_memory.hpp"

#include <algorithm>
#include <cstring>

namespace emulator {

SharedMemory::SharedMemory(int bytes)
    : bytes_(static_cast<std::uint32_t>(bytes)),
      data_((bytes_ + kPiece - 1) / kPiece * kPiece),
      pieces_(data_.size() / kPiece) {}

void SharedMemory::reset() {
  std::memset(data_.data(), 0xff, data_.size());
  std::fill(pieces_.begin(), pieces_.end(), Piece{});
}

Conflict SharedMemory::check_read(const Cell& cell, Stamp reader) {
  if (cell.write.empty()) return {Conflict::uninitialised, {}};
  if (cell.write.in_flight()) return {Conflict::in_flight, cell.write};
  if (!cell.write.before(reader)) return {Conflict::write_then_read, cell.write};
  return {};
}

Conflict SharedMemory::check_write(const Cell& cell, Stamp writer) {
  if (!cell.write.empty()) {
    if (cell.write.in_flight()) return {Conflict::in_flight, cell.write};
    if (!cell.write.before(writer)) return {Conflict::write_then_write, cell.write};
  }
  if (!cell.read.empty() && !cell.read.before(writer)) return {Conflict::read_then_write, cell.read};
  return {};
}

/// One stamp that is before exactly those accesses that both are before.
Stamp SharedMemory::merged(Stamp earlier, Stamp reader) {
  if (earlier.empty() || earlier.block_epoch() < reader.block_epoch()) return reader;
  if (earlier == reader || earlier.everyone()) return earlier;
  if (earlier.warp() != reader.warp()) return Stamp::make(reader.block_epoch(), 0, Stamp::kEveryone);
  if (earlier.warp_epoch() < reader.warp_epoch()) return reader;
  return Stamp::make(reader.block_epoch(), reader.warp_epoch(), Stamp::whole_warp(reader.warp()));
}

SharedMemory::Cell* SharedMemory::split(std::uint32_t piece) {
  if (cells_.empty()) cells_.resize(data_.size());
  Cell* cells = cells_.data() + static_cast<std::size_t>(piece) * kPiece;
  Piece& whole = pieces_[piece];
  if (whole.split) return cells;
  for (std::uint32_t i = 0; i < kPiece; ++i) {
    cells[i] = {whole.cell.write, (whole.read_mask >> i & 1) != 0 ? whole.cell.read : Stamp()};
  }
  whole.split = true;
  return cells;
}

Conflict SharedMemory::read(std::uint32_t address, std::uint32_t bytes, Stamp reader) {
  if (!inside(address, bytes)) return {Conflict::out_of_bounds, {}};
  const std::uint32_t offset = address - kBase;
  Piece& piece = pieces_[offset / kPiece];
  const auto mask = static_cast<std::uint16_t>(((1u << bytes) - 1) << offset % kPiece);
  if (!piece.split) {
    if (const Conflict conflict = check_read(piece.cell, reader)) return conflict;
    const Stamp earlier = piece.cell.read;
    if (earlier.empty() || earlier.block_epoch() < reader.block_epoch()) {
      piece.cell.read = reader;
      piece.read_mask = mask;
      return {};
    }
    if (earlier == reader || piece.read_mask == mask) {
      piece.cell.read = merged(earlier, reader);
      piece.read_mask |= mask;
      return {};
    }
  }
  Cell* cells = split(offset / kPiece) + offset % kPiece;
  for (std::uint32_t i = 0; i < bytes; ++i) {
    if (const Conflict conflict = check_read(cells[i], reader)) return conflict;
    cells[i].read = merged(cells[i].read, reader);
  }
  return {};
}

Conflict SharedMemory::write(std::uint32_t address, std::uint32_t bytes, Stamp writer) {
  if (!inside(address, bytes)) return {Conflict::out_of_bounds, {}};
  const std::uint32_t offset = address - kBase;
  Piece& piece = pieces_[offset / kPiece];
  if (bytes == kPiece && !piece.split) {
    if (const Conflict conflict = check_write(piece.cell, writer)) return conflict;
  } else {
    Cell* cells = split(offset / kPiece) + offset % kPiece;
    for (std::uint32_t i = 0; i < bytes; ++i) {
      if (const Conflict conflict = check_write(cells[i], writer)) return conflict;
      cells[i] = {writer, {}};
    }
  }
  if (bytes == kPiece) piece = {{writer, {}}, 0, false};
  return {};
}

Conflict SharedMemory::begin_copy(std::uint32_t address, Stamp writer) {
  if (const Conflict conflict = write(address, kPiece, writer)) return conflict;
  pieces_[(address - kBase) / kPiece].cell.write = Stamp(Stamp::kInFlight | writer.who());
  return {};
}

void SharedMemory::end_copy(std::uint32_t address, Stamp writer) {
  pieces_[(address - kBase) / kPiece].cell.write = writer;
}

}  // namespace emulator
