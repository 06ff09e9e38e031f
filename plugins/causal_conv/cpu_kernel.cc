// y_t = bias + sum_w weight_w * row_{t - width + 1 + w}, through silu where asked for.
#include "causal_conv/cpu.h"
#include "native/simd.h"

namespace hybrid::FORM {
namespace {

constexpr int64_t kMaxWidth = 8;

template <bool silu>
void rows(const Conv& conv, int64_t t0, int64_t t1) {
  const int64_t n = conv.channels, before = conv.width - 1;
  for (int64_t t = t0; t < t1; ++t) {
    const float* taps[kMaxWidth];
    for (int64_t w = 0; w < conv.width; ++w) {
      const int64_t row = t - before + w;
      taps[w] = row < 0 ? conv.past + (row + before) * n : conv.x + row * n;
    }
    float* y = conv.y + t * n;
    for_vectors(n, [&](int64_t i, auto load, auto store) {
      Vec sum = conv.bias ? load(conv.bias + i) : Vec{};
      for (int64_t w = 0; w < conv.width; ++w) {
        sum += load(taps[w] + i) * load(conv.weight + w * n + i);
      }
      if (silu) sum = sum / (splat(1.0f) + exp(-sum));
      store(y + i, sum);
    });
  }
}

}  // namespace

extern const ConvKernels conv_kernels = {[](const Conv& conv, int64_t t0, int64_t t1) {
  conv.silu ? rows<true>(conv, t0, t1) : rows<false>(conv, t0, t1);
}};

}  // namespace hybrid::FORM
