"""SageMaker LMI model folders: serving.properties and the environment around it, read into a Deployment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as Environment
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.config import Limits, Mapping, RuntimeConfig
from stoker.base.errors import ConfigError, EngineError
from stoker.deploy import properties
from stoker.deploy.deployment import FORMATS, BuildOptions, Deployment, EngineSource, Format, Note, Origin
from stoker.deploy.devices import check_world, visible_gpus
from stoker.deploy.engine import read_config
from stoker.deploy.fields import Collected, Found, refusal
from stoker.deploy.lmi_package import export
from stoker.deploy.lmi_table import ENVIRONMENT, OVERRIDES, TABLE
from stoker.server.protocols.sagemaker.options import LMIOptions
from stoker.server.settings import ServerSettings

FILE = "serving.properties"
CONTAINER = Path("/opt/ml/model")  # where SageMaker unpacks a model for a container
_ENVIRONMENT = Origin("environment")
_PREBUILT = ("tensorrt_llm/1", "trt_llm_model_repo/tensorrt_llm/1")
_LENGTHS = {"llama": (512, 512), "falcon": (1024, 1024)}  # model type → (max_input_len, max_output_len) where nothing is set
_OTHER_LENGTHS = (1024, 512)
_BATCH_SIZE = 32
_KV_FRACTION = 0.95
_MAX_REQUEST_BYTES = 6553500  # the DJL server's


def model_folder(path: Path) -> Path | None:
    """The folder that holds serving.properties: `path`, or its one sub-folder, as `tar czf model.tar.gz model/` leaves it."""
    if (path / FILE).is_file():
        return path
    if not path.is_dir():
        return None
    inner = [child for child in path.iterdir() if child.is_dir() and (child / FILE).is_file()]
    return inner[0] if len(inner) == 1 else None


def recognise(path: Path) -> bool:
    return (path.name == FILE and path.is_file()) or model_folder(path) is not None


def load(path: Path, environment: Environment[str, str]) -> Deployment:
    """What the folder (or its serving.properties) and `environment` ask for. Without the file, the environment alone is read.

    Precedence: SAGEMAKER_* over the file, the file over HF_* and their like, those over OPTION_*, that over SERVING_*.
    Raises ConfigError with file, line, key and cure for whatever cannot be honoured.
    """
    folder = path.parent if path.name == FILE else model_folder(path) or path
    asked = Collected(TABLE)
    for layer in (_overrides(environment), _file(folder / FILE, asked), _named(environment), _options(environment), _serving(environment)):
        asked.put_layer(layer)
    _refuse_adapters(folder)
    _settle(asked, folder, environment)
    return _deployment(asked, folder, environment)


def complete(deployment: Deployment, local: Path) -> Deployment:
    """Fill in what depends on the model, once it is at `local`: a prebuilt engine replaces the build; lengths get their family's default.

    Raises ConfigError when a *_model_version key belongs to another family than the checkpoint's.
    """
    if not isinstance(deployment.source, BuildOptions):
        return deployment
    if engine := prebuilt(local):
        return _as_engine(deployment, engine)
    kind = model_type(local)
    _check_version(deployment, kind)
    longest_input, longest_output = _LENGTHS.get(kind, _OTHER_LENGTHS)
    family = {"max_input_len": longest_input, "max_output_len": longest_output}
    unset = {s.name for s in deployment.settings if s.origin.source == "default" and s.name in family}
    limits = msgspec.structs.replace(deployment.source.limits, **{name: family[name] for name in unset})
    settings = tuple(
        msgspec.structs.replace(s, value=family[s.name], origin=Origin(f"default of {kind}")) if s.name in unset else s
        for s in deployment.settings
    )
    return msgspec.structs.replace(deployment, source=msgspec.structs.replace(deployment.source, limits=limits), settings=settings)


def prebuilt(folder: Path) -> Path | None:
    """The engine directory of the prebuilt layout (tensorrt_llm/1), or None. Raises EngineError for an engine of TensorRT itself."""
    inner = ("1",) if (folder / "config.pbtxt").is_file() else ()  # the folder is tensorrt_llm itself
    for engine in (folder / name for name in (*_PREBUILT, *inner)):
        if not engine.is_dir():
            continue
        foreign = sorted(engine.glob("*.engine"))
        if foreign and "format_version" not in read_config(engine):
            raise EngineError(
                f"{foreign[0]} is an engine of TensorRT itself, which runs on nothing else.",
                cure="Set option.model_id to the Hugging Face checkpoint; Stoker builds its own engine from it.",
            )
        if (engine / "config.json").is_file():
            return engine
        raise EngineError(f"{engine} has no config.json.", cure="Package it again with: stoker package lmi ENGINE.")
    return None


def model_type(checkpoint: Path) -> str:
    """model_type of the checkpoint's config.json; empty when there is none to read."""
    kind = read_config(checkpoint).get("model_type")
    return kind if isinstance(kind, str) else ""


def _file(path: Path, asked: Collected) -> Iterator[Found]:
    if not path.is_file():
        return
    for key, entry in properties.parse(_read_bounded(path), str(path)).items():
        origin = Origin(str(path), entry.line)
        value, comment, _ = re.split(r"(\s#(?:\s|$))", entry.value + " # ", maxsplit=1)
        if comment and value != entry.value.rstrip():
            asked.note(key, "what follows # is taken for a comment; Java would make it part of the value", origin, "warning")
        yield Found("option.entryPoint" if key.lower() == "option.entrypoint" else key, value, origin, key)


def _read_bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(properties.MAX_BYTES + 1)


def _overrides(environment: Environment[str, str]) -> Iterator[Found]:
    for name, key in OVERRIDES.items():
        if environment.get(name):
            yield Found(key, environment[name], _ENVIRONMENT, name)
    megabytes = environment.get("SAGEMAKER_MAX_PAYLOAD_IN_MB", "")
    if megabytes and not environment.get("SAGEMAKER_MAX_REQUEST_SIZE"):
        if not (megabytes.isascii() and megabytes.isdigit() and len(megabytes) < 7):
            raise refusal(_ENVIRONMENT, "SAGEMAKER_MAX_PAYLOAD_IN_MB", megabytes, "it must be a whole number", "Correct the value.")
        yield Found("max_request_size", str(int(megabytes) << 20), _ENVIRONMENT, "SAGEMAKER_MAX_PAYLOAD_IN_MB")


def _named(environment: Environment[str, str]) -> Iterator[Found]:
    for name, key in ENVIRONMENT.items():
        if environment.get(name):
            yield Found(key, environment[name], _ENVIRONMENT, name)


def _options(environment: Environment[str, str]) -> Iterator[Found]:
    """OPTION_X → option.x, lower-cased when X is all capitals, digits and _; empty values count as unset, as in DJL."""
    for name, value in environment.items():
        if name.startswith("OPTION_") and value and name != "OPTION_":
            rest = name.removeprefix("OPTION_")
            rest = rest.lower() if re.fullmatch("[A-Z_0-9]+", rest) else rest
            key = {"entrypoint": "option.entryPoint", "engine": "engine"}.get(rest, f"option.{rest}")
            yield Found(key, value, _ENVIRONMENT, name)


def _serving(environment: Environment[str, str]) -> Iterator[Found]:
    for name, value in environment.items():
        if name.startswith("SERVING_") and value and name != "SERVING_":
            yield Found(name.removeprefix("SERVING_").lower(), value, _ENVIRONMENT, name)


def _refuse_adapters(folder: Path) -> None:
    if (folder / "adapters").is_dir():
        raise ConfigError(
            f"{folder / 'adapters'}: LoRA adapters are not served.", cure="Merge them into the checkpoint, and remove the folder."
        )


def _settle(asked: Collected, folder: Path, environment: Environment[str, str]) -> None:
    """Defaults, and the keys that mean something only together."""
    _settle_lengths(asked)
    _settle_quantization(asked)
    _settle_rope(asked)
    _settle_spread(asked, environment)
    asked.default("runtime.policy", "max_utilization")
    asked.default("runtime.max_queue_size", 1000)
    if visible_gpus(environment):
        asked.default("runtime.kv_cache_fraction", _KV_FRACTION)
    asked.default("server.load_timeout_s", 1800)
    asked.default("server.request_timeout_s", 120)
    asked.default("server.http_port", 8080)
    if folder.is_relative_to(CONTAINER) or environment.get("SAGEMAKER_BIND_TO_PORT"):
        asked.set("server.host", "0.0.0.0", Origin("SageMaker's container contract"))
    asked.default("server.max_request_bytes", _MAX_REQUEST_BYTES)
    asked.default("options.rolling_batch", asked.get("options.batch_size", 1) == 1)
    streaming = asked.drop("streaming")
    if streaming and streaming.value:
        asked.default("options.output_formatter", "jsonlines")
    if asked.get("build.checkpoint") is None:
        asked.set("build.checkpoint", str(folder), Origin("default"))


def _settle_lengths(asked: Collected) -> None:
    total = asked.get("limits.max_total_len")
    longest_input, longest_output = _OTHER_LENGTHS if total is None else (total - 1, total - 1)
    asked.default("limits.max_batch_size", _BATCH_SIZE)
    asked.default("limits.max_input_len", longest_input)
    asked.default("limits.max_output_len", longest_output)


_QUANTIZATION_DEFAULTS: dict[str, dict[str, Any]] = {
    "SMOOTH_QUANT": {"alpha": 0.8, "per_token": False, "per_channel": False},
    "AWQ": {"calibration_size": 32, "group_size": 128},
}


def _settle_quantization(asked: Collected) -> None:
    """AWQ.X, SMOOTH_QUANT.X and any.X become settings of the chosen quantization; those of another have no effect, and a note says so."""
    chosen = asked.get("build.quantization")
    for place in sorted(asked.places(), key=lambda p: p.startswith("any.")):
        owner, _, name = place.partition(".")
        if owner not in ("SMOOTH_QUANT", "AWQ", "any"):
            continue
        setting = asked.where(place)
        asked.drop(place)
        if owner not in (chosen, "any") or chosen is None:
            text = f"it belongs to {'option.quantize' if owner == 'any' else owner}, and option.quantize is {chosen or 'not set'}"
            asked.note(setting.key, text, setting.origin, "warning")
        else:
            asked.set(f"quantization.{name}", setting.value, setting.origin, setting.key)
    for name, value in _QUANTIZATION_DEFAULTS.get(chosen, {}).items():
        asked.default(f"quantization.{name}", value)


def _settle_rope(asked: Collected) -> None:
    pair = ("extra.rotary_scaling_type", "extra.rotary_scaling_factor")
    given = [place for place in pair if asked.get(place) is not None]
    if len(given) == 1:
        alone = asked.where(given[0])
        raise refusal(
            alone.origin, alone.key, alone.value, "rotary_scaling_type and rotary_scaling_factor go together", "Set both, or neither."
        )


def _settle_spread(asked: Collected, environment: Environment[str, str]) -> None:
    """tensor_parallel_degree=max, the default, is the number of visible GPUs divided by the pipeline degree; 1 without a GPU."""
    gpus = visible_gpus(environment)
    pipeline = asked.get("mapping.pipeline_parallel", 1)
    given = asked.get("mapping.tensor_parallel", 0)
    if given == 0:
        held = asked.drop("mapping.tensor_parallel")
        origin, key = (held.origin, held.key) if held else (Origin("default"), "option.tensor_parallel_degree")
        asked.set("mapping.tensor_parallel", max(1, gpus // pipeline), origin, key)
    setting = asked.where("mapping.tensor_parallel")
    world_size = setting.value * pipeline
    check_world(world_size, gpus, str(setting.origin), setting.key)
    if world_size > 1 and not gpus:
        asked.note(setting.key, f"no GPU is visible: {world_size} ranks share the CPU", setting.origin, "warning")


def _deployment(asked: Collected, folder: Path, environment: Environment[str, str]) -> Deployment:
    _settle_devices(asked, environment)
    named = environment.get("HF_MODEL_ID", "")
    options = asked.build(LMIOptions, "options")
    checkpoint = asked.get("build.checkpoint")
    build = BuildOptions(
        **asked.under("build") | {"checkpoint": _inside(folder, checkpoint)},
        quantization_settings=asked.under("quantization"),
        limits=asked.build(Limits, "limits"),
        mapping=asked.build(Mapping, "mapping"),
        extra=asked.under("extra"),
        token_secret="HF_TOKEN",
    )
    deployment = Deployment(
        format="lmi",
        path=str(folder),
        source=build,
        tokenizer=build.tokenizer,
        runtime=asked.build(RuntimeConfig, "runtime"),
        server=asked.build(
            ServerSettings,
            "server",
            model_name=re.sub(r"\W", "_", named) if named and checkpoint == named else folder.resolve().name,
            protocols=("sagemaker", "openai"),
            options=options,
        ),
        settings=asked.rows(),
        notes=tuple(asked.notes),
    )
    local = Path(build.checkpoint).expanduser()
    return complete(deployment, local) if local.is_dir() else deployment


def _inside(folder: Path, location: str) -> str:
    """A relative path is looked for in the model folder first, where LMI's Python process runs."""
    inside = folder / location
    return str(inside) if "://" not in location and not Path(location).is_absolute() and inside.exists() else location


def _settle_devices(asked: Collected, environment: Environment[str, str]) -> None:
    """load_on_devices: indices separated by ; or ,; * is all."""
    setting = asked.drop("runtime.devices")
    if setting is None or setting.value in ("", "*"):
        return
    parts = [part.strip().removeprefix("gpu") for part in re.split("[;,]", setting.value)]
    if not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise refusal(setting.origin, setting.key, setting.value, "it must be device indices separated by ;, or *", "Write 0;1, or *.")
    world_size = asked.get("mapping.tensor_parallel", 1) * asked.get("mapping.pipeline_parallel", 1)
    if len(parts) != world_size:
        limit = f"{world_size} ranks need as many devices, and it names {len(parts)}"
        raise refusal(setting.origin, setting.key, setting.value, limit, "Name one device a rank, or set option.tensor_parallel_degree.")
    if visible_gpus(environment):
        asked.set("runtime.devices", tuple(map(int, parts)), setting.origin, setting.key)
    else:
        asked.note(setting.key, "no GPU is visible; every rank runs on the CPU", setting.origin, "warning")


def _as_engine(deployment: Deployment, engine: Path) -> Deployment:
    """The deployment with the build replaced by a finished engine; build keys that a person set get a note, but for the ranks."""
    assert isinstance(deployment.source, BuildOptions)
    given = [s for s in deployment.settings if s.section == "build" and s.origin.source != "default"]
    ranks = [s for s in given if s.name in ("tensor_parallel", "pipeline_parallel")]
    text = "the engine is built already; what it was built with stays"
    baked = [s for s in given if s not in ranks and s.name not in ("checkpoint", "revision", "tokenizer")]
    source = EngineSource(location=str(engine), mapping=deployment.source.mapping if ranks else None)
    beside = engine.parent  # where the layout has its tokenizer files
    own = str(beside) if (beside / "tokenizer.json").is_file() else None
    return msgspec.structs.replace(
        deployment,
        source=source,
        tokenizer=deployment.tokenizer or own,
        settings=tuple(s for s in deployment.settings if s.section != "build" or s in ranks),
        notes=deployment.notes + tuple(Note(severity="warning", key=s.key, text=text, origin=s.origin) for s in baked),
    )


_VERSIONS: dict[str, tuple[str, ...]] = {
    "baichuan_model_version": ("baichuan",),
    "chatglm_model_version": ("chatglm", "glm", "glm4"),
    "gpt_model_version": ("gpt2", "gpt_bigcode", "starcoder2"),
}


def _check_version(deployment: Deployment, kind: str) -> None:
    """A *_model_version of another family than the checkpoint's is refused; the checkpoint's own config decides the rest."""
    given: dict[str, Any] = getattr(deployment.source, "extra", {})
    for name, families in _VERSIONS.items():
        if kind and name in given and kind not in families:
            setting = next(s for s in deployment.settings if s.name == name)
            limit = f"it is for {', '.join(families)}, and the checkpoint's model_type is {kind}"
            raise refusal(setting.origin, setting.key, setting.value, limit, "Remove it.")


FORMATS.add("lmi", Format(name="lmi", recognise=recognise, load=load, complete=complete, export=export))
