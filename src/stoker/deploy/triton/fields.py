"""The fields of a config.pbtxt other than `parameters` → TritonModel."""

from __future__ import annotations

from stoker.deploy.deployment import Note
from stoker.deploy.pbtxt import Message
from stoker.deploy.triton import tensors
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.scalars import flag, text, whole, whole_of
from stoker.deploy.triton.shape import check_field
from stoker.server.protocols.kserve.model_config import MAX_BATCH_SIZE, MAX_INSTANCES, QueuePolicy, Step, TritonModel

UNFILLED_BATCH_SIZE = 128  # what the first templates say


def read(file: ModelFile, notes: list[Note]) -> TritonModel:
    """The model as clients see it. Appends to `notes`; raises ConfigError naming file and line."""
    assert file.kind is not None
    check_name(file)
    for field in file.message.fields:
        check_field(file, field, notes)
    message = file.message
    return TritonModel(
        name=file.name,
        kind=file.kind,
        platform=text(message, "platform"),
        backend=text(message, "backend"),
        max_batch_size=max_batch_size(file, notes),
        decoupled=decoupled(file, notes),
        inputs=tensors.read(file, "input", notes),
        outputs=tensors.read(file, "output", notes),
        instance_count=instances(file, notes),
        queue=queue(file, notes),
        steps=_steps(message),
        parameters={key: value.text for key, value in file.parameters if not value.unfilled},
    )


def check_name(file: ModelFile) -> None:
    """Triton wants a model's folder and its `name` to agree."""
    name = file.message.scalar("name")
    if name is not None and not name.unfilled and name.text != file.name:
        raise file.error(name.line, f"the model is called {name.text!r} in the folder {file.name!r}.", "Make the two names one.")


def max_batch_size(file: ModelFile, notes: list[Note]) -> int:
    return whole(file, file.message, "max_batch_size", notes, UNFILLED_BATCH_SIZE, MAX_BATCH_SIZE)


def decoupled(file: ModelFile, notes: list[Note]) -> bool:
    return flag(file, file.message.message("model_transaction_policy"), "decoupled", notes)


def instances(file: ModelFile, notes: list[Note]) -> int:
    """Instances over all groups. The engine's own model has one: its ranks are one instance."""
    count = 0
    for group in file.message.messages("instance_group"):
        count += whole(file, group, "count", notes, 1, MAX_INSTANCES) or 1
    limit = 1 if file.kind == "tensorrt_llm" else MAX_INSTANCES
    if count > limit:
        line = file.message.message("instance_group").line
        cure = "Set count: 1; start a server a replica." if limit == 1 else f"Use at most {limit}."
        raise file.error(line, f"instance_group asks for {count} instances of {file.name}.", cure)
    return max(count, 1)


def queue(file: ModelFile, notes: list[Note]) -> QueuePolicy | None:
    batching = file.message.messages("dynamic_batching")
    if not batching:
        return None
    policy = batching[-1].message("default_queue_policy")
    action = policy.scalar("timeout_action")
    if action is not None and action.text not in ("REJECT", "0"):
        raise file.error(action.line, f"timeout_action={action.text!r} is refused.", "Use REJECT: a request that waited too long ends.")
    preferred = (whole_of(file, scalar, "preferred_batch_size", notes) for scalar in batching[-1].scalars("preferred_batch_size"))
    return QueuePolicy(
        preferred_batch_sizes=tuple(filter(None, preferred)),
        max_queue_delay_us=whole(file, batching[-1], "max_queue_delay_microseconds", notes),
        max_queue_size=whole(file, policy, "max_queue_size", notes),
        timeout_us=whole(file, policy, "default_timeout_microseconds", notes),
        allow_timeout_override=flag(file, policy, "allow_timeout_override", notes),
        priority_levels=whole(file, batching[-1], "priority_levels", notes),
        default_priority_level=whole(file, batching[-1], "default_priority_level", notes),
    )


def _steps(message: Message) -> tuple[Step, ...]:
    return tuple(
        Step(
            model_name=text(step, "model_name"),
            input_map={text(m, "key"): text(m, "value") for m in step.messages("input_map")},
            output_map={text(m, "key"): text(m, "value") for m in step.messages("output_map")},
        )
        for scheduling in message.messages("ensemble_scheduling")
        for step in scheduling.messages("step")
    )
