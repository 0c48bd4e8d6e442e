"""Structured output: limits a request's next tokens to those that fit a schema (llguidance)."""

import enum
import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import final

import llguidance
import numpy as np

from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import DataError


class StructureKind(enum.StrEnum):
    """The language in which a request's structure is written, such as JSON schema or regex."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark's notation, as llguidance reads it


@final
class GrammarCompiler:
    """Compiles structures into constraints on the tokens of one tokenizer.

    Args:
        eos_ids: end tokens, allowed where a text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_ids: int, eos_ids: Collection[int]):
        self.num_ids = num_ids
        with tempfile.TemporaryDirectory() as made:
            file = Path(made) / "tokenizer.json"
            tokenizer.save(file)
            try:
                self._tokenizer = llguidance.LLTokenizer(
                    str(file), n_vocab=max(num_ids, tokenizer.vocab_size), eos_token=[*eos_ids]
                )
            except ValueError as error:
                raise DataError(
                    f"structured output is not possible with this tokenizer ({error}); it needs "
                    "one whose tokens are bytes"
                ) from error

    def compile(self, kind: StructureKind, text: str) -> "GrammarConstraint":
        """Compiles a structure into a new constraint for one request.

        Raises:
            DataError: llguidance cannot read the structure.
        """
        matcher = llguidance.LLMatcher
        try:
            match kind:
                case StructureKind.JSON_SCHEMA:
                    # Without space between the parts: a model could go on with it without end.
                    grammar = matcher.grammar_from_json_schema(
                        text, defaults={"whitespace_flexible": False}
                    )
                case StructureKind.REGEX:
                    grammar = matcher.grammar_from_regex(text)
                case StructureKind.GRAMMAR:
                    grammar = matcher.grammar_from_lark(text)
        except ValueError as error:
            raise DataError(f"{kind} {text[:80]!r} is not one: {error}") from error
        made = matcher(self._tokenizer, grammar)
        if made.is_error():
            raise DataError(f"{kind} {text[:80]!r} is not one: {made.get_error()}")
        return GrammarConstraint(made)


@final
class GrammarConstraint:
    """A structure's limit on one request's next token, given the tokens so far."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def mask(self) -> np.ndarray:
        """Returns a bit mask of the allowed next ids: uint32 [words], id 0 the lowest bit."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)

    def advance(self, token: int) -> None:
        """Advances the constraint by a sampled token."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether the structure is complete, so that no token can follow."""
        return self._matcher.is_stopped()


ANY_JSON = json.dumps({"type": "object"})
"""The schema of ``response_format: json_object``."""
