"""An artifact that is ready to answer requests: its runner, its signature and its queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from effexport.errors import RuntimeFailedError
from effexport.proof.check import Kind
from effexport.runners.joining import Padding
from effexport.serving.protocol.errors import RequestError
from effexport.serving.protocol.signature import Signature, signature_from_spec
from effexport.serving.server.batcher import Batcher
from effexport.serving.server.generations import Generations
from effexport.serving.server.metrics import Metrics
from effexport.serving.settings import DEFAULT_MAX_SEQ_LEN, ServingSettings
from effexport.spec import MASK_NAME, is_optional

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.dtypes import Array
    from effexport.generation.text_generator import TextGenerator
    from effexport.runners.runner import Runner
    from effexport.runtimes import Runtime
    from effexport.serving.server.text_inference import Texts
    from effexport.spec import BuildSpec

# The only version: an artifact is one version of a model.
VERSION = "1"


class ServedModel:
    """A model that answers requests: runner, signature and queue. `close` answers accepted requests, then closes it.

    why_not_joined: why requests never share a run; "" if they may. why_not_padded: the same for requests of different
    lengths. settings: resolved for the runtime.
    texts: what answers texts; for a model that does not read any, why not. loaded_at: in seconds since 1970.
    """

    version = VERSION

    def __init__(
        self,
        runner: Runner,
        artifact: Artifact,
        name: str,
        settings: ServingSettings,
        runtime: Runtime,
        texts: Texts | str = "",
    ) -> None:
        spec = artifact.spec
        self.name = name
        self.loaded_at = int(time.time())
        self._texts = texts
        self.why_not_joined = why_not_joined(spec)
        self.why_not_padded = why_not_padded(artifact, runtime)
        self.settings = replace(settings, max_padding=0.0) if self.why_not_padded else settings
        self.platform = runtime.platform
        self.signature: Signature = signature_from_spec(spec, settings)
        self.metrics = Metrics(name)
        self._runner = runner
        # the length of the build is only an example, however long it is
        self._warm_up_length = spec.model.fixed_seq_len or min(
            spec.model.seq_len, self.signature.max_sizes["seq"], DEFAULT_MAX_SEQ_LEN
        )
        self._axis_sizes: Mapping[str, int] = spec.model.axis_sizes
        self.batcher = Batcher(
            runner.run,
            self.settings,
            self.metrics,
            joins=not self.why_not_joined,
            padding=Padding.from_spec(spec),
        )
        self._generations: Generations | str = ""
        self._closed = False
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def is_ready(self) -> bool:
        runs = isinstance(self._generations, str) or self._generations.is_alive
        return not self._closed and self.batcher.is_alive and runs

    def serve_generation(self, generator: TextGenerator | str) -> None:
        """Generate texts too. generator: warmed up, and closed with the model; or why the model cannot.

        Raises what its runtime raises.
        """
        if isinstance(generator, str):
            self._generations = generator
        else:
            self._generations = Generations(generator, self.settings, self.metrics)

    @property
    def generations(self) -> Generations:
        """Raises RequestError for a model that does not generate text."""
        if isinstance(self._generations, str):
            raise RequestError(f"model {self.name!r} does not generate: {self._generations}")
        return self._generations

    @property
    def implementation(self) -> Mapping[str, str]:
        return self._runner.implementation

    @property
    def texts(self) -> Texts:
        """Raises RequestError for a model that does not read text."""
        if isinstance(self._texts, str):
            raise RequestError(f"model {self.name!r} does not read text: {self._texts or 'send tensors'}")
        return self._texts

    def metadata(self) -> dict[str, Any]:
        """The V2 model metadata. What a client may send instead of tensors is in `parameters`."""
        texts = {} if isinstance(self._texts, str) else {"parameters": self._texts.metadata()}
        tensors = self.signature.metadata()
        return {"name": self.name, "versions": [VERSION], "platform": self.platform, **tensors, **texts}

    def warm_up(self) -> None:
        """Run once at the length of the build, so that the first request does not pay for one-time work.

        Raises what the runner raises, so that a model that cannot run is noticed before the server is ready.
        """
        try:
            self._runner.run(self.example_feeds(1, self._warm_up_length))
        except MemoryError as error:
            raise RuntimeFailedError(
                f"{self.name} cannot run with {self._warm_up_length} tokens here: there is not enough memory"
            ) from error

    def example_feeds(self, rows: int, seq_len: int) -> dict[str, Array]:
        """Zeros for the inputs that are not optional; every model accepts them."""
        import numpy as np

        from effexport.dtypes import numpy_dtype

        sizes = {**self._axis_sizes, "batch": rows, "seq": seq_len}
        feeds = {}
        for tensor in self.signature.inputs:
            if not is_optional(tensor):
                shape = [dim if isinstance(dim, int) else sizes.get(dim, 2) for dim in tensor.dims]
                feeds[tensor.name] = np.zeros(shape, numpy_dtype(tensor.dtype))
        return feeds

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model loaded during the block. Only the event loop uses it."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def unused(self) -> None:
        """Return when no request uses the model; the caller has seen to it that no further one finds it."""
        await self._unused.wait()

    def close(self) -> None:
        self._closed = True
        self.batcher.close()
        if not isinstance(self._generations, str):
            self._generations.close()
        self._runner.close()


def why_not_joined(spec: BuildSpec) -> str:
    """Why requests must not share a run; "" if the parity check has shown that samples do not affect each other."""
    has_batch_axes = all(tensor.dims[:1] == ("batch",) for tensor in (*spec.inputs, *spec.outputs))
    alone = "" if has_batch_axes else "an input or output does not begin with a batch axis"
    return spec.model.why_samples_mix or alone


def why_not_padded(artifact: Artifact, runtime: Runtime) -> str:
    """Why requests of different lengths must not share a run; "" if the report of the artifact has shown that padding
    a sample to the length of another one does not change its result."""
    spec = artifact.spec
    if reason := why_not_joined(spec):
        return reason
    if MASK_NAME not in {tensor.name for tensor in spec.inputs}:
        return f"the model has no {MASK_NAME}"
    if spec.model.fixed_seq_len is not None:
        return f"the model takes {spec.model.fixed_seq_len} tokens only"
    name = f"{runtime.name}: {Kind.PADDING_LENGTH}" if runtime.engine else str(Kind.PADDING_LENGTH)
    check = artifact.manifest.parity.summary.get(name)
    if check is None or not check.passed or check.failed:
        return f"its report has no passed check named {name!r}; build it again"
    return ""
