"""Converts the fields of a config.pbtxt, except `parameters`, to a TritonModel."""

from __future__ import annotations

from stoker.deploy.deployment import Note, Setting
from stoker.deploy.syntax.pbtxt import Message
from stoker.deploy.triton.proto_fields import check_field
from stoker.deploy.triton.repository import ModelFile
from stoker.deploy.triton.scalars import flag_field, text_field, whole_field, whole_scalar
from stoker.deploy.triton.tensors import read_tensors
from stoker.server.protocols.kserve.model_config import MAX_BATCH_SIZE, MAX_INSTANCES, QueuePolicy, Step, TritonModel
from stoker.server.settings import MAX_FRONTENDS

UNFILLED_BATCH_SIZE = 128  # as in the first templates


def read_model_config(file: ModelFile, notes: list[Note]) -> TritonModel:
    """The model as clients see it. Adds to `notes`. Raises ConfigError naming file and line."""
    assert file.kind is not None
    check_name(file)
    for field in file.message.fields:
        check_field(file, field, notes)
    message = file.message
    return TritonModel(
        name=file.name,
        kind=file.kind,
        platform=text_field(message, "platform"),
        backend=text_field(message, "backend"),
        max_batch_size=max_batch_size(file, notes),
        decoupled=decoupled(file, notes),
        inputs=read_tensors(file, "input", notes),
        outputs=read_tensors(file, "output", notes),
        instance_count=instances(file, notes),
        queue=queue(file, notes),
        steps=_steps(message),
        parameters={key: value.text for key, value in file.parameters if not value.unfilled},
    )


def check_name(file: ModelFile) -> None:
    """Raise ConfigError unless the `name` of a model is the name of its folder."""
    name = file.message.scalar("name")
    if name is not None and not name.unfilled and name.text != file.name:
        raise file.error(name.line, f"the name of the model is {name.text!r} and that of its folder {file.name!r}.", "Use the same name.")


def max_batch_size(file: ModelFile, notes: list[Note]) -> int:
    """The field max_batch_size. The server's own limit applies in addition."""
    return whole_field(file, file.message, "max_batch_size", notes, UNFILLED_BATCH_SIZE, MAX_BATCH_SIZE)


def decoupled(file: ModelFile, notes: list[Note]) -> bool:
    """Whether a request can have several responses."""
    return flag_field(file, file.message.message("model_transaction_policy"), "decoupled", notes)


def instances(file: ModelFile, notes: list[Note]) -> int:
    """The number of instances in all groups.

    tensorrt_llm has one, which consists of all ranks. Instances of preprocessing and postprocessing are frontend processes.
    """
    count = 0
    for group in file.message.messages("instance_group"):
        count += whole_field(file, group, "count", notes, 1, MAX_INSTANCES) or 1
    limit = {"tensorrt_llm": 1, "preprocessing": MAX_FRONTENDS, "postprocessing": MAX_FRONTENDS}.get(file.kind or "", MAX_INSTANCES)
    if count > limit:
        line = file.message.message("instance_group").line
        cure = "Set count: 1, and start a server per replica." if limit == 1 else f"Use at most {limit}."
        raise file.error(line, f"instance_group requests {count} instances of {file.name}.", cure)
    if count > 1 and limit == MAX_INSTANCES:
        text = "the model runs in the frontends, whose number is the count of preprocessing and postprocessing"
        origin = file.origin(file.message.message("instance_group").line)
        notes.append(Note(severity="info", key="instance_group.count", text=text, origin=origin))
    return max(count, 1)


def frontends(file: ModelFile, notes: list[Note]) -> Setting | None:
    """The setting for the number of frontend processes, from the instances of a tokenizer model; None without instance_group."""
    groups = file.message.messages("instance_group")
    if file.kind not in ("preprocessing", "postprocessing") or not groups:
        return None
    count = instances(file, notes)
    return Setting(section="server", name="num_frontends", value=count, origin=file.origin(groups[0].line), key="instance_group.count")


def queue(file: ModelFile, notes: list[Note]) -> QueuePolicy | None:
    """The queue policy in dynamic_batching; None without that field."""
    batching = file.message.messages("dynamic_batching")
    if not batching:
        return None
    policy = batching[-1].message("default_queue_policy")
    action = policy.scalar("timeout_action")
    if action is not None and action.text not in ("REJECT", "0"):
        raise file.error(
            action.line, f"timeout_action={action.text!r} is refused.", "Use REJECT, which ends a request whose timeout has passed."
        )
    preferred = (whole_scalar(file, scalar, "preferred_batch_size", notes) for scalar in batching[-1].scalars("preferred_batch_size"))
    return QueuePolicy(
        preferred_batch_sizes=tuple(filter(None, preferred)),
        max_queue_delay_us=whole_field(file, batching[-1], "max_queue_delay_microseconds", notes),
        max_queue_size=whole_field(file, policy, "max_queue_size", notes),
        timeout_us=whole_field(file, policy, "default_timeout_microseconds", notes),
        allow_timeout_override=flag_field(file, policy, "allow_timeout_override", notes),
        priority_levels=whole_field(file, batching[-1], "priority_levels", notes),
        default_priority_level=whole_field(file, batching[-1], "default_priority_level", notes),
    )


def _steps(message: Message) -> tuple[Step, ...]:
    """The steps of an ensemble."""
    return tuple(
        Step(
            model_name=text_field(step, "model_name"),
            input_map={text_field(m, "key"): text_field(m, "value") for m in step.messages("input_map")},
            output_map={text_field(m, "key"): text_field(m, "value") for m in step.messages("output_map")},
        )
        for scheduling in message.messages("ensemble_scheduling")
        for step in scheduling.messages("step")
    )
