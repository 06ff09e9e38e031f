// What the ops share around ONNX Runtime's C++ interface.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <exception>
#include <iterator>
#include <vector>

namespace hybrid {

using Shape = std::vector<int64_t>;

// A kernel set exists once per instruction set; each kernel file defines both of its tables.
enum class Form { kAvx2, kAvx512 };

// The best form of this machine, or the one that HYBRID_OPS_FORM (avx2, avx512) names.
// Throws where the machine lacks it.
Form form();

template <class Kernels>
const Kernels* choose(const Kernels& avx2, const Kernels& avx512) {
  return form() == Form::kAvx512 ? &avx512 : &avx2;
}

// f(i) for i < count on ONNX Runtime's thread pool, the calling thread included.
template <class F>
void parallel_for(const Ort::KernelContext& context, int64_t count, F f) {
  if (count == 1) {
    f(0);
  } else if (count > 1) {
    const auto call = [](void* f, size_t i) { (*static_cast<F*>(f))(static_cast<int64_t>(i)); };
    context.ParallelFor(call, static_cast<size_t>(count), 0, &f);
  }
}

inline Shape shape(const Ort::ConstValue& x) { return x.GetTensorTypeAndShapeInfo().GetShape(); }

template <class F>
OrtStatusPtr guarded(F f) noexcept {
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    return Ort::GetApi().CreateStatus(ORT_FAIL, e.what());
  }
}

template <class Kernel>
struct StatusOf {
  Kernel kernel;
  OrtStatusPtr ComputeV2(OrtKernelContext* context) {
    return guarded([&] { kernel.Compute(Ort::KernelContext(context)); });
  }
};

// An op of domain hybrid, version 1. `Kernel` has a constructor (const OrtKernelInfo*) and
// Compute(const Ort::KernelContext&), both of which may throw; it names its op and the types of its
// inputs and outputs, of which those after the first kRequired... may be absent.
template <class Kernel>
struct Op : Ort::CustomOpBase<Op<Kernel>, StatusOf<Kernel>, true> {
  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    return guarded([&] { *kernel = new StatusOf<Kernel>{Kernel(info)}; });
  }
  const char* GetName() const { return Kernel::kName; }
  const char* GetExecutionProviderType() const { return "CPUExecutionProvider"; }
  size_t GetInputTypeCount() const { return std::size(Kernel::kInputs); }
  size_t GetOutputTypeCount() const { return std::size(Kernel::kOutputs); }
  ONNXTensorElementDataType GetInputType(size_t i) const { return Kernel::kInputs[i]; }
  ONNXTensorElementDataType GetOutputType(size_t i) const { return Kernel::kOutputs[i]; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t i) const {
    return i < Kernel::kRequiredInputs ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t i) const {
    return i < Kernel::kRequiredOutputs ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
};

constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr auto kFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr auto kUint8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
constexpr auto kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr auto kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;

// The ops, each from its folder's cpu.cc.
const OrtCustomOp* causal_conv_op();
const OrtCustomOp* compressed_sparse_attention_op();

}  // namespace hybrid
