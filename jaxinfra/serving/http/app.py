"""The HTTP application: OpenAI's API, health, metrics, and a web page to chat with the model."""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fastapi
from fastapi import responses
from fastapi.exceptions import RequestValidationError

from jaxinfra.errors import ConfigError, JaxinfraError
from jaxinfra.serving.engine.background import OverloadError, StoppedError
from jaxinfra.serving.engine.requests import GenerationRequest, RequestProgress
from jaxinfra.serving.http.answers import (
    AnswerForm,
    CompletionForm,
    GenerationFailedError,
    error_response,
    metrics_response,
)
from jaxinfra.serving.http.bodies import (
    AdapterBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from jaxinfra.serving.http.chat import ChatTurn
from jaxinfra.serving.http.chat_answers import ChatForm
from jaxinfra.serving.http.guards import Application, RequestGuards, unless_gone
from jaxinfra.serving.http.items import ItemsForm
from jaxinfra.serving.http.messages_api import ConversationBody, MessageForm, MessagesBody
from jaxinfra.serving.http.responses_api import (
    KeptResponses,
    ResponseForm,
    ResponsesBody,
    UnknownResponseError,
)
from jaxinfra.serving.http.service import Service

PAGE = Path(__file__).with_name("page.html")
_RETRY_AFTER_S = 1
_UNREADABLE = (400, 404, 405)  # that the framework itself answers


class UnknownModelError(JaxinfraError):
    """A request names a model or adapter that this server does not serve."""


def application(
    service: Service, *, api_key: str | None, open_metrics: bool = False
) -> Application:
    """Makes the HTTP application, behind guards that check the API key and the body's size."""
    app = fastapi.FastAPI(title="jaxinfra", docs_url=None, redoc_url=None)
    for kind in (JaxinfraError, RequestValidationError, *_UNREADABLE, Exception):
        app.add_exception_handler(kind, _refused)
    _add_generation(app, service)
    _add_agents(app, service)
    if service.takes_adapters:
        _add_adapters(app, service)
    _add_refusals(app, service)
    _add_information(app, service)
    limit = service.limits.max_body_bytes
    return RequestGuards(app, api_key=api_key, max_body_bytes=limit, open_metrics=open_metrics)


async def _refused(request: fastapi.Request, error: Exception) -> responses.Response:
    """Answers an error; of an unforeseen one the server's log has the details."""
    del request
    match error:
        case OverloadError():
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            return error_response(429, str(error), kind="rate_limit_error", headers=headers)
        case StoppedError():
            return error_response(503, str(error), kind="server_error")
        case UnknownModelError() | UnknownResponseError():
            kind, code = "invalid_request_error", "model_not_found"
            if isinstance(error, UnknownResponseError):
                code = "response_not_found"
            return error_response(404, str(error), kind=kind, code=code)
        case JaxinfraError():
            status, text = 400, str(error)
        case fastapi.exceptions.StarletteHTTPException():
            status, text = error.status_code, str(error.detail)
        case RequestValidationError():
            status, text = 400, "; ".join(map(_said, error.errors()[:4]))
        case GenerationFailedError():
            return error_response(500, str(error), kind="server_error")
        case _:
            text = f"the server failed: {type(error).__name__}"
            return error_response(500, text, kind="server_error")
    return error_response(status, text, kind="invalid_request_error")


def _said(error: Mapping[str, Any]) -> str:
    """Returns one finding of pydantic in a line, with its field."""
    where = ".".join(map(str, error["loc"][1:]))
    if error["type"] == "json_invalid":  # whose place is a character's number
        return f"the body is not JSON: {error['ctx']['error']} at character {where}"
    if error["type"] == "value_error" and not where:  # a rule of this package, which names all
        return error["msg"].removeprefix("Value error, ")
    return f"{where or 'body'}: {error['msg']}"


_TOGETHER = 32  # steps' progress of an answer that is sent whole


async def _answer(
    service: Service,
    http: fastapi.Request,
    body: Any,
    form: AnswerForm | ItemsForm,
    requests: list[GenerationRequest],
) -> responses.Response:
    """Generates, and answers at once or as a stream of events, as the body asks."""
    given = service.stream(requests, together=1 if body.stream else _TOGETHER)

    async def events(first: Sequence[tuple[int, RequestProgress]]) -> AsyncIterator[bytes]:
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


async def _turn(
    service: Service, body: ChatBody, hints: Mapping[str, Any] | None = None
) -> tuple[str, ChatTurn, list[GenerationRequest]]:
    """Returns the served model's name, the rendered conversation, and the engine's requests.

    Args:
        hints: variables for a chat template that reads them.
    """
    name = _served(service, body.model)
    turn = await asyncio.to_thread(service.chat.turn, body, hints or {})
    turn = dataclasses.replace(turn, prompt=service.shortened(turn.prompt, body))
    requests = service.requests(
        [turn.prompt], body, model=name, default_tokens=service.context, turn=turn
    )
    return name, turn, requests


def _add_generation(app: fastapi.FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(http: fastapi.Request, body: CompletionBody) -> responses.Response:
        name = _served(service, body.model)
        prompts = [service.shortened(service.encode(each), body) for each in body.prompts]
        scored = body.echo and body.logprobs is not None
        requests = service.requests(
            prompts, body, model=name, default_tokens=16, scores_prompt=scored
        )
        echoes = None
        if body.echo:
            is_whole = body.truncate_prompt_tokens is None
            echoes = [
                text if isinstance(text, str) and is_whole else service.tokenizer.decode(ids)
                for text, ids in zip(body.prompts, prompts, strict=True)
            ]
        form = CompletionForm(
            name,
            prompts,
            body,
            tokenizer=service.tokenizer,
            echoes=echoes,
            silent_ids=requests[0].silent_ids,
        )
        return await _answer(service, http, body, form, requests)

    @app.post("/v1/chat/completions")
    async def chat(http: fastapi.Request, body: ChatBody) -> responses.Response:
        name, turn, requests = await _turn(service, body)
        form = ChatForm(name, turn, body, tokenizer=service.tokenizer)
        return await _answer(service, http, body, form, requests)


def _add_agents(app: fastapi.FastAPI, service: Service) -> None:
    """Adds the other two spellings of a chat: OpenAI's Responses and Anthropic's Messages."""
    kept = KeptResponses(service.limits.max_kept_responses)

    @app.post("/v1/responses")
    async def respond(http: fastapi.Request, body: ResponsesBody) -> responses.Response:
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = kept.get(body.previous_response_id).messages
        if body.store and not kept.most:
            raise ConfigError("store=true: replicas keep no responses; leave it out")
        keeps = kept if kept.most and body.store is not False else None
        chat = body.chat(before)
        name, turn, requests = await _turn(service, chat)
        form = ResponseForm(name, turn, body, before=before, kept=keeps)
        return await _answer(service, http, body, form, requests)

    @app.get("/v1/responses/{name}")
    async def response(name: str) -> Any:
        return kept.get(name).body

    @app.get("/v1/responses/{name}/input_items")
    async def items(name: str) -> dict[str, Any]:
        return {"object": "list", "data": kept.get(name).items, "has_more": False}

    @app.delete("/v1/responses/{name}")
    async def forget(name: str) -> dict[str, Any]:
        kept.drop(name)
        return {"id": name, "object": "response", "deleted": True}

    @app.post("/v1/messages")
    async def messages(http: fastapi.Request, body: MessagesBody) -> responses.Response:
        name, turn, requests = await _turn(service, body.generation(), body.hints)
        return await _answer(service, http, body, MessageForm(name, turn), requests)

    @app.post("/v1/messages/count_tokens")
    async def count(body: ConversationBody) -> dict[str, int]:
        _served(service, body.model)
        turn = await asyncio.to_thread(service.chat.turn, body.chat(), body.hints)
        return {"input_tokens": len(turn.prompt)}


def _add_adapters(app: fastapi.FastAPI, service: Service) -> None:
    """Adds vLLM's endpoints that load and unload adapters."""

    @app.post("/v1/load_lora_adapter")
    async def load(body: AdapterBody) -> responses.Response:
        if body.lora_path is None:
            raise ConfigError("lora_path is missing: the adapter's directory on the server")
        await asyncio.to_thread(service.load_adapter, body.lora_name, Path(body.lora_path))
        return responses.PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added.")

    @app.post("/v1/unload_lora_adapter")
    async def unload(body: AdapterBody) -> responses.Response:
        await asyncio.to_thread(service.unload_adapter, body.lora_name)
        return responses.PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed.")


def _add_refusals(app: fastapi.FastAPI, service: Service) -> None:
    """Answers known paths that this server does not serve with the reason."""
    reasons: dict[str, tuple[str, ...]] = {
        "makes no embeddings": ("/v1/embeddings", "/pooling"),
        "scores no pairs of texts": ("/v1/score", "/score", "/v1/rerank", "/rerank"),
    }
    if not service.takes_adapters:
        reason = (
            "takes adapters when it starts (--adapters NAME=DIR), or later with --adapter-slots"
        )
        reasons[reason] = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    for reason, paths in reasons.items():
        message = f"{service.name} generates text; this server {reason}"

        async def refuse(message: str = message) -> responses.Response:
            kind, code = "invalid_request_error", "unsupported_endpoint"
            return error_response(400, message, kind=kind, code=code)

        for path in paths:
            app.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)


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
                service.chat.render, body.messages, body.tools, settings=body.chat_template_kwargs
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
        return service.tokenizer_facts()

    @app.get("/health")
    async def health() -> responses.Response:
        if not service.engine.is_serving:
            return error_response(503, "the server is stopping, or has failed", kind="server_error")
        state: dict[str, Any] = {"status": "ok", "stalled_s": round(service.engine.stalled_s, 3)}
        if not service.engine.is_started:
            state["status"] = "starting"
        made = service.engine.engine.runner.programs.progress
        if made.ready < made.all:
            state["programs"] = made._asdict()
        status = 200 if service.engine.is_started else 503
        return responses.JSONResponse(state, status_code=status)

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> responses.Response:
        return await health()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": importlib.metadata.version("jaxinfra")}

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
        "chat": not service.chat.refusal,
    }
    return card if name == service.name else card | {"parent": service.name}
