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
        find(wanted("recurrent", state, decay(in), half));
        find(wanted("chunk_scan", state, decay(in), half));
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
            return 4 * static_cast<size_t>(scratch(dims).total());
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
                run(dims, in[0].type, inputs, outputs, static_cast<float*>(workspace), stream);
            }
            return 0;
        });
    }

    nv::IPluginV3* clone() noexcept override { return new LinearStateReplay(*this); }
    nv::AsciiChar const* getPluginName() const noexcept override { return kNAME; }

  private:
    // Sizes, in floats, of what the chunked form keeps between its two kernels.
    struct Scratch {
        int64_t attention, inverse, decaySum;
        int64_t total() const { return attention + inverse + decaySum; }
    };

    bool gated() const { return mRule.find("gated") != std::string::npos; }
    bool delta() const { return mRule.find("delta") != std::string::npos; }

    // 0: none, 1: per head, 2: per key channel.
    int decay(std::vector<nv::Dims> const& in) const {
        return !gated() ? 0 : in[kLOG_DECAY].d[2] == mHv ? 1 : 2;
    }

    Wanted wanted(char const* kernel, nv::Dims const& state, int decay, nv::DataType half) const {
        Wanted w{kernel, typeName(half), {{"DK", static_cast<int>(state.d[2])}}};
        if (kernel != std::string("chunk_matrices")) {
            w.constants.push_back({"DV", static_cast<int>(state.d[3])});
        }
        if (kernel != std::string("recurrent")) {
            w.constants.push_back({"C", mChunk});
        }
        w.constants.push_back({"DECAY", decay});
        w.constants.push_back({"DELTA", delta()});
        return w;
    }

    int64_t chunks(int64_t tokens) const { return (tokens + mChunk - 1) / mChunk; }

    Scratch scratch(std::vector<nv::Dims> const& in) const {
        int64_t const tokens = in[kQ].d[1];
        if (tokens <= kTOKEN_BY_TOKEN) {
            return {0, 0, 0};
        }
        int64_t const rows = in[kSTATE].d[0] * mHv * chunks(tokens) * mChunk;
        int64_t const decayed = decay(in) == 2 ? in[kSTATE].d[2] : 1;
        return {rows * mChunk, delta() ? rows * mChunk : 0, rows * decayed};
    }

    Launch& common(Launch& launch, nv::Dims const& q) const {
        return launch.tensor("starts", nullptr)
            .tensor("lengths", nullptr)
            .tensor("slots", nullptr)
            .number("T", q.d[1])
            .number("NC", chunks(q.d[1]))
            .number("Hq", static_cast<int64_t>(mHq))
            .number("Hv", static_cast<int64_t>(mHv))
            .number("scale", static_cast<double>(mScale));
    }

    void run(std::vector<nv::Dims> const& dims, nv::DataType half, void const* const* inputs,
        void* const* outputs, float* workspace, cudaStream_t stream) const {
        nv::Dims const& state = dims[kSTATE];
        int const kind = decay(dims);
        int const pairs = static_cast<int>(dims[kQ].d[0]) * mHv;
        void const* const logDecay = gated() ? inputs[kLOG_DECAY] : nullptr;
        void const* const beta = delta() ? inputs[kLOG_DECAY + gated()] : nullptr;
        auto const bind = [&](Launch& launch) -> Launch& {
            return common(launch, dims[kQ])
                .tensor("q", inputs[kQ])
                .tensor("k", inputs[kK])
                .tensor("v", inputs[kV])
                .tensor("log_decay", logDecay)
                .tensor("beta", beta)
                .tensor("past", inputs[kSTATE])
                .tensor("present", outputs[1])
                .tensor("o", outputs[0]);
        };
        auto const tiles = [&](Launch const& launch) {
            int const columns = launch.kernel().constant("BV");
            return (static_cast<int>(state.d[3]) + columns - 1) / columns;
        };
        if (dims[kQ].d[1] <= kTOKEN_BY_TOKEN) {
            Launch launch(wanted("recurrent", state, kind, half));
            bind(launch).run(tiles(launch), pairs, stream);
            return;
        }
        Scratch const size = scratch(dims);
        float* const inverse = workspace + size.attention;
        float* const decaySum = inverse + size.inverse;
        auto const keep = [&](Launch& launch) -> Launch& {
            return bind(launch)
                .tensor("attention", workspace)
                .tensor("inverse", delta() ? inverse : nullptr)
                .tensor("decay_sum", decaySum);
        };
        Launch matrices(wanted("chunk_matrices", state, kind, half));
        keep(matrices).run(static_cast<int>(chunks(dims[kQ].d[1])), pairs, stream);
        Launch scan(wanted("chunk_scan", state, kind, half));
        keep(scan).run(tiles(scan), pairs, stream);
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
