"""Bodies that clients send, as OpenAI's API has it, with the additions that vLLM made usual."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic

from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import is_text
from jaxinfra.serving.engine.grammar import ANY_JSON, StructureKind
from jaxinfra.serving.sampling import SamplingConfig

_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAMPLED += ("presence_penalty", "frequency_penalty")

type TokenIds = list[Annotated[int, pydantic.Field(strict=True)]]


class Setting(pydantic.BaseModel):
    """A part of a request, whose unknown keys are refused at every depth."""

    model_config = pydantic.ConfigDict(extra="forbid")


class JsonSchema(Setting):
    """A schema as OpenAI's API has it; answers always follow it to the letter."""

    name: str | None = None
    description: str | None = None
    given: dict[str, Any] = pydantic.Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Setting):
    """Structure that the text must have."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None

    @pydantic.model_validator(mode="after")
    def _of_its_type(self) -> Self:
        others = self.model_fields_set - {"type", self.type}
        if others:
            raise ValueError(f"type {self.type} takes no {' and no '.join(sorted(others))}")
        return self

    @property
    def structure(self) -> tuple[StructureKind, str] | None:
        """The structure that is asked for, and its text; None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructureKind.JSON_SCHEMA, ANY_JSON
        given = getattr(self, self.type)
        if not given:
            raise ConfigError(f"response_format {self.type} has no {self.type}")
        text = json.dumps(given.given) if isinstance(given, JsonSchema) else given
        return StructureKind(self.type), text


class StreamOptions(Setting):
    """Contents of a stream beside its text."""

    include_usage: bool = False


class FunctionTool(Setting):
    """A function that templates tell the model of."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returned: dict[str, Any] | None = pydantic.Field(default=None, alias="return")
    strict: bool | None = None


class Tool(Setting):
    """A tool as OpenAI's API has it."""

    type: Literal["function"]
    function: FunctionTool


def tools_as_sent(tools: list[Any]) -> list[Any]:
    """The tools themselves, checked: templates see what clients send."""
    for tool in tools:
        Tool.model_validate(tool)
    return tools


type Tools = Annotated[list[dict[str, Any]], pydantic.AfterValidator(tools_as_sent)]


class ClientBody(Setting):
    """A request: texts of whole characters; null is not said."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _whole_characters(cls, body: Any) -> Any:
        found = [body]
        while found:
            match found.pop():
                case dict() as each:
                    found += (*each, *each.values())
                case list() as each:
                    found += each
                case str() as each if not is_text(each):
                    raise ValueError(f"{each[:40]!a} holds half a character; send whole ones")
        if isinstance(body, dict):
            return {name: value for name, value in body.items() if value is not None}
        return body


class GenerationBody(ClientBody):
    """Settings that completions and conversations share."""

    model: str | None = None
    max_tokens: int | None = pydantic.Field(default=None, ge=0)
    temperature: float | None = pydantic.Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = pydantic.Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = pydantic.Field(default=None, ge=-1)
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    n: int = pydantic.Field(default=1, ge=1, le=128)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Official clients send these; nothing here depends on them.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None

    @pydantic.model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are of a stream; send stream=true too, or leave them")
        return self

    @property
    def num_scores(self) -> int | None:
        """Most likely tokens told of each one; None: no log-probabilities."""
        raise NotImplementedError

    def sampling(self, defaults: Mapping[str, float]) -> SamplingConfig:
        """Sampling settings of the request, completed by ``defaults``."""
        bias = tuple((self.logit_bias or {}).items())
        return SamplingConfig.of(
            defaults,
            {name: getattr(self, name) for name in _SAMPLED},
            {"logit_bias": bias, "logprobs": self.num_scores},
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(GenerationBody):
    """Texts to continue."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool = False
    logprobs: int | None = pydantic.Field(default=None, ge=0, le=20)

    @property
    def num_scores(self) -> int | None:
        """Most likely tokens told of each one; None: no log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyrefly: ignore[bad-return]
        return self.prompt  # pyrefly: ignore[bad-return]


class ChatBody(GenerationBody):
    """A conversation to go on with."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = pydantic.Field(default=None, ge=1)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto"] | None = None
    logprobs: bool = False
    top_logprobs: int | None = pydantic.Field(default=None, ge=0, le=20)

    @property
    def num_scores(self) -> int | None:
        """Most likely tokens told of each one; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @pydantic.model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


class DetokenizeBody(ClientBody):
    """Tokens to be spelled out."""

    model: str | None = None
    tokens: TokenIds


class TokenizeBody(ClientBody):
    """A text, or a conversation, to be counted."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
