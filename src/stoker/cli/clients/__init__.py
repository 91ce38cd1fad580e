"""Clients of a running server: HTTP and event streams, metrics, Triton."""
