"""Calibration: what is measured on sample text, and what formats compute from it."""
