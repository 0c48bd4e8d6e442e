"""The HTTP application: OpenAI's API, health, metrics, and a web page to chat with the model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fastapi
from fastapi import responses
from fastapi.exceptions import RequestValidationError

from jaxinfra.errors import JaxinfraError
from jaxinfra.serving.engine.background import OverloadError, StoppedError
from jaxinfra.serving.engine.requests import GenerationRequest, RequestProgress
from jaxinfra.serving.http.answers import (
    AnswerForm,
    ChatForm,
    CompletionForm,
    GenerationFailedError,
    error_response,
    metrics_response,
)
from jaxinfra.serving.http.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from jaxinfra.serving.http.guards import Application, RequestGuards, unless_gone
from jaxinfra.serving.http.service import Service

PAGE = Path(__file__).with_name("page.html")
_RETRY_AFTER_S = 1
_UNREADABLE = (400, 404, 405)  # that the framework itself answers


class UnknownModelError(JaxinfraError):
    """A request names a model or adapter that this server does not serve."""


def application(service: Service, *, api_key: str | None) -> Application:
    """Makes the HTTP application, behind guards that check the API key and the body's size."""
    app = fastapi.FastAPI(title="jaxinfra", docs_url=None, redoc_url=None)
    for kind in (JaxinfraError, RequestValidationError, *_UNREADABLE, Exception):
        app.add_exception_handler(kind, _refused)
    _add_generation(app, service)
    _add_information(app, service)
    limit = service.limits.max_body_bytes
    return RequestGuards(app, api_key=api_key, max_body_bytes=limit)


async def _refused(request: fastapi.Request, error: Exception) -> responses.Response:
    """Answers an error; of an unforeseen one the server's log has the details."""
    del request
    match error:
        case OverloadError():
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            return error_response(429, str(error), kind="rate_limit_error", headers=headers)
        case StoppedError():
            return error_response(503, str(error), kind="server_error")
        case UnknownModelError():
            kind, code = "invalid_request_error", "model_not_found"
            return error_response(404, str(error), kind=kind, code=code)
        case JaxinfraError():
            status, text = 400, str(error)
        case fastapi.exceptions.StarletteHTTPException():
            status, text = error.status_code, str(error.detail)
        case RequestValidationError():
            said = [
                f"{'.'.join(map(str, each['loc'][1:])) or 'body'}: {each['msg']}"
                for each in error.errors()[:4]
            ]
            status, text = 400, "; ".join(said)
        case GenerationFailedError():
            return error_response(500, str(error), kind="server_error")
        case _:
            text = f"the server failed: {type(error).__name__}"
            return error_response(500, text, kind="server_error")
    return error_response(status, text, kind="invalid_request_error")


async def _answer(
    service: Service,
    http: fastapi.Request,
    body: Any,
    form: AnswerForm,
    requests: list[GenerationRequest],
) -> responses.Response:
    """Generates, and answers at once or as a stream of events, as the body asks."""
    given = service.stream(requests)

    async def events(first: tuple[int, RequestProgress]) -> AsyncIterator[str]:
        async def again():
            yield first
            async for each in given:
                yield each

        async with contextlib.aclosing(given):
            async for each in form.events(again()):
                yield each

    async def answered() -> responses.Response:
        if not body.stream:
            async with contextlib.aclosing(given):
                return responses.JSONResponse(await form.at_once(requests, given))
        # Asked for before the status is sent: overload is told by it.
        stream = events(await anext(given))
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return responses.StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    return await unless_gone(http, answered())


def _add_generation(app: fastapi.FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(http: fastapi.Request, body: CompletionBody) -> responses.Response:
        name = _served(service, body.model)
        prompts = [service.encode(prompt) for prompt in body.prompts]
        scored = body.echo and body.logprobs is not None
        requests = service.requests(
            prompts, body, model=name, default_tokens=16, scores_prompt=scored
        )
        echoes = None
        if body.echo:
            echoes = [
                text if isinstance(text, str) else service.tokenizer.decode(text)
                for text in body.prompts
            ]
        form = CompletionForm(name, prompts, body, tokenizer=service.tokenizer, echoes=echoes)
        return await _answer(service, http, body, form, requests)

    @app.post("/v1/chat/completions")
    async def chat(http: fastapi.Request, body: ChatBody) -> responses.Response:
        name = _served(service, body.model)
        tools = None if body.tool_choice == "none" else body.tools
        prompt = await asyncio.to_thread(
            service.render, body.messages, tools, body.chat_template_kwargs
        )
        requests = service.requests([prompt], body, model=name, default_tokens=service.context)
        form = ChatForm(name, [prompt], body, tokenizer=service.tokenizer)
        return await _answer(service, http, body, form, requests)

    @app.post("/v1/embeddings")
    async def embeddings() -> responses.Response:
        message = f"{service.name} generates text; this server makes no embeddings"
        return error_response(
            400, message, kind="invalid_request_error", code="unsupported_endpoint"
        )


def _add_information(app: fastapi.FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service, name) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _card(service, _served(service, name))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        _served(service, body.model)
        if body.messages is not None:
            tokens = await asyncio.to_thread(
                service.render, body.messages, body.tools, body.chat_template_kwargs
            )
        else:
            tokens = service.encode(body.prompt or "", special=body.add_special_tokens)
        return {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        _served(service, body.model)
        return {"prompt": service.spelled(body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Tokenizer facts that evaluation harnesses ask for before they tokenize here."""
        ids = {"bos_token": service.tokenizer.bos_id, "eos_token": service.tokenizer.eos_id}
        spelled = {name: service.spelled([number]) for name, number in ids.items()}
        return {"tokenizer_class": "jaxinfra"} | spelled

    @app.get("/health")
    async def health() -> responses.Response:
        if not service.engine.is_serving:
            return error_response(503, "the server is stopping, or has failed", kind="server_error")
        stalled_s = round(service.engine.stalled_s, 3)
        return responses.JSONResponse({"status": "ok", "stalled_s": stalled_s})

    @app.get("/metrics")
    async def metrics() -> responses.Response:
        return metrics_response(service.metrics.registry)

    @app.get("/")
    async def page() -> responses.Response:
        return responses.HTMLResponse(PAGE.read_text())


def _served(service: Service, name: str | None) -> str:
    """Returns the model that a request names: the server's own, or one of its adapters."""
    if name is not None and name not in service.names:
        known = ", ".join(map(repr, service.names))
        verb = "is" if len(service.names) == 1 else "are"
        raise UnknownModelError(f"model {name!r} is not served here; {known} {verb}")
    return name or service.name


def _card(service: Service, name: str) -> dict[str, Any]:
    card = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxinfra",
        "max_model_len": service.context,
        "chat": not service.no_chat,
    }
    return card if name == service.name else card | {"parent": service.name}
