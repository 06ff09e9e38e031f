"""hybrid_trtllm: hybrid models with any-token prefix hits in TensorRT-LLM's PyTorch backend.

Loaded by ``trtllm-serve --custom_module_dirs <tree>/python/hybrid_trtllm``. Where TensorRT-LLM is
installed, importing the package checks and patches it (install.py) or raises; where it is not,
there is nothing to patch and the parts that need no TensorRT-LLM can be used.
"""

import importlib.util

if importlib.util.find_spec("tensorrt_llm"):
    from .install import install

    install()
