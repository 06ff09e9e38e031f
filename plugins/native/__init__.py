"""The library of CPU kernels: how it is built (build.sh), its entry point and shared headers."""
