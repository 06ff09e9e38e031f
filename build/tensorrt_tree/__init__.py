"""Files that are copied into the tree of the TensorRT target; they run on the GPU machine."""
