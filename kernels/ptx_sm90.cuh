// One thin function per instruction of sm_90a: mbarriers, bulk tensor copies, wgmma. Nothing here knows what it computes.
#pragma once

struct alignas(64) TensorMap { char opaque[128]; };

// Barriers in shared memory, given by address.
__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A barrier of kThreads of the block's threads, of the sixteen that have numbers.
template <int kNumber, int kThreads>
__device__ __forceinline__ void named_barrier() { asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory"); }
// The same for one of the consumer warpgroups, under a number of its own.
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) { asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory"); }
// Two warpgroups at a numbered barrier: one waits until the other has come, which goes on at once.
__device__ __forceinline__ void turn_await(int number) { asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory"); }
__device__ __forceinline__ void turn_give(int number) { asm volatile("bar.arrive %0, 256;" ::"r"(number) : "memory"); }
__device__ __forceinline__ void store_shared_16(u32 to, u32 word) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void load_shared_16(u32 (&words)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void store_global_16(void* to, const u32 (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}

// One box of a 4-D tensor, innermost coordinate first; completes on the barrier.
__device__ __forceinline__ void copy_box_4d(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Clusters of two blocks: which of them this is, a barrier of all their threads that have not returned, an arrival at the mbarrier
// that lies at the same address in block `rank`, and a box for both, each completing on its own barrier at that address.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive_in(u32 barrier, u32 rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ void copy_box_4d_to_both(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
               ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<unsigned short>(3)) : "memory");
}

// Adds floats in shared memory to floats in memory, in any order and asynchronously; by one thread, which also waits.
__device__ __forceinline__ void bulk_reduce_add_f32(void* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the last kPending groups have been read from shared memory, or have been added.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory"); }
template <int kPending>
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory"); }
__device__ __forceinline__ void store_shared_4(u32 to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// Stores a warp's four 8x8 matrices of 16-bit elements, rows of 16 bytes; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(u32 row, const u32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}

// Registers a thread, for the calling warpgroup. All warpgroups together must stay within what the kernel was launched with, or
// `take` waits for ever: 168 a thread with 384 threads, 128 with 512.
template <int kRegisters>
__device__ __forceinline__ void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// The matrix unit reads and writes registers behind the compiler's back: `hold` keeps accesses on their side of it.
template <int kCount>
__device__ __forceinline__ void hold(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// An operand in rows of 64 columns, 128 bytes, with the 128-byte swizzle; chunks of 64 columns lie `chunk_bytes` apart, each a
// multiple of 1024 bytes. Where the columns are summed over, a k-step of 16 lies 32 bytes further; where the rows are, 2048.
__device__ __forceinline__ u64 wgmma_descriptor(u32 tile, u32 chunk_bytes = 16) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) | (static_cast<u64>(chunk_bytes >> 4) << 16) | ((tile & 0x3ffff) >> 4);
}

// d[64 x n] (+)= a[64 x 16] b, with b[n x 16] by rows of n (0) or of 16 (transposed, 1); a in registers or in shared memory, there
// by rows of 64 (0) or of 16 (1). `accumulate` 0 overwrites d. One function for each n that a kernel uses; a thread holds n / 2
// elements of d.
#define WGMMA_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_F8(d, i) WGMMA_F4(d, i), WGMMA_F4(d, i + 4)
#define WGMMA_F16(d, i) WGMMA_F8(d, i), WGMMA_F8(d, i + 8)
#define WGMMA_F32(d, i) WGMMA_F16(d, i), WGMMA_F16(d, i + 16)
#define WGMMA_D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_D16 WGMMA_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_D32 WGMMA_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_D40 WGMMA_D32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_D48 WGMMA_D40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_D64 WGMMA_D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_FROM_REGISTERS(N, TYPE, LIST, A0, A1, A2, A3, B, P, T, ...) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 \
               "}, %" #B ", p, 1, 1, %" #T ";\n}" \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposed))
#define WGMMA_FROM_SHARED(N, TYPE, LIST, A, B, P, T, S, ...) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST "}, %" #A ", %" #B ", p, 1, 1, %" #S ", %" #T ";\n}" \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposed), "n"(kTransposedA))
#define WGMMA_FUNCTIONS(TAG, TYPE) \
  template <int kTransposed = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[8], const u32 (&a)[4], u64 b, int accumulate) { \
    WGMMA_FROM_REGISTERS(16, TYPE, WGMMA_D8, 8, 9, 10, 11, 12, 13, 14, WGMMA_F8(d, 0)); \
  } \
  template <int kTransposed = 0, int kTransposedA = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[8], u64 a, u64 b, int accumulate) { \
    WGMMA_FROM_SHARED(16, TYPE, WGMMA_D8, 8, 9, 10, 11, 12, WGMMA_F8(d, 0)); \
  } \
  template <int kTransposed = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[16], const u32 (&a)[4], u64 b, int accumulate) { \
    WGMMA_FROM_REGISTERS(32, TYPE, WGMMA_D16, 16, 17, 18, 19, 20, 21, 22, WGMMA_F16(d, 0)); \
  } \
  template <int kTransposed = 0, int kTransposedA = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[16], u64 a, u64 b, int accumulate) { \
    WGMMA_FROM_SHARED(32, TYPE, WGMMA_D16, 16, 17, 18, 19, 20, WGMMA_F16(d, 0)); \
  } \
  template <int kTransposed = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[32], const u32 (&a)[4], u64 b, int accumulate) { \
    WGMMA_FROM_REGISTERS(64, TYPE, WGMMA_D32, 32, 33, 34, 35, 36, 37, 38, WGMMA_F32(d, 0)); \
  } \
  template <int kTransposed = 0, int kTransposedA = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[32], u64 a, u64 b, int accumulate) { \
    WGMMA_FROM_SHARED(64, TYPE, WGMMA_D32, 32, 33, 34, 35, 36, WGMMA_F32(d, 0)); \
  } \
  template <int kTransposed = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[40], const u32 (&a)[4], u64 b, int accumulate) { \
    WGMMA_FROM_REGISTERS(80, TYPE, WGMMA_D40, 40, 41, 42, 43, 44, 45, 46, WGMMA_F32(d, 0), WGMMA_F8(d, 32)); \
  } \
  template <int kTransposed = 0, int kTransposedA = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[40], u64 a, u64 b, int accumulate) { \
    WGMMA_FROM_SHARED(80, TYPE, WGMMA_D40, 40, 41, 42, 43, 44, WGMMA_F32(d, 0), WGMMA_F8(d, 32)); \
  } \
  template <int kTransposed = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[48], const u32 (&a)[4], u64 b, int accumulate) { \
    WGMMA_FROM_REGISTERS(96, TYPE, WGMMA_D48, 48, 49, 50, 51, 52, 53, 54, WGMMA_F32(d, 0), WGMMA_F16(d, 32)); \
  } \
  template <int kTransposed = 0, int kTransposedA = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[48], u64 a, u64 b, int accumulate) { \
    WGMMA_FROM_SHARED(96, TYPE, WGMMA_D48, 48, 49, 50, 51, 52, WGMMA_F32(d, 0), WGMMA_F16(d, 32)); \
  } \
  template <int kTransposed = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[64], const u32 (&a)[4], u64 b, int accumulate) { \
    WGMMA_FROM_REGISTERS(128, TYPE, WGMMA_D64, 64, 65, 66, 67, 68, 69, 70, WGMMA_F32(d, 0), WGMMA_F32(d, 32)); \
  } \
  template <int kTransposed = 0, int kTransposedA = 0> \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[64], u64 a, u64 b, int accumulate) { \
    WGMMA_FROM_SHARED(128, TYPE, WGMMA_D64, 64, 65, 66, 67, 68, WGMMA_F32(d, 0), WGMMA_F32(d, 32)); \
  }
WGMMA_FUNCTIONS(BFloat16, "bf16")
WGMMA_FUNCTIONS(Half, "f16")
