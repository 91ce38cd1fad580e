"""Writes the files of an engine into a workspace: tokenizer, generation settings, and the weights of each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from stoker.builder.background_compile import Progress
from stoker.builder.build_plan import BuildPlan
from stoker.builder.calibration.calibrate import calibrate_layers
from stoker.builder.conversion.layouts import stored_layouts
from stoker.builder.conversion.shard_plan import ShardPlan, specs_in_file_order
from stoker.builder.generation_config import write_generation_config
from stoker.builder.tokenizers.tokenizer_files import write_tokenizer
from stoker.engine.config import EngineConfig, rank_metadata
from stoker.engine.config_file import CONFIG_FILE, rank_file_name
from stoker.engine.file_record import FileRecord, record_file
from stoker.engine.publish import write_config
from stoker.engine.reader import HUGGING_FACE_CONFIG_FILE
from stoker.engine.safetensors_header import num_bytes
from stoker.engine.safetensors_writer import PINNED_BYTES, SafetensorsWriter


def write_engine(plan: BuildPlan, work: Path, progress: Progress) -> EngineConfig:
    """Write every file of the engine into directory `work`, config.json last. Returns the config with the written files."""
    checkpoint, settings = plan.checkpoint, plan.settings
    # A dummy build may have no tokenizer: config.json is sufficient.
    if not settings.dummy_weights or settings.tokenizer is not None or (checkpoint.path / "tokenizer.json").is_file():
        write_tokenizer(checkpoint, settings.tokenizer, work, trust_remote_code=settings.trust_remote_code)
    write_generation_config(checkpoint, work)
    plain = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (work / HUGGING_FACE_CONFIG_FILE).write_text(json.dumps(plain, indent=1) + "\n")
    files = {file.name: record_file(file) for file in sorted(work.iterdir())}
    if not settings.dummy_weights:
        files |= _write_weights(plan, work, progress)
    written = msgspec.structs.replace(plan.config, files=files)
    write_config(work, written)
    return written


def record_new_files(work: Path, known: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """The `known` records, and records of files that were added to `work` later."""
    new = {file.name: record_file(file) for file in sorted(work.iterdir()) if file.name not in known and file.name != CONFIG_FILE}
    return dict(known) | new


def _write_weights(plan: BuildPlan, work: Path, progress: Progress) -> dict[str, FileRecord]:
    """Convert each tensor once, and write the shards of all ranks. One thread per file writes, and one computes the digest."""
    config = plan.config
    shards = {rank_file_name(rank): ShardPlan(config, rank) for rank in range(config.mapping.world_size)}
    specs = specs_in_file_order(config)
    converter = plan.converter(calibrated=calibrate_layers(plan, work, progress) or plan.stored_cache())
    layouts = [layout for spec in specs for layout in stored_layouts(spec, config.recipe, plan.dtype).values()]
    total, done = sum(num_bytes(layout.shape, layout.dtype) for layout in layouts), 0
    with ExitStack() as stack:
        writers = {
            file: stack.enter_context(
                SafetensorsWriter(work / file, shard.layouts(), rank_metadata(config, rank), PINNED_BYTES // len(shards))
            )
            for rank, (file, shard) in enumerate(shards.items())
        }
        for spec in specs:
            local = {file: shard.layouts_of(spec) for file, shard in shards.items()}
            for name, tensor in converter.convert(spec):
                for file, shard in shards.items():
                    if name in local[file]:
                        writers[file].write(name, shard.shard_of(spec, name, tensor))
                done += tensor.numel() * tensor.element_size()
                progress("weights", done, total)
        return {file: writer.finish() for file, writer in writers.items()}
