"""The architectures of TensorRT-LLM whose checkpoints can be read: Hugging Face architectures, names of modules, and keys."""
