// The CUDA driver, opened when the first kernel is launched: the library loads without one.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

namespace hybrid {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Driver {
    decltype(&::cuGetErrorString) getErrorString;
    decltype(&::cuCtxGetDevice) ctxGetDevice;
    decltype(&::cuDeviceGetAttribute) deviceGetAttribute;
    decltype(&::cuModuleLoadData) moduleLoadData;
    decltype(&::cuModuleGetFunction) moduleGetFunction;
    decltype(&::cuFuncSetAttribute) funcSetAttribute;
    decltype(&::cuLaunchKernel) launchKernel;
    decltype(&::cuStreamWaitEvent) streamWaitEvent;
    decltype(&::cuEventRecord) eventRecord;

    // Throws Error where there is no driver.
    static Driver const& get();

    // Throws Error naming `what` unless the call succeeded.
    void check(CUresult result, std::string const& what) const;
};

}  // namespace hybrid
