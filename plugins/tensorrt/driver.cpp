#include "driver.h"

#include <dlfcn.h>

namespace hybrid {
namespace {

template <typename F>
void load(void* library, char const* symbol, F& function) {
    function = reinterpret_cast<F>(dlsym(library, symbol));
    if (!function) {
        throw Error(std::string("the CUDA driver has no ") + symbol + ": update it");
    }
}

// cuda.h renames some functions to their newest version: ask for the name that it means.
#define HYBRID_NAME_(x) #x
#define HYBRID_NAME(x) HYBRID_NAME_(x)

Driver open() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        throw Error(std::string("there is no CUDA driver on this machine: ") + dlerror());
    }
    Driver driver{};
    load(library, HYBRID_NAME(cuGetErrorString), driver.getErrorString);
    load(library, HYBRID_NAME(cuCtxGetDevice), driver.ctxGetDevice);
    load(library, HYBRID_NAME(cuDeviceGetAttribute), driver.deviceGetAttribute);
    load(library, HYBRID_NAME(cuModuleLoadData), driver.moduleLoadData);
    load(library, HYBRID_NAME(cuModuleGetFunction), driver.moduleGetFunction);
    load(library, HYBRID_NAME(cuFuncSetAttribute), driver.funcSetAttribute);
    load(library, HYBRID_NAME(cuLaunchKernel), driver.launchKernel);
    load(library, HYBRID_NAME(cuStreamWaitEvent), driver.streamWaitEvent);
    load(library, HYBRID_NAME(cuEventRecord), driver.eventRecord);
    return driver;
}

}  // namespace

Driver const& Driver::get() {
    static Driver const driver = open();
    return driver;
}

void Driver::check(CUresult result, std::string const& what) const {
    if (result == CUDA_SUCCESS) {
        return;
    }
    char const* text = "unknown error";
    getErrorString(result, &text);
    throw Error(what + ": " + text);
}

}  // namespace hybrid
