"""Reads checkpoints in the format of TensorRT-LLM: the tensors of all ranks are merged, and appear with the names of Hugging Face."""
