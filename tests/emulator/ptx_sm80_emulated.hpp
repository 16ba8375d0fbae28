// The functions of kernels/ptx_sm80.cuh in plain C++, with the semantics and fragment layouts of the PTX ISA.
#pragma once

struct BFloat16 { u16 bits; };
struct Half { u16 bits; };

inline float to_float(float x) { return x; }
inline float to_float(double x) { return static_cast<float>(x); }
inline float to_float(BFloat16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
inline float to_float(Half x) {
  const u32 sign = (x.bits & 0x8000u) << 16, magnitude = (x.bits & 0x7fffu) << 13;
  const u32 scaled = __float_as_uint(__uint_as_float(magnitude) * 0x1p112f);  // subnormals included
  return __uint_as_float(sign | ((x.bits & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : scaled));
}

namespace emulated {

// Round to nearest, ties to even.
inline u32 round_to(BFloat16, float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline u32 round_to(Half, float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (x != x) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520: the half is infinite
  if (magnitude < 0x38800000u) return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);  // 2^-14: subnormal
  return sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
}
inline u16 half_of(u32 pair, int high) { return static_cast<u16>(high ? pair >> 16 : pair); }

struct LoadMatrix {
  u32* registers;
  u32 address;
};

template <bool kTransposed>
inline void load_matrix(const char* name, u32 (&r)[4], u32 address) {
  LoadMatrix mine = {r, address};
  collective(name, mine, [name](LoadMatrix* const* lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      u16 elements[8][8];
      u32 banks = 0;
      for (int row = 0; row < 8; ++row) {
        const u32 from = lanes[8 * matrix + row]->address;
        std::memcpy(elements[row], read_piece(name, from), 16);
        banks |= 1u << from / 16 % 8;
      }
      run.bank_conflicts += 8 - __builtin_popcount(banks);
      for (int lane = 0; lane < kLanes; ++lane) {
        const int row = lane / 4, column = lane % 4 * 2;
        const u16 low = kTransposed ? elements[column][row] : elements[row][column];
        const u16 high = kTransposed ? elements[column + 1][row] : elements[row][column + 1];
        lanes[lane]->registers[matrix] = low | static_cast<u32>(high) << 16;
      }
    }
  });
}

struct Mma {
  float* d;
  const u32* a;
  u32 b[2];
};

typedef float Row __attribute__((vector_size(32)));  // the eight columns of a row of B or D

// Products are exact in float32 and summed there. The hardware cuts digits where this rounds: results agree to a few ulp.
template <typename Element>
inline void mma(const char* name, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Mma mine = {d, a, {b0, b1}};
  collective(name, mine, [](Mma* const* lanes) {
    float left[16][16], right[16][8], sum[16][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Mma& l = *lanes[lane];
      const int group = lane / 4, pair = lane % 4 * 2;
      for (int high = 0; high < 2; ++high) {
        for (int i = 0; i < 4; ++i) left[group + 8 * (i % 2)][pair + high + 8 * (i / 2)] = to_float(Element{half_of(l.a[i], high)});
        for (int i = 0; i < 2; ++i) right[pair + high + 8 * i][group] = to_float(Element{half_of(l.b[i], high)});
        for (int i = 0; i < 2; ++i) sum[group + 8 * i][pair + high] = l.d[2 * i + high];
      }
    }
    Row rows[16];
    std::memcpy(rows, right, sizeof rows);
    for (int row = 0; row < 16; ++row) {
      Row total;
      std::memcpy(&total, sum[row], sizeof total);
      for (int k = 0; k < 16; ++k) total += left[row][k] * rows[k];
      std::memcpy(sum[row], &total, sizeof total);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) lanes[lane]->d[i] = sum[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2];
    }
  });
}

}  // namespace emulated

inline u32 shared_address(const void* pointer) {
  const std::ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - emulated::block.shared;
  if (offset < 0 || offset > static_cast<std::ptrdiff_t>(emulated::block.shared_bytes))
    emulated::fail("shared_address of %p, outside the dynamic shared memory", pointer);
  return static_cast<u32>(offset);
}

inline void copy_async_16(u32 to, const void* from, bool inside) { emulated::issue_copy(to, from, inside); }
inline void copy_async_commit() { emulated::commit_copies(); }
template <int kPending> inline void copy_async_wait() { emulated::wait_copies(kPending); }

inline void load_matrix_x4(u32 (&r)[4], u32 address) { emulated::load_matrix<false>("load_matrix_x4", r, address); }
inline void load_matrix_x4_transposed(u32 (&r)[4], u32 address) { emulated::load_matrix<true>("load_matrix_x4_transposed", r, address); }

inline void mma_16x8x16(BFloat16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulated::mma<BFloat16>("mma_16x8x16", d, a, b0, b1); }
inline void mma_16x8x16(Half, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulated::mma<Half>("mma_16x8x16", d, a, b0, b1); }

inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline u32 pack(BFloat16 type, float low, float high) { return emulated::round_to(type, low) | emulated::round_to(type, high) << 16; }
inline u32 pack(Half type, float low, float high) { return emulated::round_to(type, low) | emulated::round_to(type, high) << 16; }

inline void store_pair(BFloat16* to, float low, float high) { *reinterpret_cast<u32*>(to) = pack(BFloat16(), low, high); }
inline void store_pair(Half* to, float low, float high) { *reinterpret_cast<u32*>(to) = pack(Half(), low, high); }
inline void store_pair(float* to, float low, float high) { *reinterpret_cast<float2*>(to) = make_float2(low, high); }
