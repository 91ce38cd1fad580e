"""A discrete-event simulator of a fleet: the real scheduler and router classes, with measured step times in place of devices."""
