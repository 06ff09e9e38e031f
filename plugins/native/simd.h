// Vectors of LANES floats. Kernel files (cpu_kernel.cc) are compiled once per form, with another
// FORM, LANES and target flags each. They include nothing of the C++ library that has inline
// functions: the linker would keep one copy of those, and it might be the one that this machine
// cannot run.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace hybrid::FORM {

constexpr int64_t kLanes = LANES;
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }
inline Vec splat(float x) { return x - Vec{}; }  // x + 0 would be computed: x may be -0

// Keeps x in a register: the compiler would read memory again for every use.
inline void keep(Vec& x) {
#if LANES == 8
  asm("" : "+x"(x));
#elif defined(__AVX512F__)
  asm("" : "+v"(x));
#else
  (void)x;
#endif
}

// The first n < kLanes values, zeros after them; memory beyond is not touched.
inline Vec load_part(const float* p, int64_t n) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  Vec x = {};
  memcpy(&x, p, n * sizeof(float));
  return x;
#endif
}

inline Vec load(const uint16_t* p) {  // float16
#if LANES == 8
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(
      0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  Vec x;
  memcpy(&x, &low, sizeof(low));
  memcpy(reinterpret_cast<char*>(&x) + sizeof(low), &high, sizeof(high));
  return x;
#endif
}

inline Vec load_part(const uint16_t* p, int64_t n) {
  uint16_t part[kLanes] = {};
  memcpy(part, p, n * sizeof(uint16_t));
  return load(part);
}

inline void store_part(float* p, Vec x, int64_t n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#else
  memcpy(p, &x, n * sizeof(float));
#endif
}

// f(offset, load, store) over n values, a vector at a time; the last one may be a part.
template <class F>
inline void for_vectors(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    f(i, [](const float* p) { return load(p); }, [](float* p, Vec x) { store(p, x); });
  }
  if (const int64_t rest = n - i) {
    f(i, [rest](const float* p) { return load_part(p, rest); },
      [rest](float* p, Vec x) { store_part(p, x, rest); });
  }
}

// f(offset, x) over n values at p, a vector at a time, the last one filled up with zeros.
template <class T, class F>
inline void for_vectors(int64_t n, const T* p, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, load(p + i));
  if (i < n) f(i, load_part(p + i, n - i));
}

inline Vec select(IntVec mask, Vec a, Vec b) { return mask ? a : b; }
inline Vec absolute(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }
inline Vec root(Vec x) {
#if LANES == 8
  return (Vec)_mm256_sqrt_ps((__m256)x);
#else
  for (int64_t i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }

// op over all lanes, halves folded onto each other.
template <class Op>
inline float fold(Vec x, Op op) {
#if LANES == 16
  x = op(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
  x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
  return x[0];
}
inline float sum_of(Vec x) {
  return fold(x, [](Vec a, Vec b) { return a + b; });
}
inline float largest_of(Vec x) {
  return fold(x, [](Vec a, Vec b) { return max(a, b); });
}

// e^x to 2 ulp; 0 below -87.7, and x is at most 88. NaN stays NaN.
inline Vec exp(Vec x) {
  x = select(x < splat(-88.0f), splat(-88.0f), x);
  x = select(x > splat(88.0f), splat(88.0f), x);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x * splat(1.44269504f) + magic) - magic;
  Vec r = x - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return p * (Vec)power;
}

}  // namespace hybrid::FORM
