"""Transfers of KV cache blocks between executors: one computes a prompt, and another one continues with the answer."""
