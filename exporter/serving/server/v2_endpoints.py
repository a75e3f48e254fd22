"""The endpoints of the KServe V2 protocol, and the metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from effexport.serving.server.inference import infer
from effexport.serving.server.metrics import exposition
from effexport.serving.server.service import Endpoint, Service, json_response
from effexport.version import __version__

EXTENSIONS = ("binary_tensor_data", "model_repository")


def endpoints(service: Service) -> list[Endpoint]:
    v2 = V2(service)
    prefixes = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    return [
        # paths are compared in this order, and most requests are these
        *(("POST", f"{prefix}/infer", v2.infer) for prefix in prefixes),
        *(("GET", prefix, v2.model_metadata) for prefix in prefixes),
        *(("GET", f"{prefix}/ready", v2.model_ready) for prefix in prefixes),
        ("GET", "/v2/health/live", v2.live),
        ("GET", "/v2/health/ready", v2.ready),
        ("GET", "/v2", v2.server_metadata),
        ("GET", "/metrics", v2.metrics),
    ]


class V2:
    """Handlers of the V2 protocol."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        is_ready = self._service.is_ready
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    async def server_metadata(self, request: Request) -> Response:
        return json_response({"name": "effexport", "version": __version__, "extensions": EXTENSIONS})

    async def model_metadata(self, request: Request) -> Response:
        return json_response(self._service.model(request).metadata())

    async def model_ready(self, request: Request) -> Response:
        model = self._service.model(request)
        is_ready = model.is_ready and not self._service.draining
        return json_response({"name": model.name, "ready": is_ready}, 200 if is_ready else 503)

    async def infer(self, request: Request) -> Response:
        async def answer(request: Request) -> Response:
            with self._service.using(request) as model:
                return await infer(request, model, self._service)

        return await self._service.counted(request, answer)

    async def metrics(self, request: Request) -> Response:
        text, content_type = exposition([self._service.metrics, *(model.metrics for model in self._service.models)])
        return Response(text, headers={"content-type": content_type})
