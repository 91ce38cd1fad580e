"""Plan channels: shared memory between the processes of one node, TCP between nodes."""
