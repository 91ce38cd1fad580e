"""Writes the scripts of a Slurm job that serves an engine on one or several hosts."""
