"""Writes an engine as a checkpoint of another tool."""
