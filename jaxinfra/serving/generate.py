"""Streams generated tokens, or text, from prompts."""

import dataclasses
import enum
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfra.core.errors import ConfigError, DataError
from jaxinfra.models.decoder import Decoder
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import SamplingConfig
from jaxinfra.serving.steps import StepConfig, decode, prefill

_MIN_BUCKET = 16


class FinishReason(enum.StrEnum):
    """Why a row ended."""

    EOS = "eos"  # it drew the end token
    LENGTH = "length"  # it has max_new_tokens
    CONTEXT = "context"  # the model has no positions left


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedToken:
    """One new token of one row."""

    row: int
    index: int  # among the row's new tokens
    token: int
    finish: FinishReason | None  # set on a row's last token


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
    """The text that one new token completed."""

    text: str  # empty while a character is incomplete, and for the end token
    finish: FinishReason | None  # set on the last piece


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int = 0,
    eos_id: int | None = None,
    num_ids: int | None = None,
) -> Iterator[GeneratedToken]:
    """Continues every prompt, yielding tokens as they are drawn: one of each row, then the next.

    What a row draws depends on the seed, its number and its own tokens, not on the other prompts;
    only rounding may differ with the batch's shape. Prompts are checked at once, before iteration.

    Args:
        prompts: token ids; lengths may differ.
        eos_id: ends a row; None: no token does.
        num_ids: ids from here on are never drawn, such as those the tokenizer lacks.

    Raises:
        DataError: a prompt that is empty, too long, or has ids outside the vocabulary.
    """
    vocab_size, max_positions = model.config.vocab_size, model.config.max_positions
    num_ids = vocab_size if num_ids is None else num_ids
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if not 1 <= num_ids <= vocab_size:
        raise ConfigError(f"num_ids={num_ids} must lie in 1..{vocab_size}, the model's vocabulary")
    rows = [np.asarray(prompt, np.int64) for prompt in prompts]
    for number, ids in enumerate(rows):
        _check_prompt(number, ids, vocab_size=vocab_size, max_positions=max_positions)
    if not rows:
        raise DataError("there are no prompts; give at least one")
    # The last token drawn is not fed back, so it may lie just beyond the last position.
    budgets = [min(max_new_tokens, max_positions - len(ids) + 1) for ids in rows]

    def finish(row: int, index: int, token: int) -> FinishReason | None:
        if token == eos_id:
            return FinishReason.EOS
        if index + 1 < budgets[row]:
            return None
        full = budgets[row] < max_new_tokens
        return FinishReason.CONTEXT if full else FinishReason.LENGTH

    def stream() -> Iterator[GeneratedToken]:
        unfinished = set(range(len(rows)))
        graphdef, parameters = nnx.split(model)
        config = StepConfig(graphdef=graphdef, sampling=sampling, num_ids=num_ids)
        lengths = np.array([len(ids) for ids in rows], np.int32)
        num_slots = bucket(int(np.max(lengths + budgets)) - 1, limit=max_positions)
        padded = np.zeros((len(rows), bucket(int(lengths.max()), limit=max_positions)), np.int32)
        for row, ids in enumerate(rows):
            padded[row, : len(ids)] = ids
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
            jax.random.key(seed), jnp.arange(len(rows))
        )
        tokens, state = prefill(
            parameters, padded, lengths, keys, config=config, num_slots=num_slots
        )
        for index in range(max(budgets)):
            drawn = tokens
            if index + 1 < max(budgets):
                # Before the host waits for the tokens just drawn: the device never waits for it.
                tokens, state = decode(parameters, state, drawn, config=config)
            for row, token in enumerate(np.asarray(drawn).tolist()):
                if row in unfinished:
                    reason = finish(row, index, token)
                    if reason is not None:
                        unfinished.remove(row)
                    yield GeneratedToken(row=row, index=index, token=token, finish=reason)
            if not unfinished:
                return

    return stream()


def generate_text(
    model: LoadedModel, prompt: str, *, max_new_tokens: int, sampling: SamplingConfig, seed: int = 0
) -> Iterator[TextPiece]:
    """Continues a text as the beginning of a document; a piece a token, never half a character.

    The pieces' texts, joined, are the text of all tokens before the end token. Raises as
    ``generate``.
    """
    tokenizer = model.tokenizer
    # Training puts this token before every document.
    prompt_ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    decoder = tokenizer.stream_decoder()
    for token in prompt_ids:
        decoder.push(token)  # some tokenizers drop the space before a text's first word
    tokens = generate(
        model.decoder,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        eos_id=tokenizer.eos_id,
        num_ids=tokenizer.vocab_size,
    )

    def stream() -> Iterator[TextPiece]:
        for new in tokens:
            text = "" if new.finish is FinishReason.EOS else decoder.push(new.token)
            if new.finish is not None:
                text += decoder.flush()
            yield TextPiece(text=text, finish=new.finish)

    return stream()


def bucket(length: int, *, limit: int) -> int:
    """The next power of two, at least 16 and at most ``limit``: few shapes, few compilations."""
    return min(max(_MIN_BUCKET, 1 << (length - 1).bit_length()), limit)


def _check_prompt(number: int, ids: np.ndarray, *, vocab_size: int, max_positions: int) -> None:
    if not ids.size:
        raise DataError(f"prompt {number} has no tokens; begin it with the document separator")
    if ids.size > max_positions:
        raise DataError(
            f"prompt {number} has {ids.size} tokens, more than the model's max_positions="
            f"{max_positions}; shorten it"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise DataError(
            f"prompt {number} has token ids {ids.min()}..{ids.max()}, the model's vocabulary is "
            f"0..{vocab_size - 1}; encode it with the tokenizer the model was trained with"
        )
