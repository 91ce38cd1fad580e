"""Renders chat messages with the chat template of the model: Jinja in a sandbox, with the functions that transformers provides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stoker.base.errors import EngineError, RequestError
from stoker.frontend.chat_messages import NoContent, check_messages

MAX_TEMPLATE_CHARS = 1 << 20
CONTINUE_MARK = "\ue000continue\ue001 "  # private-use characters, which no template uses; the space shows whether the template strips text


class GenerationBlock(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}, which marks text for training. It renders as its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parse the block as the statements inside it."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PromptTooLongError(Exception):
    """The rendered text exceeds the limit of characters."""


class ChatTemplate:
    """A template from the engine directory. Requests supply values, never template source.

    The source is parsed at once. It is compiled when it is first rendered, because compilation evaluates constant expressions, which can
    take any time. `frontend/rendering/` calls `run` in a process with limits.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise EngineError(f"the chat template has {len(source)} characters, and the limit is {MAX_TEMPLATE_CHARS}.", cure="Shorten it.")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.tests["none"] = lambda value: value is None or isinstance(value, NoContent)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise EngineError(f"the chat template cannot be compiled: {error}.", cure="Correct tokenizer_config.json.") from None
        self._environment = environment
        self._special_tokens = dict(special_tokens)
        self._reads_tools = any(name.name == "tools" and name.ctx == "load" for name in self._tree.find_all(jinja2.nodes.Name))

    def variables(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        max_chars: int,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        **values: Any,
    ) -> dict[str, Any]:
        """The variables for `run` that render these messages. `values` are other variables of the template, such as enable_thinking.

        `continue_final_message` marks the end of the last message, so that `cut_at_mark` can leave it open and the model continues it.
        Raises RequestError for invalid messages, for `tools` that the template does not render, and for more than `max_chars` characters.
        """
        if "chat_template" in values:
            raise RequestError(
                "chat_template",
                values["chat_template"],
                "a request cannot supply a template",
                cure="Leave it out; the template of the model is used.",
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message", True, "it cannot be combined with add_generation_prompt", cure="Set one of them to false."
            )
        if tools and not self._reads_tools:
            limit, cure = "the chat template of the model does not render tools", "Describe them in a message, or use response_format."
            raise RequestError("tools", tools, limit, cure=cure)
        messages = check_messages(messages, max_chars=max_chars)
        if continue_final_message:
            _mark_end(messages)
        given = {"messages": messages, "tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        return {**values, **given}

    def run(self, variables: dict[str, Any], max_chars: int) -> str:
        """The rendered text. Raises PromptTooLongError if it exceeds `max_chars` characters, and any exception that the template causes.

        Time and memory are not limited here.
        """
        pieces, size = [], 0
        for piece in self._template.generate({**self._special_tokens, **variables}):
            size += len(piece)
            if size > max_chars:
                raise PromptTooLongError
            pieces.append(piece)
        return "".join(pieces)

    @cached_property
    def _template(self) -> jinja2.Template:
        """The compiled template. Raises jinja2.TemplateError."""
        return self._environment.from_string(self._tree)


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Append a mark to the last message, by which its end is found in the rendered text."""
    last = messages[-1]
    if isinstance(last["content"], NoContent):
        raise RequestError("continue_final_message", True, "the last message has no text to continue")
    last["content"] += CONTINUE_MARK


def cut_at_mark(text: str) -> str:
    """The rendered text up to the mark. Raises RequestError if the template did not render the last message."""
    if (end := text.rfind(CONTINUE_MARK.rstrip())) < 0:
        raise RequestError("continue_final_message", True, "the output of the chat template does not contain the last message")
    strips = not text.startswith(CONTINUE_MARK, end)
    return text[:end].rstrip() if strips else text[:end]


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """The template filter `tojson`: plain JSON, which models were trained on. Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    """The template function `raise_exception`."""
    raise jinja2.TemplateError(message)
