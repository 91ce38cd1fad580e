"""CPU kernels in C for decode steps of up to 16 rows, compiled by the system's compiler when they are first used.

Where there is no compiler, and for arguments that a kernel does not support, the reference runs.
"""
