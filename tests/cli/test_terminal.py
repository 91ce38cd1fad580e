"""Commands in a pseudo-terminal: progress is shown from the start to the end, and a chat is a dialogue."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from terminal import terminal

from stoker.base.types import SamplingParams
from stoker.cli.conversation import Conversation


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, new_cache: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(new_cache(tmp_path / "cache")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # engines for the CPU, also on a machine with a GPU


def test_a_chat_with_a_checkpoint_shows_progress_and_then_answers(tiny_engine: Path, tmp_path: Path) -> None:
    with terminal("chat", str(tiny_engine.parent / "checkpoint"), "--max-tokens", "4", "--ignore-eos") as run:
        run.wait_for("preparing")  # before any stage, while libraries are imported
        run.wait_for("/help lists the commands.")
        shown = run.text
        stages = [shown.index(stage) for stage in ("preparing", "read", "weights", "compare", "loading", "/help lists")]
        assert stages == sorted(stages)
        assert re.search("verify ━+.* 100 %", shown)
        run.send("/set max_tokens 2\n")
        run.wait_for("max_tokens 2\n")
        run.send("hello\n")
        run.wait_for("\n> ")
        run.send(f"/save {tmp_path / 'chat.json'}\n")
        run.wait_for("2 messages are saved to")
        run.send("/exit\n")
        assert run.wait() == 0
    assert (tmp_path / "chat.json").exists()


def test_ctrl_d_ends_a_chat(tiny_engine: Path) -> None:
    with terminal("chat", str(tiny_engine)) as run:
        run.wait_for("> ")
        run.send("\x04")
        assert run.wait() == 0


def test_a_conversation_starts_anew_with_its_system_message() -> None:
    conversation = Conversation("m", "Be brief.", SamplingParams())
    conversation.messages.append({"role": "user", "content": "hello"})
    assert conversation.run_command("/reset") == ""
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.run_command("/set stop END") == "stop END"
    assert conversation.params.stop == ("END",)
    assert conversation.run_command("/set stop none") == "stop none"
    assert conversation.run_command("/set top_p=0.5") == "top_p 0.5"
