// hybrid::CompressedSparseAttention on the CPU (see node.py for its inputs and outputs).
//
// One query per sequence (decode) runs here; several (prefill, replay) in ONNX Runtime's own
// GroupQueryAttention, called from here.
#include "compressed_sparse_attention/cpu.h"
#include "native/ops.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace hybrid {
namespace {

constexpr int64_t kTaskRows = 1024;  // rows of one task: fixed, so that results are too

// The partial results of many tasks in one allocation.
class Partials {
 public:
  Partials(const Heads& heads, int64_t count)
      : o_size_(heads.G * heads.stride),
        size_(o_size_ + 2 * heads.G),
        G_(heads.G),
        data_(new float[count * size_]) {}
  Partial operator[](int64_t i) const {
    float* o = data_.get() + i * size_;
    return {o, o + o_size_, o + o_size_ + G_};
  }

 private:
  int64_t o_size_, size_, G_;
  std::unique_ptr<float[]> data_;
};

// What the op reads beyond dense attention's inputs, all of it null for a dense step.
struct Compression {
  const int32_t* rows = nullptr;  // [B, Hk]
  Shape sizes{0, 0, 0, 2};        // of the stats: B, Hk, S, 2
  uint16_t* entry = nullptr;      // [B, Hk, S, 2*dk + dv] float16
  float* stats = nullptr;
  const float *epsilon = nullptr, *factor = nullptr;  // [B]
  float *error_bound = nullptr, *mass_read = nullptr;  // [B, Hq]
  int32_t* rows_read = nullptr;                        // [B, Hk]
  uint8_t* chosen = nullptr;                           // [B, Hk, S]
  ScatteredRows host{};                                // at: [B, Hk, count]
  int64_t host_size = 0;
  const int32_t* host_first = nullptr;  // [B, Hk, S]
};

class CompressedSparseAttention {
 public:
  static constexpr const char* kName = "CompressedSparseAttention";
  static constexpr ONNXTensorElementDataType kInputs[] = {
      kFloat,   kFloat, kFloat, kFloat, kFloat, kInt32, kInt32, kInt64, kInt32,
      kFloat16, kFloat, kFloat, kFloat, kFloat, kFloat, kInt32, kInt32};
  static constexpr ONNXTensorElementDataType kOutputs[] = {
      kFloat, kFloat, kFloat, kFloat16, kFloat, kFloat, kFloat, kInt32, kUint8};
  static constexpr size_t kRequiredInputs = 7, kRequiredOutputs = 3;

  explicit CompressedSparseAttention(const OrtKernelInfo* info) {
    const Ort::ConstKernelInfo node(info);
    Hq_ = node.GetAttribute<int64_t>("num_heads");
    Hk_ = node.GetAttribute<int64_t>("kv_num_heads");
    scale_ = node.GetAttribute<float>("scale");
    window_ = node.GetAttribute<int64_t>("local_window_size");
    many_ = group_query_attention(info);
  }

  void Compute(const Ort::KernelContext& context) {
    const Shape q = shape(context.GetInput(0)), k = shape(context.GetInput(3));
    const Shape v = shape(context.GetInput(4));
    auto o = context.GetOutput(0, Shape{q.at(0), q.at(1), Hq_ * v.at(3)});
    auto present_k = context.GetOutput(1, k), present_v = context.GetOutput(2, v);
    Compression c = compression(context, q[0], k[3], v[3]);
    if (q[1] != 1) {
      if (c.rows) throw std::invalid_argument("a compressed step has one query per sequence");
      const OrtValue* inputs[7];
      for (size_t i = 0; i < 7; ++i) inputs[i] = context.GetInput(i);
      OrtValue* outputs[] = {o, present_k, present_v};
      many_.Invoke(context.GetOrtKernelContext(), inputs, 7, outputs, 3);
      return;
    }
    const std::vector<int64_t> rows = visible_rows(context, c, k);
    float* keys = present_k.GetTensorMutableData<float>();
    float* values = present_v.GetTensorMutableData<float>();
    append(context, 1, 3, k, rows, keys);
    append(context, 2, 4, v, rows, values);
    const int64_t stride = (std::max(k[3], v[3]) + 15) / 16 * 16;
    const auto queries = scaled_queries(context.GetInput(0), stride);
    const Slots slots{keys, values, queries.get(), k[0] * Hk_, k[2], k[3], v[3], stride};
    dense(context, slots, rows, c, o.GetTensorMutableData<float>());
    if (c.rows) sparse(context, slots, rows, c, o.GetTensorMutableData<float>());
  }

 private:
  struct Slots {
    const float *k, *v;  // [B, Hk, C, dk], [B, Hk, C, dv]
    const float* q;      // [B, Hq, stride], scaled
    int64_t heads, C, dk, dv, stride;  // heads: B * Hk
    Rows rows(int64_t head, int64_t first, int64_t count) const {
      const int64_t at = head * C + first;
      return {k + at * dk, v + at * dv, count};
    }
  };

  Heads queries(const Slots& s, int64_t head, int64_t first, int64_t count) const {
    return {s.q + (head * Hq_ / Hk_ + first) * s.stride, count, s.dk, s.dv, s.stride};
  }

  Ort::Op group_query_attention(const OrtKernelInfo* info) const {
    const char* names[] = {"T", "T_CACHE", "M"};
    const ONNXTensorElementDataType types[] = {kFloat, kFloat, kInt32};
    const auto attribute = [](const char* name, const void* value, OrtOpAttrType type) {
      return Ort::OpAttr(name, value, 1, type);
    };
    const Ort::OpAttr attributes[] = {
        attribute("num_heads", &Hq_, ORT_OP_ATTR_INT),
        attribute("kv_num_heads", &Hk_, ORT_OP_ATTR_INT),
        attribute("scale", &scale_, ORT_OP_ATTR_FLOAT),
        attribute("local_window_size", &window_, ORT_OP_ATTR_INT),
    };
    return Ort::Op::Create(info, "GroupQueryAttention", "com.microsoft", 1, names, types, 3,
                           attributes, 4, 7, 3);
  }

  // The last nine inputs and six outputs; the answers of dense steps are filled in here.
  Compression compression(const Ort::KernelContext& context, int64_t B, int64_t dk,
                          int64_t dv) const {
    Compression c;
    const bool compressed = context.GetInputCount() > 12 && context.GetInput(12) &&
                            context.GetInput(12).GetTensorTypeAndShapeInfo().GetElementCount() > 0;
    if (context.GetInputCount() > 10) c.sizes = shape(context.GetInput(10));
    const int64_t S = c.sizes.at(2);
    if (compressed) {
      if (c.sizes != Shape{B, Hk_, S, 2} || shape(context.GetInput(8)) != Shape{B, Hk_} ||
          shape(context.GetInput(9)) != Shape{B, Hk_, S, 2 * dk + dv} ||
          shape(context.GetInput(11)) != Shape{B} || shape(context.GetInput(12)) != Shape{B} ||
          Hq_ / Hk_ > kMaxGroup || context.GetOutputCount() < 9) {
        throw std::invalid_argument("the shapes of the compressed inputs do not fit");
      }
      c.rows = context.GetInput(8).GetTensorData<int32_t>();
      c.epsilon = context.GetInput(11).GetTensorData<float>();
      c.factor = context.GetInput(12).GetTensorData<float>();
      add_host(context, Shape{B, Hk_, S}, dk, dv, c);
    }
    if (context.GetOutputCount() < 9) return c;
    c.entry = present<uint16_t>(context, 9, 3);
    c.stats = present<float>(context, 10, 4);
    c.error_bound = context.GetOutput(5, Shape{B, Hq_}).GetTensorMutableData<float>();
    c.mass_read = context.GetOutput(6, Shape{B, Hq_}).GetTensorMutableData<float>();
    c.rows_read = context.GetOutput(7, Shape{B, Hk_}).GetTensorMutableData<int32_t>();
    c.chosen = context.GetOutput(8, Shape{B, Hk_, S}).GetTensorMutableData<uint8_t>();
    const int32_t* last = context.GetInput(5).GetTensorData<int32_t>();
    for (int64_t b = 0; b < B; ++b) {
      std::fill_n(c.error_bound + b * Hq_, Hq_, 0.0f);
      std::fill_n(c.mass_read + b * Hq_, Hq_, 1.0f);
      for (int64_t h = b * Hk_; h < (b + 1) * Hk_; ++h) {
        c.rows_read[h] = c.rows ? c.rows[h] : last[b] + 1;
      }
      std::fill_n(c.chosen + b * Hk_ * S, Hk_ * S, uint8_t{0});
    }
    return c;
  }

  void add_host(const Ort::KernelContext& context, const Shape& entries, int64_t dk, int64_t dv,
                Compression& c) const {
    if (context.GetInputCount() <= 16 || shape(context.GetInput(13)).at(0) == 0) return;
    const Shape rows = shape(context.GetInput(15));
    c.host_size = shape(context.GetInput(13)).at(0);
    if (shape(context.GetInput(14)) != Shape{c.host_size} || rows.size() != 3 ||
        Shape{rows[0], rows[1]} != Shape{entries[0], entries[1]} ||
        shape(context.GetInput(16)) != entries || dk != dv) {
      throw std::invalid_argument("the shapes of the host's inputs do not fit");
    }
    c.host = {context.GetInput(13).GetTensorData<float>(),
              context.GetInput(14).GetTensorData<float>(),
              context.GetInput(15).GetTensorData<int32_t>(), rows[2]};
    c.host_first = context.GetInput(16).GetTensorData<int32_t>();
  }

  // An output of the shape of an input, a copy of it where it is not the same memory.
  template <class T>
  static T* present(const Ort::KernelContext& context, size_t input, size_t output) {
    const auto past = context.GetInput(input);
    const auto info = past.GetTensorTypeAndShapeInfo();
    auto* to = static_cast<T*>(
        context.GetOutput(output, info.GetShape()).GetTensorMutableRawData());
    const void* from = past.GetTensorRawData();
    if (to != from) std::memcpy(to, from, info.GetElementCount() * sizeof(T));
    return to;
  }

  // Rows of each head [B * Hk] that count, the step's own among them.
  std::vector<int64_t> visible_rows(const Ort::KernelContext& context, const Compression& c,
                                    const Shape& k) const {
    const int32_t* last = context.GetInput(5).GetTensorData<int32_t>();
    std::vector<int64_t> rows(k[0] * Hk_);
    for (size_t h = 0; h < rows.size(); ++h) {
      rows[h] = c.rows ? c.rows[h] : last[h / Hk_] + 1;
      if (rows[h] < 1 || rows[h] > k[2]) throw std::invalid_argument("rows outside the slot");
    }
    return rows;
  }

  // present [B, Hk, C, d] = past with the new row [B, 1 or 0, Hk*d] as the last that counts.
  void append(const Ort::KernelContext& context, size_t new_input, size_t past_input,
              const Shape& sizes, const std::vector<int64_t>& rows, float* present) const {
    const int64_t C = sizes[2], d = sizes[3];
    const float* past = context.GetInput(past_input).GetTensorData<float>();
    const auto added = context.GetInput(new_input);
    const bool has_new = shape(added).at(1) == 1;
    for (size_t h = 0; h < rows.size(); ++h) {
      float* slot = present + h * C * d;
      if (present != past) {  // not bound to the same memory
        std::memcpy(slot, past + h * C * d, (rows[h] - has_new) * d * sizeof(float));
      }
      if (has_new) {
        const float* row = added.GetTensorData<float>() + h * d;
        std::memcpy(slot + (rows[h] - 1) * d, row, d * sizeof(float));
      }
    }
  }

  static bool is_sparse(const Compression& c, int64_t b) { return c.rows && c.epsilon[b] > 0; }

  // Sequences that read every row: pieces of kTaskRows rows, put together in order.
  void dense(const Ort::KernelContext& context, const Slots& slots,
             const std::vector<int64_t>& rows, const Compression& c, float* o) const {
    struct Task {
      int64_t head, slice, first, rows;  // head of B * Hk; slice: its first query head
    };
    const int64_t G = Hq_ / Hk_;
    std::vector<Task> tasks;
    for (int64_t head = 0; head < slots.heads; ++head) {
      if (is_sparse(c, head / Hk_)) continue;
      const int64_t total = rows[head];
      const int64_t start = window_ > 0 ? std::max<int64_t>(0, total - window_) : 0;
      for (int64_t slice = 0; slice < G; slice += kMaxGroup) {
        for (int64_t row = start; row < total; row += kTaskRows) {
          tasks.push_back({head, slice, row, std::min(kTaskRows, total - row)});
        }
      }
    }
    const auto heads = [&](const Task& t) {
      return queries(slots, t.head, t.slice, std::min(kMaxGroup, G - t.slice));
    };
    const Partials partials(queries(slots, 0, 0, std::min(G, kMaxGroup)), tasks.size());
    parallel_for(context, tasks.size(), [&](int64_t i) {
      const Task& t = tasks[i];
      kernels_->clear(heads(t), partials[i]);
      const Rows part = slots.rows(t.head, t.first, t.rows);
      kernels_->attend(heads(t), part, nullptr, (t.rows + kBlock - 1) / kBlock, partials[i]);
    });
    for (size_t i = 0; i < tasks.size();) {
      const Task& t = tasks[i];
      size_t j = i + 1;
      for (; j < tasks.size() && tasks[j].head == t.head && tasks[j].slice == t.slice; ++j) {
        kernels_->merge(heads(t), partials[j], partials[i]);
      }
      kernels_->finish(heads(t), partials[i], o + (t.head * G + t.slice) * slots.dv);
      i = j;
    }
  }

  // Sequences with an epsilon: a K/V head each.
  void sparse(const Ort::KernelContext& context, const Slots& slots,
              const std::vector<int64_t>& rows, const Compression& c, float* o) const {
    const int64_t G = Hq_ / Hk_, S = c.sizes[2], size = 2 * slots.dk + slots.dv;
    const bool has_new = shape(context.GetInput(1)).at(1) == 1;
    parallel_for(context, slots.heads, [&](int64_t head) {
      const int64_t b = head / Hk_;
      if (!is_sparse(c, b)) return;
      uint16_t* entry = c.entry + head * S * size;
      float* stats = c.stats + head * S * 2;
      const int64_t left = (rows[head] - 1) / kBlock - kRecent;
      if (has_new && rows[head] % kBlock == 1 && left >= 0 && left < S) {
        const Rows block = slots.rows(head, left * kBlock, kBlock);
        kernels_->summarise(block, slots.dk, slots.dv, c.factor[b] == 0, entry + left * size,
                            stats + left * 2);
      }
      ScatteredRows host = c.host;
      if (host.count) host.at += head * host.count;
      const SparseStep step{slots.rows(head, 0, rows[head]), slots.C, entry, stats, S,
                            c.epsilon[b], c.factor[b], host, c.host_size,
                            c.host_first ? c.host_first + head * S : nullptr};
      sparse_attention(*kernels_, queries(slots, head, 0, G), step,
                       {o + head * G * slots.dv, c.error_bound + head * G,
                        c.mass_read + head * G, c.rows_read + head, c.chosen + head * S});
    });
  }

  std::unique_ptr<float[]> scaled_queries(const Ort::ConstValue& q, int64_t stride) const {
    const float* from = q.GetTensorData<float>();
    const int64_t rows = shape(q)[0] * Hq_, dk = shape(q)[2] / Hq_;
    std::unique_ptr<float[]> out(new float[rows * stride]());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < dk; ++i) out[r * stride + i] = from[r * dk + i] * scale_;
    }
    return out;
  }

  const AttentionKernels* kernels_ = choose(avx2::attention_kernels, avx512::attention_kernels);
  int64_t Hq_, Hk_, window_;
  float scale_;
  Ort::Op many_{nullptr};
};

}  // namespace

// The summaries of a slot's first `blocks` blocks, for the engine, which calls it from Python:
// k [rows, dk], v [rows, dv] -> entry [blocks, 2*dk + dv] float16, stats [blocks, 2]. Returns 0, or
// 1 where this machine cannot run it.
extern "C" __attribute__((visibility("default"))) int hybrid_summarise(
    const float* k, const float* v, int64_t rows, int64_t dk, int64_t dv, int64_t blocks,
    int sound, uint16_t* entry, float* stats) noexcept {
  try {
    const AttentionKernels* kernels = choose(avx2::attention_kernels, avx512::attention_kernels);
    for (int64_t j = 0; j < blocks; ++j) {
      const int64_t first = j * kBlock, count = std::min(kBlock, rows - first);
      kernels->summarise({k + first * dk, v + first * dv, count}, dk, dv, sound != 0,
                         entry + j * (2 * dk + dv), stats + 2 * j);
    }
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

const OrtCustomOp* compressed_sparse_attention_op() {
  static const Op<CompressedSparseAttention> op;
  return &op;
}

}  // namespace hybrid
