"""``convert.py --target tensorrt-llm``: a tree for TensorRT-LLM's PyTorch backend (tree.py).

package/ is what TensorRT-LLM loads with --custom_module_dirs. It lies here and not in plugins/, as
it uses the replay planner and the checkpoint codec of serving/, which plugins/ may not import.
"""

from build.tensorrt_llm.tree import write

__all__ = ["write"]
