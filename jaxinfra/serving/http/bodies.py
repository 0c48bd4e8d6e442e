"""Request bodies of OpenAI's API, with the additional fields that vLLM introduced."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic

from jaxinfra.errors import ConfigError, DataError
from jaxinfra.runtime.files import is_text
from jaxinfra.serving.engine.grammar import ANY_JSON, StructureKind
from jaxinfra.serving.sampling import SamplingConfig

_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SAMPLED += ("presence_penalty", "frequency_penalty")

type TokenIds = list[Annotated[int, pydantic.Field(strict=True)]]


class Setting(pydantic.BaseModel):
    """Base class of request bodies and their parts: unknown keys are rejected, null is no key."""

    model_config = pydantic.ConfigDict(extra="forbid")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if isinstance(body, dict):
            return {name: value for name, value in body.items() if value is not None}
        return body


class AdapterBody(Setting):
    """Body of ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them."""

    lora_name: str = pydantic.Field(min_length=1)
    lora_path: str | None = None  # the adapter's directory on the server
    lora_int_id: int | None = None  # of older clients; a name is enough


class JsonSchema(Setting):
    """A named JSON schema in a request; answers always follow it exactly."""

    name: str | None = None
    description: str | None = None
    given: dict[str, Any] = pydantic.Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Setting):
    """The structure that an answer's text must have: JSON, a regex or a grammar."""

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
        """The requested structure as its kind and text; None if any text may be sampled."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructureKind.JSON_SCHEMA, ANY_JSON
        given = getattr(self, self.type)
        if not given:
            raise ConfigError(f"response_format {self.type} has no {self.type}")
        text = json.dumps(given.given) if isinstance(given, JsonSchema) else given
        return StructureKind(self.type), text


class StructuredOutputs(Setting):
    """A structure in vLLM's form: one of JSON, a regex, a grammar, or a choice of texts."""

    json_: dict[str, Any] | str | None = pydantic.Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = pydantic.Field(default=None, min_length=1)
    grammar: str | None = None

    @property
    def structure(self) -> tuple[StructureKind, str]:
        """The requested structure as its kind and text."""
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return StructureKind.JSON_SCHEMA, text
        if self.regex is not None:
            return StructureKind.REGEX, self.regex
        if self.grammar is not None:
            return StructureKind.GRAMMAR, self.grammar
        if self.choice is not None:
            options = " | ".join(json.dumps(each, ensure_ascii=False) for each in self.choice)
            return StructureKind.GRAMMAR, f"start: {options}"
        return StructureKind.JSON_SCHEMA, ANY_JSON

    @pydantic.model_validator(mode="after")
    def _one(self) -> Self:
        if len(self.model_fields_set) != 1 or self.json_object is False:
            named = sorted(self.model_fields_set) or "none"
            raise ValueError(f"give one of json, json_object, regex, choice, grammar; got {named}")
        return self


class StreamOptions(Setting):
    """Options of a streamed answer: whether token counts are sent at the end."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # nothing here depends on it


class FunctionTool(Setting):
    """Name, description and parameters of a function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returned: dict[str, Any] | None = pydantic.Field(default=None, alias="return")
    strict: bool | None = None


class Tool(Setting):
    """A tool in OpenAI's format; the only type is a function."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Setting):
    """The name of a function, as a tool choice has it."""

    name: str


class ToolChoice(Setting):
    """The function that an answer must call."""

    type: Literal["function"] = "function"
    function: FunctionName


def tools_as_sent(tools: list[Any]) -> list[Any]:
    """Validates tools, and returns them unchanged, since chat templates render them as sent."""
    for tool in tools:
        Tool.model_validate(tool)
    return tools


type Tools = Annotated[list[dict[str, Any]], pydantic.AfterValidator(tools_as_sent)]


class ClientBody(Setting):
    """Base class of request bodies, whose texts must be valid Unicode."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _whole_characters(cls, body: Any) -> Any:
        found = [body]
        while found:
            match found.pop():
                case dict() as each:
                    found += (*each, *each.values())
                case list() as each if {*map(type, each)} != {int}:  # no token ids: they are many
                    found += each
                case str() as each if not is_text(each):
                    raise ValueError(f"{each[:40]!a} holds half a character; send whole ones")
        return body


class GenerationBody(ClientBody):
    """Request fields that completions and chat completions share."""

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
    # What vLLM has besides.
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    min_tokens: int = pydantic.Field(default=0, ge=0)
    bad_words: list[Annotated[str, pydantic.Field(min_length=1)]] = []
    allowed_token_ids: TokenIds | None = pydantic.Field(default=None, min_length=1)
    truncate_prompt_tokens: int | None = pydantic.Field(default=None, ge=-1)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = pydantic.Field(default=None, ge=0, le=20)
    return_token_ids: bool = False
    cache_salt: str | None = pydantic.Field(default=None, min_length=1)
    priority: int = 0
    # Official clients send these; nothing here depends on them.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None

    @pydantic.model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are of a stream; send stream=true too, or leave them")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs come with whole answers; leave out stream")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if self.priority:
            raise ValueError(
                f"priority={self.priority}: requests are served in the order of their arrival; "
                "leave it out"
            )
        return self

    @property
    def structure(self) -> tuple[StructureKind, str] | None:
        """The structure that the answer must have, as its kind and text; None: any text.

        Raises:
            ConfigError: the request asks for several.
        """
        guided = {
            name: getattr(self, f"guided_{name}")
            for name in ("json", "regex", "choice", "grammar")
            if getattr(self, f"guided_{name}") is not None
        }
        outputs = [
            self.structured_outputs,
            *(StructuredOutputs(**{k: v}) for k, v in guided.items()),
        ]
        given = [each.structure for each in (self.response_format, *outputs) if each is not None]
        found = [each for each in given if each is not None]
        if len(found) > 1:
            raise ConfigError(
                "an answer has one structure; send one of response_format, structured_outputs and "
                "guided_*"
            )
        return found[0] if found else None

    @property
    def num_scores(self) -> int | None:
        """Number of most likely tokens to report per token; None: no log-probabilities."""
        raise NotImplementedError

    def sampling(self, defaults: Mapping[str, float]) -> SamplingConfig:
        """Returns the request's sampling settings; ``defaults`` fill those that it leaves out."""
        bias = tuple((self.logit_bias or {}).items())
        return SamplingConfig.of(
            defaults,
            {name: getattr(self, name) for name in _SAMPLED},
            {"logit_bias": bias, "logprobs": self._most_scores},
        )

    @property
    def _most_scores(self) -> int | None:
        asked = [each for each in (self.num_scores, self.prompt_logprobs) if each is not None]
        return max(asked, default=None)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, at which the answer's text ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(GenerationBody):
    """Request body of ``/v1/completions``: prompts to continue."""

    # In this order: a kind that is tried in vain makes an error for each of a thousand tokens.
    prompt: Annotated[
        TokenIds | str | list[str] | list[TokenIds], pydantic.Field(union_mode="left_to_right")
    ]
    echo: bool = False
    logprobs: int | None = pydantic.Field(default=None, ge=0, le=20)

    @property
    def num_scores(self) -> int | None:
        """Number of most likely tokens to report per token; None: no log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The request's prompts as a list, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyrefly: ignore[bad-return]
        return self.prompt  # pyrefly: ignore[bad-return]


class ChatBody(GenerationBody):
    """Request body of ``/v1/chat/completions``: a conversation to continue."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = pydantic.Field(default=None, ge=1)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    logprobs: bool = False
    top_logprobs: int | None = pydantic.Field(default=None, ge=0, le=20)

    @property
    def num_scores(self) -> int | None:
        """Number of most likely tokens to report per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @pydantic.model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @pydantic.model_validator(mode="after")
    def _scores_are_asked_for(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} takes logprobs=true; send it too")
        return self

    @pydantic.model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message goes on with the last message and add_generation_prompt "
                "begins a new one; send one of them"
            )
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the answer may call; None if there are none.

        Raises:
            ConfigError: the tool choice names a tool that is not given.
        """
        choice = self.tool_choice
        if choice == "none":
            return None
        names = [tool["function"]["name"] for tool in self.tools or ()]
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise ConfigError(
                f"tool_choice names {choice.function.name!r}, and the tools are {names}; give it "
                "among tools"
            )
        if choice == "required" and not names:
            raise ConfigError("tool_choice is 'required', and there are no tools; send some")
        return self.tools or None


def chat_body(fields: Mapping[str, Any]) -> ChatBody:
    """Makes the chat request that is equivalent to these fields of another API's request.

    Raises:
        DataError: a setting is invalid.
    """
    try:
        return ChatBody.model_validate(dict(fields))
    except pydantic.ValidationError as error:
        said = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:4]]
        raise DataError("; ".join(said)) from error


class DetokenizeBody(ClientBody):
    """Request body of ``/detokenize``: token ids to decode into text."""

    model: str | None = None
    tokens: TokenIds


class TokenizeBody(ClientBody):
    """Request body of ``/tokenize``: a text or a conversation to encode into tokens."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("send either a prompt or messages")
        return self
