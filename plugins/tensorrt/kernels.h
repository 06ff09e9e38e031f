// The embedded cubins: finding the one for a shape and a device, launching it by argument name.
#pragma once

#include "driver.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hybrid {

struct Argument {
    char const* name;
    char const* type;  // as Triton-lang writes it: "*bf16", "i32", "fp32"
};

struct Constant {
    char const* name;
    int value;
};

// One cubin; the table of all is generated (build.py).
struct Kernel {
    char const* name;
    int arch;  // 90: compute capability 9.0
    char const* symbol;
    int warps;
    int sharedBytes;
    Argument const* arguments;
    int numArguments;
    Constant const* constants;
    int numConstants;
    unsigned char const* image;

    Constant const* find(std::string const& which) const;  // null where there is none
    // Throws Error when the kernel has no constant of this name.
    int constant(std::string const& which) const;
};

// A kernel by what it was compiled for. `type`: of its arguments "q" and "k", and of "o" unless
// `output` says otherwise; arguments and constants that the kernel does not have are no matter.
struct Wanted {
    char const* name;
    std::string type;
    std::vector<Constant> constants;
    std::string output = "";
};

// For any device. Null where there is none; `find` throws Error that lists what there is.
Kernel const* search(Wanted const& wanted);
Kernel const& find(Wanted const& wanted);

// One launch on the current device. Every argument of the kernel must be given; a null pointer says
// that an optional tensor is absent.
class Launch {
  public:
    // Picks the cubin for the current device. Throws Error.
    explicit Launch(Wanted const& wanted);

    Kernel const& kernel() const { return *mKernel; }
    Launch& tensor(char const* name, void const* pointer);
    Launch& number(char const* name, std::int64_t value);
    Launch& number(char const* name, double value);
    void run(int gridX, int gridY, int gridZ, CUstream stream);

  private:
    union Value {
        void const* pointer;
        std::int64_t integer;
        float real;
    };
    Kernel const* mKernel;
    CUfunction mFunction;
    std::vector<std::pair<std::string, Value>> mValues;
};

}  // namespace hybrid
