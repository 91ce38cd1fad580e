"""Checks of a written engine: its files, its greedy tokens compared with the checkpoint's, and its loss of accuracy."""
