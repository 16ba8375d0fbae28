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

// A K-major operand in 128-byte rows, 128-byte swizzle, 1024-byte aligned. A k-step of 16 lies 32 bytes further.
__device__ __forceinline__ u64 wgmma_descriptor(u32 tile) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) | (static_cast<u64>(1) << 16) | ((tile & 0x3ffff) >> 4);
}

// d[64 x 8n] (+)= a[64 x 16] b[8n x 16]^T, a in registers; `accumulate` 0 overwrites d.
#define WGMMA_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_F8(d, i) WGMMA_F4(d, i), WGMMA_F4(d, i + 4)
#define WGMMA_F16(d, i) WGMMA_F8(d, i), WGMMA_F8(d, i + 8)
#define WGMMA_F32(d, i) WGMMA_F16(d, i), WGMMA_F16(d, i + 16)
#define WGMMA_D32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_D36 WGMMA_D32 ",%32,%33,%34,%35"
#define WGMMA_D40 WGMMA_D32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_D44 WGMMA_D40 ",%40,%41,%42,%43"
#define WGMMA_D48 WGMMA_D44 ",%44,%45,%46,%47"
#define WGMMA_D52 WGMMA_D48 ",%48,%49,%50,%51"
#define WGMMA_D56 WGMMA_D52 ",%52,%53,%54,%55"
#define WGMMA_D64 WGMMA_D56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_RS(N, TYPE, LIST, A0, A1, A2, A3, B, P, ...)                                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3         \
               "}, %" #B ", p, 1, 1, 0;\n}"                                                                                             \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define WGMMA_RS_FUNCTIONS(TAG, TYPE)                                                                                                   \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[32], const u32 (&a)[4], u64 b, int accumulate) {                                \
    WGMMA_RS(64, TYPE, WGMMA_D32, 32, 33, 34, 35, 36, 37, WGMMA_F32(d, 0));                                                             \
  }                                                                                                                                     \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[36], const u32 (&a)[4], u64 b, int accumulate) {                                \
    WGMMA_RS(72, TYPE, WGMMA_D36, 36, 37, 38, 39, 40, 41, WGMMA_F32(d, 0), WGMMA_F4(d, 32));                                            \
  }                                                                                                                                     \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[40], const u32 (&a)[4], u64 b, int accumulate) {                                \
    WGMMA_RS(80, TYPE, WGMMA_D40, 40, 41, 42, 43, 44, 45, WGMMA_F32(d, 0), WGMMA_F8(d, 32));                                            \
  }                                                                                                                                     \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[44], const u32 (&a)[4], u64 b, int accumulate) {                                \
    WGMMA_RS(88, TYPE, WGMMA_D44, 44, 45, 46, 47, 48, 49, WGMMA_F32(d, 0), WGMMA_F8(d, 32), WGMMA_F4(d, 40));                           \
  }                                                                                                                                     \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[52], const u32 (&a)[4], u64 b, int accumulate) {                                \
    WGMMA_RS(104, TYPE, WGMMA_D52, 52, 53, 54, 55, 56, 57, WGMMA_F32(d, 0), WGMMA_F16(d, 32), WGMMA_F4(d, 48));                         \
  }                                                                                                                                     \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[48], const u32 (&a)[4], u64 b, int accumulate) {                                \
    WGMMA_RS(96, TYPE, WGMMA_D48, 48, 49, 50, 51, 52, 53, WGMMA_F32(d, 0), WGMMA_F16(d, 32));                                           \
  }                                                                                                                                     \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[56], const u32 (&a)[4], u64 b, int accumulate) {                                \
    WGMMA_RS(112, TYPE, WGMMA_D56, 56, 57, 58, 59, 60, 61, WGMMA_F32(d, 0), WGMMA_F16(d, 32), WGMMA_F8(d, 48));                         \
  }                                                                                                                                     \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[64], const u32 (&a)[4], u64 b, int accumulate) {                                \
    WGMMA_RS(128, TYPE, WGMMA_D64, 64, 65, 66, 67, 68, 69, WGMMA_F32(d, 0), WGMMA_F32(d, 32));                                          \
  }
WGMMA_RS_FUNCTIONS(BFloat16, "bf16")
WGMMA_RS_FUNCTIONS(Half, "f16")

// The same with a in shared memory.
#define WGMMA_SS(N, TYPE, LIST, A, B, P, ...)                                                                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}"        \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate))
#define WGMMA_SS_FUNCTIONS(TAG, TYPE)                                                                                                   \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[32], u64 a, u64 b, int accumulate) { \
    WGMMA_SS(64, TYPE, WGMMA_D32, 32, 33, 34, WGMMA_F32(d, 0)); \
  } \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[36], u64 a, u64 b, int accumulate) { \
    WGMMA_SS(72, TYPE, WGMMA_D36, 36, 37, 38, WGMMA_F32(d, 0), WGMMA_F4(d, 32)); \
  } \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[40], u64 a, u64 b, int accumulate) { \
    WGMMA_SS(80, TYPE, WGMMA_D40, 40, 41, 42, WGMMA_F32(d, 0), WGMMA_F8(d, 32)); \
  } \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[44], u64 a, u64 b, int accumulate) { \
    WGMMA_SS(88, TYPE, WGMMA_D44, 44, 45, 46, WGMMA_F32(d, 0), WGMMA_F8(d, 32), WGMMA_F4(d, 40)); \
  } \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[48], u64 a, u64 b, int accumulate) { \
    WGMMA_SS(96, TYPE, WGMMA_D48, 48, 49, 50, WGMMA_F32(d, 0), WGMMA_F16(d, 32)); \
  } \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[52], u64 a, u64 b, int accumulate) { \
    WGMMA_SS(104, TYPE, WGMMA_D52, 52, 53, 54, WGMMA_F32(d, 0), WGMMA_F16(d, 32), WGMMA_F4(d, 48)); \
  } \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[56], u64 a, u64 b, int accumulate) { \
    WGMMA_SS(112, TYPE, WGMMA_D56, 56, 57, 58, WGMMA_F32(d, 0), WGMMA_F16(d, 32), WGMMA_F8(d, 48)); \
  } \
  __device__ __forceinline__ void wgmma(TAG, float (&d)[64], u64 a, u64 b, int accumulate) { \
    WGMMA_SS(128, TYPE, WGMMA_D64, 64, 65, 66, WGMMA_F32(d, 0), WGMMA_F32(d, 32)); \
  }
WGMMA_SS_FUNCTIONS(BFloat16, "bf16")
WGMMA_SS_FUNCTIONS(Half, "f16")
