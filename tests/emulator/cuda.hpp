// What NVRTC has built in, for g++: the part of it that the kernels use.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "grid.hpp"
#include "shared_memory.hpp"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
// Blocks run one after another, those of a cluster together; no kernel of theirs has static shared memory. (runner.py makes `extern __shared__` the dynamic shared memory.)
#define __shared__ static

#define threadIdx (emulated::block.current->index)
#define blockIdx (emulated::block.index)
#define blockDim (emulated::block.threads_shape)
#define gridDim (emulated::block.grid_shape)
constexpr int warpSize = 32;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// As in CUDA: of a number and a NaN, the number.
#define EMULATED_MIN_MAX(type) \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long)
EMULATED_MIN_MAX(unsigned long)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
#undef EMULATED_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

template <typename T> inline T __ldg(const T* pointer) { return *pointer; }
template <typename T> inline T atomicAdd(T* to, T value) { return std::exchange(*to, static_cast<T>(*to + value)); }
inline void __threadfence() {}

inline void __syncthreads() { emulated::barrier(); }

namespace emulated {

inline void check_mask(const char* name, unsigned mask) {
  if (mask != kFullMask) fail("%s with mask %08x: only the full mask is emulated", name, mask);
}

// Lane l receives the value of lane source(l), or keeps its own where that is no lane of its segment of `width` lanes.
template <typename T, typename Source>
inline T shuffle(const char* name, unsigned mask, T value, int width, const Source& source) {
  check_mask(name, mask);
  struct Operands { T value, result; } mine = {value, value};
  const int lane = block.current->lane;
  const int from = source(lane, lane / width * width);
  struct Request { Operands operands; int from; } request = {mine, from};
  collective(name, request, [](Request* const* lanes) {
    for (int l = 0; l < kLanes; ++l) lanes[l]->operands.result = lanes[lanes[l]->from]->operands.value;
  });
  return request.operands.result;
}

inline unsigned ballot(const char* name, unsigned mask, bool value) {
  check_mask(name, mask);
  struct Request { bool value; unsigned result; } request = {value, 0};
  collective(name, request, [](Request* const* lanes) {
    unsigned bits = 0;
    for (int l = 0; l < kLanes; ++l) bits |= static_cast<unsigned>(lanes[l]->value) << l;
    for (int l = 0; l < kLanes; ++l) lanes[l]->result = bits;
  });
  return request.result;
}

}  // namespace emulated

inline void __syncwarp(unsigned mask = emulated::kFullMask) { emulated::ballot("__syncwarp", mask, false); }
inline unsigned __ballot_sync(unsigned mask, int value) { return emulated::ballot("__ballot_sync", mask, value != 0); }
inline int __any_sync(unsigned mask, int value) { return emulated::ballot("__any_sync", mask, value != 0) != 0; }
inline int __all_sync(unsigned mask, int value) { return emulated::ballot("__all_sync", mask, value != 0) == emulated::kFullMask; }

template <typename T> inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return emulated::shuffle("__shfl_sync", mask, value, width, [=](int, int first) { return first + (from & (width - 1)); });
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return emulated::shuffle("__shfl_xor_sync", mask, value, width,
                           [=](int lane, int first) { return (lane ^ bits) < first + width ? lane ^ bits : lane; });
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, int by, int width = 32) {
  return emulated::shuffle("__shfl_down_sync", mask, value, width, [=](int lane, int first) { return lane + by < first + width ? lane + by : lane; });
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, int by, int width = 32) {
  return emulated::shuffle("__shfl_up_sync", mask, value, width, [=](int lane, int first) { return lane - by >= first ? lane - by : lane; });
}

namespace emulated {

// How runner.py calls a kernel: its parameters by address, their sizes to check them by.
template <auto kKernel> struct Entry;
template <typename... Parameters, void (*kKernel)(Parameters...)>
struct Entry<kKernel> {
  static constexpr int kCount = sizeof...(Parameters);
  inline static void** arguments = nullptr;
  static int sizes(int* out) {
    ((*out++ = static_cast<int>(sizeof(Parameters))), ...);
    return kCount;
  }
  static void call() { call(std::index_sequence_for<Parameters...>()); }
  template <std::size_t... kIndex> static void call(std::index_sequence<kIndex...>) {
    kKernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[kIndex])...);
  }
};

struct Launch {
  unsigned grid[3], threads[3], shared_bytes, range_count;
  const Range* ranges;
  void** arguments;
};

template <typename Kernel> const char* launch(const Launch& l, unsigned cluster, long long* bank_conflicts) {
  Kernel::arguments = l.arguments;
  block.global_memory.assign(l.ranges, l.ranges + l.range_count);
  run_grid({l.grid[0], l.grid[1], l.grid[2]}, {l.threads[0], l.threads[1], l.threads[2]}, l.shared_bytes, cluster, Kernel::call);
  *bank_conflicts = run.bank_conflicts;
  return run.error.c_str();
}

}  // namespace emulated
