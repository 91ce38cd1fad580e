"""Settings, placement, scaling and exports of the Ray Serve application, without a Ray cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from stoker.base.errors import ConfigError
from stoker.cli.command_table import command_group
from stoker.cli.commands import COMMANDS
from stoker.cli.main import SUMMARY, global_options
from stoker.cli.ray_options import read_application
from stoker.ray.autoscaling import INGRESS_WAITING, KV_USAGE, SEQUENCES, EnginePolicy
from stoker.ray.export import KubeSettings, arguments_of, export_ray
from stoker.ray.placement import place_replica
from stoker.ray.settings import ApplicationSettings, EngineSettings, read_settings

APP = command_group("stoker", COMMANDS, SUMMARY, global_options)
ENGINE = {"model": "org/model"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "missing required field `engines`"),
        ({"engines": []}, "engines is empty"),
        ({"engines": [{}]}, "missing required field `model`"),
        ({"engines": [{**ENGINE, "replicas": 2}]}, "unknown field `replicas`"),
        ({"engines": [{**ENGINE, "nodes": "two"}]}, "Expected `int`, got `str` - at `$.engines[0].nodes`"),
        ({"engines": [{**ENGINE, "min_replicas": 3, "max_replicas": 2}]}, "max_replicas=2 is refused"),
        ({"engines": [{**ENGINE, "target_kv_usage": 2}]}, "target_kv_usage=2"),
        ({"engines": [{**ENGINE, "serve": {"grpc_port": 1}}]}, "serve: the option grpc_port is refused with Ray"),
        ({"engines": [{**ENGINE, "env": {"STOKER_API_KEY": "k"}}]}, "env: STOKER_API_KEY is refused, because Ray shows"),
        ({"engines": [{**ENGINE, "command": "a 'b"}]}, "is refused: No closing quotation"),
        ({"engines": [ENGINE, ENGINE]}, "two engines have the name 'model'"),
        ({"engines": [ENGINE], "ingress": {"replicas": 0}}, "replicas=0 is refused"),
        ({"engines": [ENGINE], "ingress": {"policy": "random"}}, "policy='random' is refused"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(args)
    assert message in str(caught.value) and "\n" not in caught.value.message


def test_an_engine_of_the_cache_has_the_name_of_its_model(tmp_path: Path) -> None:
    """Its folder is named after a digest."""
    engine = tmp_path / ("0123456789" * 4)
    engine.mkdir()
    (engine / "config.json").write_text('{"checkpoint": {"name": "org/Qwen3-8B"}}')
    assert EngineSettings(model=str(engine)).name == "Qwen3-8B"


def test_placement() -> None:
    assert place_replica(EngineSettings(model="org/model", serve={"device": "cpu"})).bundles == ({"CPU": 1},)
    placed = place_replica(
        EngineSettings(
            model="org/model", nodes=2, serve={"tensor-parallel": 4, "pipeline-parallel": 2}, accelerator_type="H100", resources={"rack": 1}
        )
    )
    assert placed.strategy == "STRICT_SPREAD"
    assert placed.bundles == ({"CPU": 4, "GPU": 4, "accelerator_type:H100": 0.001, "rack": 1},) * 2
    assert placed.actor_options == {"num_cpus": 4, "num_gpus": 4, "resources": {"accelerator_type:H100": 0.001, "rack": 1}}
    with pytest.raises(ConfigError, match="nnodes=3 is refused"):
        place_replica(EngineSettings(model="org/model", nodes=3, serve={"tensor_parallel": 4}))
    with pytest.raises(ConfigError, match="model=/absent/engine does not exist"):
        place_replica(EngineSettings(model="/absent/engine"))


@pytest.mark.parametrize("model", ["./absent", "~/absent", "models/of/absent", "absent"])
def test_a_model_that_does_not_exist_is_refused_before_the_start(model: str) -> None:
    with pytest.raises(ConfigError, match=f"model={model} does not exist"):
        place_replica(EngineSettings(model=model))


def test_another_program_may_know_other_names() -> None:
    assert place_replica(EngineSettings(model="name", gpus=0, command="container stoker")).bundles == ({"CPU": 1},)


@pytest.mark.parametrize(
    ("sequences", "usage", "waiting", "replicas"),
    [([0, 0], [0, 0], 0, 0), ([1], [0.0], 0, 1), ([20, 20], [0.1, 0.1], 0, 2), ([32, 32], [0.1, 0.1], 30, 3), ([4, 4], [0.9, 0.9], 0, 3)],
)
def test_the_policy_considers_requests_and_kv_usage(sequences: list[float], usage: list[float], waiting: float, replicas: int) -> None:
    metrics = {
        SEQUENCES: dict(enumerate(sequences)), KV_USAGE: dict(enumerate(usage)), INGRESS_WAITING: dict.fromkeys(range(len(usage)), waiting)
    }  # fmt: skip
    policy = EnginePolicy(target_requests=32, target_kv_usage=0.8)
    assert policy(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=7)) == (replicas, {})
    assert policy(SimpleNamespace(aggregated_metrics={}, target_num_replicas=7)) == (7, {})


def test_the_exported_files(tmp_path: Path) -> None:
    """The application in the file is the exported one; Ray's own schema accepts the file."""
    schema = pytest.importorskip("ray.serve.schema")
    engines = (EngineSettings(model="org/one", max_replicas=4, min_replicas=0, nodes=2, gpus=4), EngineSettings(model="org/two", gpus=1))
    settings = ApplicationSettings(engines=engines)
    config, manifest = export_ray(settings, tmp_path, KubeSettings(image="registry/stoker:ray", claim="models"))
    assert read_application(config) == settings == read_settings(arguments_of(settings))
    schema.ServeDeploySchema.model_validate(yaml.safe_load(config.read_text()))
    service = yaml.safe_load(manifest.read_text())
    schema.ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    one, two = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (one["minReplicas"], one["maxReplicas"], two["replicas"]) == (0, 8, 1)
    container = one["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4" and container["image"] == "registry/stoker:ray"
    with pytest.raises(ConfigError, match=r"serve\.yaml exists"):
        export_ray(settings, tmp_path)


def test_the_manifest_has_the_fields_of_kuberay(tmp_path: Path) -> None:
    """The schema was written from the published API reference of `ray.io/v1`: it knows no field that is not there."""
    one = EngineSettings(model="org/one", max_replicas=4, min_replicas=0, nodes=2, gpus=4, resources={"rack": 1})
    settings = ApplicationSettings(engines=(one, EngineSettings(model="org/two", gpus=0)))
    for name, kube in (("all", {"claim": "models", "memory": "1.5Ti", "name": "llm-1"}), ("least", {})):
        _, manifest = export_ray(settings, tmp_path / name, KubeSettings(image="registry:5000/a/stoker@sha256:0", **kube))
        schema = json.loads((Path(__file__).parent / "kuberay_schema.json").read_text())
        Draft202012Validator(schema).validate(yaml.safe_load(manifest.read_text()))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "1st"}, "name='1st' is refused"),
        ({"name": "ends-"}, "name='ends-' is refused"),
        ({"image": "a b"}, "image='a b' is refused"),
        ({"claim": "Models"}, "claim='Models' is refused"),
        ({"memory": "64 GB"}, "memory='64 GB' is refused"),
        ({"mount_path": "models"}, "mount_path='models' is refused"),
        ({"workers": 3}, "workers=3 is refused for the engine model. Use 2 to 2"),
        ({"max_workers": 1}, "max_workers=1 is less than the 2 hosts of min_replicas of the engine model"),
    ],
)
def test_what_kubernetes_would_refuse_is_not_written(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        settings = ApplicationSettings(engines=(EngineSettings(model="org/model", nodes=2, gpus=1),))
        export_ray(settings, tmp_path / "app", KubeSettings(**{"image": "stoker", **setting}))
    assert message in str(caught.value) and not (tmp_path / "app").exists()


def test_options_of_the_command_line(tmp_path: Path) -> None:
    options = [
        "--ray",
        "--ray-max-replicas",
        "3",
        "--kv-cache-fraction",
        "0.5",
        "--reasoning-parser",
        "auto",
        "--model-name",
        "m",
        "--dry-run",
    ]
    done = CliRunner().invoke(APP, ["serve", "org/model", *options, "--dry-run"])
    (application,) = yaml.safe_load(done.stdout)["applications"]
    (engine,) = application["args"]["engines"]
    assert engine["name"] == "m" and engine["max_replicas"] == 3
    assert engine["serve"] == {"kv-cache-fraction": 0.5, "reasoning-parser": "auto"}
    (tmp_path / "serve.yaml").write_text(done.stdout)
    again = CliRunner().invoke(APP, ["serve", "--ray", "--ray-config", str(tmp_path / "serve.yaml"), "--dry-run"])
    assert json.dumps(yaml.safe_load(again.stdout)["applications"]) == json.dumps([application])
    for arguments, message in (
        (["org/model", "--ray-nodes", "2"], "ray_nodes=2 requires --ray"),
        (["--ray", "--ray-config", str(tmp_path / "absent")], "cannot be read"),
        (["org/model", "--ray", "--ray-config", str(tmp_path / "serve.yaml")], "model is refused together with ray_config"),
        (["--ray"], "no model is given"),
    ):
        refused = CliRunner().invoke(APP, ["serve", *arguments, "--dry-run"])
        assert isinstance(refused.exception, ConfigError) and message in str(refused.exception)


def test_ray_is_imported_with_the_option_only() -> None:
    code = "import sys, stoker.cli.commands.serve, stoker.ray.settings, stoker.ray.export; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
