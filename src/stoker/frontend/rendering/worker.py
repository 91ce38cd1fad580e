"""A process that renders one chat template. The kernel ends it when a rendering exceeds its processor time.

Jinja's sandbox prevents access to Python objects, but a template can still compute for any time and allocate any memory: nested loops,
`"x" * 10**10`, `10 ** 10 ** 10`, filters with a large width. A limit in the interpreter cannot interrupt such an operation, and a timer
of the kernel can.
"""

from __future__ import annotations

import resource
import signal
import socket
from typing import Any

from stoker.base.errors import EngineError, RequestError
from stoker.frontend.chat_template import ChatTemplate, PromptTooLongError
from stoker.frontend.rendering.messages import FAILED, MAX_REASON_CHARS, RENDERED, TOO_LONG, UTF8_ERRORS, pack, read_object

RENDER_CPU_S = 2.0  # published templates need 0.1 ms for a short conversation and 20 ms for 4096 messages
MEMORY_BYTES = 1 << 30  # of address space


def main() -> None:
    """Render until the frontend closes the socket, which is file descriptor 0."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside a C function
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with socket.socket(fileno=0) as connection, connection.makefile("rb") as file:
        try:
            source, special_tokens, cpu_s = read_object(file)
            template = ChatTemplate(source, special_tokens)
            while True:
                variables, max_chars = read_object(file)
                signal.setitimer(signal.ITIMER_PROF, cpu_s)
                answer = _render(template, variables, max_chars)
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.sendall(pack(answer))
        except (EOFError, ConnectionError):
            return


def _render(template: ChatTemplate, variables: dict[str, Any], max_chars: int) -> bytes:
    """The status byte and the text of one rendering. The first one compiles the template."""
    try:
        return bytes([RENDERED]) + template.run(variables, max_chars).encode("utf-8", UTF8_ERRORS)
    except PromptTooLongError:
        return bytes([TOO_LONG])
    except (RequestError, EngineError) as error:
        return bytes([FAILED]) + str(error)[:MAX_REASON_CHARS].encode("utf-8", UTF8_ERRORS)
    except MemoryError:
        return bytes([FAILED]) + f"it needs more than {MEMORY_BYTES >> 30} GiB of memory".encode()
    except Exception as error:  # a template can raise any exception
        return bytes([FAILED]) + (str(error) or type(error).__name__)[:MAX_REASON_CHARS].encode("utf-8", UTF8_ERRORS)


if __name__ == "__main__":
    main()
