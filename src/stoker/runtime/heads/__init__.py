"""Draft heads: published checkpoints of Medusa, EAGLE and EAGLE-3 heads and of multi-token prediction layers, and how they draft."""
