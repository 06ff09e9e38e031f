// The library's entry point: the ops of domain hybrid that have a CPU kernel. ONNX Runtime takes a
// registered op before a model's function of the same name; the others run as their functions.
#include "native/ops.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace hybrid {

Form form() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f");
#ifdef WIDE_ANYWHERE
  const bool wide = avx2;
#else
  const bool wide = avx512;
#endif
  const char* named = std::getenv("HYBRID_OPS_FORM");
  const std::string wanted = named ? named : avx512 ? "avx512" : "avx2";
  if (wanted == "avx512" && wide) return Form::kAvx512;
  if (wanted == "avx2" && avx2) return Form::kAvx2;
  throw std::runtime_error("this machine has no " + wanted);
}

}  // namespace hybrid

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) return nullptr;  // an older runtime: the functions run
  Ort::InitApi(api);
  try {
    hybrid::form();
    static const Ort::CustomOpDomain& domain = *[] {
      auto* made = new Ort::CustomOpDomain("hybrid");
      made->Add(hybrid::causal_conv_op());
      made->Add(hybrid::compressed_sparse_attention_op());
      return made;
    }();
    Ort::UnownedSessionOptions(options).Add(domain);
    return nullptr;
  } catch (const std::exception& e) {
    return api->CreateStatus(ORT_FAIL, e.what());
  }
}
