"""The format of Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} per call, after any text."""

from __future__ import annotations

from stoker.server.protocols.openai.parsers.markers import partial_marker_start
from stoker.server.protocols.openai.parsers.tools.parser import ToolCall, ToolParser, read_first_json, read_json, short_id

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(ToolParser):
    """Holds back everything after the first [TOOL_CALLS] until the end of the answer."""

    needs_special_tokens = True

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self._held = ""
        self._inside = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        if self._inside:
            return "", []
        if (start := self._held.find(MARKER)) >= 0:
            self._inside = True
            plain, self._held = self._held[:start].rstrip(), self._held[start:]
        else:
            end = len(self._held[: partial_marker_start(self._held, MARKER)].rstrip())
            plain, self._held = self._held[:end], self._held[end:]
        return plain, []

    def flush(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        calls = self._calls(held) if self._inside else []
        return ("", calls) if calls else (held, [])

    def new_id(self) -> str:
        return short_id()

    def _calls(self, text: str) -> list[ToolCall]:
        """The calls if the whole `text` consists of calls; otherwise an empty list."""
        calls: list[ToolCall | None] = []
        for part in text.split(MARKER)[1:]:
            part = part.strip()
            if part.startswith("["):
                values = read_json(part)
                calls += [self.call(value) for value in values] if isinstance(values, list) else [None]
            else:
                calls.append(self._named(part))
        return [call for call in calls if call is not None] if all(calls) else []

    def _named(self, part: str) -> ToolCall | None:
        """The call of name[ARGS]{…}. [ARGS] is optional, because the first releases with this format omit it."""
        brace = part.find("{")
        name = part[:brace].removesuffix(ARGS).partition(CALL_ID)[0].strip()
        value, end = read_first_json(part[brace:]) if brace > 0 else (None, 0)
        whole = brace + end == len(part)
        return self.call({"name": name, "arguments": value}) if isinstance(value, dict) and whole else None
