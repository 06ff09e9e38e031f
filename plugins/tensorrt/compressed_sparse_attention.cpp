// hybrid::CompressedSparseAttention (dense): q [B, T, Hq*d], k_new, v_new [B, T, Hk*d],
// key_pool, value_pool [P, page, Hk, d], block_table [B, M] int32, seqlens [B] int32 (tokens visible
// to the last query, its own included), kv_append [1] int32 (0: replay, write nothing)
// -> o [B, T, Hq*d], the two pools in place.
#include "kernels.h"
#include "layer_events.h"
#include "plugin.h"

#include <cmath>
#include <memory>

namespace hybrid {
namespace {

enum : int32_t { kQ, kK, kV, kKEY_POOL, kVALUE_POOL, kTABLE, kSEQLENS, kAPPEND };

class CompressedSparseAttention final : public Plugin {
  public:
    static constexpr char const* kNAME = "CompressedSparseAttention";

    std::vector<Attribute> attributes() override {
        using Type = nv::PluginFieldType;
        return {{"num_heads", Type::kINT32, &mHq}, {"kv_num_heads", Type::kINT32, &mHk},
            {"scale", Type::kFLOAT32, &mScale}, {"local_window_size", Type::kINT32, &mWindow},
            {"layer", Type::kINT32, &mLayer}};
    }

    void check() const override {
        require(mHq > 0 && mHk > 0 && mHq % mHk == 0,
            "kv_num_heads is " + std::to_string(mHk) + ", must divide num_heads, " +
                std::to_string(mHq));
        require(std::isfinite(mScale) && mScale > 0, "scale is " + std::to_string(mScale));
        require(mWindow == -1 || mWindow > 0,
            "local_window_size is " + std::to_string(mWindow) + ", expected -1 or more than 0");
        require(mLayer >= 0, "layer is " + std::to_string(mLayer));
    }

    std::vector<Kind> kinds() const override {
        Kind const half = Kind::kHALF, integer = Kind::kINT;
        return {half, half, half, half, half, integer, integer, integer, half, half, half};
    }

    void checkShapes(std::vector<nv::Dims> const& in, nv::DataType half) const override {
        require(static_cast<int32_t>(in.size()) == numInputs(),
            std::to_string(in.size()) + " inputs, expected " + std::to_string(numInputs()));
        for (int32_t which : {kKEY_POOL, kVALUE_POOL}) {
            require(in[which].nbDims == 4 && in[which].d[2] == mHk,
                "a pool is " + dimsText(in[which]) + ", expected [blocks, rows, " +
                    std::to_string(mHk) + ", d]");
        }
        int64_t const size = in[kKEY_POOL].d[3];
        auto const width = [&](int32_t which, int64_t heads, char const* name) {
            require(in[which].nbDims == 3 && in[which].d[2] == heads * size, std::string(name) +
                    " is " + dimsText(in[which]) + ", its last size should be " +
                    std::to_string(heads * size));
        };
        width(kQ, mHq, "q");
        width(kK, mHk, "k_new");
        width(kV, mHk, "v_new");
        require(in[kTABLE].nbDims == 2 && in[kSEQLENS].nbDims == 1 && in[kAPPEND].nbDims == 1,
            "block_table, seqlens and kv_append are " + dimsText(in[kTABLE]) + ", " +
                dimsText(in[kSEQLENS]) + ", " + dimsText(in[kAPPEND]));
        find(wanted("append_kv", in[kKEY_POOL], half));
        find(wanted("paged_attention", in[kKEY_POOL], half));
    }

    int32_t getOutputShapes(nv::DimsExprs const* in, int32_t nbInputs, nv::DimsExprs const*,
        int32_t, nv::DimsExprs* out, int32_t, nv::IExprBuilder&) noexcept override {
        if (nbInputs != numInputs()) {
            report(std::string(kNAME) + ": " + std::to_string(nbInputs) + " inputs");
            return -1;
        }
        out[0] = in[kQ];
        out[1] = in[kKEY_POOL];
        out[2] = in[kVALUE_POOL];
        return 0;
    }

    int32_t getAliasedInput(int32_t output) noexcept override {
        return output == 1 ? kKEY_POOL : output == 2 ? kVALUE_POOL : -1;
    }

    size_t getWorkspaceSize(nv::DynamicPluginTensorDesc const*, int32_t,
        nv::DynamicPluginTensorDesc const*, int32_t) const noexcept override {
        return 0;
    }

    int32_t enqueue(nv::PluginTensorDesc const* in, nv::PluginTensorDesc const*,
        void const* const* inputs, void* const* outputs, void*,
        cudaStream_t stream) noexcept override {
        return guarded<int32_t>(-1, kNAME, [&]() -> int32_t {
            require(outputs[1] == inputs[kKEY_POOL] && outputs[2] == inputs[kVALUE_POOL],
                "the pools are not in place: build with PreviewFeature ALIASED_PLUGIN_IO_10_03");
            Driver const& driver = Driver::get();
            LayerEvents const events = layerEvents(mLayer);
            if (events.ready) {
                driver.check(driver.streamWaitEvent(stream, events.ready, 0), "waiting for K/V");
            }
            if (in[kQ].dims.d[0] * in[kQ].dims.d[1] > 0) {
                run(in, inputs, outputs[0], stream);
            }
            if (events.done) {
                driver.check(driver.eventRecord(events.done, stream), "recording an event");
            }
            return 0;
        });
    }

    nv::IPluginV3* clone() noexcept override { return new CompressedSparseAttention(*this); }
    nv::AsciiChar const* getPluginName() const noexcept override { return kNAME; }

  private:
    Wanted wanted(char const* kernel, nv::Dims const& pool, nv::DataType half) const {
        return {kernel, typeName(half),
            {{"D", static_cast<int>(pool.d[3])}, {"PAGE", static_cast<int>(pool.d[1])}}};
    }

    void run(nv::PluginTensorDesc const* in, void const* const* inputs, void* o,
        cudaStream_t stream) const {
        nv::Dims const& q = in[kQ].dims;
        auto const bind = [&](Launch& launch) -> Launch& {
            return launch.tensor("q", inputs[kQ])
                .tensor("k", inputs[kK])
                .tensor("v", inputs[kV])
                .tensor("pool_k", inputs[kKEY_POOL])
                .tensor("pool_v", inputs[kVALUE_POOL])
                .tensor("block_table", inputs[kTABLE])
                .tensor("total_lens", inputs[kSEQLENS])
                .tensor("append", inputs[kAPPEND])
                .tensor("starts", nullptr)
                .tensor("lengths", nullptr)
                .tensor("o", o)
                .tensor("lse", nullptr)
                .number("T", q.d[1])
                .number("M", in[kTABLE].dims.d[1])
                .number("Hq", static_cast<int64_t>(mHq))
                .number("Hk", static_cast<int64_t>(mHk))
                .number("window", static_cast<int64_t>(mWindow < 0 ? 0 : mWindow))
                .number("scale", static_cast<double>(mScale));
        };
        int const pairs = static_cast<int>(q.d[0]) * mHk;
        auto const tiles = [](Launch const& launch, int64_t rows, char const* size) {
            int const step = launch.kernel().constant(size);
            return static_cast<int>((rows + step - 1) / step);
        };
        Launch append(wanted("append_kv", in[kKEY_POOL].dims, in[kQ].type));
        bind(append).run(tiles(append, q.d[1], "ROWS"), pairs, 1, stream);
        Launch attend(wanted("paged_attention", in[kKEY_POOL].dims, in[kQ].type));
        bind(attend).run(tiles(attend, q.d[1] * (mHq / mHk), "BQ"), pairs, 1, stream);
    }

    int32_t mHq = 0, mHk = 0, mWindow = 0, mLayer = -1;
    float mScale = 0;
};

}  // namespace

nv::IPluginCreatorInterface* compressedSparseAttentionCreator() {
    static Creator<CompressedSparseAttention> creator;
    return &creator;
}

}  // namespace hybrid
