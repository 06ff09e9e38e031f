#include "layer_events.h"

#include <mutex>
#include <unordered_map>

namespace hybrid {
namespace {
std::mutex gMutex;
std::unordered_map<std::int32_t, LayerEvents> gEvents;
}  // namespace

void setLayerEvents(std::int32_t layer, LayerEvents events) {
    std::lock_guard<std::mutex> const lock(gMutex);
    gEvents[layer] = events;
}

LayerEvents layerEvents(std::int32_t layer) {
    std::lock_guard<std::mutex> const lock(gMutex);
    auto const found = gEvents.find(layer);
    return found == gEvents.end() ? LayerEvents{} : found->second;
}

}  // namespace hybrid
