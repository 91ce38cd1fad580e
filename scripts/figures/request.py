"""The life of a request: which process does what, and how the data is called on the way."""

from __future__ import annotations

from svg import Drawing


def request() -> Drawing:
    d = Drawing(
        "The life of a request",
        "A frontend process parses and tokenizes; the executor process queues, plans and commits; the device runs the model and samples.",
        980,
        540,
    )
    d.heading()
    _lane(d, 50, 158, "Frontend process", "HTTP or gRPC; imports no torch")
    _lane(d, 222, 150, "Executor process", "the step loop; rank 0 of the engine")
    _lane(d, 386, 134, "Device", "a GPU, or the cores of a CPU")

    d.box(
        176,
        76,
        176,
        112,
        "blue",
        "1  Protocol",
        "every field is mapped,",
        "refused, or documented",
        "as without effect",
        "→ GenerationRequest",
    )
    d.box(376, 76, 176, 112, "blue", "2  Prompt", "chat template,", "token ids, truncation,", "limits of the engine", "→ TokenRequest")
    d.box(770, 76, 186, 112, "blue", "10  Text", "whole characters,", "stop strings,", "one event per write", "→ Delta")

    d.box(376, 250, 128, 100, "amber", "4  Queue", "bounded; a full", "queue is a 429", "→ Sequence")
    d.box(528, 250, 128, 100, "amber", "5  Plan", "policy, prefix", "index, blocks", "→ StepPlan")
    d.box(680, 250, 128, 100, "amber", "6  Inputs", "ids, positions,", "block tables", "→ ForwardBatch")
    d.box(832, 250, 124, 100, "amber", "9  Commit", "append tokens,", "index blocks,", "free blocks")

    d.box(528, 414, 190, 84, "green", "7  Model", "layers, paged attention;", "decode replays a CUDA graph")
    d.box(766, 414, 190, 84, "green", "8  Sampler", "features change logits,", "then one draw per row")

    d.line((24, 132), (174, 132), arrow=True)
    d.text(34, 124, "request", "small soft")
    d.line((352, 132), (374, 132), arrow=True)
    d.line((440, 188), (440, 248), arrow=True)
    d.text(450, 212, "3  ZeroMQ, or a queue", "small soft")
    d.line((504, 300), (526, 300), arrow=True)
    d.line((656, 300), (678, 300), arrow=True)
    d.line((744, 350), (744, 382), (623, 382), (623, 412), arrow=True)
    d.line((718, 456), (764, 456), arrow=True)
    d.line((894, 414), (894, 352), arrow=True)
    d.text(902, 404, "tokens", "small soft")
    d.line((894, 250), (894, 190), arrow=True)
    d.text(902, 240, "outputs", "small soft")
    d.line((770, 132), (580, 132), arrow=True)
    d.text(594, 124, "answer to the client", "small soft")
    d.line((850, 250), (850, 234), (592, 234), (592, 248), colour="strong-amber", arrow=True)
    d.text(664, 229, "next step: any number of rows", "small soft")
    return d


def _lane(d: Drawing, y: float, height: float, heading: str, note: str) -> None:
    d.rect(12, y, 956, height, "paper", outline="grid")
    d.text(24, y + height - 26, heading, "bold")
    d.text(24, y + height - 10, note, "small soft")
