"""`effexport serve`."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.base.errors import MissingExtraError, UserError
from effexport.base.formatting import counted, say
from effexport.base.option_fields import A_FOLDER, A_NUMBER, Options, argument, given, option, options_of
from effexport.cli._console import implementation_text, stage_progress, stderr_console
from effexport.cli._verbs import verb
from effexport.options import DeviceOptions
from effexport.serving.engine.settings import TOKEN_VARIABLE, ServingSettings
from effexport.serving.http.ray_deployment import RAY, ReplicaSettings

if TYPE_CHECKING:
    from effexport.serving.http.models import ServedModel, ServingTarget

SERVER_MODULES = ("starlette", "uvicorn", "httptools", "orjson", "prometheus_client")
# Modules whose package has another name.
PACKAGES = {"prometheus_client": "prometheus-client", "ray.serve": "ray[serve]"}
LAST_PORT = 65535
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class AddressOptions(Options):
    """Artifacts and their addresses."""

    artifacts: Sequence[Path] = field(metadata=argument("Artifact folders.", metavar="ARTIFACT..."))
    _: KW_ONLY
    names: Sequence[str] = option((), "Name in URLs; repeat it for several artifacts.", flag="--name", metavar="NAME")
    host: str = option("127.0.0.1", "Address to listen on.", metavar="ADDRESS")
    port: int = option(8000, "0 picks a free one.", metavar=A_NUMBER)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DeviceOptions, ServingSettings, ReplicaSettings, AddressOptions):
    """The options of `effexport serve`."""

    allow_load: Path | None = option(None, "Let clients load and unload artifacts in it.", metavar=A_FOLDER)
    ray: bool = option(False, "Deploy on Ray Serve with autoscaling replicas.", RAY)


@verb("serve", ServeOptions)
def serve_command(options: ServeOptions, as_json: bool) -> None:
    """Serve artifacts over HTTP with the KServe V2 protocol, until SIGTERM or Ctrl-C.

    Each model has its own queue. Requests of similar length to one model run as one batch. When the server stops, it
    still answers accepted requests. With --json, it prints one object with its URL on stdout as soon as it is ready.
    """
    from effexport.runners.artifact_runner import options_from_flags
    from effexport.serving.http.models import ServingTarget

    artifacts, names = options.artifacts, options.names
    if not 0 <= options.port <= LAST_PORT:
        raise UserError(f"--port is {options.port}; expected 0 to {LAST_PORT}")
    settings = ServingSettings(**{name: getattr(options, name) for name in options_of(ServingSettings)})
    if options.allow_load is not None and not options.allow_load.is_dir():
        raise UserError(f"--allow-load is {options.allow_load}, which is not a folder; expected a folder of artifacts")
    if names and len(names) != len(artifacts):
        raise UserError(
            f"--name is given {counted(len(names), 'time')} for {counted(len(artifacts), 'artifact')}; expected one "
            "name for each artifact, in their order, or none"
        )
    how = options_from_flags(options.runtime, implementation=options.implementation, device=options.device)
    targets = [
        ServingTarget(artifact, name, how, settings)
        for artifact, name in zip(artifacts, names or itertools.repeat(None), strict=False)
    ]
    if options.ray:
        serve_on_ray(targets, options, as_json=as_json)
        return
    if replicas := given(options, ReplicaSettings):
        raise UserError(f"--{next(iter(replicas)).replace('_', '-')} only works with --ray")
    serve_here(targets, options, as_json=as_json)


def require(*modules: str, extra: str) -> None:
    """Raises MissingExtraError unless every module is installed."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingExtraError(PACKAGES.get(module, module), extra) from error


def serve_here(targets: Sequence[ServingTarget], options: ServeOptions, *, as_json: bool) -> None:
    """Serve the models in this process."""
    require(*SERVER_MODULES, extra="serve")
    from effexport.cli.main import print_json
    from effexport.serving.http.models import repository_from_targets
    from effexport.serving.http.server import bound_socket, create_app, run_server, url_of

    console = stderr_console()
    bound = bound_socket(options.host, options.port)
    try:
        with stage_progress(console) as on_stage:
            models = repository_from_targets(targets, options.allow_load, on_stage)
    except BaseException:
        bound.close()
        raise

    def on_ready() -> None:
        for line in ready_lines(list(models), url_of(bound)):
            say(console, line)
        if options.host not in LOOPBACK and models.settings.token is None:
            where = f"other machines can reach {options.host}"
            say(console, f"warning: {where} and no token is required; set {TOKEN_VARIABLE}")
        if as_json:
            print_json(json_of_server(url_of(bound), [model.name for model in models]))

    run_server(create_app(models), bound, on_ready)
    say(console, "stopped: every accepted request was answered")


def json_of_server(url: str, names: Sequence[str]) -> dict[str, object]:
    """A server that is ready, for --json; `model` and `version` are there for a single model."""
    from effexport.serving.http.models import VERSION

    only = {"model": names[0], "version": VERSION} if len(names) == 1 else {}
    return {"url": url, **only, "models": names, "ready": True}


def serve_on_ray(targets: Sequence[ServingTarget], options: ServeOptions, *, as_json: bool) -> None:
    """Serve the same application with Ray Serve. Raises UserError for options that do not apply to it."""
    from effexport.cli.main import print_json

    if options.device:
        raise UserError(
            f"--device {options.device} does not work with --ray, which gives each replica its GPUs; leave it out"
        )
    if len(targets) > 1:
        raise UserError(f"--ray serves one artifact; {len(targets)} were given: deploy each with its own command")
    if options.allow_load is not None:
        raise UserError("--allow-load does not work with --ray, whose replicas have one model; leave it out")

    require(*SERVER_MODULES, extra="serve")
    require("ray.serve", extra="serve-ray")
    from effexport.serving.http.ray_deployment import deploy_until_stopped

    address = options.address
    console = stderr_console()

    def on_ready(url: str, name: str) -> None:
        end = "it keeps running; stop it with: serve shutdown" if address else "stop with Ctrl-C"
        say(console, f"serving {name} at {url} on Ray; {end}")
        if as_json:
            print_json(json_of_server(url, [name]))

    deploy_until_stopped(targets[0], options, options.host, options.port, on_ready)
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
