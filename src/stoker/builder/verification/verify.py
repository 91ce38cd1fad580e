"""Verifies a written engine before it is published."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stoker.builder.background_compile import Progress
from stoker.builder.build_plan import BuildPlan
from stoker.builder.calibration.calibrate import calibrate_layers
from stoker.builder.conversion.shard_plan import ShardPlan
from stoker.builder.recipe import is_quantized
from stoker.builder.verification.accuracy import check_accuracy
from stoker.builder.verification.greedy_tokens import GreedyComparison, compare_greedy_tokens
from stoker.builder.verification.stored_files import verify_files


def verify_engine(plan: BuildPlan, work: Path, verify: str, progress: Progress) -> dict[str, Any]:
    """Verify the engine in directory `work`. `verify` is files, auto or full, as in `build`.

    Returns the findings for config.json. Raises EngineError for a damaged file, and when the engine's tokens or its accuracy are wrong.
    """
    config = plan.config
    layouts = [ShardPlan(config, rank).layouts() for rank in range(config.mapping.world_size)]
    with ThreadPoolExecutor(1, "verify") as pool:
        files = pool.submit(verify_files, work, layouts, partial(progress, "verify"))
        try:
            checks = _compare_with_checkpoint(plan, work, verify == "full", progress) if verify != "files" else {}
        finally:
            files.result()  # raises first: a damaged file explains all other errors
    return {"files": "digests and tensors as planned"} | checks


def _compare_with_checkpoint(plan: BuildPlan, work: Path, even_if_slow: bool, progress: Progress) -> dict[str, Any]:
    """The results of comparing tokens and accuracy with the checkpoint, for config.json."""
    config = plan.config
    checks: dict[str, Any] = {"greedy": msgspec.to_builtins(_compare_greedy_tokens(plan, work, even_if_slow, progress))}
    if is_quantized(config.recipe):
        # Rank files hold shards only, so for several ranks the calibrated layers are loaded again.
        calibrated = calibrate_layers(plan, work, progress) if config.mapping.world_size > 1 else None
        accuracy = check_accuracy(plan, work, even_if_slow=even_if_slow, progress=progress, calibrated=calibrated)
        checks["accuracy"] = msgspec.to_builtins(accuracy)
    return checks


def _compare_greedy_tokens(plan: BuildPlan, work: Path, even_if_slow: bool, progress: Progress) -> GreedyComparison:
    """The comparison of greedy tokens, or the reason why it is skipped."""
    if plan.settings.changes_positions:
        return GreedyComparison(skipped="the rotary settings differ from the checkpoint's")
    return compare_greedy_tokens(
        work,
        plan.checkpoint,
        even_if_slow=even_if_slow,
        trust_remote_code=plan.settings.trust_remote_code,
        progress=partial(progress, "compare"),
    )
