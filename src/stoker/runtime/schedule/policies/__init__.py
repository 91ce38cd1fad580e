"""The scheduling policies by name.

`base.config.POLICIES` is the table of names. Each is a module of this package, whose `POLICY` is the class. Adding a policy takes one file
here and one row there.
"""

from __future__ import annotations

from importlib import import_module

from stoker.base import config
from stoker.base.registry import Registry
from stoker.runtime.schedule.policies.policy import Policy

POLICIES: Registry[type[Policy]] = Registry("policy")
for name in config.POLICIES:
    POLICIES.add(name, import_module(f"{__name__}.{name}").POLICY)
