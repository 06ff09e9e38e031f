"""One function per model family: Hugging Face config in, HybridSpec out."""
