"""The op surface: models call these names and never see a device. `dispatch` binds each to a reference or a Triton launcher."""
