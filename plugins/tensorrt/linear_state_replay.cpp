// hybrid::LinearStateReplay: q, k [B, T, Hq*dk], v [B, T, Hv*dv], past_state [B, Hv, dk, dv] fp32,
// then what the rule needs of log_decay [B, T, Hv or Hv*dk] and beta [B, T, Hv], fp32
// -> o [B, T, Hv*dv], present_state (in place of past_state).
#include "kernels.h"
#include "plugin.h"

#include <algorithm>
#include <cmath>
#include <memory>

namespace hybrid {
namespace {

constexpr int32_t kQ = 0, kK = 1, kV = 2, kSTATE = 3, kLOG_DECAY = 4;
constexpr int64_t kTOKEN_BY_TOKEN = 16;  // as kernel.py: up to here the one-token form is faster

class LinearStateReplay final : public Plugin {
  public:
    static constexpr char const* kNAME = "LinearStateReplay";

    std::vector<Attribute> attributes() override {
        using Type = nv::PluginFieldType;
        return {{"update_rule", Type::kCHAR, &mRule}, {"q_num_heads", Type::kINT32, &mHq},
            {"kv_num_heads", Type::kINT32, &mHv}, {"scale", Type::kFLOAT32, &mScale},
            {"chunk_size", Type::kINT32, &mChunk}};
    }

    void check() const override {
        std::vector<std::string> const rules{"linear", "gated", "delta", "gated_delta"};
        require(std::find(rules.begin(), rules.end(), mRule) != rules.end(),
            "update_rule is '" + mRule + "', expected linear, gated, delta or gated_delta");
        require(mHq > 0 && mHv > 0 && mHv % mHq == 0,
            "q_num_heads is " + std::to_string(mHq) + ", must divide kv_num_heads, " +
                std::to_string(mHv));
        require(std::isfinite(mScale) && mScale > 0, "scale is " + std::to_string(mScale));
        require(mChunk > 0, "chunk_size is " + std::to_string(mChunk));
    }

    std::vector<Kind> kinds() const override {
        std::vector<Kind> all{Kind::kHALF, Kind::kHALF, Kind::kHALF, Kind::kFLOAT};
        all.insert(all.end(), gated() + delta(), Kind::kFLOAT);
        all.insert(all.end(), {Kind::kHALF, Kind::kFLOAT});
        return all;
    }

    void checkShapes(std::vector<nv::Dims> const& in, nv::DataType half) const override {
        require(static_cast<int32_t>(in.size()) == numInputs(),
            std::to_string(in.size()) + " inputs, rule " + mRule + " takes " +
                std::to_string(numInputs()));
        nv::Dims const& state = in[kSTATE];
        require(state.nbDims == 4 && state.d[1] == mHv,
            "past_state is " + dimsText(state) + ", expected [B, " + std::to_string(mHv) +
                ", dk, dv]");
        auto const width = [&](int32_t which, int64_t heads, int64_t size, char const* name) {
            nv::Dims const& dims = in[which];
            require(dims.nbDims == 3 && dims.d[2] == heads * size, std::string(name) + " is " +
                    dimsText(dims) + ", its last size should be " + std::to_string(heads * size));
        };
        width(kQ, mHq, state.d[2], "q");
        width(kK, mHq, state.d[2], "k");
        width(kV, mHv, state.d[3], "v");
        if (gated()) {
            bool const perKey = in[kLOG_DECAY].d[2] != mHv;
            width(kLOG_DECAY, mHv, perKey ? state.d[2] : 1, "log_decay");
        }
        if (delta()) {
            width(kLOG_DECAY + gated(), mHv, 1, "beta");
        }
        for (char const* kernel : {"recurrent", "chunk_states", "chunk_outputs"}) {
            find(wanted(kernel, state, decay(in), half));
        }
    }

    int32_t getOutputShapes(nv::DimsExprs const* in, int32_t nbInputs, nv::DimsExprs const*,
        int32_t, nv::DimsExprs* out, int32_t, nv::IExprBuilder&) noexcept override {
        if (nbInputs != numInputs()) {
            report(std::string(kNAME) + ": " + std::to_string(nbInputs) + " inputs");
            return -1;
        }
        out[0] = in[kV];
        out[1] = in[kSTATE];
        return 0;
    }

    int32_t getAliasedInput(int32_t output) noexcept override { return output == 1 ? kSTATE : -1; }

    size_t getWorkspaceSize(nv::DynamicPluginTensorDesc const* in, int32_t,
        nv::DynamicPluginTensorDesc const*, int32_t) const noexcept override {
        return guarded<size_t>(0, kNAME, [&]() -> size_t {
            std::vector<nv::Dims> dims;
            for (int32_t i = 0; i < numInputs(); ++i) {
                dims.push_back(in[i].max);
            }
            return scratch(dims).bytes;
        });
    }

    int32_t enqueue(nv::PluginTensorDesc const* in, nv::PluginTensorDesc const*,
        void const* const* inputs, void* const* outputs, void* workspace,
        cudaStream_t stream) noexcept override {
        return guarded<int32_t>(-1, kNAME, [&]() -> int32_t {
            std::vector<nv::Dims> dims;
            for (int32_t i = 0; i < numInputs(); ++i) {
                dims.push_back(in[i].dims);
            }
            if (dims[kQ].d[0] * dims[kQ].d[1] > 0) {
                run(dims, in[0].type, inputs, outputs, static_cast<char*>(workspace), stream);
            }
            return 0;
        });
    }

    nv::IPluginV3* clone() noexcept override { return new LinearStateReplay(*this); }
    nv::AsciiChar const* getPluginName() const noexcept override { return kNAME; }

  private:
    // Where in the workspace the chunked form keeps what its kernels leave for each other.
    struct Scratch {
        size_t states, updates, inverse, sums, entering, leaving, bytes;
    };

    bool gated() const { return mRule.find("gated") != std::string::npos; }
    bool delta() const { return mRule.find("delta") != std::string::npos; }

    // 0: none, 1: per head, 2: per key channel.
    int decay(std::vector<nv::Dims> const& in) const {
        return !gated() ? 0 : in[kLOG_DECAY].d[2] == mHv ? 1 : 2;
    }

    Wanted wanted(char const* kernel, nv::Dims const& state, int decay, nv::DataType half) const {
        return {kernel, typeName(half),
            {{"DK", static_cast<int>(state.d[2])}, {"DV", static_cast<int>(state.d[3])},
                {"C", mChunk}, {"DECAY", decay}, {"DELTA", delta()}}};
    }

    int64_t chunks(int64_t tokens) const { return (tokens + mChunk - 1) / mChunk; }

    Scratch scratch(std::vector<nv::Dims> const& in) const {
        int64_t const tokens = in[kQ].d[1];
        Scratch s{};
        if (tokens <= kTOKEN_BY_TOKEN) {
            return s;
        }
        nv::Dims const& state = in[kSTATE];
        int64_t const heads = state.d[0] * mHv, all = heads * chunks(tokens);
        bool const perKey = decay(in) == 2;
        auto const place = [&](size_t& where, bool needed, int64_t values, size_t size) {
            where = s.bytes;
            size_t const bytes = needed ? static_cast<size_t>(values) * size : 0;
            s.bytes += (bytes + 255) / 256 * 256;
        };
        place(s.states, true, all * state.d[2] * state.d[3], 2);
        place(s.updates, delta(), heads * tokens * state.d[3], 2);
        place(s.inverse, delta(), all * mChunk * mChunk, 4);
        place(s.sums, perKey, all * mChunk * state.d[2], 4);
        place(s.entering, perKey, all * mChunk * state.d[2], 2);
        place(s.leaving, perKey, all * mChunk * state.d[2], 2);
        return s;
    }

    // The kernels of kernel.py's linear_state_replay, in its order.
    void run(std::vector<nv::Dims> const& dims, nv::DataType half, void const* const* inputs,
        void* const* outputs, char* workspace, cudaStream_t stream) const {
        nv::Dims const &q = dims[kQ], &state = dims[kSTATE];
        int const kind = decay(dims);
        int const heads = static_cast<int>(q.d[0]) * mHv, count = static_cast<int>(chunks(q.d[1]));
        Scratch const s = scratch(dims);
        bool const perKey = kind == 2;
        auto const at = [&](bool needed, size_t place) -> void const* {
            return needed ? workspace + place : nullptr;
        };
        auto const bound = [&](char const* kernel) {
            Launch launch(wanted(kernel, state, kind, half));
            void const* const products = at(delta(), s.inverse);
            launch.tensor("q", inputs[kQ]).tensor("k", inputs[kK]).tensor("v", inputs[kV]);
            launch.tensor("log_decay", gated() ? inputs[kLOG_DECAY] : nullptr)
                .tensor("beta", delta() ? inputs[kLOG_DECAY + gated()] : nullptr)
                .tensor("past", inputs[kSTATE])
                .tensor("present", outputs[1])
                .tensor("o", outputs[0]);
            launch.tensor("states", at(true, s.states))
                .tensor("updates", delta() ? at(true, s.updates) : inputs[kV])
                .tensor("inverse", products)
                .tensor("products", products)
                .tensor("sums", at(perKey, s.sums))
                .tensor("entering", at(perKey, s.entering))
                .tensor("leaving", at(perKey, s.leaving));
            launch.tensor("starts", nullptr).tensor("lengths", nullptr).tensor("slots", nullptr);
            launch.number("T", q.d[1])
                .number("NC", static_cast<int64_t>(count))
                .number("Hq", static_cast<int64_t>(mHq))
                .number("Hv", static_cast<int64_t>(mHv))
                .number("scale", static_cast<double>(mScale));
            return launch;
        };
        auto const tiles = [&](Launch const& launch) {
            int const columns = launch.kernel().constant("BV");
            return (static_cast<int>(state.d[3]) + columns - 1) / columns;
        };
        if (q.d[1] <= kTOKEN_BY_TOKEN) {
            Launch one = bound("recurrent");
            one.run(tiles(one), heads, 1, stream);
            return;
        }
        if (perKey) {
            bound("key_decay").run(count, heads, 1, stream);
        }
        if (delta()) {
            bound("chunk_products").run(count, heads, 1, stream);
            bound("chunk_inverse").run(count, heads, 1, stream);
        }
        Launch walk = bound("chunk_states");
        walk.run(tiles(walk), heads, 1, stream);
        Launch finish = bound("chunk_outputs");
        finish.run(tiles(finish), count, heads, stream);
    }

    std::string mRule;
    int32_t mHq = 0, mHv = 0, mChunk = 0;
    float mScale = 0;
};

}  // namespace

nv::IPluginCreatorInterface* linearStateReplayCreator() {
    static Creator<LinearStateReplay> creator;
    return &creator;
}

}  // namespace hybrid
