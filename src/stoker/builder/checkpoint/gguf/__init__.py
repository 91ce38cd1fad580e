"""GGUF files, read as if they were Hugging Face checkpoints.

Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md) and llama.cpp's converter, whose permutation of q and k rows is
reversed here.
"""
