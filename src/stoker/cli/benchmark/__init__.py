"""The parts that benchmark commands and the scripts in benchmarks/ share: a benchmarked executor, facts about the machine, and results."""
