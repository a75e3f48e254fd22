"""The same application on Ray Serve, with autoscaling replicas on one or many machines."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from effexport.base.errors import EffexportError, UserError
from effexport.base.option_fields import A_NUMBER, Options, option
from effexport.base.runtimes import RUNTIMES

if TYPE_CHECKING:
    from effexport.serving.http.models import ServingTarget

# Each attempt takes up to a minute, in which Ray waits for its proxies.
START_ATTEMPTS = 3


RAY = "On Ray Serve"


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings(Options):
    """Number and resources of the replicas. replica_cpus: also the threads of ONNX Runtime."""

    address: str | None = option(None, "Of a cluster; default: this machine.", RAY, metavar="ADDRESS")
    min_replicas: int = option(1, "Fewest replicas.", RAY, metavar=A_NUMBER)
    max_replicas: int = option(4, "Most replicas.", RAY, metavar=A_NUMBER)
    replica_cpus: float = option(1.0, "CPUs of a replica.", RAY, metavar=A_NUMBER)
    replica_gpus: float | None = option(None, "GPUs of a replica; default: 1 if it needs one.", RAY, metavar=A_NUMBER)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise UserError(
                f"--min-replicas is {self.min_replicas} and --max-replicas {self.max_replicas}; expected 1 or "
                "more, and a maximum that is not smaller"
            )
        for name, value, low in (("cpus", self.replica_cpus, 0.1), ("gpus", self.replica_gpus or 0.0, 0.0)):
            if not low <= value < math.inf:
                raise UserError(f"--replica-{name} is {value:g}; expected at least {low:g}")

    def gpus(self, runtime: str) -> float:
        """GPUs of a replica: a whole one by default if the runtime needs one."""
        needed = 1.0 if RUNTIMES[runtime].device == "cuda" else 0.0
        return needed if self.replica_gpus is None else self.replica_gpus


def application(target: ServingTarget, replicas: ReplicaSettings) -> Any:
    """The Ray Serve application. Every replica opens the artifact at the same path, on its own machine."""
    from ray import serve

    settings = target.settings.absolute()
    options = replace(target.options, threads=max(1, int(replicas.replica_cpus)))
    target = replace(target, artifact=target.artifact.resolve(), settings=settings, options=options)

    def build_app() -> Any:
        from effexport.serving.http.models import ModelRepository
        from effexport.serving.http.server import create_app

        return create_app(ModelRepository([target.load()], settings))

    deployment = serve.deployment(
        name="effexport",
        # every replica has its own queue and answers 503 when it is full
        max_ongoing_requests=settings.queue_size + settings.max_batch,
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            # one batch running and one waiting; beyond that, another replica helps
            "target_ongoing_requests": 2 * settings.max_batch,
        },
        ray_actor_options={"num_cpus": replicas.replica_cpus, "num_gpus": replicas.gpus(options.runtime)},
        # a replica answers accepted requests before it stops
        graceful_shutdown_timeout_s=settings.timeout_s,
    )
    return deployment(serve.ingress(build_app)()).bind()


def deploy_until_stopped(
    target: ServingTarget, replicas: ReplicaSettings, host: str, port: int, on_ready: Callable[[str, str], None]
) -> None:
    """Serve on this machine until SIGTERM or Ctrl-C, or deploy on a cluster and return.

    on_ready: called with URL and model name when the application answers. The artifact is checked here first.
    Raises UserError if the artifact or the cluster cannot be used, EffexportError if no replica starts.
    """
    import ray
    from ray import serve

    from effexport.serving.http.server import bound_socket

    # what cannot be served would otherwise fail in the log of a replica
    _, name = target.checked()
    # Ray reports a port that is taken only after minutes
    if port == 0:
        raise UserError("--port is 0; Ray Serve cannot pick a free port: choose one")
    if replicas.address is None:
        bound_socket(host, port).close()
    connect(replicas.address)
    try:
        start_proxies(host, port)
        try:
            serve.run(application(target, replicas), name=name, route_prefix="/")
        except (RuntimeError, TimeoutError) as error:
            raise EffexportError(f"Ray Serve did not bring up {name}: {error}") from error
        on_ready(f"http://{host}:{port}", name)
        if replicas.address is None:
            wait_for_signal()
            serve.shutdown()
    finally:
        ray.shutdown()


def start_proxies(host: str, port: int) -> None:
    """Start Ray's proxies; on a busy machine this may take longer than the minute that Ray waits."""
    from ray import serve

    for attempt in range(START_ATTEMPTS):
        try:
            serve.start(http_options={"host": host, "port": port, "request_timeout_s": None})
            return
        except TimeoutError as error:
            if attempt + 1 == START_ATTEMPTS:
                raise EffexportError(f"Ray Serve did not start in {START_ATTEMPTS} minutes: {error}") from error


def wait_for_signal() -> None:
    """Wait for SIGTERM or Ctrl-C. Replaces Ray's signal handlers, which end the process as a failure."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    # on some platforms, signal handlers do not run during a wait without a limit
    while not stop.wait(1.0):
        pass
    for number, handler in before.items():
        signal.signal(number, handler)


def connect(address: str | None) -> None:
    """Start Ray on this machine, or connect to a cluster. Raises UserError if no cluster answers."""
    import ray

    # no usage reports unless the user enables them
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False)
        return
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"no Ray cluster answers at --address {address!r}: {error}") from error
