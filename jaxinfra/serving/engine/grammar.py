"""Structured output: which tokens may come next so that a text fits a schema, by llguidance."""

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
    """How a structure is written down."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark's notation, as llguidance reads it


@final
class GrammarCompiler:
    """Makes constraints over one tokenizer's tokens.

    Args:
        eos_ids: tokens that may come where a text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_ids: int, eos_ids: Collection[int]):
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
        """A constraint of its own for one request.

        Raises:
            DataError: a structure that llguidance does not read.
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
    """How far one text is in its structure."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def mask(self) -> np.ndarray:
        """Bits of the ids that may come next, uint32 [words], the lowest id lowest."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)

    def advance(self, token: int) -> None:
        """Takes note of a sampled token."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()


ANY_JSON = json.dumps({"type": "object"})
"""The schema of ``response_format: json_object``."""
