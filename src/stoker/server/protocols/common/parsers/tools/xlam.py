"""The format of xLAM: the answer is [{"name": …, "arguments": {…}}, …]. The list may also follow text, in one of three kinds of markers."""

from __future__ import annotations

from stoker.server.protocols.common.parsers.calls.tagged_json import TaggedJsonParser
from stoker.server.protocols.common.parsers.markers import is_partial
from stoker.server.protocols.common.parsers.tools.parser import Schemas

CODE = "```json"


class XlamParser(TaggedJsonParser):
    """An object is a call if it names a tool of the request, because lists and code blocks are ordinary text otherwise."""

    template_marks = ("make calls in a single JSON array",)
    opens, closes = ("[TOOL_CALLS]", "<tool_call>", CODE), ("</tool_call>", "```")
    separators = "[,]"

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._at_start = True

    def accepts(self, name: str) -> bool:
        """Whether the request has a tool with this name."""
        return name in self._schemas

    def _find_section(self, *markers: str) -> bool:
        """Look for a list at the start of the answer, or else for a marker. True if a section has begun."""
        start = self._held.lstrip()
        if self._at_start and is_partial(start, *markers):
            return False
        is_list = self._at_start and start.startswith("[") and not start.startswith(markers)
        self._at_start = False
        if not is_list:
            return super()._find_section(*markers)
        self._start_section()
        self._consume(len(self._held) - len(start))
        return True
