// hybrid::CompressedSparseAttention (dense): q [B, T, Hq*d], k_new, v_new [B, T, Hk*d],
// key_pool, value_pool [P, page, Hk, d], block_table [B, M] int32, seqlens [B] int32 (tokens visible
// to the last query, its own included), kv_append [1] int32 (0: replay, write nothing)
// -> o [B, T, Hq*d], the two pools in place.
#include "kernels.h"
#include "layer_events.h"
#include "plugin.h"

#include <algorithm>
#include <cmath>
#include <memory>

namespace hybrid {
namespace {

constexpr int kFEW = 16;  // as kernel.py: rows of queries up to which the keys are split

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

    size_t getWorkspaceSize(nv::DynamicPluginTensorDesc const* in, int32_t,
        nv::DynamicPluginTensorDesc const*, int32_t) const noexcept override {
        return guarded<size_t>(0, kNAME, [&]() -> size_t {
            // A step of few tokens may be in the range of a profile that also holds many.
            nv::Dims q = in[kQ].max;
            q.d[1] = std::min<int64_t>(q.d[1], kFEW / (mHq / mHk));
            Split const s = split(q, in[kTABLE].max.d[1], in[kKEY_POOL].max, in[kQ].desc.type);
            return s.count > 1 ? s.bytes : 0;
        });
    }

    int32_t enqueue(nv::PluginTensorDesc const* in, nv::PluginTensorDesc const*,
        void const* const* inputs, void* const* outputs, void* workspace,
        cudaStream_t stream) noexcept override {
        return guarded<int32_t>(-1, kNAME, [&]() -> int32_t {
            require(outputs[1] == inputs[kKEY_POOL] && outputs[2] == inputs[kVALUE_POOL],
                "the pools are not in place: bind each present_ output where its input lies");
            Driver const& driver = Driver::get();
            LayerEvents const events = layerEvents(mLayer);
            if (events.ready) {
                driver.check(driver.streamWaitEvent(stream, events.ready, 0), "waiting for K/V");
            }
            if (in[kQ].dims.d[0] * in[kQ].dims.d[1] > 0) {
                run(in, inputs, outputs[0], static_cast<char*>(workspace), stream);
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
    // How many parts of the rows are read side by side, and where each leaves its answer.
    struct Split {
        int count;
        size_t partLse, lse, bytes;
    };

    Wanted wanted(char const* kernel, nv::Dims const& pool, nv::DataType half) const {
        return {kernel, typeName(half),
            {{"D", static_cast<int>(pool.d[3])}, {"PAGE", static_cast<int>(pool.d[1])}}};
    }

    // The form for few rows of queries, whose parts are fp32.
    Wanted few(nv::Dims const& pool, nv::DataType half) const {
        Wanted form = wanted("paged_attention", pool, half);
        form.constants.push_back({"BQ", kFEW});
        form.output = "fp32";
        return form;
    }

    // As kernel.py's attend: one part unless a step brings few queries and the table is long.
    Split split(nv::Dims const& q, int64_t blocks, nv::Dims const& pool, nv::DataType half) const {
        Split s{1, 0, 0, 0};
        int64_t const tokens = q.d[0] * q.d[1];
        if (q.d[1] * (mHq / mHk) > kFEW || tokens == 0 || !search(few(pool, half))) {
            return s;
        }
        int64_t const most = find(wanted("merge_splits", pool, half)).constant("BS");
        int64_t const useful = std::min(blocks * pool.d[1] / 256, 512 / (q.d[0] * mHk));
        s.count = static_cast<int>(std::max<int64_t>(1, std::min(most, useful)));
        size_t const rows = static_cast<size_t>(tokens * mHq);
        s.partLse = static_cast<size_t>(s.count) * rows * static_cast<size_t>(pool.d[3]) * 4;
        s.lse = s.partLse + static_cast<size_t>(s.count) * rows * 4;
        s.bytes = s.lse + rows * 4;
        return s;
    }

    void run(nv::PluginTensorDesc const* in, void const* const* inputs, void* o, char* workspace,
        cudaStream_t stream) const {
        nv::Dims const &q = in[kQ].dims, &pool = in[kKEY_POOL].dims;
        nv::DataType const half = in[kQ].type;
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
        Launch append(wanted("append_kv", pool, half));
        bind(append).run(tiles(append, q.d[1], "ROWS"), pairs, 1, stream);
        int64_t const rows = q.d[1] * (mHq / mHk);
        Split const s = split(q, in[kTABLE].dims.d[1], pool, half);
        if (s.count == 1) {
            Launch attend(wanted("paged_attention", pool, half));
            bind(attend).tensor("o", o).tensor("lse", nullptr);
            attend.run(tiles(attend, rows, "BQ"), pairs, 1, stream);
            return;
        }
        Launch attend(few(pool, half));
        bind(attend).tensor("o", workspace).tensor("lse", workspace + s.partLse);
        attend.run(tiles(attend, rows, "BQ"), pairs, s.count, stream);
        int64_t const answers = q.d[0] * q.d[1] * mHq;
        Launch merge(wanted("merge_splits", pool, half));
        merge.tensor("parts", workspace)
            .tensor("part_lse", workspace + s.partLse)
            .tensor("o", o)
            .tensor("lse", workspace + s.lse)
            .number("N", answers)
            .number("splits", static_cast<int64_t>(s.count))
            .run(static_cast<int>(answers), 1, 1, stream);
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
