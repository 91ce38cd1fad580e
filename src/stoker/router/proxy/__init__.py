"""The server of `stoker route`: forwards HTTP and gRPC requests to the replicas that the core chooses."""
