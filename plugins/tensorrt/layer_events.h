// Events by which copies of K/V between host and device overlap the layers that run meanwhile.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace hybrid {

struct LayerEvents {
    CUevent ready = nullptr;  // the layer's K/V rows have arrived
    CUevent done = nullptr;   // the layer has read and written them
};

void setLayerEvents(std::int32_t layer, LayerEvents events);
LayerEvents layerEvents(std::int32_t layer);

}  // namespace hybrid
