"""What the benchmark commands and the scripts in benchmarks/ share: the executor they drive, machine facts, and results."""
