"""Settings of the engine that is built when a command or program names a checkpoint instead of an engine."""

from __future__ import annotations

import msgspec

from stoker.base.config import DTYPES, check_choice
from stoker.base.errors import ConfigError
from stoker.deploy.deployment import BuildOptions, Deployment


class BuildSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that replace those of a deployment's build. None: the deployment's own, or the default."""

    quantization: str | None = None
    """Name of a quantization, such as FP8."""

    dtype: str | None = None
    """Dtype of activations and of weights that are not quantized."""

    kv_cache_dtype: str | None = None
    """`auto`, `int8` or `float8_e4m3fn`."""

    max_input_len: int | None = None
    """Prompt tokens of a request."""

    max_output_len: int | None = None
    """New tokens of a request."""

    max_total_len: int | None = None
    """Prompt and new tokens of a request together."""

    max_beam_width: int | None = None
    """Beams of a request with beam search."""

    tensor_parallel: int | None = None
    """Ranks that share each layer."""

    pipeline_parallel: int | None = None
    """Stages of consecutive layers."""

    data_parallel: int | None = None
    """Ranks among which the sequences are distributed."""

    expert_parallel: bool | None = None
    """Distribute whole experts over the ranks."""

    trust_remote_code: bool | None = None
    """Allow Python code from the checkpoint to run."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)

    def chosen(self) -> dict[str, object]:
        """The fields that are set, by name."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


def apply_build_settings(deployment: Deployment, settings: BuildSettings) -> Deployment:
    """A copy of the deployment with `settings`. Raises ConfigError for a wrong value, and for a deployment of a built engine."""
    chosen, source = settings.chosen(), deployment.source
    if not chosen:
        return deployment
    if not isinstance(source, BuildOptions):
        name, value = next(iter(chosen.items()))
        message = f"{name}={value} is refused: {deployment.path} is an engine, and only a build can change it."
        raise ConfigError(message, cure="Leave it out, or name the checkpoint.")
    parts = {}
    for field in ("limits", "mapping"):
        struct = getattr(source, field)
        parts[field] = msgspec.structs.replace(struct, **{name: chosen.pop(name) for name in struct.__struct_fields__ if name in chosen})
    return msgspec.structs.replace(deployment, source=msgspec.structs.replace(source, **parts, **chosen))
