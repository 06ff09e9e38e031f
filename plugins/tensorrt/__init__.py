"""The TensorRT plugin library: our two ops as IPluginV3, their kernels embedded as cubins."""
