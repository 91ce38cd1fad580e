"""Print the cache keys of launches of `compile_all` as JSON: {launch: [key, ...]}. Runs in a process without the interpreter.

Arguments: the names of the launches, which are launched in this order.
"""

from __future__ import annotations

import json
import sys

from compile_all import LAUNCHES

from stoker.kernels.triton.aot.compiler import collecting

if __name__ == "__main__":
    keys = {}
    for name in sys.argv[1:]:
        with collecting(90) as jobs:
            LAUNCHES[name]()
        keys[name] = sorted(jobs)
    print(json.dumps(keys))
