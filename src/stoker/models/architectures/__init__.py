"""One file per model family. Each file defines `ARCHITECTURES`, a tuple of rows that `stoker.models.registry` collects."""
