"""Converts the tokenizer of a checkpoint to tokenizer.json, and compares the result with the original library."""
