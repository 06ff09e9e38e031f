// Softmax attention of a few query heads over rows of one K/V head, and the same over summaries of
// rows; one pass each, fp32.
#include "compressed_sparse_attention/cpu.h"
#include "native/simd.h"

namespace hybrid::FORM {
namespace {

constexpr float kNone = -1e30f;  // below any score
constexpr int64_t kTile = kLanes;  // rows at a time: few, so that what comes next is fetched in time

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
  __m256 pair[4];
  for (int i = 0; i < 4; ++i) pair[i] = _mm256_hadd_ps(half(x[2 * i]), half(x[2 * i + 1]));
  const __m256 low = _mm256_hadd_ps(pair[0], pair[1]), high = _mm256_hadd_ps(pair[2], pair[3]);
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                       _mm256_permute2f128_ps(low, high, 0x31));
}

// Memory that will be wanted next, fetched in step with the work on what is at hand.
struct Ahead {
  const float *at, *end;
  template <int n>
  inline void lines() {
    if (at >= end) return;
    for (int i = 0; i < n; ++i) __builtin_prefetch(at + i * 16);
    at += n * 16;
  }
};

// The same where it is rows of `width` floats that lie anywhere.
struct AheadRows {
  const float* const* row;
  int64_t count, width;
  int64_t at = 0;
  template <int n>
  inline void lines() {
    for (int i = 0; i < n && count > 0; ++i) {
      __builtin_prefetch(*row + at);
      at += 16;
      if (at >= width) at = 0, ++row, --count;
    }
  }
};

// What a tile sums over the channels.
struct Product {
  static Vec add(Vec sum, Vec query, Vec key) { return sum + query * key; }
};
struct ProductOfSquare {
  static Vec add(Vec sum, Vec query, Vec key) { return sum + query * (key * key); }
};

// out[j * out_stride + r] for R rows of d channels and Q queries, R * Q = 8.
template <int R, int Q, class Term, class T, class A>
inline void tile(const float* q, int64_t stride, const T* const* row, int64_t d, float* out,
                 int64_t out_stride, A& ahead) {
  Vec sum[8] = {};
  const auto step = [&](int64_t i, auto load_key) __attribute__((always_inline)) {
    Vec key[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) key[r] = load_key(row[r] + i);
    if (Q > 1) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) keep(key[r]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < Q; ++j) {
      const Vec query = load(q + j * stride + i);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[j * R + r] = Term::add(sum[j * R + r], query, key[r]);
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) {
    step(i, [](const T* p) { return load(p); });
    ahead.template lines<R * kLanes / 16>();
  }
  if (i < d) step(i, [n = d - i](const T* p) { return load_part(p, n); });
  alignas(32) float sums[8];
  _mm256_store_ps(sums, sums_of_8(sum));
#pragma GCC unroll 8
  for (int j = 0; j < Q; ++j) memcpy(out + j * out_stride, sums + j * R, R * sizeof(float));
}

// out [G, out_stride] for eight rows.
template <class Term, class T, class A>
inline void eight_rows(const float* q, int64_t G, int64_t stride, const T* const* row, int64_t d,
                       float* out, int64_t out_stride, A& ahead) {
  int64_t g = 0;
  for (; g + 2 <= G; g += 2) {
    const float* query = q + g * stride;
    float* to = out + g * out_stride;
    tile<4, 2, Term>(query, stride, row, d, to, out_stride, ahead);
    tile<4, 2, Term>(query, stride, row + 4, d, to + 4, out_stride, ahead);
  }
  if (g < G) tile<8, 1, Term>(q + g * stride, stride, row, d, out + g * out_stride, out_stride, ahead);
}

// scores [G, kTile] of up to kTile rows; those beyond the last are kNone. `k(r)` is where one starts.
template <class Row, class A>
inline void score(const Heads& h, Row k, int64_t rows, float* scores, A ahead) {
  const float* row[8];
  for (int64_t r0 = 0; r0 < rows; r0 += 8) {
    for (int64_t r = 0; r < 8; ++r) row[r] = k(r0 + r < rows ? r0 + r : rows - 1);
    eight_rows<Product>(h.q, h.G, h.stride, row, h.dk, scores + r0, kTile, ahead);
  }
  for (int64_t g = 0; g < h.G; ++g) {
    for (int64_t r = rows; r < kTile; ++r) scores[g * kTile + r] = kNone;
  }
}

inline void scale(float* x, int64_t n, float by) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) * splat(by));
}

inline float exp_of(float x) { return exp(splat(x))[0]; }

// Scores become weights e^(s - max); what was summed under a smaller maximum is brought to it.
inline void weigh(const Heads& h, float* scores, Partial part) {
  for (int64_t g = 0; g < h.G; ++g) {
    float* s = scores + g * kTile;
    Vec best = load(s);
    for (int64_t i = kLanes; i < kTile; i += kLanes) best = max(best, load(s + i));
    const float top = largest_of(best);
    if (top > part.max[g]) {
      const float shrink = exp_of(part.max[g] - top);
      part.max[g] = top;
      part.weight[g] *= shrink;
      scale(part.o + g * h.stride, h.stride, shrink);
    }
    Vec sum = {};
    for (int64_t i = 0; i < kTile; i += kLanes) {
      const Vec p = exp(load(s + i) - splat(part.max[g]));
      store(s + i, p);
      sum += p;
    }
    part.weight[g] += sum_of(sum);
  }
}

// o_j += sum_r p[j, r] row_r over W vectors of Q queries. `row(r)` is where the vectors start.
template <int Q, int W, class Row, class A, class Load, class Store>
inline void gather_tile(const float* p, int64_t p_stride, Row row, int64_t rows, float* o,
                        int64_t stride, A& ahead, Load load_v, Store store_o) {
  Vec sum[Q][W];
#pragma GCC unroll 8
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) sum[j][w] = load(o + j * stride + w * kLanes);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const auto* v = row(r);
    Vec value[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) value[w] = load_v(v + w * kLanes);
    if (Q > 1) {
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) keep(value[w]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < Q; ++j) {
      const Vec weight = splat(p[j * p_stride + r]);
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) sum[j][w] += weight * value[w];
    }
    ahead.template lines<4 / Q>();
  }
#pragma GCC unroll 8
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) store_o(o + j * stride + w * kLanes, sum[j][w]);
  }
}

template <int Q, int W, class Row, class A>
inline void gather_heads(const float* p, int64_t p_stride, Row row, int64_t rows, int64_t d,
                         float* o, int64_t stride, A& ahead) {
  const auto whole = [](const auto* x) { return load(x); };
  const auto put = [](float* x, Vec y) { store(x, y); };
  int64_t i = 0;
  const auto from = [&](int64_t r) { return row(r) + i; };
  for (; i + W * kLanes <= d; i += W * kLanes) {
    gather_tile<Q, W>(p, p_stride, from, rows, o + i, stride, ahead, whole, put);
  }
  for (; i + kLanes <= d; i += kLanes) {
    gather_tile<Q, 1>(p, p_stride, from, rows, o + i, stride, ahead, whole, put);
  }
  if (i < d) {
    const auto part = [n = d - i](const auto* x) { return load_part(x, n); };
    gather_tile<Q, 1>(p, p_stride, from, rows, o + i, stride, ahead, part, put);
  }
}

// o [G, stride] += sum_r p[g, r] row_r
template <class Row, class A>
inline void gather(int64_t G, const float* p, int64_t p_stride, Row row, int64_t rows, int64_t d,
                   float* o, int64_t stride, A ahead) {
  int64_t g = 0;
  for (; g + 2 <= G; g += 2) {
    gather_heads<2, 4>(p + g * p_stride, p_stride, row, rows, d, o + g * stride, stride, ahead);
  }
  if (g < G) {
    gather_heads<1, 8>(p + g * p_stride, p_stride, row, rows, d, o + g * stride, stride, ahead);
  }
}

void clear(const Heads& h, Partial part) {
  memset(part.o, 0, h.G * h.stride * sizeof(float));
  memset(part.weight, 0, h.G * sizeof(float));
  for (int64_t g = 0; g < h.G; ++g) part.max[g] = kNone;
}

void attend(const Heads& h, Rows rows, const int32_t* ids, int64_t count, Partial part) {
  alignas(64) float scores[kMaxGroup * kTile];
  constexpr int64_t kTiles = kBlock / kTile;  // of a block
  const auto first_row = [&](int64_t tile) {
    tile = tile < count * kTiles ? tile : count * kTiles - 1;
    const int64_t block = tile / kTiles;
    return (ids ? ids[block] : block) * kBlock + tile % kTiles * kTile;
  };
  for (int64_t tile = 0; tile < count * kTiles; ++tile) {
    const int64_t first = first_row(tile), left = rows.count - first;
    if (left <= 0) continue;
    const int64_t n = left < kTile ? left : kTile;
    const float *k = rows.k + first * h.dk, *v = rows.v + first * h.dv;
    const float* next_k = rows.k + first_row(tile + 1) * h.dk;
    score(h, [&](int64_t r) { return k + r * h.dk; }, n, scores, Ahead{v, v + n * h.dv});
    weigh(h, scores, part);
    gather(h.G, scores, kTile, [&](int64_t r) { return v + r * h.dv; }, n, h.dv, part.o, h.stride,
           Ahead{next_k, next_k + kTile * h.dk});
  }
}

void attend_scattered(const Heads& h, ScatteredRows rows, Partial part) {
  alignas(64) float scores[kMaxGroup * kTile];
  const float *k[2][kTile], *v[kTile];  // of this tile, and the keys of the next
  const auto find = [&](const float* base, int64_t first, const float** row) {
    const int64_t left = rows.count - first, n = left < kTile ? left : kTile;
    for (int64_t r = 0; r < n; ++r) row[r] = base + kUnit * rows.at[first + r];
    return n;
  };
  int64_t n = find(rows.k, 0, k[0]);
  for (int64_t first = 0, i = 0; first < rows.count; first += kTile, i = 1 - i) {
    find(rows.v, first, v);
    const int64_t next = find(rows.k, first + kTile, k[1 - i]);
    const auto of = [](const float* const* row) { return [row](int64_t r) { return row[r]; }; };
    score(h, of(k[i]), n, scores, AheadRows{v, n, h.dv});
    weigh(h, scores, part);
    gather(h.G, scores, kTile, of(v), n, h.dv, part.o, h.stride, AheadRows{k[1 - i], next, h.dk});
    n = next;
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

// f(first, row[8]) for the entries' channels from `offset` on, eight entries at a time.
template <class F>
inline void for_entries(const Heads& h, const Entries& e, int64_t offset, F f) {
  const uint16_t* row[8];
  const int64_t size = 2 * h.dk + h.dv;
  for (int64_t i = 0; i < e.count; i += 8) {
    for (int64_t r = 0; r < 8; ++r) {
      const int64_t id = e.ids[i + r < e.count ? i + r : e.count - 1];
      row[r] = e.entry + id * size + offset;
    }
    f(i, row);
  }
}

void score_entries(const Heads& h, const float* q2, Entries e, bool sound, Estimates x) {
  Ahead none{nullptr, nullptr};
  for_entries(h, e, 0, [&](int64_t i, const uint16_t* const* row) {
    const uint16_t* spread[8];
    for (int r = 0; r < 8; ++r) spread[r] = row[r] + h.dk;
    eight_rows<Product>(h.q, h.G, h.stride, row, h.dk, x.mean + i, e.stride, none);
    if (sound) {
      eight_rows<Product>(q2, h.G, h.stride, spread, h.dk, x.width + i, e.stride, none);
    } else {
      eight_rows<ProductOfSquare>(q2, h.G, h.stride, spread, h.dk, x.width + i, e.stride, none);
    }
  });
  for (int64_t i = 0; i < e.count; ++i) {
    const uint16_t* mean_v = e.entry + e.ids[i] * (2 * h.dk + h.dv) + 2 * h.dk;
    Vec sum = {};
    for_vectors(h.dv, mean_v, [&](int64_t, Vec v) { sum += v * v; });
    x.square[i] = sum_of(sum);
  }
  for (int64_t g = 0; g < h.G; ++g) {
    float *mean = x.mean + g * e.stride, *width = x.width + g * e.stride;
    for (int64_t i = e.count; i < e.stride; ++i) mean[i] = kNone, width[i] = 0;
    if (sound) continue;
    for (int64_t i = 0; i < e.stride; i += kLanes) {
      const Vec w = load(width + i);
      store(width + i, select(w > splat(30.0f), splat(30.0f), w));
    }
  }
}

float highest(int64_t g, Entries e, bool sound, Estimates x) {
  const float *mean = x.mean + g * e.stride, *width = x.width + g * e.stride;
  Vec top = splat(kNone);
  for (int64_t i = 0; i < e.stride; i += kLanes) {
    top = max(top, load(mean + i) + load(width + i) * splat(sound ? 1.0f : 0.5f));
  }
  return largest_of(top);
}

// e^x - 1, exact for small x too.
inline Vec exp_less_1(Vec x) {
  const Vec series = x * (splat(1.0f) + x * (splat(0.5f) + x * (splat(1.0f / 6) + x * splat(1.0f / 24))));
  return select(x < splat(0.1f), series, exp(x) - splat(1.0f));
}

float masses(int64_t g, float top, Entries e, bool sound, Estimates x, float* low) {
  const int64_t at = g * e.stride;
  Vec sum = {}, low_sum = {};
  for (int64_t i = 0; i < e.stride; i += kLanes) {
    const Vec mean = load(x.mean + at + i) - splat(top), width = load(x.width + at + i);
    const Vec rows = load(x.rows + i);
    Vec mass, gap;
    if (sound) {
      const Vec below = rows * exp(mean - width), above = rows * exp(mean + width);
      mass = (below + above) * splat(0.5f);
      gap = (above - below) * splat(0.5f);
      store(x.high + at + i, above);
      low_sum += below;
    } else {
      mass = rows * exp(mean + width * splat(0.5f));
      gap = mass * mass * exp_less_1(width) / max(rows, splat(1.0f));
      low_sum += mass;
    }
    store(x.mass + at + i, mass);
    store(x.gap + at + i, gap);
    sum += mass;
  }
  *low = sum_of(low_sum);
  return sum_of(sum);
}

void gather_entries(const Heads& h, Entries e, Estimates x, float* o) {
  memset(o, 0, h.G * h.stride * sizeof(float));
  const int64_t size = 2 * h.dk + h.dv;
  for (int64_t i = 0; i < e.count; i += kBlock) {  // while they are in the nearest cache
    const int64_t n = e.count - i < kBlock ? e.count - i : kBlock;
    const auto row = [&](int64_t r) { return e.entry + e.ids[i + r] * size + 2 * h.dk; };
    gather(h.G, x.mass + i, e.stride, row, n, h.dv, o, h.stride, Ahead{nullptr, nullptr});
  }
}

void distances(const Heads& h, const float* o, Entries e, Estimates x, float* size) {
  Ahead none{nullptr, nullptr};
  for_entries(h, e, 2 * h.dk, [&](int64_t i, const uint16_t* const* row) {
    eight_rows<Product>(o, h.G, h.stride, row, h.dv, x.away + i, e.stride, none);
  });
  for (int64_t g = 0; g < h.G; ++g) {
    float* away = x.away + g * e.stride;
    const float* og = o + g * h.stride;
    Vec sum = {};
    for (int64_t i = 0; i < h.stride; i += kLanes) sum += load(og + i) * load(og + i);
    size[g] = sum_of(sum);
    for (int64_t i = 0; i < e.count; i += kLanes) {
      const Vec d = load(x.square + i) + splat(size[g]) - splat(2.0f) * load(away + i);
      store(away + i, max(d, Vec{}));
    }
  }
}

float errors(int64_t g, float over, Entries e, bool sound, Estimates x) {
  const int64_t at = g * e.stride;
  Vec sum = {};
  for (int64_t i = 0; i < e.count; i += kLanes) {
    const Vec gap = load(x.gap + at + i), away = load(x.away + at + i);
    const Vec spread = load(x.value_spread + i);
    Vec error;
    if (sound) {
      error = (gap * root(away) + load(x.high + at + i) * spread) * splat(over);
    } else {
      error = gap * (splat(over) * splat(over)) * (spread * spread + away);
    }
    store(x.error + at + i, error);
    // Padding lies past the end, where nothing is open.
    sum += select(load(x.open + i) > Vec{}, error, Vec{});
  }
  return sum_of(sum);
}

inline float of_half(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// The smallest float16 that is not below x >= 0.
inline uint16_t half_above(double x) {
  const uint16_t nearest = to_half((float)x);
  return (double)of_half(nearest) < x ? nearest + 1 : nearest;
}

void summarise(Rows rows, int64_t dk, int64_t dv, bool sound, uint16_t* entry, float* stats) {
  const double n = (double)rows.count;
  for (int64_t c = 0; c < dk; ++c) {
    const float* k = rows.k + c;
    double low = k[0], high = k[0], sum = 0;
    for (int64_t r = 0; r < rows.count; ++r) {
      const double x = k[r * dk];
      low = x < low ? x : low, high = x > high ? x : high, sum += x;
    }
    entry[c] = to_half((float)(sound ? (low + high) / 2 : sum / n));
    const double centre = of_half(entry[c]);
    double far = 0, squares = 0;
    for (int64_t r = 0; r < rows.count; ++r) {
      const double away = __builtin_fabs(k[r * dk] - centre);
      far = away > far ? away : far, squares += away * away;
    }
    entry[dk + c] = sound ? half_above(far) : to_half((float)__builtin_sqrt(squares / n));
  }
  double far = 0, squares = 0;
  for (int64_t c = 0; c < dv; ++c) {
    double sum = 0;
    for (int64_t r = 0; r < rows.count; ++r) sum += rows.v[r * dv + c];
    entry[2 * dk + c] = to_half((float)(sum / n));
  }
  for (int64_t r = 0; r < rows.count; ++r) {
    double distance = 0;
    for (int64_t c = 0; c < dv; ++c) {
      const double away = rows.v[r * dv + c] - (double)of_half(entry[2 * dk + c]);
      distance += away * away;
    }
    far = distance > far ? distance : far, squares += distance;
  }
  stats[0] = (float)n;
  stats[1] = (float)__builtin_sqrt(sound ? far : squares / n);
  if (sound) stats[1] *= 1.0000002f;  // rounded up
}

}  // namespace

extern const AttentionKernels attention_kernels = {
    clear,  attend,  attend_scattered, merge,     finish, score_entries,
    masses, highest, gather_entries,   distances, errors, summarise,
};

}  // namespace hybrid::FORM
