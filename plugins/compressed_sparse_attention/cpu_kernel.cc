// Softmax attention of a few query heads over rows of one K/V head, one pass, fp32.
#include "compressed_sparse_attention/cpu.h"
#include "native/simd.h"

namespace hybrid::FORM {
namespace {

constexpr float kNone = -1e30f;  // below any score

#if LANES == 16
inline __m256 half(Vec x) {
  return (__m256)__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
         (__m256)__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
}
#else
inline __m256 half(Vec x) { return (__m256)x; }
#endif

// Lane i is the sum of the lanes of x[i].
inline __m256 sums_of_8(const Vec* x) {
  const __m256 ab = _mm256_hadd_ps(half(x[0]), half(x[1])), cd = _mm256_hadd_ps(half(x[2]), half(x[3]));
  const __m256 ef = _mm256_hadd_ps(half(x[4]), half(x[5])), gh = _mm256_hadd_ps(half(x[6]), half(x[7]));
  const __m256 low = _mm256_hadd_ps(ab, cd), high = _mm256_hadd_ps(ef, gh);
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                       _mm256_permute2f128_ps(low, high, 0x31));
}

// Memory that will be wanted next, fetched in step with the work on what is at hand.
struct Ahead {
  const float* at;
  const float* end;
  inline void lines(int64_t n) {
    for (int64_t i = 0; i < n && at < end; ++i, at += 16) __builtin_prefetch(at);
  }
};

// scores[j * kBlock + r] = q_j . k_r for R rows and Q queries, R * Q = 8.
template <int R, int Q>
inline void score_tile(const float* q, int64_t stride, const float* const* k, int64_t dk,
                       float* scores, Ahead& ahead) {
  Vec sum[8] = {};
  const auto step = [&](int64_t i, auto load_key) {
    Vec key[R];
    for (int r = 0; r < R; ++r) key[r] = load_key(k[r] + i);
    for (int j = 0; j < Q; ++j) {
      const Vec query = load(q + j * stride + i);
      for (int r = 0; r < R; ++r) sum[j * R + r] += query * key[r];
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= dk; i += kLanes) {
    step(i, [](const float* p) { return load(p); });
    ahead.lines(R * kLanes / 16);
  }
  if (i < dk) step(i, [n = dk - i](const float* p) { return load_part(p, n); });
  alignas(32) float out[8];
  _mm256_store_ps(out, sums_of_8(sum));
  for (int j = 0; j < Q; ++j) memcpy(scores + j * kBlock, out + j * R, R * sizeof(float));
}

// scores [G, kBlock] of up to kBlock rows; those beyond the last are kNone.
inline void score(const Heads& h, const float* k, int64_t rows, float* scores, Ahead ahead) {
  const float* row[8];
  for (int64_t r0 = 0; r0 < rows; r0 += 8) {
    for (int64_t r = 0; r < 8; ++r) row[r] = k + (r0 + r < rows ? r0 + r : rows - 1) * h.dk;
    int64_t g = 0;
    for (; g + 2 <= h.G; g += 2) {
      const float* q = h.q + g * h.stride;
      score_tile<4, 2>(q, h.stride, row, h.dk, scores + g * kBlock + r0, ahead);
      score_tile<4, 2>(q, h.stride, row + 4, h.dk, scores + g * kBlock + r0 + 4, ahead);
    }
    if (g < h.G) {
      score_tile<8, 1>(h.q + g * h.stride, h.stride, row, h.dk, scores + g * kBlock + r0, ahead);
    }
  }
  for (int64_t g = 0; g < h.G; ++g) {
    for (int64_t r = rows; r < kBlock; ++r) scores[g * kBlock + r] = kNone;
  }
}

inline float largest(const float* x) {
  Vec best = load(x);
  for (int64_t i = kLanes; i < kBlock; i += kLanes) best = max(best, load(x + i));
  float lane[kLanes], top = kNone;
  store(lane, best);
  for (float value : lane) top = value > top ? value : top;
  return top;
}

inline void scale(float* x, int64_t n, float by) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) * splat(by));
}

inline float exp_of(float x) { return exp(splat(x))[0]; }

// Scores become weights e^(s - max); what was summed under a smaller maximum is brought to it.
inline void weigh(const Heads& h, float* scores, Partial part) {
  for (int64_t g = 0; g < h.G; ++g) {
    float* s = scores + g * kBlock;
    const float top = largest(s);
    if (top > part.max[g]) {
      const float shrink = exp_of(part.max[g] - top);
      part.max[g] = top;
      part.weight[g] *= shrink;
      scale(part.o + g * h.stride, h.stride, shrink);
    }
    Vec sum = {};
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vec p = exp(load(s + i) - splat(part.max[g]));
      store(s + i, p);
      sum += p;
    }
    float lane[kLanes];
    store(lane, sum);
    for (float value : lane) part.weight[g] += value;
  }
}

// o_j += sum_r p[j, r] v_r over W vectors of Q queries.
template <int Q, int W, class Load, class Store>
inline void gather_tile(const float* p, const float* v, int64_t dv, int64_t rows, float* o,
                        int64_t stride, Ahead& ahead, int64_t lines, Load load_v, Store store_o) {
  Vec sum[Q][W];
  for (int j = 0; j < Q; ++j) {
    for (int w = 0; w < W; ++w) sum[j][w] = load(o + j * stride + w * kLanes);
  }
  for (int64_t r = 0; r < rows; ++r, v += dv) {
    Vec value[W];
    for (int w = 0; w < W; ++w) value[w] = load_v(v + w * kLanes);
    for (int j = 0; j < Q; ++j) {
      const Vec weight = splat(p[j * kBlock + r]);
      for (int w = 0; w < W; ++w) sum[j][w] += weight * value[w];
    }
    ahead.lines(lines);
  }
  for (int j = 0; j < Q; ++j) {
    for (int w = 0; w < W; ++w) store_o(o + j * stride + w * kLanes, sum[j][w]);
  }
}

template <int Q, int W>
inline void gather_heads(const Heads& h, const float* p, const float* v, int64_t rows, float* o,
                         Ahead& ahead, int64_t lines) {
  const auto whole = [](const float* x) { return load(x); };
  const auto put = [](float* x, Vec y) { store(x, y); };
  int64_t i = 0;
  for (; i + W * kLanes <= h.dv; i += W * kLanes) {
    gather_tile<Q, W>(p, v + i, h.dv, rows, o + i, h.stride, ahead, lines, whole, put);
  }
  for (; i + kLanes <= h.dv; i += kLanes) {
    gather_tile<Q, 1>(p, v + i, h.dv, rows, o + i, h.stride, ahead, lines, whole, put);
  }
  if (i < h.dv) {
    const auto part = [n = h.dv - i](const float* x) { return load_part(x, n); };
    gather_tile<Q, 1>(p, v + i, h.dv, rows, o + i, h.stride, ahead, lines, part, put);
  }
}

// o_g += sum_r p[g, r] v_r
inline void gather(const Heads& h, const float* p, const float* v, int64_t rows, Partial part,
                   Ahead ahead) {
  const int64_t turns = rows * ((h.G + 1) / 2) * ((h.dv + 31) / 32);
  const int64_t lines = (ahead.end - ahead.at) / 16 / turns + 1;
  int64_t g = 0;
  for (; g + 2 <= h.G; g += 2) {
    gather_heads<2, 4>(h, p + g * kBlock, v, rows, part.o + g * h.stride, ahead, lines);
  }
  if (g < h.G) gather_heads<1, 8>(h, p + g * kBlock, v, rows, part.o + g * h.stride, ahead, lines);
}

void clear(const Heads& h, Partial part) {
  memset(part.o, 0, h.G * h.stride * sizeof(float));
  memset(part.weight, 0, h.G * sizeof(float));
  for (int64_t g = 0; g < h.G; ++g) part.max[g] = kNone;
}

void attend(const Heads& h, const float* k, const float* v, int64_t rows, Partial part) {
  alignas(64) float scores[kMaxGroup * kBlock];
  for (int64_t r = 0; r < rows; r += kBlock) {
    const int64_t n = rows - r < kBlock ? rows - r : kBlock;
    const float *tile_v = v + r * h.dv, *next_k = k + (r + kBlock) * h.dk;
    score(h, k + r * h.dk, n, scores, {tile_v, tile_v + n * h.dv});
    weigh(h, scores, part);
    gather(h, scores, tile_v, n, part, {next_k, next_k + kBlock * h.dk});
  }
}

void merge(const Heads& h, Partial other, Partial part) {
  for (int64_t g = 0; g < h.G; ++g) {
    const float top = other.max[g] > part.max[g] ? other.max[g] : part.max[g];
    const float mine = exp_of(part.max[g] - top), theirs = exp_of(other.max[g] - top);
    float* o = part.o + g * h.stride;
    const float* from = other.o + g * h.stride;
    for (int64_t i = 0; i < h.stride; i += kLanes) {
      store(o + i, load(o + i) * splat(mine) + load(from + i) * splat(theirs));
    }
    part.weight[g] = part.weight[g] * mine + other.weight[g] * theirs;
    part.max[g] = top;
  }
}

void finish(const Heads& h, Partial part, float* o) {
  for (int64_t g = 0; g < h.G; ++g) {
    const Vec over = splat(1.0f / part.weight[g]);
    const float* from = part.o + g * h.stride;
    float* to = o + g * h.dv;
    for_vectors(h.dv, [&](int64_t i, auto load, auto store) { store(to + i, load(from + i) * over); });
  }
}

}  // namespace

extern const AttentionKernels attention_kernels = {clear, attend, merge, finish};

}  // namespace hybrid::FORM
