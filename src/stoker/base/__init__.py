"""Values and services that every package uses: configuration, errors, types, field tables, the environment, logging, metric names.

This package imports no torch, and performs no I/O apart from reading the environment and writing the log.
"""
