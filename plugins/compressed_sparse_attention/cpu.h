// Between the op (cpu.cc) and its kernels (cpu_kernel.cc).
#pragma once

#include <stdint.h>

namespace hybrid {

constexpr int64_t kBlock = 32;     // rows of a block
constexpr int64_t kMaxGroup = 64;  // query heads that share a K/V head

// The G query heads that share one K/V head. Every buffer of theirs has rows of `stride` floats,
// a multiple of 16 that holds dk and dv; what lies beyond is zero.
struct Heads {
  const float* q;  // [G, stride], scaled
  int64_t G, dk, dv, stride;
};

// Softmax attention so far: o = sum_r e^(s_r - max) v_r, weight = sum_r e^(s_r - max).
struct Partial {
  float* o;       // [G, stride]
  float* max;     // [G]
  float* weight;  // [G]
};

struct AttentionKernels {
  // Nothing seen yet.
  void (*clear)(const Heads&, Partial);
  // Attends to rows of k [rows, dk] and v [rows, dv] as well.
  void (*attend)(const Heads&, const float* k, const float* v, int64_t rows, Partial);
  // Adds what another part of the rows gave.
  void (*merge)(const Heads&, Partial other, Partial);
  // o [G, dv], divided by the weight.
  void (*finish)(const Heads&, Partial, float* o);
};

namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}

}  // namespace hybrid
