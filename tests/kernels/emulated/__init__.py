"""Kernels' machine code (PTX) on this machine: for those that no interpreter runs. As slow as it is exact about who holds what.

A kernel is compiled as for a device. Tensors are copied to addresses of their own, so an access outside of them is found; shared memory and
registers begin with what shows when it is used; copies arrive as late as waiting allows; programs take turns in a random order.
"""
