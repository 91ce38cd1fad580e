"""A build, and the files of the engine directory."""

from __future__ import annotations

from svg import Drawing

FILES = (
    ("config.json", "sizes, formats, digests"),
    ("rank0.safetensors", "weights, in kernel layout"),
    ("rank1.safetensors", "one file per rank"),
    ("tokenizer.json", "and the chat template"),
    ("kernels.zip", "compiled GPU kernels"),
    ("tuning.json", "from `stoker tune`; optional"),
)


def engine() -> Drawing:
    d = Drawing(
        "The build and the engine directory",
        "A checkpoint is prepared, converted, written, verified and published as an engine directory, which the runtime maps.",
        980,
        400,
    )
    d.heading()

    d.box(24, 60, 170, 118, "grey", "Checkpoint", "config.json", "*.safetensors, *.bin", "or one .gguf file", "tokenizer files")
    d.box(24, 216, 170, 100, "grey", "Options", "limits, dtype, format", "parallelism, target GPU", "calibration text")

    d.rect(236, 52, 340, 326, "paper", outline="grid")
    d.text(250, 76, "stoker build", "mono bold")
    steps = (
        ("1  Prepare", "decide everything; refuse before reading weights"),
        ("2  Convert", "read, calibrate, quantize; one weight at a time"),
        ("3  Write", "shard for the ranks, in the layout of the kernels"),
        ("4  Verify", "digests, greedy tokens, perplexity"),
        ("5  Publish", "rename the finished directory"),
    )
    for number, (heading, text) in enumerate(steps):
        y = 90 + 46 * number
        d.rect(250, y, 312, 38, "amber")
        d.text(261, y + 16, heading, "bold")
        d.text(261, y + 31, text, "small")
        if number < len(steps) - 1:
            d.line((406, y + 38), (406, y + 46), width=1.2)
    d.rect(250, 328, 312, 38, "green")
    d.text(261, 344, "In parallel", "bold")
    d.text(261, 359, "other processes compile the kernels of all steps", "small")

    d.rect(618, 52, 338, 236, "paper", outline="grid")
    d.text(632, 76, "engine/", "mono bold")
    for number, (name, text) in enumerate(FILES):
        y = 90 + 32 * number
        d.rect(632, y, 310, 28, "blue", radius=3)
        d.text(640, y + 18, name, "mono")
        d.text(640 + 138, y + 18, text, "small soft")

    d.box(618, 312, 338, 66, "green", "stoker serve · stoker.LLM", "maps the files, loads compiled kernels, captures graphs")
    d.line((194, 119), (234, 119), arrow=True)
    d.line((194, 266), (234, 266), arrow=True)
    d.line((576, 180), (616, 180), arrow=True)
    d.line((787, 288), (787, 310), arrow=True)
    return d
