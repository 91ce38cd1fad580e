"""Tuning as data: which tile a kernel uses, by device, op, dtype and shape.

`<device>.json` holds what was measured on a device, `default.json` the safe choices for any other. `stoker tune ENGINE` measures the shapes
of an engine on the current machine and writes `tuning.json` into its directory, which is used before these files (`devices`).
"""
