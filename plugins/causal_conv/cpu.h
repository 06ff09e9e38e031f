// Between the op (cpu.cc) and its kernels (cpu_kernel.cc).
#pragma once

#include <stdint.h>

namespace hybrid {

struct Conv {
  const float* x;       // [T, channels]
  const float* past;    // [width - 1, channels]
  const float* weight;  // [width, channels]
  const float* bias;    // [channels] or null
  float* y;             // [T, channels]
  int64_t channels, width;
  bool silu;
};

struct ConvKernels {
  // Rows t0 .. t1 of y. A row's bits depend on its own inputs alone.
  void (*rows)(const Conv&, int64_t t0, int64_t t1);
};

namespace avx2 {
extern const ConvKernels conv_kernels;
}
namespace avx512 {
extern const ConvKernels conv_kernels;
}

}  // namespace hybrid
