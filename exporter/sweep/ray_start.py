"""Ray itself: one of this process, or the cluster that somebody has started."""

from __future__ import annotations

import os
import socket
from typing import Any

from effexport.errors import MissingExtraError, UserError
from effexport.sweep.attempt import Limits, Work, run_attempt
from effexport.sweep.cluster import RayExecutor, short
from effexport.sweep.gpus import gpus_here

LOCAL_STORE_BYTES = 512 * 2**20
CONNECT_SECONDS = 10.0


def import_ray() -> Any:
    """Raises MissingExtraError without Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Ray", "sweep", remark="without --address, a sweep does without it") from error
    return ray


def local_executor(limits: Limits, *, jobs: int, work: Work = run_attempt) -> RayExecutor:
    """A Ray of this process, which ends with it. Raises MissingExtraError and UserError."""
    ray = import_ray()
    gpus = gpus_here()
    architectures = [gpu.architecture for gpu in gpus]
    try:
        ray.init(
            address="local",
            num_cpus=jobs,
            num_gpus=len(gpus),
            resources={name: float(architectures.count(name)) for name in architectures},
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=True,
            logging_level="ERROR",
            object_store_memory=LOCAL_STORE_BYTES,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"Ray does not start here: {error}; add --processes to do without it") from error
    return RayExecutor(ray, f"this machine by Ray, {jobs} at a time", limits, cpus=1, wait_seconds=0, work=work)


def check_reachable(address: str) -> None:
    """Ray itself tries for minutes. Raises UserError where nothing listens at host:port; other addresses are Ray's."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"no Ray cluster at --address {address}: {error}; expected host:port of its head, as ray start printed it, "
            "or auto on one of its nodes"
        ) from error


def cluster_executor(
    address: str, limits: Limits, *, cpus: float, wait_seconds: float, work: Work = run_attempt
) -> RayExecutor:
    """The cluster at `address`. Raises MissingExtraError, and UserError where there is none that can be used."""
    ray = import_ray()
    if address.startswith("ray://"):
        raise UserError(
            f"--address is {address}; Ray's client cannot send artifacts back. Run effexport on a node of the cluster, "
            "with --address auto"
        )
    check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"no Ray cluster at --address {address}: {short(error)}; expected host:port of its head, as ray start "
            "printed it, or auto on one of its nodes"
        ) from error
    nodes = sum(node["Alive"] for node in ray.nodes())
    title = f"the cluster at {address}, {nodes} {'node' if nodes == 1 else 'nodes'}"
    return RayExecutor(ray, title, limits, cpus=cpus, wait_seconds=wait_seconds, work=work)
