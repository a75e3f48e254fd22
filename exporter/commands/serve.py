"""`effexport serve`."""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._options import (
    common_options,
    implementation_text,
    length_option,
    runtime_options,
    stage_progress,
    stderr_console,
)
from effexport.errors import MissingExtraError, UserError
from effexport.one_line import say
from effexport.runtimes import ARTIFACT_RUNTIMES
from effexport.serving.engine.settings import ServingSettings
from effexport.units import bytes_from_text, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from effexport.serving.http.models import ServedModel, ServingTarget

TOKEN_VARIABLE = "EFFEXPORT_SERVE_TOKEN"
SERVER_MODULES = ("starlette", "uvicorn", "httptools", "orjson", "prometheus_client")
# Modules whose package has another name.
PACKAGES = {"prometheus_client": "prometheus-client", "ray.serve": "ray[serve]"}
LAST_PORT = 65535
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def setting(option: str, field: str, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option for a field of ServingSettings, with its type and its default."""
    default = getattr(ServingSettings(), field)
    return click.option(option, field, type=type(default), default=default, show_default=True, help=help)


@click.command("serve")
@click.argument("artifacts", metavar="ARTIFACT...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--name",
    "names",
    multiple=True,
    help="The model's name in URLs; for several artifacts, once for each, in their order.  [default: the names of the "
    "artifacts' folders]",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 listens on all interfaces."
)
@click.option("--port", type=int, default=8000, show_default=True, help="Port; 0 picks a free one.")
@runtime_options(ARTIFACT_RUNTIMES)
@setting("--max-batch", "max_batch", "Largest batch of a run, in rows.")
@setting(
    "--max-padding",
    "max_padding",
    "Largest share of padding in the tokens of a run, which lets requests of different lengths share runs; 0: none.",
)
@click.option(
    "--max-run-tokens",
    type=int,
    help="Largest number of tokens of a run that requests share.  [default: 256 for each core; no limit on a GPU]",
)
@click.option(
    "--concurrent-runs",
    type=int,
    help="Runs of a model at a time, which share its threads.  [default: 2 for ort on several cores, otherwise 1]",
)
@setting("--batch-delay-ms", "batch_delay_ms", "How long a run waits for more requests to fill its batch.")
@setting("--queue-size", "queue_size", "Requests that may wait; further ones are answered with 503.")
@setting("--max-sessions", "max_sessions", "Texts that a model generates at a time; further ones get a 503.")
@setting("--max-request-bytes", "max_request_bytes", "Largest request body, before and after decompression.")
@length_option("--max-seq-len", help="Longest sequence, in tokens.  [default: the model's own limit, or 16384]")
@setting("--timeout", "timeout_s", "Seconds that a request may wait for its run, and that its body may take to arrive.")
@click.option(
    "--allow-load",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Let clients load artifacts that are directly in this folder, and unload models.  [default: neither]",
)
@click.option(
    "--max-memory",
    metavar="SIZE",
    help="Load no model beyond this memory of the process, such as 8GiB.  [default: no limit]",
)
@click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    help=f"Require Authorization: Bearer TOKEN everywhere, /metrics included, except at /v2/health; better set with "
    f"{TOKEN_VARIABLE}.",
)
@click.option("--ray", "on_ray", is_flag=True, help="Deploy on Ray Serve with autoscaling replicas.")
@click.option("--address", help="With --ray: address of the cluster.  [default: this machine]")
@click.option("--min-replicas", type=int, help="With --ray: fewest replicas.  [default: 1]")
@click.option("--max-replicas", type=int, help="With --ray: most replicas.  [default: 4]")
@click.option("--replica-cpus", "cpus", type=float, help="With --ray: CPUs per replica.  [default: 1]")
@click.option(
    "--replica-gpus", "gpus", type=float, help="With --ray: GPUs per replica.  [default: 1 for runtimes on a GPU]"
)
@common_options
def command(
    artifacts: tuple[Path, ...],
    names: tuple[str, ...],
    host: str,
    port: int,
    runtime: str,
    implementation: str,
    device: int,
    allow_load: Path | None,
    max_memory: str | None,
    on_ray: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Serve artifacts over HTTP with the KServe V2 protocol, until SIGTERM or Ctrl-C.

    Each model has its own queue. Requests of similar length to one model run as one batch. When the server stops, it
    still answers accepted requests. With --json, it prints one object with its URL on stdout as soon as it is ready.
    """
    from effexport.serving.http.models import ServingTarget

    if not 0 <= port <= LAST_PORT:
        raise UserError(f"--port is {port}; expected 0 to {LAST_PORT}")
    flags["max_memory_bytes"] = None if max_memory is None else bytes_from_text(max_memory, "--max-memory")
    settings = ServingSettings(**{field.name: flags.pop(field.name) for field in fields(ServingSettings)})
    if allow_load is not None and not allow_load.is_dir():
        raise UserError(f"--allow-load is {allow_load}, which is not a folder; expected a folder of artifacts")
    if names and len(names) != len(artifacts):
        raise UserError(
            f"--name is given {counted(len(names), 'time')} for {counted(len(artifacts), 'artifact')}; expected one "
            "name for each artifact, in their order, or none"
        )
    targets = [
        ServingTarget(artifact, name, runtime, implementation, settings, device=device)
        for artifact, name in zip(artifacts, names or [None] * len(artifacts), strict=True)
    ]
    # the other options are fields of ReplicaSettings
    replicas = {option: value for option, value in flags.items() if value is not None}
    if on_ray:
        if device:
            raise UserError(
                f"--device {device} does not work with --ray, which gives each replica its GPUs; leave it out"
            )
        if len(targets) > 1:
            raise UserError(f"--ray serves one artifact; {len(targets)} were given: deploy each with its own command")
        if allow_load is not None:
            raise UserError("--allow-load does not work with --ray, whose replicas have one model; leave it out")
        serve_on_ray(targets[0], host, port, replicas, as_json)
        return
    if replicas:
        option = next(iter(replicas)).replace("_", "-")
        option = f"--replica-{option}" if option in ("cpus", "gpus") else f"--{option}"
        raise UserError(f"{option} only works with --ray")
    serve_here(targets, allow_load, host, port, as_json)


def require(*modules: str, extra: str) -> None:
    """Raises MissingExtraError unless every module is installed."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingExtraError(PACKAGES.get(module, module), extra) from error


def serve_here(targets: Sequence[ServingTarget], allow_load: Path | None, host: str, port: int, as_json: bool) -> None:
    """Serve the models in this process."""
    require(*SERVER_MODULES, extra="serve")
    from effexport.cli import print_json
    from effexport.serving.http.models import repository_from_targets
    from effexport.serving.http.server import bound_socket, create_app, run_server, url_of

    console = stderr_console()
    bound = bound_socket(host, port)
    try:
        with stage_progress(console) as on_stage:
            models = repository_from_targets(targets, allow_load, on_stage)
    except BaseException:
        bound.close()
        raise

    def on_ready() -> None:
        for line in ready_lines(list(models), url_of(bound)):
            say(console, line)
        if host not in LOOPBACK and models.settings.token is None:
            say(console, f"warning: other machines can reach {host} and no token is required; set {TOKEN_VARIABLE}")
        if as_json:
            print_json({"url": url_of(bound), **described_models(list(models)), "ready": True})

    run_server(create_app(models), bound, on_ready)
    say(console, "stopped: every accepted request was answered")


def described_models(models: Sequence[ServedModel]) -> dict[str, object]:
    """The models for --json; `model` and `version` are there for a single model."""
    only = {"model": models[0].name, "version": models[0].version} if len(models) == 1 else {}
    return {**only, "models": [model.name for model in models]}


def serve_on_ray(target: ServingTarget, host: str, port: int, given: dict[str, object], as_json: bool) -> None:
    """Serve the same application with Ray Serve."""
    from effexport.cli import print_json

    require(*SERVER_MODULES, extra="serve")
    require("ray.serve", extra="serve-ray")
    from effexport.proof.other_answers import VERSION
    from effexport.serving.http.ray_deployment import ReplicaSettings, deploy_until_stopped

    address = given.get("address")
    console = stderr_console()

    def on_ready(url: str, name: str) -> None:
        end = "it keeps running; stop it with: serve shutdown" if address else "stop with Ctrl-C"
        say(console, f"serving {name} at {url} on Ray; {end}")
        if as_json:
            print_json({"url": url, "model": name, "version": VERSION, "models": [name], "ready": True})

    deploy_until_stopped(target, ReplicaSettings.from_options(given, target.runtime), host, port, on_ready)
    if not address:
        say(console, "stopped")


def ready_lines(models: Sequence[ServedModel], url: str) -> list[str]:
    """One line for one model; for several, a line for each and one for the server."""
    if len(models) == 1:
        return [f"serving {models[0].name} at {url} ({how_it_runs(models[0])}); stop with Ctrl-C"]
    lines = [f"{model.name}: {how_it_runs(model)}" for model in models]
    return [*lines, f"serving {len(models)} models at {url}; stop with Ctrl-C"]


def how_it_runs(model: ServedModel) -> str:
    settings = model.settings
    batches = f"not batched: {model.why_not_joined}"
    if not model.why_not_joined:
        batches = f"batched up to {settings.max_batch} rows"
        batches += f" and {settings.max_run_tokens} tokens" if settings.max_run_tokens else ""
        batches += f", {settings.max_padding:.0%} of them padding" if settings.max_padding else ", of one length"
        batches += f" because {model.why_not_padded}" if model.why_not_padded else ""
    ran = implementation_text(model.implementation, verb="runs as")
    at_once = f"; {settings.concurrent_runs} runs at a time" if (settings.concurrent_runs or 1) > 1 else ""
    return f"requests are {batches}; up to {settings.queue_size} may wait{at_once}{ran}"
