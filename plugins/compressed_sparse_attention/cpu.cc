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

class CompressedSparseAttention {
 public:
  static constexpr const char* kName = "CompressedSparseAttention";
  static constexpr ONNXTensorElementDataType kInputs[] = {kFloat, kFloat, kFloat, kFloat, kFloat,
                                                          kInt32, kInt32, kInt64};
  static constexpr ONNXTensorElementDataType kOutputs[] = {kFloat, kFloat, kFloat};
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
    if (q[1] != 1) {
      const OrtValue* inputs[7];
      for (size_t i = 0; i < 7; ++i) inputs[i] = context.GetInput(i);
      OrtValue* outputs[] = {o, present_k, present_v};
      many_.Invoke(context.GetOrtKernelContext(), inputs, 7, outputs, 3);
      return;
    }
    append(context, 1, 3, k, present_k.GetTensorMutableData<float>());
    append(context, 2, 4, v, present_v.GetTensorMutableData<float>());
    decode(context, k, v, present_k.GetTensorData<float>(), present_v.GetTensorData<float>(),
           o.GetTensorMutableData<float>());
  }

 private:
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

  // present [B, Hk, C, d] = past with the new row [B, 1 or 0, Hk*d] as the last visible one.
  void append(const Ort::KernelContext& context, size_t new_input, size_t past_input,
              const Shape& sizes, float* present) const {
    const int64_t B = sizes[0], Hk = sizes[1], C = sizes[2], d = sizes[3];
    const float* past = context.GetInput(past_input).GetTensorData<float>();
    const auto added = context.GetInput(new_input);
    const bool has_new = shape(added).at(1) == 1;
    const int32_t* last = context.GetInput(5).GetTensorData<int32_t>();
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < Hk; ++h) {
        float* slot = present + (b * Hk + h) * C * d;
        if (present != past) {  // not bound to the same memory
          const int64_t held = last[b] + (has_new ? 0 : 1);
          std::memcpy(slot, past + (b * Hk + h) * C * d, held * d * sizeof(float));
        }
        if (has_new) {
          const float* row = added.GetTensorData<float>() + (b * Hk + h) * d;
          std::memcpy(slot + last[b] * d, row, d * sizeof(float));
        }
      }
    }
  }

  void decode(const Ort::KernelContext& context, const Shape& k_sizes, const Shape& v_sizes,
              const float* k, const float* v, float* o) const {
    const int64_t B = k_sizes[0], C = k_sizes[2], dk = k_sizes[3], dv = v_sizes[3];
    const int64_t G = Hq_ / Hk_, stride = (std::max(dk, dv) + 15) / 16 * 16;
    const int32_t* last = context.GetInput(5).GetTensorData<int32_t>();
    const auto q = scaled_queries(context.GetInput(0).GetTensorData<float>(), B * Hq_, dk, stride);

    struct Task {
      int64_t head, slice, first, rows;  // head of B * Hk; slice: its first query head
    };
    std::vector<Task> tasks;
    for (int64_t head = 0; head < B * Hk_; ++head) {
      const int64_t total = last[head / Hk_] + 1;
      if (total < 1 || total > C) throw std::invalid_argument("seqlens: outside the slot");
      const int64_t first = window_ > 0 ? std::max<int64_t>(0, total - window_) : 0;
      for (int64_t slice = 0; slice < G; slice += kMaxGroup) {
        for (int64_t row = first; row < total; row += kTaskRows) {
          tasks.push_back({head, slice, row, std::min(kTaskRows, total - row)});
        }
      }
    }
    const auto heads = [&](const Task& t) {
      const int64_t count = std::min(kMaxGroup, G - t.slice);
      return Heads{q.get() + (t.head * G + t.slice) * stride, count, dk, dv, stride};
    };
    const Partials partials({nullptr, std::min(G, kMaxGroup), dk, dv, stride}, tasks.size());
    parallel_for(context, tasks.size(), [&](int64_t i) {
      const Task& t = tasks[i];
      const int64_t row = t.head * C + t.first;
      kernels_->clear(heads(t), partials[i]);
      kernels_->attend(heads(t), k + row * dk, v + row * dv, t.rows, partials[i]);
    });
    for (size_t i = 0; i < tasks.size();) {
      const Task& t = tasks[i];
      size_t j = i + 1;
      for (; j < tasks.size() && tasks[j].head == t.head && tasks[j].slice == t.slice; ++j) {
        kernels_->merge(heads(t), partials[j], partials[i]);
      }
      kernels_->finish(heads(t), partials[i], o + (t.head * G + t.slice) * dv);
      i = j;
    }
  }

  std::unique_ptr<float[]> scaled_queries(const float* q, int64_t rows, int64_t dk,
                                          int64_t stride) const {
    std::unique_ptr<float[]> out(new float[rows * stride]());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < dk; ++i) out[r * stride + i] = q[r * dk + i] * scale_;
    }
    return out;
  }

  const AttentionKernels* kernels_ = choose(avx2::attention_kernels, avx512::attention_kernels);
  int64_t Hq_, Hk_, window_;
  float scale_;
  Ort::Op many_{nullptr};
};

}  // namespace

const OrtCustomOp* compressed_sparse_attention_op() {
  static const Op<CompressedSparseAttention> op;
  return &op;
}

}  // namespace hybrid
