"""The routing decision, without HTTP: which replica holds which blocks, how loaded it is, and whose turn it is."""
