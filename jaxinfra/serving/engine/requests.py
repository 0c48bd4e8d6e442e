"""Generation requests, their state while they run, and their progress after each step."""

import dataclasses
import enum
import zlib
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import numpy as np

from jaxinfra.serving.engine.states import Snapshot
from jaxinfra.serving.sampling import GREEDY, SamplingConfig


class EndReason(enum.StrEnum):
    """The reason why a request ended."""

    EOS = "eos"  # it drew an end token
    STOP = "stop"  # it drew a stop token, or its text came to a stop string
    LENGTH = "length"  # it has max_new_tokens
    CONTEXT = "context"  # the model, or the pool of pages, has no positions left
    CANCELLED = "cancelled"
    ERROR = "error"


class Asked(enum.IntEnum):
    """Demands of a request on the step that draws its next token; each includes those before it."""

    BEST = 0  # take the most likely token
    DRAW = 1  # sample at a temperature
    SCORE = 2  # and return the token's log-probability
    ALL = 3  # and apply every other setting


class Constraint(Protocol):
    """A grammar's limit on which tokens may come next; each request has its own object."""

    def mask(self) -> np.ndarray:
        """Returns a bit mask of the ids that may come next: uint32 [words], id 0 the lowest bit."""
        ...

    def advance(self, token: int) -> None:
        """Advances the constraint by a sampled token."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the structure is complete, so that no token can follow."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A prompt to continue, with its sampling settings and the conditions that end it.

    Its samples depend only on its tokens, its settings, ``seed`` and ``choice``. Other requests
    change only rounding, which matters if two tokens are almost equally likely.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingConfig = GREEDY
    seed: int = 0  # any whole number; ``seed_bits`` has what is used of it
    choice: int = 0  # tells continuations of one prompt and seed apart
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()  # strings; the text ends before them
    constraint: Constraint | None = dataclasses.field(default=None, compare=False)
    adapter: str | None = None  # name in the engine's bank; None: the base model
    scores_prompt: bool = False  # with ``sampling.logprobs``: of the prompt's tokens too
    keeps_stop: bool = False  # the stop string or token that ends the text is part of it
    min_tokens: int = 0  # stop strings are ignored before this many tokens
    silent_ids: frozenset[int] = frozenset()  # tokens that add no text
    cache_salt: str | None = None  # requests of different salts share no pages

    @property
    def seed_bits(self) -> int:
        """The seed if it has 32 bits, else a checksum of all its bits."""
        if 0 <= self.seed < 1 << 32:
            return self.seed
        num_bytes = self.seed.bit_length() // 8 + 1
        return zlib.crc32(self.seed.to_bytes(num_bytes, "little", signed=True))

    @property
    def asks(self) -> Asked:
        """The request's demands on steps that draw its tokens."""
        plain = SamplingConfig(temperature=self.sampling.temperature)
        if self.constraint is not None or self.scores_prompt:
            return Asked.ALL
        if self.sampling == plain:
            return Asked.DRAW if plain.temperature else Asked.BEST
        is_scored = self.sampling == dataclasses.replace(plain, logprobs=0)
        return Asked.SCORE if is_scored else Asked.ALL


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenScore:
    """A token's log-probability by the model alone, and the most likely tokens at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # ids and their log-probabilities, the most likely first


class RequestProgress(NamedTuple):
    """Tokens and text that a step added to one request; a tuple, as it is quick to make."""

    request: int  # the number that ``submit`` gave
    tokens: tuple[int, ...] = ()
    text: str = ""  # text that is final now; empty if the engine has no tokenizer
    end: EndReason | None = None  # set on the last one
    error: str | None = None  # with EndReason.ERROR
    stop: str | None = None  # the stop string that ended the text, with EndReason.STOP
    num_cached: int = 0  # tokens of the prompt that were not computed again
    scores: tuple[TokenScore, ...] = ()  # of the tokens, where they were asked for
    prompt_scores: tuple[TokenScore, ...] = ()  # only in the first progress


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostCopy:
    """Host copy of a preempted request's first tokens: the host slots that store their pages."""

    slots: tuple[int, ...]
    num_tokens: int  # the last page may be partly filled
    kind: Hashable  # of the request when it was saved
    state: Snapshot | None = None  # after these tokens, in a model with states


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class RequestStream:
    """Scheduling state of one request: its tokens, pages and slot; no arrays, no text."""

    number: int  # order of arrival
    request: GenerationRequest
    tokens: list[int]  # prompt and sampled tokens that the host knows
    limit: int  # number of tokens, prompt included, at which the request ends
    kind: Hashable = None  # streams of different kinds share no pages
    pages: tuple[int, ...] = ()
    num_registered: int = 0  # pages at the front that are in the prefix tree
    unread: int = 0  # rows of dispatched steps whose results are not read yet
    num_finite: int = 0  # first pages whose keys and values are known to be finite
    computed: int = 0  # tokens whose keys and values steps have been dispatched for
    pending: int = 0  # tokens sampled by steps whose results are not read yet
    slot: int | None = None  # where the device keeps its last token; None: it is not running
    num_cached: int = 0
    saved: HostCopy | None = None  # host copy of its pages while it is preempted
    # In a model with states: the snapshot that its next row goes on from, the newest that was taken
    # of it, and the numbers of tokens after which others want one.
    begins_from: Snapshot | None = None
    snapshot: Snapshot | None = None
    wanted: set[int] = dataclasses.field(default_factory=set)
    # First tokens in common with running requests, by their numbers, while it waits.
    common: dict[int, int] = dataclasses.field(default_factory=dict)
    is_over: bool = False
    asks: Asked = dataclasses.field(init=False)  # as the request

    def __post_init__(self) -> None:
        self.asks = self.request.asks

    @property
    def can_be_drafted(self) -> bool:
        """Whether tokens may be drafted: the request has no grammar and no penalties."""
        return self.request.constraint is None and not self.request.sampling.is_penalized

    @property
    def total(self) -> int:
        """Number of prompt and sampled tokens, those that only the device knows included."""
        return len(self.tokens) + self.pending
