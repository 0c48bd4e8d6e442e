"""What clients send, as OpenAI's API has it, with the additions that vLLM made usual."""

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


class ResponseFormat(pydantic.BaseModel):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def structure(self) -> tuple[StructureKind, str] | None:
        """The structure that is asked for, and its text; None for any text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructureKind.JSON_SCHEMA, ANY_JSON
            case "json_schema":
                schema = (self.json_schema or {}).get("schema")
                if not isinstance(schema, dict):
                    raise ConfigError(
                        "response_format json_schema has no object json_schema.schema"
                    )
                return StructureKind.JSON_SCHEMA, pydantic.TypeAdapter(dict).dump_json(
                    schema
                ).decode()
            case "regex" | "grammar":
                text = getattr(self, self.type)
                if not text:
                    raise ConfigError(f"response_format {self.type} has no {self.type}")
                return StructureKind(self.type), text


class StreamOptions(pydantic.BaseModel):
    """What a stream holds beside its text."""

    include_usage: bool = False


class ClientBody(pydantic.BaseModel):
    """What holds texts of clients: each of whole characters."""

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
        return body


class GenerationBody(ClientBody):
    """Settings that completions and conversations share. Others are refused, not ignored."""

    model_config = pydantic.ConfigDict(extra="forbid")

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
    user: str | None = None  # who asks; nothing depends on it

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
        """How tokens are drawn; what the request does not say is as ``defaults`` have it."""
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
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
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
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
