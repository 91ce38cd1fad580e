"""Value types that all packages above share: weight specs, the model config, and the tensors of one step."""
