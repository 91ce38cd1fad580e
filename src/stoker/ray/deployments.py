"""Builds the Ray Serve application: one deployment for each engine, and the ingress."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from stoker.ray.engine_replica import EngineReplica
from stoker.ray.ingress import Ingress
from stoker.ray.keys import Keys, read_keys
from stoker.ray.placement import place_replica
from stoker.ray.settings import ApplicationSettings, EngineSettings

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 10.0
METRICS_S = 1.0  # how often replicas and the ingress report to the autoscaler; a start from zero waits for such a report
INGRESS_REQUESTS = 4096  # that an ingress has at the same time
INGRESS = "ingress"
ENVIRONMENT = {  # of the actors. Ray prints it. Ray Serve 2.60 announces these variables, but reads metrics_interval_s only
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": f"{METRICS_S:g}",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": f"{METRICS_S:g}",
}
# By default, Ray Serve passes each part of a request and of its response between two threads with an event loop each.
INGRESS_ENVIRONMENT = {**ENVIRONMENT, "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
LOGGING = {"enable_access_log": False}  # the router has an access log; calls of a replica are those that describe it


def build_application(settings: ApplicationSettings, grpc_address: str | None = None) -> Any:
    """The bound application. Raises ConfigError for an engine that cannot be placed, or whose keys the ingress does not have.

    `grpc_address`: where each ingress listens for gRPC, if all run on this machine; None: Ray Serve's proxies listen for it, if at all.
    """
    keys = read_keys(settings)
    engines = [_bind_engine(engine, keys) for engine in settings.engines]
    ingress = serve.deployment(
        name=INGRESS, num_replicas=settings.ingress.replicas, max_ongoing_requests=INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": settings.ingress.cpus, "runtime_env": {"env_vars": INGRESS_ENVIRONMENT}},
        health_check_period_s=HEALTH_PERIOD_S, health_check_timeout_s=HEALTH_TIMEOUT_S, graceful_shutdown_timeout_s=60,
        logging_config=LOGGING,
    )  # fmt: skip
    return ingress(serve.ingress()(Ingress)).bind(settings, keys, *engines, grpc_address=grpc_address)


def deployment_name(engine: EngineSettings) -> str:
    """The name of an engine's deployment, which Ray Serve uses in paths."""
    return "engine-" + engine.name.replace("/", "--").replace(":", "--").replace("@", "--")


def _bind_engine(engine: EngineSettings, keys: Keys) -> Any:
    """The deployment of an engine."""
    placement = place_replica(engine)
    scaling: dict[str, Any] = {"num_replicas": engine.max_replicas}
    if engine.min_replicas < engine.max_replicas:
        targets = {"target_requests": engine.target_requests, "target_kv_usage": engine.target_kv_usage}
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=engine.min_replicas, max_replicas=engine.max_replicas, initial_replicas=engine.initial_replicas,
                upscale_delay_s=engine.upscale_delay_s, downscale_delay_s=engine.downscale_delay_s, look_back_period_s=10.5,
                metrics_interval_s=METRICS_S,
                policy=AutoscalingPolicy(policy_function="stoker.ray.autoscaling.EnginePolicy", policy_kwargs=targets),
            )
        }  # fmt: skip
    options = serve.deployment(
        name=deployment_name(engine), **scaling, max_ongoing_requests=INGRESS_REQUESTS,
        ray_actor_options={**placement.actor_options, "runtime_env": {"env_vars": ENVIRONMENT}},
        placement_group_bundles=list(placement.bundles), placement_group_strategy=placement.strategy,
        health_check_period_s=HEALTH_PERIOD_S, health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=engine.drain_timeout_s + 10, max_surge_percent=engine.max_surge_percent, logging_config=LOGGING,
    )  # fmt: skip
    return options(EngineReplica).bind(engine, placement, keys)
