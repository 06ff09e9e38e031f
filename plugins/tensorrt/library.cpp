// What the library exports: TensorRT's two entry points and ours.
#include "layer_events.h"
#include "plugin.h"

#define HYBRID_EXPORT extern "C" __attribute__((visibility("default")))

HYBRID_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static nvinfer1::IPluginCreatorInterface* const creators[] = {
        hybrid::linearStateReplayCreator(), hybrid::compressedSparseAttentionCreator()};
    count = 2;
    return creators;
}

HYBRID_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { hybrid::setLogger(finder); }

// Before attention layer `layer` reads its K/V the stream waits for `ready`; once it has run,
// `done` is recorded. Null: neither. Holds until it is set again; any thread may call.
HYBRID_EXPORT void hybrid_layer_events(int32_t layer, CUevent ready, CUevent done) {
    hybrid::setLayerEvents(layer, {ready, done});
}

// The last message of this thread, "" if none.
HYBRID_EXPORT char const* hybrid_last_error() { return hybrid::lastError(); }
