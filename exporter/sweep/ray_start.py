"""Start Ray on this machine, or connect to a cluster."""

from __future__ import annotations

import os
import socket
from typing import Any

from effexport.errors import MissingExtraError, UserError
from effexport.plugins.building.toolchain import gpus_here
from effexport.sweep.attempt import Limits, Work, run_attempt
from effexport.sweep.cluster import RayExecutor, short

LOCAL_STORE_BYTES = 512 * 2**20
CONNECT_SECONDS = 10.0


def import_ray() -> Any:
    """Raises MissingExtraError without Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Ray", "sweep", remark="a sweep without --address does not need it") from error
    return ray


def local_executor(limits: Limits, *, jobs: int, work: Work = run_attempt) -> RayExecutor:
    """Start Ray on this machine; it ends with this process. Raises MissingExtraError and UserError."""
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
    except Exception as error:  # Ray raises anything, also Exception itself
        raise UserError(
            f"Ray does not start on this machine: {short(error)}; add --processes to run without Ray"
        ) from error
    return RayExecutor(ray, f"this machine with Ray, {jobs} at a time", limits, cpus=1, wait_seconds=0, work=work)


def check_reachable(address: str) -> None:
    """Raises UserError if nothing listens at host:port; Ray itself would try for minutes. Ignores other addresses."""
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
    """Connect to the cluster at `address`. Raises MissingExtraError, and UserError if it cannot be used."""
    ray = import_ray()
    if address.startswith("ray://"):
        raise UserError(
            f"--address is {address}; Ray's client cannot send artifacts back. Run effexport on a node of the cluster, "
            "with --address auto"
        )
    check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise UserError(
            f"no Ray cluster at --address {address}: {short(error)}; expected host:port of its head, as ray start "
            "printed it, or auto on one of its nodes"
        ) from error
    nodes = sum(node["Alive"] for node in ray.nodes())
    title = f"the cluster at {address}, {nodes} {'node' if nodes == 1 else 'nodes'}"
    return RayExecutor(ray, title, limits, cpus=cpus, wait_seconds=wait_seconds, work=work)
