// Hopper's barriers and bulk copies: mbarriers in shared memory, numbered barriers, boxes of tensors, reductions into memory.
//
// In some blocks a box arrives as late as the hardware allows, when no thread can run any more, in others perhaps earlier; boxes that
// are in flight together arrive in random order or the oldest last, and from its issue on a box's destination is NaN. A reduction is made when its
// thread waits for it or returns. All that is random is the same in every run.
#pragma once

#include "shared_memory.hpp"

namespace emulated {

using u64 = unsigned long long;

struct Mbarrier {
  unsigned address;
  int count, pending;  // arrivals: of a phase, and still missing in this one
  long long bytes;     // expected and not arrived yet
  unsigned parity;     // of the phase that is not complete
  std::vector<Thread*> waiting;

  // What lies in shared memory, so that a store over it is noticed.
  u64 image() const {
    return static_cast<u64>(parity) << 63 | (static_cast<u64>(bytes) & 0x7fffff) << 40 | static_cast<u64>(count) << 20 | static_cast<u64>(pending);
  }
};

struct NumberedBarrier {
  int threads = 0, arrived = 0;  // arrived: those that did not wait
  std::vector<Thread*> waiting;
};

// What tensor_maps.py writes into the 128 bytes of a TensorMap.
struct EncodedMap {
  u64 magic, base, sizes[4], strides[3];  // innermost first, in elements; the strides, of all axes but the innermost, in bytes
  u64 rows;                               // of a box
};
constexpr u64 kMapMagic = 0x70616d726f736e65ull;
constexpr unsigned kBoxColumns = 64, kBoxRowBytes = 128;

struct BoxCopy {
  EncodedMap map;
  unsigned to, barrier;
  long long at[4];
};

struct Reduction {
  float* to;
  unsigned from, bytes;
};
struct Reductions {
  std::vector<Reduction> queue;  // committed or not, oldest first
  std::vector<unsigned> groups;
  unsigned uncommitted;
};

struct Hopper {
  std::vector<Mbarrier> barriers;
  NumberedBarrier numbered[16];
  std::vector<BoxCopy> copies;
  std::vector<Reductions> reductions;             // one a thread
  std::vector<std::pair<unsigned, unsigned>> waits;  // one a thread: which barrier or number, and parity
  unsigned random;
  unsigned patience;  // things in flight take place early once in so many times that a thread gives the CPU away; 0: never
};
inline Hopper hopper;
inline Hopper parked_hopper;  // of the parked block

inline unsigned random_below(unsigned n) {
  hopper.random = hopper.random * 1664525u + 1013904223u;
  return (hopper.random >> 8) % n;
}

inline int thread_number() { return static_cast<int>(block.current - block.threads.data()); }

inline void wake_all(std::vector<Thread*>& waiting) {
  for (Thread* t : waiting) wake(*t);
  waiting.clear();
}

constexpr char kMbarrierWait[] = "barrier_wait", kNumberedWait[] = "named_barrier";

inline Mbarrier& mbarrier(const char* name, unsigned address) {
  for (Mbarrier& b : hopper.barriers) {
    if (b.address != address) continue;
    u64 image;
    std::memcpy(&image, block.shared + address, 8);
    if (image != b.image()) fail("%s: something was stored over the mbarrier at shared address %u", name, address);
    if (b.count < 1) fail("%s: the mbarrier at shared address %u was made for %d arrivals", name, address, b.count);
    return b;
  }
  fail("%s: there is no mbarrier at shared address %u", name, address);
}

inline void store_image(const Mbarrier& b) {
  const u64 image = b.image();
  std::memcpy(block.shared + b.address, &image, 8);
}

// A count below 1 is accepted as long as nobody uses the barrier.
inline void init_mbarrier(unsigned address, int count) {
  if (address % 8 != 0 || address + 8ull > block.shared_bytes) fail("barrier_init: no mbarrier fits shared address %u", address);
  for (const Mbarrier& b : hopper.barriers) {
    if (b.address == address) fail("barrier_init: there is an mbarrier at shared address %u", address);
  }
  hopper.barriers.push_back({address, count < 0 ? 0 : count, count < 0 ? 0 : count, 0, 0, {}});
  store_image(hopper.barriers.back());
}

inline void settle(Mbarrier& b) {
  if (b.pending == 0 && b.bytes == 0) {
    b.parity ^= 1;
    b.pending = b.count;
    ++block.barriers;
    wake_all(b.waiting);
  }
  store_image(b);
}

inline void arrive(const char* name, unsigned address, unsigned bytes) {
  Mbarrier& b = mbarrier(name, address);
  if (b.pending == 0) fail("%s: all %d arrivals of this phase have come to the mbarrier at shared address %u", name, b.count, address);
  b.bytes += bytes;
  --b.pending;
  settle(b);
}

// Looks again whenever it is woken, like the loop around try_wait: who sleeps through a whole phase waits for the next but one.
inline void wait_mbarrier(unsigned address, unsigned parity) {
  if (parity > 1) fail("barrier_wait: the parity is %u", parity);
  while (mbarrier(kMbarrierWait, address).parity == parity) {
    mbarrier(kMbarrierWait, address).waiting.push_back(block.current);
    hopper.waits[thread_number()] = {address, parity};
    wait_at(kMbarrierWait);
  }
}

// One more thread is at a numbered barrier; the last of them opens it, for this one returns true then.
inline bool come_to_numbered(int number, int threads) {
  if (number < 1 || number > 15 || threads % kLanes != 0) fail("named_barrier %d of %d threads: 1 to 15, and whole warps", number, threads);
  NumberedBarrier& b = hopper.numbered[number];
  const int there = static_cast<int>(b.waiting.size()) + b.arrived;
  if (there > 0 && b.threads != threads) fail("named_barrier %d of %d threads, and others came to it with %d", number, threads, b.threads);
  b.threads = threads;
  if (there + 1 < threads) return false;
  ++block.barriers;
  b.arrived = 0;
  wake_all(b.waiting);
  return true;
}

inline void wait_numbered(int number, int threads) {
  if (come_to_numbered(number, threads)) return;
  hopper.numbered[number].waiting.push_back(block.current);
  hopper.waits[thread_number()] = {static_cast<unsigned>(number), 0};
  wait_at(kNumberedWait);
}

inline void arrive_numbered(int number, int threads) {
  if (!come_to_numbered(number, threads)) ++hopper.numbered[number].arrived;
}

// The 128-byte swizzle, on the bits of the address itself.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 3 & 0x70); }

inline bool box_row_begin(const BoxCopy& copy, unsigned row, const char*& begin) {
  const long long index[3] = {copy.at[1] + row, copy.at[2], copy.at[3]};
  begin = reinterpret_cast<const char*>(copy.map.base);
  for (int axis = 0; axis < 3; ++axis) {
    if (index[axis] < 0 || index[axis] >= static_cast<long long>(copy.map.sizes[axis + 1])) return false;
    begin += index[axis] * static_cast<long long>(copy.map.strides[axis]);
  }
  return true;
}

// The columns of a box that exist: [first, end) of its 64.
inline void box_columns(const BoxCopy& copy, long long& first, long long& end) {
  const long long columns = static_cast<long long>(copy.map.sizes[0]);
  first = copy.at[0] < 0 ? -copy.at[0] : 0;
  end = columns - copy.at[0] < kBoxColumns ? columns - copy.at[0] : kBoxColumns;
}

inline void issue_box(unsigned to, const void* map, unsigned barrier, int c0, int c1, int c2, int c3) {
  BoxCopy copy = {{}, to, barrier, {c0, c1, c2, c3}};
  std::memcpy(&copy.map, map, sizeof copy.map);
  if (copy.map.magic != kMapMagic) fail("copy_box_4d: this is no TensorMap of tensor_maps.py");
  const unsigned bytes = static_cast<unsigned>(copy.map.rows) * kBoxRowBytes;
  if (to % 128 != 0 || to + static_cast<u64>(bytes) > block.shared_bytes)
    fail("copy_box_4d: %u bytes at shared address %u, of %u; it takes a multiple of 128", bytes, to, block.shared_bytes);
  mbarrier("copy_box_4d", barrier);
  long long first, end;
  box_columns(copy, first, end);
  for (unsigned row = 0; row < copy.map.rows && first < end; ++row) {
    const char* begin;
    if (!box_row_begin(copy, row, begin)) continue;
    const auto from = reinterpret_cast<std::uintptr_t>(begin + 2 * (copy.at[0] + first));
    bool known = false;
    for (const Range& range : block.global_memory) known |= from >= range.begin && from + 2 * (end - first) <= range.end;
    if (!known) fail("copy_box_4d (%d, %d, %d, %d) reads row %u outside the arrays of the launch", c0, c1, c2, c3, row);
  }
  for (unsigned address = to; address < to + bytes; address += 16) {
    check_fenced("copy_box_4d", address);
    ++block.chunks[address / 16].in_flight;
  }
  std::memset(block.shared + to, 0xff, bytes);
  hopper.copies.push_back(copy);
}

inline void land(const BoxCopy& copy) {
  const unsigned rows = static_cast<unsigned>(copy.map.rows);
  long long first, end;
  box_columns(copy, first, end);
  for (unsigned row = 0; row < rows; ++row) {
    char values[kBoxRowBytes] = {};
    const char* begin;
    if (box_row_begin(copy, row, begin) && first < end) std::memcpy(values + 2 * first, begin + 2 * (copy.at[0] + first), 2 * (end - first));
    for (unsigned piece = 0; piece < kBoxRowBytes; piece += 16) {
      const unsigned address = swizzled(copy.to + row * kBoxRowBytes + piece);
      std::memcpy(block.shared + address, values + piece, 16);
      --block.chunks[address / 16].in_flight;
      block.chunks[address / 16].stored_by = kNobody;
    }
  }
  Mbarrier& b = mbarrier("copy_box_4d", copy.barrier);
  b.bytes -= rows * kBoxRowBytes;
  settle(b);
}

inline void land_number(unsigned index) {
  const BoxCopy copy = hopper.copies[index];
  hopper.copies.erase(hopper.copies.begin() + index);
  land(copy);
}

inline void issue_reduction(void* to, unsigned from, unsigned bytes) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0 || from % 16 != 0 || bytes % 16 != 0 || from + static_cast<u64>(bytes) > block.shared_bytes)
    fail("bulk_reduce_add_f32: %u bytes from shared address %u to %p; all are multiples of 16", bytes, from, to);
  Reductions& r = hopper.reductions[thread_number()];
  r.queue.push_back({static_cast<float*>(to), from, bytes});
  ++r.uncommitted;
}
inline void commit_reductions() {
  Reductions& r = hopper.reductions[thread_number()];
  r.groups.push_back(r.uncommitted);
  r.uncommitted = 0;
}
inline void wait_reductions(unsigned pending_groups) {
  Reductions& r = hopper.reductions[thread_number()];
  while (r.groups.size() > pending_groups) {
    for (unsigned i = 0; i < r.groups[0]; ++i) {
      const Reduction& add = r.queue[i];
      for (unsigned address = add.from; address < add.from + add.bytes; address += 16) check_fenced("bulk_reduce_add_f32", address);
      for (unsigned j = 0; j < add.bytes / 4; ++j) {
        float value;
        std::memcpy(&value, block.shared + add.from + 4 * j, 4);
        add.to[j] += value;
      }
    }
    r.queue.erase(r.queue.begin(), r.queue.begin() + r.groups[0]);
    r.groups.erase(r.groups.begin());
  }
}

// In the other block of the cluster.
template <typename Do>
inline void in_the_other(const char* name, const Do& act) {
  if (run.cluster != 2) fail("%s: the block has no other in its cluster", name);
  if (parked.live == 0) fail("%s: the other block has returned", name);
  exchange();
  act();
  exchange();
}
inline void arrive_in(unsigned rank, unsigned address) {
  auto act = [=] { arrive("barrier_arrive_in", address, 0); };
  rank == block.index.x % run.cluster ? act() : in_the_other("barrier_arrive_in", act);
}
// A box that arrives at the same place in both blocks, and on the barrier of each.
inline void issue_box_to_both(unsigned to, const void* map, unsigned barrier, int c0, int c1, int c2, int c3) {
  auto act = [=] { issue_box(to, map, barrier, c0, c1, c2, c3); };
  act();
  in_the_other("copy_box_4d_to_both", act);
}

inline void begin_hopper() {
  hopper.barriers.clear();
  hopper.copies.clear();
  for (NumberedBarrier& b : hopper.numbered) b = NumberedBarrier();
  hopper.reductions.assign(block.threads.size(), Reductions());
  hopper.waits.assign(block.threads.size(), {0, 0});
  hopper.random = (block.index.x + 1) * 2654435761u;
  constexpr unsigned kPatience[] = {0, 3, 30};
  hopper.patience = kPatience[block.index.x % 3];
}

inline void leave_hopper() {
  commit_reductions();
  wait_reductions(0);
  if (block.live == 1 && !hopper.copies.empty())
    fail("the block ends while %zu boxes are on their way to shared memory", hopper.copies.size());
}

inline std::string mbarrier_detail(const Thread& t) {
  const auto [subject, parity] = hopper.waits[&t - block.threads.data()];
  if (t.waits_at == kNumberedWait) {
    const NumberedBarrier& b = hopper.numbered[subject];
    return " " + std::to_string(subject) + ", where " + std::to_string(b.waiting.size() + b.arrived) + " of " + std::to_string(b.threads) + " threads are";
  }
  if (t.waits_at != kMbarrierWait) return "";
  const Mbarrier& b = mbarrier(kMbarrierWait, subject);
  return " of the mbarrier at shared address " + std::to_string(subject) + " with parity " + std::to_string(parity) + ", which lacks " +
         std::to_string(b.pending) + " of " + std::to_string(b.count) + " arrivals and " + std::to_string(b.bytes) + " bytes";
}

}  // namespace emulated
