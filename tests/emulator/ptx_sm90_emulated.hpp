// The functions of kernels/ptx_sm90.cuh in plain C++; mbarriers.hpp and wgmma.hpp say when what takes place.
#pragma once

#include "wgmma.hpp"

namespace emulated {

inline const bool hooked = [] {
  hooks = {begin_wgmma, next_warp, advance, leave_wgmma, wgmma_detail, exchange_wgmma};
  return true;
}();

struct StoreMatrix {
  const u32* registers;
  u32 address;
};

}  // namespace emulated

struct alignas(64) TensorMap { char opaque[128]; };

inline void barrier_init(u32 barrier, int arrivals) { emulated::init_mbarrier(barrier, arrivals); }
inline u32 cluster_rank() { return emulated::block.index.x % emulated::run.cluster; }
inline void cluster_sync() { emulated::cluster_barrier(); }
inline void barrier_init_fence() {}
inline void proxy_fence() { ++emulated::block.current->proxy_fences; }
template <int kNumber, int kThreads> inline void named_barrier() { emulated::wait_numbered(kNumber, kThreads); }
inline void warpgroup_barrier(int warpgroup) { emulated::wait_numbered(2 + warpgroup, 128); }
inline void turn_await(int number) { emulated::wait_numbered(number, 256); }
inline void turn_give(int number) { emulated::arrive_numbered(number, 256); }
inline void barrier_arrive(u32 barrier) { emulated::arrive("barrier_arrive", barrier, 0); }
inline void barrier_arrive_expect(u32 barrier, u32 bytes) { emulated::arrive("barrier_arrive_expect", barrier, bytes); }
inline void barrier_arrive_in(u32 barrier, u32 rank) { emulated::arrive_in(rank, barrier); }
inline void barrier_wait(u32 barrier, u32 parity) { emulated::wait_mbarrier(barrier, parity); }

inline void store_shared_16(u32 to, u32 word) {
  emulated::check_piece("store_shared_16", to);
  for (int i = 0; i < 4; ++i) std::memcpy(emulated::block.shared + to + 4 * i, &word, 4);
  emulated::mark_stored(to);
}
inline void load_shared_16(u32 (&words)[4], u32 from) { std::memcpy(words, emulated::read_piece("load_shared_16", from), 16); }
inline void store_global_16(void* to, const u32 (&words)[4]) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0) emulated::fail("store_global_16 to %p, no multiple of 16 bytes", to);
  std::memcpy(to, words, 16);
}
inline void store_shared_4(u32 to, float a, float b, float c, float d) {
  emulated::check_piece("store_shared_4", to);
  const float values[] = {a, b, c, d};
  std::memcpy(emulated::block.shared + to, values, 16);
  emulated::mark_stored(to);
}
inline void store_matrix_x4(u32 row, const u32 (&m)[4]) {
  emulated::StoreMatrix mine = {m, row};
  emulated::collective("store_matrix_x4", mine, [](emulated::StoreMatrix* const* lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      u32 banks = 0;
      for (int i = 0; i < 8; ++i) {
        const u32 to = lanes[8 * matrix + i]->address;
        emulated::check_piece("store_matrix_x4", to);
        for (int quarter = 0; quarter < 4; ++quarter)
          std::memcpy(emulated::block.shared + to + 4 * quarter, &lanes[4 * i + quarter]->registers[matrix], 4);
        emulated::mark_stored(to);
        banks |= 1u << to / 16 % 8;
      }
      emulated::run.bank_conflicts += 8 - __builtin_popcount(banks);
    }
  });
}

inline void copy_box_4d(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  emulated::issue_box(to, map, barrier, c0, c1, c2, c3);
}
inline void copy_box_4d_to_both(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  emulated::issue_box_to_both(to, map, barrier, c0, c1, c2, c3);
}
inline void prefetch_tensor_map(const TensorMap*) {}

inline void bulk_reduce_add_f32(void* to, u32 from, u32 bytes) { emulated::issue_reduction(to, from, bytes); }
inline void bulk_commit() { emulated::commit_reductions(); }
template <int kPending> inline void bulk_wait_read() { emulated::wait_reductions(kPending); }
template <int kPending> inline void bulk_wait() { emulated::wait_reductions(kPending); }

template <int kRegisters> inline void registers_take() { emulated::set_registers(kRegisters); }
template <int kRegisters> inline void registers_give() { emulated::set_registers(kRegisters); }
template <int kCount> inline void hold(float (&)[kCount]) {}

inline void wgmma_fence() { emulated::wgmma_thread().fenced = true; }
inline void wgmma_commit() { emulated::commit_wgmma(); }
template <int kPending> inline void wgmma_wait() { emulated::wait_wgmma(kPending); }

inline u64 wgmma_descriptor(u32 tile, u32 chunk_bytes = 16) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) | (static_cast<u64>(chunk_bytes >> 4) << 16) | ((tile & 0x3ffff) >> 4);
}

template <int kTransposed = 0, typename Element, int kCount>
inline void wgmma(Element, float (&d)[kCount], const u32 (&a)[4], u64 b, int accumulate) {
  static_assert(kCount % 4 == 0 && kCount <= 128, "n is a multiple of 8, at most 256");
  emulated::issue_wgmma({2 * kCount, std::is_same_v<Element, BFloat16>, true, false, kTransposed != 0, accumulate != 0, 0, b}, d, a);
}
template <int kTransposed = 0, int kTransposedA = 0, typename Element, int kCount>
inline void wgmma(Element, float (&d)[kCount], u64 a, u64 b, int accumulate) {
  static_assert(kCount % 4 == 0 && kCount <= 128, "n is a multiple of 8, at most 256");
  emulated::issue_wgmma({2 * kCount, std::is_same_v<Element, BFloat16>, false, kTransposedA != 0, kTransposed != 0, accumulate != 0, a, b}, d, nullptr);
}
