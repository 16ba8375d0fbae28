// Runs a grid: its blocks one after another, or two by two where they make a cluster.
#pragma once

#include "block.hpp"

namespace emulated {

inline int live_in_cluster() { return block.live + (run.cluster > 1 ? parked.live : 0); }

inline void wake_at(Block& of, const char* name) {
  for (Thread& t : of.threads) {
    if (t.waits_at != name) continue;
    t.waits_at = nullptr;
    of.warps[t.warp].runnable |= 1u << t.lane;
  }
}

constexpr char kClusterWait[] = "cluster_sync";

// All threads of a cluster that have not returned come together.
inline void pass_cluster_barrier() {
  if (run.at_cluster_barrier == 0 || run.at_cluster_barrier < live_in_cluster()) return;
  run.at_cluster_barrier = 0;
  ++block.barriers, ++parked.barriers;
  wake_at(block, kClusterWait);
  wake_at(parked, kClusterWait);
}
inline void cluster_barrier() {
  if (++run.at_cluster_barrier < live_in_cluster()) return wait_at(kClusterWait);
  pass_cluster_barrier();
}

// What a fiber runs: one thread of the kernel.
inline void thread_main() {
  block.kernel();
  if (hooks.leave != nullptr) hooks.leave();
  Thread& t = *block.current;
  t.returned = true;
  block.warps[t.warp].runnable &= ~(1u << t.lane);
  --block.live;
  pass_cluster_barrier();
  if (live_in_cluster() == 0) switch_fiber(t.fiber, run.scheduler);
  run_another();
  __builtin_unreachable();
}

inline void set_up_block(uint3 index, char* stacks) {
  block.index = index;
  std::memset(block.shared, 0xff, block.shared_bytes + kCanaryBytes);  // NaN in every type
  block.chunks.assign(block.shared_bytes / 16 + 1, Chunk{-1, 0, -1, 0, 0, kNobody, 0});
  const int count = static_cast<int>(block.threads.size());
  for (int i = 0; i < count; ++i) {
    Thread& t = block.threads[i];
    const unsigned x = block.threads_shape.x, y = block.threads_shape.y, linear = static_cast<unsigned>(i);
    t.index = {linear % x, linear / x % y, linear / (x * y)};
    t.warp = i / kLanes;
    t.lane = i % kLanes;
    t.waits_at = nullptr;
    t.returned = false;
    t.copies.clear();
    t.groups.clear();
    t.uncommitted = t.proxy_fences = 0;
    prepare(t.fiber, stacks + i * kStackBytes, thread_main);
  }
  block.warps.assign(count / kLanes, Warp{kFullMask, 0, nullptr, {}});
  block.live = count;
  block.at_barrier = block.barriers = 0;
  block.current = &block.threads[0];
  if (hooks.begin != nullptr) hooks.begin();
}

inline void check_canary() {
  for (unsigned i = block.shared_bytes; i < block.shared_bytes + kCanaryBytes && run.error.empty(); ++i) {
    if (block.shared[i] != 0xff)
      run.error = where() + "a store reached byte " + std::to_string(i) + " of " + std::to_string(block.shared_bytes) + " of shared memory";
  }
}

// The blocks of a cluster, from `index` on along x.
inline void run_blocks(uint3 index, char* stacks) {
  run.at_cluster_barrier = 0;
  for (unsigned i = 0; i < run.cluster; ++i) {
    set_up_block({index.x + i, index.y, index.z}, stacks + i * block.threads.size() * kStackBytes);
    if (run.cluster > 1) exchange();
  }
  switch_fiber(run.scheduler, block.current->fiber);
  for (unsigned i = 0; i < run.cluster; ++i) {
    check_canary();
    if (run.cluster > 1) exchange();
  }
}

inline void set_up_launch(uint3 grid, uint3 threads, unsigned shared_bytes, void (*kernel)()) {
  block.grid_shape = grid;
  block.threads_shape = threads;
  block.kernel = kernel;
  block.threads.resize(threads.x * threads.y * threads.z);
  block.shared_bytes = shared_bytes;
  constexpr std::uintptr_t kAlignment = 1024;
  block.buffer.reset(new char[shared_bytes + kCanaryBytes + kAlignment]);
  const auto start = reinterpret_cast<std::uintptr_t>(block.buffer.get());
  block.shared = reinterpret_cast<unsigned char*>((start + kAlignment - 1) / kAlignment * kAlignment);
}

// Every block of a grid, until one fails; what went wrong is in run.error.
inline void run_grid(uint3 grid, uint3 threads, unsigned shared_bytes, unsigned cluster, void (*kernel)()) {
  run.error.clear();
  run.cluster = cluster;
  run.bank_conflicts = 0;
  if (cluster > 2 || grid.x % cluster != 0) {
    run.error = "a grid of " + std::to_string(grid.x) + " blocks in clusters of " + std::to_string(cluster) + ": whole ones, of 1 or 2";
    return;
  }
  parked = Block();
  for (unsigned i = 0; i < cluster; ++i) {
    if (i > 0) parked.global_memory = block.global_memory, exchange();
    set_up_launch(grid, threads, shared_bytes, kernel);
  }
  const int count = static_cast<int>(cluster * block.threads.size());
  char* stacks = allocate_stacks(count);
  if (stacks == nullptr) run.error = "no memory for the threads' stacks";
  for (unsigned z = 0; z < grid.z && run.error.empty(); ++z) {
    for (unsigned y = 0; y < grid.y && run.error.empty(); ++y) {
      for (unsigned x = 0; x < grid.x && run.error.empty(); x += cluster) run_blocks({x, y, z}, stacks);
    }
  }
  free_stacks(stacks, count);
}

}  // namespace emulated
