// Calls what TensorRT calls of the plugin library, with no GPU and no TensorRT: one line per check.
//   harness LIBRARY          checks; says what failed
//   harness LIBRARY launch   also runs the plugins on whatever libcuda.so.1 there is
#include <NvInfer.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace nvinfer1;
using Fields = std::vector<PluginField>;

namespace {

int gFailures = 0;
char const* (*gLastError)() = nullptr;

void check(std::string const& name, bool good) {
    std::printf("%s %s\n", good ? "ok  " : "FAIL", name.c_str());
    gFailures += !good;
}

// The last call left a message that holds `part`.
void checkMessage(std::string const& name, bool refused, std::string const& part) {
    std::string const message = gLastError();
    check(name, refused && message.find(part) != std::string::npos);
    std::printf("     %s\n", message.c_str());
}

struct Values {
    std::string rule;
    int32_t first, second, third;
    float scale;
};

Fields linearFields(Values const& v) {
    return {{"update_rule", v.rule.data(), PluginFieldType::kCHAR, int32_t(v.rule.size())},
        {"q_num_heads", &v.first, PluginFieldType::kINT32, 1},
        {"kv_num_heads", &v.second, PluginFieldType::kINT32, 1},
        {"scale", &v.scale, PluginFieldType::kFLOAT32, 1},
        {"chunk_size", &v.third, PluginFieldType::kINT32, 1}};
}

Fields attentionFields(Values const& v, int32_t const& layer) {
    return {{"num_heads", &v.first, PluginFieldType::kINT32, 1},
        {"kv_num_heads", &v.second, PluginFieldType::kINT32, 1},
        {"scale", &v.scale, PluginFieldType::kFLOAT32, 1},
        {"local_window_size", &v.third, PluginFieldType::kINT32, 1},
        {"layer", &layer, PluginFieldType::kINT32, 1}};
}

using Owned = std::unique_ptr<IPluginV3>;

Owned make(IPluginCreatorV3One* creator, Fields const& fields) {
    PluginFieldCollection const all{int32_t(fields.size()), fields.data()};
    return Owned(creator->createPlugin("test", &all, TensorRTPhase::kBUILD));
}

IPluginV3OneBuildV2* buildOf(Owned const& p) {
    return static_cast<IPluginV3OneBuildV2*>(p->getCapabilityInterface(PluginCapabilityType::kBUILD));
}

IPluginV3OneRuntime* runtimeOf(Owned const& p) {
    return static_cast<IPluginV3OneRuntime*>(
        p->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

std::map<std::string, std::string> serialised(Owned const& plugin) {
    std::map<std::string, std::string> found;
    PluginFieldCollection const* fields = runtimeOf(plugin)->getFieldsToSerialize();
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        PluginField const& f = fields->fields[i];
        size_t const size = f.type == PluginFieldType::kCHAR ? f.length : 4 * size_t(f.length);
        found[f.name] = {static_cast<char const*>(f.data), size};
    }
    return found;
}

// Written, read back and cloned, every attribute is what it was.
void checkRoundTrip(std::string const& name, IPluginCreatorV3One* creator, Owned const& plugin,
    size_t attributes) {
    auto const before = serialised(plugin);
    PluginFieldCollection const* fields = runtimeOf(plugin)->getFieldsToSerialize();
    Owned const again(creator->createPlugin("again", fields, TensorRTPhase::kRUNTIME));
    check(name + ": serialised and read back",
        again && before.size() == attributes && serialised(again) == before);
    Owned const copy(plugin->clone());
    check(name + ": cloned", serialised(copy) == before);
}

DynamicPluginTensorDesc tensor(DataType type, std::vector<int64_t> const& dims) {
    DynamicPluginTensorDesc t{};
    t.desc.type = type;
    t.desc.format = TensorFormat::kLINEAR;
    t.desc.dims.nbDims = int32_t(dims.size());
    std::copy(dims.begin(), dims.end(), t.desc.dims.d);
    t.min = t.max = t.opt = t.desc.dims;
    return t;
}

using Tensors = std::vector<DynamicPluginTensorDesc>;

// Types, formats and symbolic shapes. `source[i]`: the input that output i has the shape of.
void checkInterface(std::string const& name, Owned const& plugin, Tensors const& in,
    std::vector<int32_t> const& source) {
    auto* const build = buildOf(plugin);
    auto const inputs = int32_t(in.size()), outputs = int32_t(source.size());
    check(name + ": outputs", build->getNbOutputs() == outputs);
    Tensors all(in);
    std::vector<DataType> types, made(source.size());
    for (auto const& t : in) {
        types.push_back(t.desc.type);
    }
    check(name + ": output types",
        build->getOutputDataTypes(made.data(), outputs, types.data(), inputs) == 0);
    for (int32_t i = 0; i < outputs; ++i) {
        check(name + ": type of output " + std::to_string(i), made[i] == types[source[i]]);
        check(name + ": alias of output " + std::to_string(i),
            build->getAliasedInput(i) == (i ? source[i] : -1));
        all.push_back(in[source[i]]);
    }
    types[0] = DataType::kFLOAT;
    checkMessage(name + ": fp32 is refused",
        build->getOutputDataTypes(made.data(), outputs, types.data(), inputs) != 0, "cast to");
    for (int32_t i = 0; i < inputs + outputs; ++i) {
        check(name + ": format " + std::to_string(i),
            build->supportsFormatCombination(i, all.data(), inputs, outputs));
        Tensors wrong(all);
        wrong[i].desc.format = TensorFormat::kCHW32;
        check(name + ": vectorised format " + std::to_string(i) + " is refused",
            !build->supportsFormatCombination(i, wrong.data(), inputs, outputs));
        wrong[i] = all[i];
        wrong[i].desc.type = DataType::kINT64;
        check(name + ": int64 at " + std::to_string(i) + " is refused",
            !build->supportsFormatCombination(i, wrong.data(), inputs, outputs));
    }
    // Expressions are opaque: an output's must be the very ones of its source.
    std::vector<DimsExprs> shapes(in.size()), out(source.size());
    static char marks[256];
    char* mark = marks;
    for (size_t i = 0; i < in.size(); ++i) {
        shapes[i].nbDims = in[i].desc.dims.nbDims;
        for (int32_t d = 0; d < shapes[i].nbDims; ++d) {
            shapes[i].d[d] = reinterpret_cast<IDimensionExpr const*>(mark++);
        }
    }
    IExprBuilder* const none = nullptr;
    check(name + ": output shapes", build->getOutputShapes(shapes.data(), inputs, nullptr, 0,
                                        out.data(), outputs, *none) == 0);
    for (int32_t i = 0; i < outputs; ++i) {
        DimsExprs const& want = shapes[source[i]];
        check(name + ": shape of output " + std::to_string(i), out[i].nbDims == want.nbDims &&
                std::equal(want.d, want.d + want.nbDims, out[i].d));
    }
}

Tensors linearTensors(std::string const& rule, int64_t T, int64_t heads, int64_t dk, int64_t dv,
    bool perKey, DataType half) {
    int64_t const B = 2;
    Tensors in{tensor(half, {B, T, heads * dk}), tensor(half, {B, T, heads * dk}),
        tensor(half, {B, T, heads * dv}), tensor(DataType::kFLOAT, {B, heads, dk, dv})};
    if (rule.find("gated") != std::string::npos) {
        in.push_back(tensor(DataType::kFLOAT, {B, T, heads * (perKey ? dk : 1)}));
    }
    if (rule.find("delta") != std::string::npos) {
        in.push_back(tensor(DataType::kFLOAT, {B, T, heads}));
    }
    return in;
}

size_t workspace(Owned const& plugin, Tensors const& in) {
    return buildOf(plugin)->getWorkspaceSize(in.data(), int32_t(in.size()), nullptr, 0);
}

int32_t configure(Owned const& plugin, Tensors const& in) {
    return buildOf(plugin)->configurePlugin(in.data(), int32_t(in.size()), nullptr, 0);
}

int32_t changeShape(Owned const& plugin, Tensors const& in) {
    std::vector<PluginTensorDesc> descs;
    for (auto const& t : in) {
        descs.push_back(t.desc);
    }
    return runtimeOf(plugin)->onShapeChange(descs.data(), int32_t(descs.size()), nullptr, 0);
}

// With no driver a launch must fail with a message, not crash.
void checkNoDriver(std::string const& name, Owned const& plugin, Tensors const& in, int outputs) {
    if (dlopen("libcuda.so.1", RTLD_NOW)) {
        return;
    }
    std::vector<PluginTensorDesc> descs;
    for (auto const& t : in) {
        descs.push_back(t.desc);
    }
    std::vector<void const*> inputs(in.size(), nullptr);
    std::vector<void*> made(size_t(outputs), nullptr);
    int32_t const rc = runtimeOf(plugin)->enqueue(
        descs.data(), nullptr, inputs.data(), made.data(), nullptr, nullptr);
    checkMessage(name + ": no driver is said", rc != 0, "no CUDA driver");
}

// Input i lies at 0x1000 * (i + 1), output i at 0x100000 * (i + 1) unless it is in place.
int32_t enqueue(Owned const& plugin, Tensors const& in, int32_t outputs) {
    std::vector<PluginTensorDesc> descs;
    std::vector<char*> inputs, made;
    for (auto const& t : in) {
        descs.push_back(t.desc);
        inputs.push_back(reinterpret_cast<char*>(0x1000 * descs.size()));
    }
    for (int32_t i = 0; i < outputs; ++i) {
        int32_t const source = buildOf(plugin)->getAliasedInput(i);
        made.push_back(source < 0 ? reinterpret_cast<char*>(size_t(0x100000) * size_t(i + 1))
                                  : inputs[size_t(source)]);
    }
    std::vector<void const*> const from(inputs.begin(), inputs.end());
    std::vector<void*> const to(made.begin(), made.end());
    return runtimeOf(plugin)->enqueue(descs.data(), nullptr, from.data(), to.data(),
        reinterpret_cast<void*>(0x800000), nullptr);
}

void launchLinear(IPluginCreatorV3One* creator) {
    Owned const plugin = make(creator, linearFields({"gated_delta", 4, 4, 64, 0.125F}));
    for (int64_t const T : {1, 16, 450, 0}) {
        std::printf("enqueue T=%d\n", int(T));
        auto const in = linearTensors("gated_delta", T, 4, 128, 128, false, DataType::kBF16);
        std::printf("returned %d\n", enqueue(plugin, in, 2));
    }
}

void checkLinear(IPluginCreatorV3One* creator) {
    for (std::string const rule : {"linear", "gated", "delta", "gated_delta"}) {
        Values const values{rule, 4, 4, 64, 0.125F};
        Owned const plugin = make(creator, linearFields(values));
        check(rule + ": made", bool(plugin));
        if (!plugin) {
            continue;
        }
        checkRoundTrip(rule, creator, plugin, 5);
        for (DataType half : {DataType::kBF16, DataType::kHALF}) {
            auto const in = linearTensors(rule, 512, 4, 128, 128, false, half);
            checkInterface(rule, plugin, in, {2, 3});
        }
        bool const delta = rule.find("delta") != std::string::npos;
        auto const size = [&](int64_t T, bool perKey) {
            return workspace(plugin, linearTensors(rule, T, 4, 128, 64, perKey, DataType::kBF16));
        };
        size_t const heads = 2 * 4, rows = heads * 512;  // B, heads; tokens in whole chunks
        size_t const states = heads * 8 * 128 * 64 * 2, updates = heads * 450 * 64 * 2;
        size_t const inverse = rows * 64 * 4;
        check(rule + ": decode needs no workspace", size(1, false) == 0 && size(16, false) == 0);
        check(rule + ": workspace", size(450, false) == states + delta * (updates + inverse));
        if (rule == "gated_delta") {
            check("per-key decay: workspace",
                size(450, true) == states + updates + inverse + rows * 128 * (4 + 2 + 2));
            auto const good = linearTensors(rule, 512, 4, 128, 128, false, DataType::kBF16);
            check("a compiled shape is taken", configure(plugin, good) == 0);
            check("and at run time", changeShape(plugin, good) == 0);
            checkNoDriver(rule, plugin, good, 2);
            auto const odd = linearTensors(rule, 512, 4, 40, 24, false, DataType::kBF16);
            checkMessage("a shape without kernel", configure(plugin, odd) != 0, "DK=40 DV=24");
            auto wide = good;
            wide[0].max.d[2] = 7;
            checkMessage("a wrong width", configure(plugin, wide) != 0, "q is [2, 512, 7]");
            auto few = good;
            few.pop_back();
            checkMessage("a missing input", configure(plugin, few) != 0, "5 inputs");
        }
    }
    auto const refuse = [&](std::string const& name, Values const& v, std::string const& part) {
        checkMessage("refused: " + name, !make(creator, linearFields(v)), part);
    };
    refuse("rule", {"gate", 4, 4, 64, 1}, "update_rule is 'gate'");
    refuse("heads", {"gated", 3, 4, 64, 1}, "q_num_heads is 3");
    refuse("no heads", {"gated", 0, 4, 64, 1}, "q_num_heads is 0");
    refuse("scale", {"gated", 4, 4, 64, 0}, "scale is 0");
    refuse("chunk", {"gated", 4, 4, 0, 1}, "chunk_size is 0");
    Values const values{"gated", 4, 4, 64, 1};
    Fields fields = linearFields(values);
    fields.pop_back();
    checkMessage("refused: missing", !make(creator, fields), "chunk_size is missing");
    fields = linearFields(values);
    fields[4].type = PluginFieldType::kFLOAT32;
    checkMessage("refused: type", !make(creator, fields), "chunk_size has the wrong type");
    fields = linearFields(values);
    fields.push_back({"colour", &values.first, PluginFieldType::kINT32, 1});
    checkMessage("refused: unknown", !make(creator, fields), "unknown attribute colour");
}

Tensors attentionTensors(DataType half, int64_t d, int64_t T = 64, int64_t blocks = 12) {
    auto const integers = DataType::kINT32;
    int64_t const B = 2, page = 32;
    return {tensor(half, {B, T, 8 * d}), tensor(half, {B, T, 2 * d}), tensor(half, {B, T, 2 * d}),
        tensor(half, {100, page, 2, d}), tensor(half, {100, page, 2, d}),
        tensor(integers, {B, blocks}), tensor(integers, {B}), tensor(integers, {1})};
}

void launchAttention(IPluginCreatorV3One* creator, void (*events)(int32_t, void*, void*)) {
    int32_t const layer = 3;
    Owned const plugin = make(creator, attentionFields({"", 8, 2, -1, 0.125F}, layer));
    std::printf("enqueue attention\n");
    events(layer, reinterpret_cast<void*>(0xa), reinterpret_cast<void*>(0xb));
    std::printf("returned %d\n", enqueue(plugin, attentionTensors(DataType::kBF16, 128), 3));
    events(layer, nullptr, nullptr);
    auto const decode = attentionTensors(DataType::kBF16, 128, 1, 64);
    std::printf("enqueue decode\n");
    std::printf("returned %d\n", enqueue(plugin, decode, 3));
    std::printf("enqueue attention without events\n");
    std::printf("returned %d\n", enqueue(plugin, attentionTensors(DataType::kBF16, 128), 3));
}

void checkAttention(IPluginCreatorV3One* creator) {
    Values const values{"", 8, 2, -1, 0.125F};
    int32_t const layer = 3;
    Owned const plugin = make(creator, attentionFields(values, layer));
    check("attention: made", bool(plugin));
    if (!plugin) {
        return;
    }
    checkRoundTrip("attention", creator, plugin, 5);
    for (DataType half : {DataType::kBF16, DataType::kHALF}) {
        checkInterface("attention", plugin, attentionTensors(half, 128), {0, 3, 4});
    }
    auto const good = attentionTensors(DataType::kBF16, 128);
    check("attention: a compiled shape is taken", configure(plugin, good) == 0);
    check("attention: and at run time", changeShape(plugin, good) == 0);
    checkNoDriver("attention", plugin, good, 3);
    // Eight parts of 2048 rows for two tokens of eight heads: answers and sums in fp32, then sums.
    size_t const answers = 2 * 8, parts = 8 * answers * (128 + 1) * 4;
    check("attention: decode over long tables takes workspace",
        workspace(plugin, attentionTensors(DataType::kBF16, 128, 1, 64)) == parts + answers * 4);
    check("attention: over short ones none",
        workspace(plugin, attentionTensors(DataType::kBF16, 128, 1, 4)) == 0);
    checkMessage("attention: a head size without kernel",
        configure(plugin, attentionTensors(DataType::kBF16, 40)) != 0, "=40");
    auto wrong = good;
    wrong[3].max.d[2] = 5;
    checkMessage("attention: a wrong pool", configure(plugin, wrong) != 0, "[100, 32, 5, 128]");
    auto const refuse = [&](std::string const& name, Values const& v, std::string const& part) {
        checkMessage("refused: " + name, !make(creator, attentionFields(v, layer)), part);
    };
    refuse("attention heads", {"", 8, 3, -1, 1}, "kv_num_heads is 3");
    refuse("window", {"", 8, 2, 0, 1}, "local_window_size is 0");
    int32_t const below = -1;
    checkMessage("refused: layer", !make(creator, attentionFields(values, below)), "layer is -1");
}

}  // namespace

int main(int given, char** arguments) {
    void* const library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        std::puts(dlerror());
        return 2;
    }
    using Get = IPluginCreatorInterface* const* (*)(int32_t&);
    auto const get = reinterpret_cast<Get>(dlsym(library, "getCreators"));
    gLastError = reinterpret_cast<char const* (*)()>(dlsym(library, "hybrid_last_error"));
    auto const events = reinterpret_cast<void (*)(int32_t, void*, void*)>(
        dlsym(library, "hybrid_layer_events"));
    int32_t count = 0;
    auto* const* const creators = get(count);
    check("two creators, events", count == 2 && events && dlsym(library, "setLoggerFinder"));
    events(3, nullptr, nullptr);
    std::map<std::string, IPluginCreatorV3One*> byName;
    for (int32_t i = 0; i < count; ++i) {
        auto* const creator = static_cast<IPluginCreatorV3One*>(creators[i]);
        byName[creator->getPluginName()] = creator;
        check(std::string(creator->getPluginName()) + ": namespace hybrid, version 1",
            !std::strcmp(creator->getPluginNamespace(), "hybrid") &&
                !std::strcmp(creator->getPluginVersion(), "1"));
        check("five attributes are announced", creator->getFieldNames()->nbFields == 5);
    }
    checkLinear(byName.at("LinearStateReplay"));
    checkAttention(byName.at("CompressedSparseAttention"));
    std::printf("%d failed\n", gFailures);
    if (given > 2) {
        launchLinear(byName.at("LinearStateReplay"));
        launchAttention(byName.at("CompressedSparseAttention"), events);
    }
    return gFailures != 0;
}
