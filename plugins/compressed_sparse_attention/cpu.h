// Between the op (cpu.cc), the choice of what it reads (cpu_sparse.cc) and the kernels
// (cpu_kernel.cc). ref.py says what all of it means.
#pragma once

#include <stdint.h>

namespace hybrid {

constexpr int64_t kBlock = 32;     // rows of a block
constexpr int64_t kMaxGroup = 64;  // query heads that share a K/V head
constexpr int64_t kRecent = 2;     // last blocks of a slot that are always read
constexpr int64_t kUnit = 8;       // floats; where rows of the host start is counted in these

// The G query heads that share one K/V head. Every buffer of theirs has rows of `stride` floats,
// a multiple of 16 that holds dk and dv; what lies beyond is zero.
struct Heads {
  const float* q;  // [G, stride], scaled
  int64_t G, dk, dv, stride;
};

// The rows of a slot that count: k [rows, dk], v [rows, dv].
struct Rows {
  const float *k, *v;
  int64_t count;
};

// Rows that lie anywhere: row i at k + kUnit * at[i] and v + kUnit * at[i].
struct ScatteredRows {
  const float *k, *v;
  const int32_t* at;
  int64_t count;
};

// Softmax attention so far: o = sum_r e^(s_r - max) v_r, weight = sum_r e^(s_r - max).
struct Partial {
  float* o;       // [G, stride]
  float* max;     // [G]
  float* weight;  // [G]
};

// Some of the entries of a head's summaries: `count` of them, those that `ids` lists. Buffers over
// them have rows of `stride` floats, a multiple of kBlock; what lies beyond `count` is padding.
struct Entries {
  const uint16_t* entry;  // [S, 2*dk + dv] float16: centre_k, spread_k, mean_v
  const int32_t* ids;
  int64_t count, stride;
};

// What is known of the entries, [stride] each and, by query head, [G, stride].
struct Estimates {
  const float *rows, *value_spread;  // the entries' stats; 0 for padding
  float *open, *square;              // 1: not read, nor asked for; |mean_v|^2
  float *mean, *width;               // mean score; its variance (sound: half its range)
  float *mass, *gap, *high;  // estimated mass; its variance (sound: half its range, its upper end)
  float *away, *error;       // |mean_v - o|^2; expected error
};

struct AttentionKernels {
  // Nothing seen yet.
  void (*clear)(const Heads&, Partial);
  // Attends as well to `count` blocks of kBlock rows, those that `ids` lists (null: the first).
  void (*attend)(const Heads&, Rows, const int32_t* ids, int64_t count, Partial);
  void (*attend_scattered)(const Heads&, ScatteredRows, Partial);
  // Adds what another part of the rows gave.
  void (*merge)(const Heads&, Partial other, Partial);
  // o [G, dv], divided by the weight.
  void (*finish)(const Heads&, Partial, float* o);

  // Fills square, mean and width. q2 [G, stride]: q squared (sound: its absolute value).
  void (*score_entries)(const Heads&, const float* q2, Entries, bool sound, Estimates);
  // Head g's mass, gap and high, as e^(x - top); returns the sum of mass, and that of its lower
  // ends in *low.
  float (*masses)(int64_t g, float top, Entries, bool sound, Estimates, float* low);
  // The largest score that head g may find in an entry.
  float (*highest)(int64_t g, Entries, bool sound, Estimates);
  // o [G, stride] = sum of mass * mean_v.
  void (*gather_entries)(const Heads&, Entries, Estimates, float* o);
  // Fills away for o [G, stride], and size [G] = |o|^2.
  void (*distances)(const Heads&, const float* o, Entries, Estimates, float* size);
  // Head g's error: by 1 / (total |o|), total the mass of everything (sound: its lower end).
  // Returns the sum over open entries.
  float (*errors)(int64_t g, float over, Entries, bool sound, Estimates);

  // The entry and the stats of one group of rows.
  void (*summarise)(Rows, int64_t dk, int64_t dv, bool sound, uint16_t* entry, float* stats);
};

namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}

// One sequence and K/V head of a step that may read a selection.
struct SparseStep {
  Rows rows;
  int64_t capacity;                // rows of the slot
  const uint16_t* entry;           // [S, 2*dk + dv]
  const float* stats;              // [S, 2]
  int64_t S;
  float epsilon, factor;           // factor 0: the summaries are sound ones
  ScatteredRows host;              // evicted rows; none of them: what is gone stays gone
  int64_t host_size;               // floats of host.k and of host.v
  const int32_t* host_first;       // [S]
};

struct SparseAnswer {
  float* o;            // [G, dv]
  float* error_bound;  // [G]
  float* mass_read;    // [G]
  int32_t* rows_read;
  uint8_t* chosen;  // [S]: 1 chosen, 2 only after the first choice was not enough
};

void sparse_attention(const AttentionKernels&, const Heads&, const SparseStep&, SparseAnswer);

}  // namespace hybrid
