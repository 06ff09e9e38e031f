#include "kernels.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>

namespace hybrid {
namespace {

#include "kernels.inc"  // Kernel const kKernels[]

constexpr int kSharedWithoutAsking = 48 * 1024;

bool matches(Kernel const& kernel, Wanted const& wanted) {
    if (kernel.name != std::string(wanted.name)) {
        return false;
    }
    for (int i = 0; i < kernel.numArguments; ++i) {
        Argument const& argument = kernel.arguments[i];
        std::string const name = argument.name;
        std::string const& output = wanted.output.empty() ? wanted.type : wanted.output;
        if (((name == "q" || name == "k") && argument.type != "*" + wanted.type) ||
            (name == "o" && argument.type != "*" + output)) {
            return false;
        }
    }
    return std::all_of(wanted.constants.begin(), wanted.constants.end(), [&](Constant const& c) {
        Constant const* const has = kernel.find(c.name);
        return !has || has->value == c.value;
    });
}

std::string text(Wanted const& wanted) {
    std::ostringstream out;
    out << "no kernel " << wanted.name << " in " << wanted.type << " with";
    for (Constant const& c : wanted.constants) {
        out << ' ' << c.name << '=' << c.value;
    }
    return out.str();
}

// What could have been asked for instead: the values of the wanted constants, once each.
std::string alternatives(Wanted const& wanted) {
    std::vector<std::string> rows;
    for (Kernel const& kernel : kKernels) {
        if (kernel.name != std::string(wanted.name)) {
            continue;
        }
        std::ostringstream row;
        for (Constant const& c : wanted.constants) {
            Constant const* const has = kernel.find(c.name);
            if (has) {
                row << c.name << '=' << has->value << ' ';
            }
        }
        row << kernel.arguments[0].type + 1;
        if (std::find(rows.begin(), rows.end(), row.str()) == rows.end()) {
            rows.push_back(row.str());
        }
    }
    std::string joined = rows.empty() ? "none at all" : "";
    for (std::string const& row : rows) {
        joined += joined.empty() ? row : "; " + row;
    }
    return "; compiled: " + joined + ". Add the shape to the kernel's list and build again";
}

struct Device {
    int ordinal;
    int arch;
    int sharedBytes;
};

Device currentDevice() {
    Driver const& driver = Driver::get();
    CUdevice device;
    driver.check(driver.ctxGetDevice(&device), "no current CUDA context");
    int major, minor, shared;
    auto read = [&](int& value, CUdevice_attribute which) {
        driver.check(driver.deviceGetAttribute(&value, which, device), "device attribute");
    };
    read(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    read(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    read(shared, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    return {device, 10 * major + minor, shared};
}

// A cubin runs on devices of its major version whose minor is not lower.
Kernel const& findFor(Wanted const& wanted, Device const& device) {
    Kernel const* best = nullptr;
    for (Kernel const& kernel : kKernels) {
        bool const runs = kernel.arch / 10 == device.arch / 10 && kernel.arch <= device.arch;
        if (runs && matches(kernel, wanted) && (!best || kernel.arch > best->arch)) {
            best = &kernel;
        }
    }
    if (!best) {
        find(wanted);  // says so when it is the shape that is missing
        throw Error(text(wanted) + " for compute capability " + std::to_string(device.arch / 10) +
            "." + std::to_string(device.arch % 10) + ": build the library with --archs " +
            std::to_string(device.arch));
    }
    if (best->sharedBytes > device.sharedBytes) {
        throw Error(std::string(best->symbol) + " needs " + std::to_string(best->sharedBytes) +
            " bytes of shared memory, this device has " + std::to_string(device.sharedBytes));
    }
    return *best;
}

CUfunction functionOf(Kernel const& kernel, Device const& device) {
    static std::mutex mutex;
    static std::map<std::pair<int, Kernel const*>, CUfunction> loaded;
    std::lock_guard<std::mutex> const lock(mutex);
    CUfunction& function = loaded[{device.ordinal, &kernel}];
    if (!function) {
        Driver const& driver = Driver::get();
        CUmodule module;
        driver.check(driver.moduleLoadData(&module, kernel.image), kernel.symbol);
        CUfunction found;
        driver.check(driver.moduleGetFunction(&found, module, kernel.symbol), kernel.symbol);
        if (kernel.sharedBytes > kSharedWithoutAsking) {
            driver.check(driver.funcSetAttribute(found,
                             CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.sharedBytes),
                kernel.symbol);
        }
        function = found;
    }
    return function;
}

}  // namespace

Constant const* Kernel::find(std::string const& which) const {
    auto const* const end = constants + numConstants;
    auto const* const found =
        std::find_if(constants, end, [&](Constant const& c) { return c.name == which; });
    return found == end ? nullptr : found;
}

int Kernel::constant(std::string const& which) const {
    Constant const* const found = find(which);
    if (!found) {
        throw Error(std::string(name) + " has no constant " + which);
    }
    return found->value;
}

Kernel const* search(Wanted const& wanted) {
    auto const found = std::find_if(std::begin(kKernels), std::end(kKernels),
        [&](Kernel const& kernel) { return matches(kernel, wanted); });
    return found == std::end(kKernels) ? nullptr : found;
}

Kernel const& find(Wanted const& wanted) {
    Kernel const* const found = search(wanted);
    if (!found) {
        throw Error(text(wanted) + alternatives(wanted));
    }
    return *found;
}

Launch::Launch(Wanted const& wanted) {
    Device const device = currentDevice();
    mKernel = &findFor(wanted, device);
    mFunction = functionOf(*mKernel, device);
}

Launch& Launch::tensor(char const* name, void const* pointer) {
    Value value{};
    value.pointer = pointer;
    mValues.emplace_back(name, value);
    return *this;
}

Launch& Launch::number(char const* name, std::int64_t integer) {
    Value value{};
    value.integer = integer;  // an i32 is its lower half
    mValues.emplace_back(name, value);
    return *this;
}

Launch& Launch::number(char const* name, double real) {
    Value value{};
    value.real = static_cast<float>(real);
    mValues.emplace_back(name, value);
    return *this;
}

void Launch::run(int gridX, int gridY, int gridZ, CUstream stream) {
    // The last two arguments are Triton-lang's own and unused.
    tensor("scratch", nullptr).tensor("profile", nullptr);
    std::vector<void*> arguments;
    for (int i = 0; i < mKernel->numArguments; ++i) {
        char const* const name = mKernel->arguments[i].name;
        auto const given = std::find_if(mValues.begin(), mValues.end(),
            [&](auto const& value) { return value.first == name; });
        if (given == mValues.end()) {
            throw Error(std::string(mKernel->symbol) + ": argument " + name + " is not given");
        }
        arguments.push_back(&given->second);
    }
    Driver const& driver = Driver::get();
    driver.check(driver.launchKernel(mFunction, gridX, gridY, gridZ, 32 * mKernel->warps, 1, 1,
                     mKernel->sharedBytes, stream, arguments.data(), nullptr),
        mKernel->symbol);
}

}  // namespace hybrid
