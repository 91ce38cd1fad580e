"""Python imports this when it starts with this folder in PYTHONPATH: the process collects garbage rarely, as the commands of Stoker do."""

from stoker.base.process import collect_rarely

collect_rarely()
