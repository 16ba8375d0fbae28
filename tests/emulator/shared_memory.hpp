// Shared memory as cp.async and ldmatrix use it: 16 bytes at a time, by offset from the start of the dynamic shared memory.
//
// Copies take place when their thread waits for them. Two warps that touch the same 16 bytes without a barrier between them,
// and not both to read, are an error; so is touching what a copy in flight writes. Plain loads and stores are not looked at.
#pragma once

#include "grid.hpp"

namespace emulated {

inline void check_piece(const char* name, unsigned address) {
  if (address % 16 != 0) fail("%s: shared address %u is no multiple of 16", name, address);
  if (address + 16ull > block.shared_bytes) fail("%s: shared address %u lies beyond the block's %u bytes", name, address, block.shared_bytes);
}
inline const unsigned char* read_piece(const char* name, unsigned address) {
  check_piece(name, address);
  Chunk& c = block.chunks[address / 16];
  const int warp = block.current->warp;
  if (c.in_flight != 0) fail("%s reads shared address %u while a cp.async to it is in flight", name, address);
  if (c.written_since == block.barriers && c.writer != warp)
    fail("%s reads shared address %u, which warp %d wrote after the last __syncthreads", name, address, c.writer);
  c.reader = c.read_since == block.barriers && c.reader != warp ? kSeveral : warp;
  c.read_since = block.barriers;
  return block.shared + address;
}

// The asynchronous proxy (bulk copies, wgmma) sees what a thread stored only after a proxy fence of that thread.
inline void mark_stored(unsigned address) {
  Chunk& c = block.chunks[address / 16];
  c.stored_by = static_cast<int>(block.current - block.threads.data());
  c.fences_before = block.current->proxy_fences;
}
inline void check_fenced(const char* name, unsigned address) {
  const Chunk& c = block.chunks[address / 16];
  if (c.in_flight != 0) fail("%s at shared address %u while a cp.async to it is in flight", name, address);
  if (c.stored_by == kNobody || block.threads[c.stored_by].proxy_fences != c.fences_before) return;
  fail("%s at shared address %u, which warp %d, lane %d stored to without a proxy_fence since", name, address, c.stored_by / kLanes,
       c.stored_by % kLanes);
}

inline void issue_copy(unsigned to, const void* from, bool inside) {
  check_piece("cp.async", to);
  if (inside) {
    const auto begin = reinterpret_cast<std::uintptr_t>(from);
    bool known = false;
    for (const Range& range : block.global_memory) known |= begin >= range.begin && begin + 16 <= range.end;
    if (!known) fail("cp.async reads 16 bytes at %p, outside the arrays of the launch", from);
    if (begin % 16 != 0) fail("cp.async reads from %p, no multiple of 16 bytes", from);
  }
  Chunk& c = block.chunks[to / 16];
  Thread& t = *block.current;
  if (c.in_flight != 0) fail("cp.async writes shared address %u while another cp.async to it is in flight", to);
  if (c.written_since == block.barriers && c.writer != t.warp)
    fail("cp.async writes shared address %u, which warp %d wrote after the last __syncthreads", to, c.writer);
  if (c.read_since == block.barriers && c.reader != t.warp)
    fail("cp.async writes shared address %u, which another warp read after the last __syncthreads", to);
  ++c.in_flight;
  t.copies.push_back({to, inside ? from : nullptr});
  ++t.uncommitted;
}
inline void commit_copies() {
  Thread& t = *block.current;
  t.groups.push_back(t.uncommitted);
  t.uncommitted = 0;
}
inline void wait_copies(unsigned pending_groups) {
  Thread& t = *block.current;
  std::size_t groups = 0, copies = 0;
  while (t.groups.size() - groups > pending_groups) copies += t.groups[groups++];
  for (std::size_t i = 0; i < copies; ++i) {
    const Copy& copy = t.copies[i];
    if (copy.from != nullptr) std::memcpy(block.shared + copy.to, copy.from, 16);
    else std::memset(block.shared + copy.to, 0, 16);
    Chunk& c = block.chunks[copy.to / 16];
    --c.in_flight;
    c.written_since = block.barriers;
    c.writer = t.warp;
    mark_stored(copy.to);
  }
  t.copies.erase(t.copies.begin(), t.copies.begin() + copies);
  t.groups.erase(t.groups.begin(), t.groups.begin() + groups);
}

}  // namespace emulated
