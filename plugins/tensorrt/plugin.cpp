#include "plugin.h"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>

namespace hybrid {
namespace {

nv::ILoggerFinder* gFinder = nullptr;
thread_local std::string tLastError;

bool fits(Kind kind, nv::DataType type, nv::DataType half) {
    switch (kind) {
        case Kind::kHALF: return type == half;
        case Kind::kFLOAT: return type == nv::DataType::kFLOAT;
        case Kind::kINT: return type == nv::DataType::kINT32;
    }
    return false;
}

bool isHalf(nv::DataType type) {
    return type == nv::DataType::kHALF || type == nv::DataType::kBF16;
}

}  // namespace

void setLogger(nv::ILoggerFinder* finder) noexcept { gFinder = finder; }

char const* lastError() noexcept { return tLastError.c_str(); }

void report(std::string const& message) noexcept {
    tLastError = "hybrid: " + message;
    nv::ILogger* const logger = gFinder ? gFinder->findLogger() : nullptr;
    if (logger) {
        logger->log(nv::ILogger::Severity::kERROR, tLastError.c_str());
    } else {
        std::fprintf(stderr, "%s\n", tLastError.c_str());
    }
}

void require(bool good, std::string const& otherwise) {
    if (!good) {
        throw Error(otherwise);
    }
}

std::string typeName(nv::DataType type) {
    require(isHalf(type), "type " + std::to_string(static_cast<int>(type)) +
            " is not served: cast to bfloat16 or float16");
    return type == nv::DataType::kHALF ? "fp16" : "bf16";
}

std::string dimsText(nv::Dims const& dims) {
    std::string text = "[";
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        text += (i ? ", " : "") + std::to_string(dims.d[i]);
    }
    return text + "]";
}

void read(std::vector<Attribute> const& attributes, nv::PluginFieldCollection const& given) {
    std::set<std::string> missing;
    for (Attribute const& attribute : attributes) {
        missing.insert(attribute.name);
    }
    for (int32_t i = 0; i < given.nbFields; ++i) {
        nv::PluginField const& field = given.fields[i];
        Attribute const* found = nullptr;
        for (Attribute const& attribute : attributes) {
            found = field.name == std::string(attribute.name) ? &attribute : found;
        }
        require(found, "unknown attribute " + std::string(field.name));
        require(field.type == found->type && field.data,
            "attribute " + std::string(field.name) + " has the wrong type");
        if (found->type == nv::PluginFieldType::kCHAR) {
            auto const* text = static_cast<char const*>(field.data);
            *static_cast<std::string*>(found->value) = {text, strnlen(text, field.length)};
        } else {
            require(field.length == 1, "attribute " + std::string(field.name) + " is no scalar");
            std::memcpy(found->value, field.data, 4);
        }
        missing.erase(field.name);
    }
    require(missing.empty(), "attribute " + (missing.empty() ? "" : *missing.begin()) +
            " is missing");
}

nv::IPluginCapability* Plugin::getCapabilityInterface(nv::PluginCapabilityType type) noexcept {
    switch (type) {
        case nv::PluginCapabilityType::kBUILD: return static_cast<nv::IPluginV3OneBuildV2*>(this);
        case nv::PluginCapabilityType::kRUNTIME: return static_cast<nv::IPluginV3OneRuntime*>(this);
        case nv::PluginCapabilityType::kCORE: return static_cast<nv::IPluginV3OneCore*>(this);
    }
    return nullptr;
}

int32_t Plugin::getNbOutputs() const noexcept {
    int32_t aliased = 0;
    while (const_cast<Plugin*>(this)->getAliasedInput(aliased + 1) >= 0) {
        ++aliased;
    }
    return 1 + aliased;
}

bool Plugin::supportsFormatCombination(int32_t pos, nv::DynamicPluginTensorDesc const* inOut,
    int32_t nbInputs, int32_t nbOutputs) noexcept {
    std::vector<Kind> const expected = kinds();
    if (nbInputs != numInputs() || nbOutputs != getNbOutputs()) {
        report(std::string(getPluginName()) + ": " + std::to_string(nbInputs) + " inputs and " +
            std::to_string(nbOutputs) + " outputs, expected " + std::to_string(numInputs()) +
            " and " + std::to_string(getNbOutputs()));
        return false;
    }
    nv::PluginTensorDesc const& desc = inOut[pos].desc;
    nv::DataType const half = inOut[0].desc.type;  // of q
    return desc.format == nv::TensorFormat::kLINEAR && isHalf(half) &&
        fits(expected[pos], desc.type, half);
}

int32_t Plugin::getOutputDataTypes(nv::DataType* out, int32_t nbOutputs, nv::DataType const* in,
    int32_t nbInputs) const noexcept {
    return guarded<int32_t>(-1, getPluginName(), [&]() -> int32_t {
        std::vector<Kind> const expected = kinds();
        require(nbInputs == numInputs(), std::to_string(nbInputs) + " inputs, expected " +
                std::to_string(numInputs()));
        typeName(in[0]);
        for (int32_t i = 0; i < nbInputs; ++i) {
            require(fits(expected[i], in[i], in[0]), "input " + std::to_string(i) + " has type " +
                    std::to_string(static_cast<int>(in[i])));
        }
        out[0] = in[0];
        for (int32_t i = 1; i < nbOutputs; ++i) {
            out[i] = in[const_cast<Plugin*>(this)->getAliasedInput(i)];
        }
        return 0;
    });
}

int32_t Plugin::configurePlugin(nv::DynamicPluginTensorDesc const* in, int32_t nbInputs,
    nv::DynamicPluginTensorDesc const*, int32_t) noexcept {
    return guarded<int32_t>(-1, getPluginName(), [&]() -> int32_t {
        std::vector<nv::Dims> dims;
        for (int32_t i = 0; i < nbInputs; ++i) {
            dims.push_back(in[i].max);
        }
        checkShapes(dims, in[0].desc.type);
        return 0;
    });
}

int32_t Plugin::onShapeChange(nv::PluginTensorDesc const* in, int32_t nbInputs,
    nv::PluginTensorDesc const*, int32_t) noexcept {
    return guarded<int32_t>(-1, getPluginName(), [&]() -> int32_t {
        std::vector<nv::Dims> dims;
        for (int32_t i = 0; i < nbInputs; ++i) {
            dims.push_back(in[i].dims);
        }
        checkShapes(dims, in[0].type);
        return 0;
    });
}

nv::PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept {
    mFields.clear();
    for (Attribute const& a : attributes()) {
        bool const isText = a.type == nv::PluginFieldType::kCHAR;
        auto const* text = static_cast<std::string const*>(a.value);
        void const* const data = isText ? static_cast<void const*>(text->c_str()) : a.value;
        int32_t const length = isText ? static_cast<int32_t>(text->size()) + 1 : 1;
        mFields.emplace_back(a.name, data, a.type, length);
    }
    mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
    return &mCollection;
}

}  // namespace hybrid
