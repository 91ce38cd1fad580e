"""The op surface. Models call `ops.name(...)`; `ops` binds each to a plain-torch reference or a Triton launcher."""
