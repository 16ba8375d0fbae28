// One block of threads on the CPU, or a cluster of two: who runs, who waits for whom, and what is wrong when nobody can.
//
// A warp runs until all its lanes wait at a barrier; then the next warp does, or a random one on Hopper. A collective of a warp is computed by the lane that
// comes last, on operands that lie on the others' stacks.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fibers.hpp"

struct uint3 { unsigned x, y, z; };
using dim3 = uint3;

namespace emulated {

constexpr int kLanes = 32;
constexpr unsigned kFullMask = 0xffffffffu;
constexpr unsigned kCanaryBytes = 1024;  // behind the shared memory, to notice stores beyond it

// A cp.async in flight: it takes place when its thread waits for it, the latest moment that the hardware allows.
struct Copy {
  unsigned to;
  const void* from;  // null: zeros
};

struct Thread {
  Fiber fiber;
  uint3 index;
  int warp, lane;
  const char* waits_at;          // null: it can run, or has returned
  bool returned;
  std::vector<Copy> copies;      // committed or not, oldest first
  std::vector<unsigned> groups;  // committed groups in flight, oldest first: how many copies each has
  unsigned uncommitted;
  unsigned proxy_fences;
};

struct Warp {
  unsigned runnable;  // one bit a lane
  int arrived;
  const char* at;
  void* operands[kLanes];
};

// Who touched 16 bytes of shared memory since the last barrier: `since` is the barrier's number.
struct Chunk {
  int written_since, writer, read_since, reader;  // warps; reader is kSeveral where more than one read
  int in_flight;
  // Who wrote it last by an ordinary store or cp.async, and after how many proxy fences of its own; kNobody: a bulk copy.
  int stored_by;
  unsigned fences_before;
};
constexpr int kNobody = -1;
constexpr int kSeveral = -1;

struct Range {
  std::uintptr_t begin, end;
};

struct Block {
  Thread* current;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  uint3 index, threads_shape, grid_shape;
  int live, at_barrier, barriers;
  std::unique_ptr<char[]> buffer;
  unsigned char* shared;
  unsigned shared_bytes;
  std::vector<Chunk> chunks;
  std::vector<Range> global_memory;
  void (*kernel)();
};
inline Block block;   // the one that runs
inline Block parked;  // the other block of a cluster; without threads where there is none

// What a launch has in common.
struct Run {
  Fiber scheduler;
  unsigned cluster = 1;  // blocks of a cluster
  int at_cluster_barrier;
  unsigned turns;  // how often a thread gave the CPU away
  long long bank_conflicts;
  std::string error;
};
inline Run run;

// What the hardware does besides the threads: ptx_sm90_emulated.hpp fills this in.
struct Hooks {
  void (*begin)();                      // a block starts
  int (*next_warp)(int warp);           // a thread of this warp gives the CPU away: which warp to ask first
  bool (*advance)();                    // no thread can run: one thing in flight takes place; false where nothing is
  void (*leave)();                      // a thread returns
  std::string (*detail)(const Thread&);  // what else there is to say about where a thread waits
  void (*exchange)();                   // the parked block comes to run
};
inline Hooks hooks;

inline std::string where() {
  const uint3& b = block.index;
  return "block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) + "): ";
}

// Ends the launch; what the threads have on their stacks is left there.
[[noreturn]] inline void fail(const char* format, ...) {
  char what[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  run.error = where() + "warp " + std::to_string(block.current->warp) + ", lane " + std::to_string(block.current->lane) + ": " + what;
  switch_fiber(block.current->fiber, run.scheduler);
  __builtin_unreachable();
}

inline std::string whereabouts(const Thread& t) {
  if (t.returned) return "has returned";
  return std::string("waits at ") + t.waits_at + (hooks.detail == nullptr ? "" : hooks.detail(t));
}

// Every warp's lanes that have not returned, those together that wait at the same.
inline std::string all_whereabouts() {
  std::string all, last;
  for (std::size_t w = 0; w < block.warps.size(); ++w) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Thread& t = block.threads[w * kLanes + lane];
      if (t.returned) continue;
      const std::string text = "warp " + std::to_string(w) + " " + whereabouts(t);
      if (text != last) all += (all.empty() ? "" : "; ") + text;
      last = text;
    }
  }
  return all;
}

[[noreturn]] inline void fail_stuck() {
  for (std::size_t w = 0; w < block.warps.size(); ++w) {
    if (block.warps[w].arrived == 0) continue;
    for (int lane = 0; lane < kLanes; ++lane) {
      const Thread& t = block.threads[w * kLanes + lane];
      if (t.returned || t.waits_at != block.warps[w].at)
        fail("%d lanes of warp %zu wait at %s, and lane %d %s", block.warps[w].arrived, w, block.warps[w].at, lane, whereabouts(t).c_str());
    }
  }
  for (const Thread& t : block.threads) {
    if (block.at_barrier > 0 && t.returned) fail("%d threads wait at __syncthreads, and lane %d of warp %d has returned", block.at_barrier, t.lane, t.warp);
  }
  fail("no thread can run: %s", all_whereabouts().c_str());
}

// Changes places with the other block of the cluster.
inline void exchange() {
  std::swap(block, parked);
  if (hooks.exchange != nullptr) hooks.exchange();
}

// The thread of this block that runs next, of this warp if there is one unless `next_warp` has it otherwise; null: none can.
inline Thread* next_thread() {
  const Thread& from = *block.current;
  const int count = static_cast<int>(block.warps.size());
  const int first = hooks.next_warp == nullptr ? from.warp : hooks.next_warp(from.warp);
  for (int i = 0; i < count; ++i) {
    const int w = (first + i) % count;
    const unsigned runnable = block.warps[w].runnable;
    if (runnable == 0) continue;
    const unsigned later = w != from.warp || from.lane == kLanes - 1 ? 0 : runnable & (kFullMask << (from.lane + 1));
    return &block.threads[w * kLanes + __builtin_ctz(later != 0 ? later : runnable)];
  }
  return nullptr;
}

// Lets one thing that is in flight in any block take place; false where nothing is.
inline bool advance_some() {
  for (unsigned i = 0; hooks.advance != nullptr && i < run.cluster; ++i) {
    if (hooks.advance()) return true;
    if (run.cluster > 1) exchange();
  }
  return false;
}

// Gives the CPU to a thread that can run. In a cluster the other block has its turn now and then, and where no thread of this one can.
inline void run_another() {
  Thread& from = *block.current;
  if (run.cluster > 1 && ++run.turns % 5 == 0) exchange();
  do {
    for (unsigned i = 0; i < run.cluster; ++i) {
      Thread* const next = next_thread();
      if (next != nullptr) {
        block.current = next;
        if (next != &from) switch_fiber(from.fiber, next->fiber);
        return;
      }
      if (run.cluster > 1) exchange();
    }
  } while (advance_some());
  fail_stuck();
}

inline void wait_at(const char* name) {
  Thread& t = *block.current;
  t.waits_at = name;
  block.warps[t.warp].runnable &= ~(1u << t.lane);
  run_another();
}
inline void wake(Thread& t) {
  t.waits_at = nullptr;
  block.warps[t.warp].runnable |= 1u << t.lane;
}

// All lanes of a warp come together; the last one computes for all, `compute(operands)`, one pointer a lane.
template <typename Operands, typename Compute>
inline void collective(const char* name, Operands& mine, const Compute& compute) {
  Thread& t = *block.current;
  Warp& warp = block.warps[t.warp];
  if (warp.arrived != 0 && warp.at != name && std::strcmp(warp.at, name) != 0)
    fail("it comes to %s while %d other lanes of the warp wait at %s", name, warp.arrived, warp.at);
  if (warp.arrived == 0) warp.at = name;
  warp.operands[t.lane] = &mine;
  if (++warp.arrived < kLanes) return wait_at(warp.at);
  Operands* all[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) all[lane] = static_cast<Operands*>(warp.operands[lane]);
  compute(all);
  for (int lane = 0; lane < kLanes; ++lane) block.threads[t.warp * kLanes + lane].waits_at = nullptr;
  warp.arrived = 0;
  warp.runnable = kFullMask;
}

inline void barrier() {
  if (++block.at_barrier < static_cast<int>(block.threads.size())) return wait_at("__syncthreads");
  block.at_barrier = 0;
  ++block.barriers;
  for (Thread& t : block.threads) t.waits_at = nullptr;
  for (Warp& warp : block.warps) warp.runnable = kFullMask;
}

}  // namespace emulated
