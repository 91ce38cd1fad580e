"""One file per family of GGUF architectures. The registry imports every file."""
