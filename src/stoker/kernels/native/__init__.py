"""CPU kernels in C for steps of few rows, compiled by the system's compiler when they are first used.

Without a compiler, and for all that they do not take, the reference runs.
"""
