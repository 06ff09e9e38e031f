// hybrid::CausalConv on the CPU (see node.py for its inputs and outputs).
#include "causal_conv/cpu.h"
#include "native/ops.h"

#include <algorithm>
#include <cstring>

namespace hybrid {
namespace {

constexpr int64_t kMaxWidth = 8;
constexpr int64_t kTaskValues = 1 << 16;  // of y: long enough to be worth handing out

class CausalConv {
 public:
  static constexpr const char* kName = "CausalConv";
  static constexpr ONNXTensorElementDataType kInputs[] = {kFloat, kFloat, kFloat, kInt64, kFloat};
  static constexpr ONNXTensorElementDataType kOutputs[] = {kFloat, kFloat};
  static constexpr size_t kRequiredInputs = 4, kRequiredOutputs = 2;

  explicit CausalConv(const OrtKernelInfo* info) {
    silu_ = Ort::ConstKernelInfo(info).GetAttribute<int64_t>("silu") != 0;
  }

  void Compute(const Ort::KernelContext& context) {
    const auto x = context.GetInput(0), past = context.GetInput(1), weight = context.GetInput(2);
    const auto valid_len = context.GetInput(3), bias = context.GetInput(4);
    const Shape sizes = shape(x), state = shape(past);
    const int64_t B = sizes.at(0), T = sizes.at(1), C = sizes.at(2), width = state.at(1) + 1;
    if (shape(weight) != Shape{width, C} || state != Shape{B, width - 1, C} || width > kMaxWidth) {
      throw std::invalid_argument("CausalConv: shapes of x, past and weight do not fit");
    }
    const float* x0 = x.GetTensorData<float>();
    const float* past0 = past.GetTensorData<float>();
    float* y0 = context.GetOutput(0, sizes).GetTensorMutableData<float>();
    float* present = context.GetOutput(1, state).GetTensorMutableData<float>();

    const int64_t rows = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, C));
    const int64_t tasks = (T + rows - 1) / rows, step = T * C, kept = (width - 1) * C;
    parallel_for(context, B * tasks, [&](int64_t task) {
      const int64_t b = task / tasks, t = task % tasks * rows;
      const Conv conv{x0 + b * step,
                      past0 + b * kept,
                      weight.GetTensorData<float>(),
                      bias ? bias.GetTensorData<float>() : nullptr,
                      y0 + b * step,
                      C,
                      width,
                      silu_};
      kernels_->rows(conv, t, std::min(t + rows, T));
    });
    const int64_t* valid = valid_len.GetTensorData<int64_t>();
    for (int64_t b = 0; b < B; ++b) {
      const int64_t last = std::clamp<int64_t>(valid[b], 0, T);
      keep_state(x0 + b * step, past0 + b * kept, present + b * kept, last, width, C);
    }
  }

 private:
  // The inputs before row `last`; present may be past itself, so rows move upwards in order.
  static void keep_state(const float* x, const float* past, float* present, int64_t last,
                         int64_t width, int64_t C) {
    for (int64_t w = 0; w < width - 1; ++w) {
      const int64_t row = last + w - (width - 1);
      const float* source = row < 0 ? past + (row + width - 1) * C : x + row * C;
      std::memmove(present + w * C, source, C * sizeof(float));
    }
  }

  const ConvKernels* kernels_ = choose(avx2::conv_kernels, avx512::conv_kernels);
  bool silu_;
};

}  // namespace

const OrtCustomOp* causal_conv_op() {
  static const Op<CausalConv> op;
  return &op;
}

}  // namespace hybrid
