// Which blocks a decode step reads, and what it answers: `sparse_decode_attention` of ref.py, whose
// numbered steps are named below.
#include "compressed_sparse_attention/cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

namespace hybrid {
namespace {

constexpr int kAttempts = 3;
constexpr uint8_t kFirst = 1, kLate = 2;  // how `chosen` is marked

// One query group's search. Its buffers are taken from one that the thread keeps.
class Search {
 public:
  Search(const AttentionKernels& kernels, const Heads& heads, const SparseStep& step,
         SparseAnswer answer)
      : kernels_(kernels), h_(heads), step_(step), answer_(answer), sound_(step.factor == 0) {
    limit_ = sound_ ? step.epsilon / (1 + step.epsilon)
                    : std::pow(step.epsilon / step.factor, 2.0f);
    blocks_ = blocks_of(step.capacity);
  }

  void run() {
    const std::vector<int32_t> always = sort_entries();
    allocate();
    kernels_.clear(h_, read_part_);
    read(always, kFirst);  // 1.
    if (!ids_.empty()) kernels_.score_entries(h_, q2_, entries(), sound_, x_);
    evaluate();
    for (int attempt = 0; attempt <= kAttempts; ++attempt) {  // 4.
      const uint8_t mark = attempt ? kLate : kFirst;
      const std::vector<int32_t> wanted = choose(attempt == kAttempts, mark);
      if (!broken_) break;
      read(wanted, mark);  // 3.
      evaluate();
    }
    report();
  }

 private:
  static int64_t blocks_of(int64_t rows) { return (rows + kBlock - 1) / kBlock; }

  // The blocks that are always read; ids_ gets every other entry that says something.
  std::vector<int32_t> sort_entries() {
    const int64_t used = blocks_of(step_.rows.count);
    const int64_t recent = std::max<int64_t>(used - kRecent, 0);
    std::vector<int32_t> always;
    ids_.reserve(step_.S);
    for (int64_t j = 0; j < step_.S; ++j) {
      const bool in_slot = j < blocks_;
      if (in_slot && j >= recent) continue;
      if (!(step_.stats[2 * j] > 0)) continue;
      (in_slot && std::isinf(step_.stats[2 * j + 1]) ? always : ids_).push_back(j);
    }
    for (int64_t j = recent; j < used; ++j) always.push_back(j);
    return always;
  }

  void allocate() {
    const int64_t n = (ids_.size() + kBlock - 1) / kBlock * kBlock, G = h_.G;
    stride_ = n;
    thread_local std::vector<float> memory;
    const size_t size = n * (4 + 7 * G) + G * (4 * h_.stride + 7);
    if (memory.size() < size) memory.resize(size);
    float* at = memory.data();
    const auto take = [&](int64_t count) { return std::exchange(at, at + count); };
    float *rows = take(n), *value_spread = take(n), *open = take(n);
    for (int64_t i = 0; i < n; ++i) {
      const bool real = i < static_cast<int64_t>(ids_.size());
      rows[i] = real ? step_.stats[2 * ids_[i]] : 0;
      value_spread[i] = real ? step_.stats[2 * ids_[i] + 1] : 0;
      open[i] = real;
    }
    x_ = {rows,        value_spread, open,        take(n),     take(n * G), take(n * G),
          take(n * G), take(n * G),  take(n * G), take(n * G), take(n * G)};
    q2_ = take(G * h_.stride);
    for (int64_t i = 0; i < G * h_.stride; ++i) {
      q2_[i] = sound_ ? std::fabs(h_.q[i]) : h_.q[i] * h_.q[i];
    }
    read_part_ = {take(G * h_.stride), take(G), take(G)};
    estimate_ = take(G * h_.stride);
    std::fill_n(estimate_, G * h_.stride, 0.0f);  // where there is nothing to estimate
    o_ = take(G * h_.stride);
    top_ = take(G), total_ = take(G), low_ = take(G), size_ = take(G), open_error_ = take(G);
    std::fill_n(open_error_, G, 0.0f);
    state_.assign(ids_.size(), kUnread);
    std::memset(answer_.chosen, 0, step_.S);
  }

  Entries entries() const {
    return {step_.entry, ids_.data(), static_cast<int64_t>(ids_.size()), stride_};
  }

  void read(const std::vector<int32_t>& blocks, uint8_t mark) {
    kernels_.attend(h_, step_.rows, blocks.data(), blocks.size(), read_part_);
    for (const int32_t j : blocks) {
      answer_.chosen[j] = mark;
      rows_read_ += std::min<int64_t>(kBlock, step_.rows.count - j * kBlock);
    }
  }

  // o, and e_j of what is not read, from what is known now.
  void evaluate() {
    for (int64_t g = 0; g < h_.G; ++g) {
      const float top = ids_.empty() ? read_part_.max[g]
                                     : std::max(read_part_.max[g],
                                                kernels_.highest(g, entries(), sound_, x_));
      top_[g] = std::exp(read_part_.max[g] - top);
      total_[g] = low_[g] = read_part_.weight[g] * top_[g];
      if (ids_.empty()) continue;
      float low;
      total_[g] += kernels_.masses(g, top, entries(), sound_, x_, &low);
      low_[g] += low;
    }
    if (!ids_.empty()) kernels_.gather_entries(h_, entries(), x_, estimate_);
    for (int64_t g = 0; g < h_.G; ++g) {
      for (int64_t i = g * h_.stride; i < (g + 1) * h_.stride; ++i) {
        o_[i] = (read_part_.o[i] * top_[g] + estimate_[i]) / total_[g];
      }
    }
    if (ids_.empty()) return;
    kernels_.distances(h_, o_, entries(), x_, size_);
    for (int64_t g = 0; g < h_.G; ++g) {
      const float mass = sound_ ? low_[g] : total_[g];
      const float size = std::max(std::sqrt(size_[g]) * mass, 1e-30f);
      open_error_[g] = kernels_.errors(g, 1 / size, entries(), sound_, x_);
    }
  }

  // 2. for every head that breaks its limit; `all`: all that is left. Returns the blocks to read.
  std::vector<int32_t> choose(bool all, uint8_t mark) {
    broken_ = false;
    for (int64_t g = 0; g < h_.G; ++g) {
      if (open_error_[g] <= limit_) continue;
      broken_ = true;
      const float* e = x_.error + g * stride_;
      const float least = all ? 0.0f : threshold(e);
      for (size_t i = 0; i < ids_.size(); ++i) {
        if (x_.open[i] && (all || !(e[i] < least))) state_[i] = kWanted;
      }
    }
    if (!broken_) return {};
    std::vector<int32_t> blocks;
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (state_[i] != kWanted) continue;
      const int32_t j = ids_[i];
      x_.open[i] = 0;
      answer_.chosen[j] = mark;
      if (j < blocks_) {
        blocks.push_back(j);
      } else if (!take_from_host(j)) {
        state_[i] = kMissing;
        continue;
      }
      state_[i] = kRead;
      for (int64_t g = 0; g < h_.G; ++g) {
        x_.mean[g * stride_ + i] = -1e30f;
        x_.width[g * stride_ + i] = 0;
      }
    }
    read_from_host();
    return blocks;
  }

  // Notes the rows of an evicted group; false where the host does not have it.
  bool take_from_host(int32_t j) {
    const ScatteredRows& all = step_.host;
    const int64_t first = all.count ? step_.host_first[j] : -1;
    const int64_t count = static_cast<int64_t>(step_.stats[2 * j]);
    if (first < 0 || first + count > all.count) return false;
    const int32_t *from = all.at + first, *to = from + count;
    const int64_t last = (step_.host_size - h_.dk) / kUnit;
    if (std::any_of(from, to, [&](int32_t at) { return at < 0 || at > last; })) return false;
    from_host_.insert(from_host_.end(), from, to);
    return true;
  }

  void read_from_host() {
    const int64_t count = from_host_.size();
    const ScatteredRows rows{step_.host.k, step_.host.v, from_host_.data(), count};
    kernels_.attend_scattered(h_, rows, read_part_);
    rows_read_ += count;
    from_host_.clear();
  }

  // The largest t for which the open entries with e < t are within the limit together. A histogram
  // over the floats' exponents finds the few entries that have to be sorted.
  float threshold(const float* e) {
    constexpr int kShift = 22, kBins = 512;  // two bins per power of two
    double bin[kBins] = {};
    const auto bin_of = [](float x) {
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof(bits));
      return (bits & 0x7fffffff) >> kShift;
    };
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (x_.open[i]) bin[bin_of(e[i])] += e[i];
    }
    double sum = 0;
    uint32_t edge = 0;
    while (edge < kBins && sum + bin[edge] <= limit_) sum += bin[edge++];
    sorted_.clear();
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (x_.open[i] && bin_of(e[i]) == edge) sorted_.push_back(e[i]);
    }
    std::sort(sorted_.begin(), sorted_.end());
    for (const float x : sorted_) {
      sum += x;
      if (!(sum <= limit_)) return x;
    }
    return INFINITY;
  }

  void report() {
    for (int64_t g = 0; g < h_.G; ++g) {
      std::memcpy(answer_.o + g * h_.dv, o_ + g * h_.stride, h_.dv * sizeof(float));
      answer_.mass_read[g] = read_part_.weight[g] * top_[g] / total_[g];
      double left = 0;
      for (size_t i = 0; i < ids_.size(); ++i) {
        if (state_[i] != kRead) left += x_.error[g * stride_ + i];
      }
      const double sound = left < 1 ? left / (1 - left) : INFINITY;
      answer_.error_bound[g] = sound_ ? sound : step_.factor * std::sqrt(left);
    }
    *answer_.rows_read = rows_read_;
  }

  // kMissing: chosen, but not to be had: still estimated.
  enum State : uint8_t { kUnread, kWanted, kRead, kMissing };

  const AttentionKernels& kernels_;
  const Heads& h_;
  const SparseStep& step_;
  SparseAnswer answer_;
  bool sound_, broken_ = false;
  float limit_;
  int64_t blocks_, stride_ = 0, rows_read_ = 0;
  std::vector<int32_t> ids_;
  std::vector<State> state_;
  std::vector<float> sorted_;
  std::vector<int32_t> from_host_;
  Estimates x_{};
  Partial read_part_{};
  float *q2_ = nullptr, *estimate_ = nullptr, *o_ = nullptr;
  float *size_ = nullptr, *open_error_ = nullptr;  // by head: |o|^2; error of open entries
  float *top_ = nullptr, *total_ = nullptr, *low_ = nullptr;  // top: e^(max read - max)
};

}  // namespace

void sparse_attention(const AttentionKernels& kernels, const Heads& heads, const SparseStep& step,
                      SparseAnswer answer) {
  Search(kernels, heads, step, answer).run();
}

}  // namespace hybrid
