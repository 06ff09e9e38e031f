// A CUDA driver that does nothing but say what it was asked for: built as libcuda.so.1 for tests of
// the plugin library's launches. $FAKE_ARCH: the compute capability of its device (90 = 9.0).
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {
// Functions handed out are the names they were asked for by.
char const* nameOf(CUfunction function) { return reinterpret_cast<char const*>(function); }
}  // namespace

extern "C" {

CUresult cuGetErrorString(CUresult, char const** text) {
    *text = "fake error";
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
    char const* const set = std::getenv("FAKE_ARCH");
    int const arch = set ? std::atoi(set) : 90;
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = arch / 10; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = arch % 10; break;
        default: *value = 227 * 1024;
    }
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, void const* image) {
    bool const elf = std::string(static_cast<char const*>(image), 4) == "\x7f" "ELF";
    *module = nullptr;
    return elf ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, char const* name) {
    *function = reinterpret_cast<CUfunction>(const_cast<char*>(name));
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute, int value) {
    std::printf("driver: %s may use %d bytes of shared memory\n", nameOf(function), value);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads,
    unsigned, unsigned, unsigned, CUstream, void** arguments, void**) {
    std::printf("driver: %s grid %u %u %u threads %u:", nameOf(function), x, y, z, threads);
    for (int i = 0; i < 7; ++i) {  // no kernel of ours has fewer
        std::printf(" %llx", *static_cast<unsigned long long*>(arguments[i]) & 0xffffff);
    }
    std::printf("\n");
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream, CUevent event, unsigned) {
    std::printf("driver: wait %p\n", static_cast<void*>(event));
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream) {
    std::printf("driver: record %p\n", static_cast<void*>(event));
    return CUDA_SUCCESS;
}

}  // extern "C"
