"""Streams generated tokens, or text, from prompts."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int32

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.rope import LongRopeScaling
from jaxinfra.errors import CheckpointError, ConfigError, DataError
from jaxinfra.model.decoder import Decoder
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import NO_TOKEN, SamplingConfig, SamplingNeeds, SamplingRows
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
    sampling: SamplingConfig | Sequence[SamplingConfig],
    seed: int = 0,
    eos_ids: Collection[int] = (),
    num_ids: int | None = None,
) -> Iterator[GeneratedToken]:
    """Continues every prompt, yielding tokens as they are drawn: one of each row, then the next.

    Under LongRoPE, rows beyond the original context come after those within it, and a row that
    crosses over is run again from its first token, since its keys are rotated otherwise then.

    What a row draws depends on the seed, its number and its own tokens, not on the other prompts;
    only rounding may differ with the batch's shape. Prompts are checked at once, before iteration.

    Args:
        prompts: token ids; lengths may differ.
        sampling: of all prompts, or one for each of them.
        eos_ids: each of them ends a row.
        num_ids: ids from here on are never drawn, such as those the tokenizer lacks.

    Raises:
        DataError: a prompt that is empty, too long, or has ids outside the vocabulary.
        CheckpointError: while iterating: logits that are not finite.
    """
    vocab_size, max_positions = model.config.vocab_size, model.config.max_positions
    num_ids = vocab_size if num_ids is None else num_ids
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if not 1 <= num_ids <= vocab_size:
        raise ConfigError(f"num_ids={num_ids} must lie in 1..{vocab_size}, the model's vocabulary")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed} must lie in 0..2^63-1")
    if not prompts:
        raise DataError("there are no prompts; give at least one")
    settings = [sampling] * len(prompts) if isinstance(sampling, SamplingConfig) else [*sampling]
    if len(settings) != len(prompts):
        raise ConfigError(
            f"{len(settings)} sampling settings for {len(prompts)} prompts; give one for all, or "
            "one for each"
        )
    rows = [np.asarray(prompt, np.int64) for prompt in prompts]
    for number, ids in enumerate(rows):
        _check_prompt(number, ids, vocab_size=vocab_size, max_positions=max_positions)
    needs = SamplingNeeds.of(settings)
    if needs.logprobs is not None:
        raise ConfigError(
            "logprobs: generate yields tokens without log-probabilities; leave it out"
        )
    original = original_context(model.config)
    if needs.penalties and original is not None:
        raise ConfigError(
            "penalties under LongRoPE: a row that crosses its original context is run again, its "
            "drawn tokens as a prompt; leave them out"
        )
    graphdef, parameters = nnx.split(model)
    begun = [
        _Row(number=number, ids=ids, budget=max_new_tokens, sampling=each)
        for number, (ids, each) in enumerate(zip(rows, settings, strict=True))
    ]
    run = functools.partial(
        _stream,
        parameters=parameters,
        eos_ids=frozenset(eos_ids),
        config=StepConfig(graphdef=graphdef, num_ids=num_ids, needs=needs),
        batch_shards=model.execution.place.batch_shards,
        seed=seed,
    )
    if original is None:
        return run(begun, max_positions=max_positions)
    return _crossing(begun, run, original=original, max_positions=max_positions)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A sequence to be continued."""

    number: int
    ids: np.ndarray  # the prompt, and what was drawn before it was run again
    budget: int  # new tokens that it may have
    sampling: SamplingConfig
    drawn: int = 0  # of ids


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """Checked rows, and when they end."""

    rows: Sequence[_Row]
    max_positions: int
    eos_ids: frozenset[int]

    @property
    def lengths(self) -> Int32[np.ndarray, "B"]:
        """Tokens of each row."""
        return np.array([len(row.ids) for row in self.rows], np.int32)

    @property
    def budgets(self) -> np.ndarray:
        """Most new tokens of each row, int32 [B]."""
        # The last token drawn is not fed back, so it may lie just beyond the last position.
        return np.minimum([row.budget for row in self.rows], self.max_positions - self.lengths + 1)

    @property
    def num_slots(self) -> int:
        """Cache slots that hold every row to its end."""
        return bucket(int(np.max(self.lengths + self.budgets)) - 1, limit=self.max_positions)

    def padded(self) -> Int32[np.ndarray, "B T"]:
        """The prompts padded on the right with zeros."""
        length = bucket(int(self.lengths.max()), limit=self.max_positions)
        padded = [np.pad(row.ids, (0, length - len(row.ids))) for row in self.rows]
        return np.stack(padded).astype(np.int32)

    def finish(self, row: _Row, *, index: int, token: int, budget: int) -> FinishReason | None:
        """Why a row ends with this token; None if it goes on."""
        if token in self.eos_ids:
            return FinishReason.EOS
        if index + 1 < budget:
            return None
        return FinishReason.LENGTH if budget == row.budget else FinishReason.CONTEXT


def _stream(
    rows: Sequence[_Row],
    *,
    max_positions: int,
    parameters: nnx.State,
    eos_ids: frozenset[int],
    config: StepConfig,
    batch_shards: int,
    seed: int,
) -> Iterator[GeneratedToken]:
    unfinished = set(range(len(rows)))
    # Rows that divide over the devices; nobody listens to the last one's copies.
    rows = [*rows, *[rows[-1]] * (-len(rows) % batch_shards)]
    request = _Request(rows=rows, max_positions=max_positions, eos_ids=eos_ids)
    budgets = request.budgets.tolist()
    row_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    tokens, state = prefill(
        parameters,
        request.padded(),
        request.lengths,
        row_keys(jax.random.key(seed), np.array([row.number for row in rows])),
        SamplingRows.of([row.sampling for row in rows]),
        config=config,
        num_slots=request.num_slots,
    )
    for index in range(max(budgets)):
        drawn = tokens
        if index + 1 < max(budgets):
            # Before the host waits for the tokens just drawn: the device never waits for the host.
            tokens, state = decode(parameters, state, drawn, config=config)
        host_tokens = np.asarray(drawn).tolist()
        for place in sorted(unfinished):
            row, token = rows[place], host_tokens[place]
            if token == NO_TOKEN:
                raise CheckpointError(
                    f"the logits of prompt {row.number} for new token {row.drawn + index + 1} are "
                    "not finite, so there is nothing to draw: its weights, or what this precision "
                    "makes of them, are not; take an earlier checkpoint, or another --policy"
                )
            finish = request.finish(row, index=index, token=token, budget=budgets[place])
            if finish is not None:
                unfinished.remove(place)
            yield GeneratedToken(
                row=row.number, index=row.drawn + index, token=token, finish=finish
            )
        if not unfinished:
            return


def _crossing(
    rows: Sequence[_Row],
    run: Callable[..., Iterator[GeneratedToken]],
    *,
    original: int,
    max_positions: int,
) -> Iterator[GeneratedToken]:
    """``run``, by the two rotations of LongRoPE: a cache holds keys of one of them."""
    within = {row.number: row for row in rows if len(row.ids) <= original}
    beyond = [row for row in rows if row.number not in within]
    new: dict[int, list[int]] = {number: [] for number in within}
    limit = min(original, max_positions)
    for each in run([*within.values()], max_positions=limit) if within else ():
        new[each.row].append(each.token)
        crosses = each.finish is FinishReason.CONTEXT and limit < max_positions
        if crosses:
            row, tokens = within[each.row], new[each.row]
            beyond.append(
                dataclasses.replace(
                    row,
                    ids=np.concatenate([row.ids, tokens]),
                    budget=row.budget - len(tokens),
                    drawn=len(tokens),
                )
            )
        yield dataclasses.replace(each, finish=None) if crosses else each
    if beyond:
        yield from run(beyond, max_positions=max_positions)


def generate_text(
    model: LoadedModel, prompt: str, *, max_new_tokens: int, sampling: SamplingConfig, seed: int = 0
) -> Iterator[TextPiece]:
    """Continues a text as the beginning of a document; a piece a token, never half a character.

    The pieces' texts, joined, are the text of all tokens before the end token. Raises as
    ``generate``.
    """
    return generate_text_after(
        model, model.prompt(prompt), max_new_tokens=max_new_tokens, sampling=sampling, seed=seed
    )


def generate_text_after(
    model: LoadedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    seed: int = 0,
) -> Iterator[TextPiece]:
    """``generate_text`` after a prompt that is tokens already, a rendered conversation say."""
    tokenizer = model.tokenizer
    decoder = tokenizer.stream_decoder(prompt_ids)
    tokens = generate(
        model.decoder,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        eos_ids=tokenizer.end_ids,
        num_ids=model.num_ids,
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


def original_context(config: ModelConfig) -> int | None:
    """Tokens up to which LongRoPE rotates by its short factors; None without it."""
    scalings = [block.mixer.rope and block.mixer.rope.scaling for block in config.blocks]
    found = {each.original_max_positions for each in scalings if type(each) is LongRopeScaling}
    if len(found) > 1:
        raise ConfigError(
            f"LongRoPE with original contexts of {sorted(found)} tokens in one model: generation "
            "runs a row again where it crosses one; give all blocks the same"
        )
    return found.pop() if found else None


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
