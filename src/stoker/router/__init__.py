"""Routing of requests to replicas by the prefixes that they hold. `core` makes the decisions; `proxy` is the HTTP and gRPC server."""
