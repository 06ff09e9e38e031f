// What the two plugins share: attributes, their checks and serialisation, errors as messages.
#pragma once

#include "driver.h"

#include <NvInfer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace hybrid {

namespace nv = nvinfer1;

// Tells TensorRT's logger, where one was given, and keeps the text for hybrid_last_error().
void report(std::string const& message) noexcept;
void setLogger(nv::ILoggerFinder* finder) noexcept;
char const* lastError() noexcept;

// Runs `body`; an exception becomes a message and `failed`.
template <typename R>
R guarded(R failed, char const* where, std::function<R()> const& body) noexcept {
    try {
        return body();
    } catch (std::exception const& e) {
        report(std::string(where) + ": " + e.what());
        return failed;
    }
}

// One attribute of a plugin: where it lies, how TensorRT sees it.
struct Attribute {
    char const* name;
    nv::PluginFieldType type;  // kINT32, kFLOAT32 or kCHAR
    void* value;               // int32_t, float or std::string
};

// Sets attributes from fields. Throws Error on unknown, missing and mistyped ones.
void read(std::vector<Attribute> const& attributes, nv::PluginFieldCollection const& given);

// What a tensor of a plugin may hold.
enum class Kind { kHALF, kFLOAT, kINT };

std::string typeName(nv::DataType type);  // "bf16", "fp16"; throws Error on others
std::string dimsText(nv::Dims const& dims);
void require(bool good, std::string const& otherwise);  // throws Error

class Plugin : public nv::IPluginV3,
               public nv::IPluginV3OneCore,
               public nv::IPluginV3OneBuildV2,
               public nv::IPluginV3OneRuntime {
  public:
    // Throws Error when the attributes make no sense together.
    virtual void check() const = 0;
    virtual std::vector<Attribute> attributes() = 0;
    // Kinds of inputs, then outputs, in order.
    virtual std::vector<Kind> kinds() const = 0;
    // Throws Error where no kernel serves these shapes (inputs, static or actual).
    virtual void checkShapes(std::vector<nv::Dims> const& in, nv::DataType half) const = 0;

    nv::IPluginCapability* getCapabilityInterface(nv::PluginCapabilityType type) noexcept override;
    nv::AsciiChar const* getPluginVersion() const noexcept override { return "1"; }
    nv::AsciiChar const* getPluginNamespace() const noexcept override { return "hybrid"; }

    int32_t getNbOutputs() const noexcept override;
    bool supportsFormatCombination(int32_t pos, nv::DynamicPluginTensorDesc const* inOut,
        int32_t nbInputs, int32_t nbOutputs) noexcept override;
    int32_t getOutputDataTypes(nv::DataType* out, int32_t nbOutputs, nv::DataType const* in,
        int32_t nbInputs) const noexcept override;
    int32_t configurePlugin(nv::DynamicPluginTensorDesc const* in, int32_t nbInputs,
        nv::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
    int32_t onShapeChange(nv::PluginTensorDesc const* in, int32_t nbInputs,
        nv::PluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
    int32_t setTactic(int32_t) noexcept override { return 0; }
    nv::IPluginV3* attachToContext(nv::IPluginResourceContext*) noexcept override {
        return clone();
    }
    nv::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

  protected:
    int32_t numInputs() const { return static_cast<int32_t>(kinds().size()) - getNbOutputs(); }

  private:
    std::vector<nv::PluginField> mFields;
    nv::PluginFieldCollection mCollection{};
};

// Makes plugins of class P, which has a `kNAME`.
template <typename P>
class Creator : public nv::IPluginCreatorV3One {
  public:
    Creator() {
        for (Attribute const& a : P().attributes()) {
            mFields.emplace_back(a.name, nullptr, a.type, 1);
        }
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
    }

    nv::IPluginV3* createPlugin(nv::AsciiChar const* name, nv::PluginFieldCollection const* fields,
        nv::TensorRTPhase) noexcept override {
        std::string const where = std::string(P::kNAME) + " " + (name ? name : "");
        return guarded<nv::IPluginV3*>(nullptr, where.c_str(), [&]() -> nv::IPluginV3* {
            auto plugin = std::make_unique<P>();
            read(plugin->attributes(), *fields);
            plugin->check();
            return plugin.release();
        });
    }

    nv::PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }
    nv::AsciiChar const* getPluginName() const noexcept override { return P::kNAME; }
    nv::AsciiChar const* getPluginVersion() const noexcept override { return "1"; }
    nv::AsciiChar const* getPluginNamespace() const noexcept override { return "hybrid"; }

  private:
    std::vector<nv::PluginField> mFields;
    nv::PluginFieldCollection mCollection{};
};

nv::IPluginCreatorInterface* linearStateReplayCreator();
nv::IPluginCreatorInterface* compressedSparseAttentionCreator();

}  // namespace hybrid
