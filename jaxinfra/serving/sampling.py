"""Samples the next token from logits; each batch row has its own settings, given as arrays.

Top-k and top-p keep a prefix of the most likely tokens, found without a sort. Tokens are ordered by
logit, lower ids first among equals. So a prefix is a least logit, and a number of tokens that have
exactly this logit. A search finds both: logits become integers of the same order, and each pass
over the vocabulary settles three bits.

Dims: B batch, V vocabulary, K most likely tokens, E biased tokens, W words of 32 tokens, T token.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxinfra.errors import ConfigError

_BITS = 3  # of the searched number that a round settles


def kept_tokens(
    scaled_BV: Float[Array, "B V"], top_k_B: Int[Array, "B"], top_p_B: Float[Array, "B"]
) -> Bool[Array, "B V"]:
    """Returns a mask of the tokens that top-k and then top-p keep, also exact among ties.

    Top-p keeps the fewest tokens whose probabilities, renormalized after top-k, sum to p or more.
    Probabilities are summed in fp32.

    Args:
        scaled_BV: fp32 logits divided by the temperature, shifted so that each row's largest is 0.
        top_k_B: number of tokens to keep; 0 keeps all.
        top_p_B: probability to keep; 1 or more keeps all tokens that top-k left.
    """
    batch, num_ids = scaled_BV.shape
    order_BV = _ordered(scaled_BV)
    weight_BV = jnp.exp(scaled_BV)
    k_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, num_ids), num_ids)

    def counts(bounds: list[jax.Array]) -> list[jax.Array]:
        """Number of tokens from each of these logits on."""
        return _row_sums([(order_BV >= each[:, None]).astype(jnp.int32) for each in bounds])

    def reach_k(bounds: list[jax.Array]) -> list[jax.Array]:
        return [count_B >= k_B for count_B in counts(bounds)]

    least_k_B = _largest_logit(reach_k, batch=batch, num_bits=32)
    (above_k_B,) = counts([least_k_B + 1])
    ties_k_B = k_B - above_k_B
    tied_B = jnp.max(jnp.where(order_BV == least_k_B[:, None], weight_BV, 0), axis=1)
    tied_B = tied_B * ties_k_B.astype(tied_B.dtype)

    def masses(bounds: list[jax.Array]) -> list[jax.Array]:
        """Probability of the tokens from each of these logits on that top-k left."""
        above = [jnp.maximum(each, least_k_B + 1)[:, None] for each in bounds]
        sums = _row_sums([jnp.where(order_BV >= each, weight_BV, 0) for each in above])
        with_ties = [jnp.where(each <= least_k_B, tied_B, 0) for each in bounds]
        return [sum_B + ties_B for sum_B, ties_B in zip(sums, with_ties, strict=True)]

    (whole_B,) = masses([jnp.zeros_like(least_k_B)])
    target_B = top_p_B * whole_B

    def reach_p(bounds: list[jax.Array]) -> list[jax.Array]:
        return [mass_B >= target_B for mass_B in masses(bounds)]

    # Not below top-k's: from there down nothing is added.
    least_p_B = _largest_logit(reach_p, batch=batch, num_bits=32)
    weight_B = jnp.max(jnp.where(order_BV == least_p_B[:, None], weight_BV, 0), axis=1)
    (above_p_B,) = masses([least_p_B + 1])
    ties_p_B = jnp.maximum(jnp.ceil((target_B - above_p_B) / weight_B), 1).astype(jnp.int32)
    # A quotient may round up beyond what top-k left.
    ties_p_B = jnp.where(least_p_B == least_k_B, jnp.minimum(ties_p_B, ties_k_B), ties_p_B)
    is_all_B = top_p_B >= 1
    return _prefix(
        order_BV,
        jnp.where(is_all_B, least_k_B, least_p_B),
        jnp.where(is_all_B, ties_k_B, ties_p_B),
    )


def _ordered(scaled_BV: jax.Array) -> UInt32[Array, "B V"]:
    """Maps fp32 numbers to integers of the same order; equal numbers to equal integers."""
    # 0 has two signs.
    scaled_BV = jnp.where(scaled_BV == 0, 0, scaled_BV)
    bits_BV = jax.lax.bitcast_convert_type(scaled_BV, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits_BV >= sign, ~bits_BV, bits_BV | sign)


def _prefix(order_BV: jax.Array, least_B: jax.Array, ties_B: jax.Array) -> Bool[Array, "B V"]:
    """Mask of the ids above a number, and of the first few that equal it."""
    batch, num_ids = order_BV.shape
    ids_V = jnp.arange(num_ids, dtype=jnp.uint32)[None]
    is_tied_BV = order_BV == least_B[:, None]

    def fit(ends: list[jax.Array]) -> list[jax.Array]:
        """Whether no more than asked for are before these ids."""
        before = [is_tied_BV & (ids_V < end_B[:, None]) for end_B in ends]
        return [n_B <= ties_B for n_B in _row_sums([each.astype(jnp.int32) for each in before])]

    end_B = _largest_logit(fit, batch=batch, num_bits=num_ids.bit_length())
    return (order_BV > least_B[:, None]) | (is_tied_BV & (ids_V < end_B[:, None]))


def _largest_logit(
    hold: Callable[[list[jax.Array]], list[jax.Array]], *, batch: int, num_bits: int
) -> UInt32[Array, "B"]:
    """The largest number of ``num_bits`` bits for which a condition holds, of every row.

    Args:
        hold: several uint32 [B] -> bool [B] of each; true for 0, and false from some number on.
    """
    num_rounds = -(-num_bits // _BITS)

    def settle(i: jax.Array, found_B: jax.Array) -> jax.Array:
        shift = (_BITS * (num_rounds - 1 - i)).astype(jnp.uint32)
        steps = [jnp.uint32(j) << shift for j in range(1, 1 << _BITS)]
        held = hold([found_B + step for step in steps])
        # The first round may try numbers of more than 32 bits.
        fits = [step >> shift == j for j, step in enumerate(steps, start=1)]
        passed = [(each & fit).astype(jnp.uint32) for each, fit in zip(held, fits, strict=True)]
        return found_B + (sum(passed[1:], passed[0]) << shift)

    return jax.lax.fori_loop(0, num_rounds, settle, jnp.zeros(batch, jnp.uint32))


def _row_sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """The sum over the last dim of each of these [B, V] arrays, in one pass over all of them.

    As reductions of their own they are two kernels each on a GPU.
    """
    zeros = [jnp.zeros((), each.dtype) for each in arrays]

    def add(first: tuple[jax.Array, ...], second: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(a + b for a, b in zip(first, second, strict=True))

    return [*jax.lax.reduce(tuple(arrays), tuple(zeros), add, (1,))]


_BELOW_ONE = np.float32(1.0 - 2.0**-24)
_TINY = float(np.finfo(np.float32).tiny)
_BLOCK = 1024  # ids whose most likely are found at a time
MOST_LOGPROBS = 20
"""Most alternatives per token that a request may ask for, the limit of OpenAI's API."""

NO_TOKEN = -1
"""Sampled in place of an id if a row's logits have a NaN or infinity, or exclude every token."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Settings with which a token is sampled from logits.

    Applied in this order: bias, penalties, temperature, min-p, top-k, and top-p of the remaining
    tokens. A temperature of 0 is greedy: the most likely token, the lowest id among equals.
    """

    temperature: float = 1.0
    top_k: int | None = None  # keep the k most likely, lower ids first among equals
    top_p: float | None = None  # keep the fewest whose probabilities reach p (Holtzman et al. 2020)
    min_p: float | None = None  # keep those at least p times as likely as the most likely
    # Logits of the prompt's and drawn tokens are divided by it if positive, else multiplied (CTRL,
    # Keskar et al. 2019).
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from logits of tokens sampled before
    frequency_penalty: float = 0.0  # subtracted once for each time that a token was sampled
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, and what is added to its logit
    logprobs: int | None = None  # most likely tokens to report per sample; None: none

    @classmethod
    def of(cls, *settings: Mapping[str, Any]) -> "SamplingConfig":
        """Merges settings by name; later ones override earlier ones, and None leaves a setting as
        it is. A ``top_k`` of 0 or -1 keeps all tokens, as in files and requests.
        """
        said = {
            name: value for each in settings for name, value in each.items() if value is not None
        }
        if said.get("top_k") in (0, -1):
            del said["top_k"]
        return cls(**said)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature={self.temperature} must be 0 (greedy) or a positive number"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} must be at least 1; leave it out to keep all")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} must be in (0, 1]; leave it out to keep all")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min_p={self.min_p} must be in [0, 1]; leave it out to keep all")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty} must be a positive number; 1 is none"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not -2.0 <= value <= 2.0:
                raise ConfigError(f"{name}={value} must be in [-2, 2]; 0 is none")
        ids = [token for token, _ in self.logit_bias]
        if len(set(ids)) < len(ids) or min(ids, default=0) < 0:
            raise ConfigError(f"logit_bias of ids {ids}: each must be at least 0, and named once")
        if any(math.isnan(bias) or bias == math.inf for _, bias in self.logit_bias):
            raise ConfigError(
                f"logit_bias={self.logit_bias} must be numbers; -inf excludes a token"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise ConfigError(f"logprobs={self.logprobs} must be in 0..{MOST_LOGPROBS}")

    @property
    def is_penalized(self) -> bool:
        """Whether a sample depends on the row's earlier tokens, by a penalty."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


GREEDY = SamplingConfig(temperature=0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenHistory:
    """Counts of each batch row's tokens, for penalties. Kept on the device; donate it when it is
    replaced.
    """

    sampled_BV: Int[Array, "B V"]  # int32
    in_prompt_BV: Bool[Array, "B V"]

    @classmethod
    def empty(cls, *, batch: int, num_ids: int) -> "TokenHistory":
        """Makes a history of rows without tokens."""
        return cls(
            sampled_BV=jnp.zeros((batch, num_ids), jnp.int32),
            in_prompt_BV=jnp.zeros((batch, num_ids), bool),
        )

    def begin(
        self,
        row: Int[Array, ""],
        ids_T: Int[Array, "T"],
        *,
        num_prompt: Int[Array, ""],
        num_tokens: Int[Array, ""],
    ) -> "TokenHistory":
        """Returns the history with one row replaced by the tokens of a new sequence.

        Args:
            ids_T: the prompt's ids, then tokens sampled before the sequence was preempted, then
                padding.
            num_prompt, num_tokens: number of ids in the prompt, and in prompt and samples.
        """
        place_T = jnp.arange(ids_T.size)
        num_ids = self.sampled_BV.shape[1]
        prompt_T = jnp.where(place_T < num_prompt, ids_T, num_ids)
        drawn_T = jnp.where((place_T >= num_prompt) & (place_T < num_tokens), ids_T, num_ids)
        in_prompt_V = jnp.zeros(num_ids, bool).at[prompt_T].set(True, mode="drop")
        sampled_V = jnp.zeros(num_ids, jnp.int32).at[drawn_T].add(1, mode="drop")
        return TokenHistory(
            sampled_BV=self.sampled_BV.at[row].set(sampled_V),
            in_prompt_BV=self.in_prompt_BV.at[row].set(in_prompt_V),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingNeeds:
    """Settings that any row of a batch uses. They are static, so that no other is computed.

    Each value compiles to its own program. A row's sample is equal in all programs that have its
    settings. A branch on the device instead would make the host wait for the device.
    """

    noise: bool = False  # a row is not greedy
    cuts: bool = False  # a row that is not greedy has top-k, top-p or min-p
    bias: bool = False
    penalties: bool = False  # takes a ``TokenHistory``
    logprobs: int | None = None  # most likely tokens to report; None: no log-probabilities

    @classmethod
    def of(cls, configs: Iterable[SamplingConfig]) -> "SamplingNeeds":
        """Returns the settings that any of these configs uses."""
        configs = [*configs]
        drawn = [c for c in configs if c.temperature > 0]
        told = [c.logprobs for c in configs if c.logprobs is not None]
        return cls(
            noise=bool(drawn),
            cuts=any(c.top_k or c.min_p or (c.top_p or 1.0) < 1.0 for c in drawn),
            bias=any(c.logit_bias for c in configs),
            penalties=any(c.is_penalized for c in configs),
            logprobs=max(told, default=None),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Sampling settings of each batch row, as arrays that are passed to a compiled step."""

    temperature_B: jax.Array  # fp32; 0: greedy
    top_k_B: jax.Array  # int32; 0: all tokens
    top_p_B: jax.Array  # fp32; 1: all that top-k left
    min_p_B: jax.Array  # fp32; 0: all tokens
    repetition_B: jax.Array  # fp32; 1: none
    presence_B: jax.Array  # fp32
    frequency_B: jax.Array  # fp32
    bias_ids_BE: jax.Array  # int32; below 0: none
    bias_BE: jax.Array  # fp32

    @classmethod
    def of(
        cls, configs: Sequence[SamplingConfig], *, num_biases: int | None = None
    ) -> "SamplingRows":
        """Packs configs into arrays, one row per config.

        Args:
            num_biases: biased tokens that each row has space for; by default the most of any
                config.
        """
        most = max((len(c.logit_bias) for c in configs), default=0)
        width = most if num_biases is None else num_biases
        if most > width:
            raise ConfigError(f"logit_bias of {most} tokens; this engine has room for {width}")
        bias_ids_BE = np.full((len(configs), width), -1, np.int32)
        bias_BE = np.zeros((len(configs), width), np.float32)
        for row, config in enumerate(configs):
            for place, (token, bias) in enumerate(config.logit_bias):
                bias_ids_BE[row, place], bias_BE[row, place] = token, bias
        # Not under the smallest normal number: a device may flush what is smaller to 0, greedy.
        temperatures = [c.temperature and max(c.temperature, _TINY) for c in configs]
        top_ks = [min(c.top_k or 0, np.iinfo(np.int32).max) for c in configs]
        top_ps = [1.0 if c.top_p is None else max(c.top_p, _TINY) for c in configs]

        def floats(values: Sequence[float]) -> jax.Array:
            return jnp.asarray(np.asarray(values, np.float32))

        return cls(
            temperature_B=floats(temperatures),
            top_k_B=jnp.asarray(np.asarray(top_ks, np.int32)),
            top_p_B=floats(top_ps),
            min_p_B=floats([c.min_p or 0.0 for c in configs]),
            repetition_B=floats([c.repetition_penalty for c in configs]),
            presence_B=floats([c.presence_penalty for c in configs]),
            frequency_B=floats([c.frequency_penalty for c in configs]),
            bias_ids_BE=jnp.asarray(bias_ids_BE),
            bias_BE=jnp.asarray(bias_BE),
        )


def sampling_key(seed: jax.Array, choice: jax.Array, position: jax.Array) -> Key[Array, ""]:
    """Returns the PRNG key with which a request samples its token at a position."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogProbabilities:
    """Log-probabilities by the model alone, fp32: before bias, penalties and temperature."""

    chosen_B: Float[Array, "B"]
    top_ids_BK: Int[Array, "B K"]  # int32, the most likely first, lower ids first among equals
    top_BK: Float[Array, "B K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One sampled token id per row, with log-probabilities if asked for."""

    ids_B: Int[Array, "B"]  # int32; ``NO_TOKEN`` if no token can be sampled
    logprobs: LogProbabilities | None  # where needed
    is_finite_B: Bool[Array, "B"]  # whether all of a row's logits were


def sample(
    logits_BV: Float[Array, "B V"],
    keys_B: Key[Array, "B"],
    *,
    rows: SamplingRows,
    needs: SamplingNeeds,
    history: TokenHistory | None = None,
    allowed_BW: UInt32[Array, "B W"] | None = None,
    total_B1: Float[Array, "B 1"] | None = None,
) -> Sampled:
    """Samples one token id per row; it depends on the row's own logits, key, settings and history.

    Args:
        logits_BV: fp32 logits; a token with -inf is never sampled.
        keys_B: typed PRNG keys, one per row; not used by a greedy row.
        needs: settings to compute, at least those that the rows use; others are ignored.
        history: the rows' earlier tokens, if penalties are needed.
        allowed_BW: bit ``i % 32`` of word ``i // 32`` is 1 if token i may be sampled; None: all
            tokens may.
        total_B1: as in ``log_probabilities``.
    """
    given_BV = logits_BV
    if allowed_BW is not None:
        logits_BV = jnp.where(_bits(allowed_BW, logits_BV.shape[1]), logits_BV, -jnp.inf)
    if needs.bias:
        num_ids = logits_BV.shape[1]
        ids_BE = jnp.where(rows.bias_ids_BE < 0, num_ids, rows.bias_ids_BE)
        rows_B1 = jnp.arange(len(logits_BV))[:, None]
        logits_BV = logits_BV.at[rows_B1, ids_BE].add(rows.bias_BE, mode="drop")
    if needs.penalties:
        assert history is not None, "penalties need a history"
        logits_BV = _penalized(logits_BV, rows, history)
    largest_B, greedy_B, is_finite_B = _largest(logits_BV, jnp.isfinite(given_BV))
    ids_B = greedy_B
    if needs.noise:
        ids_B = _drawn(logits_BV, largest_B[:, None], greedy_B, keys_B, rows, cuts=needs.cuts)
    logprobs = None
    if needs.logprobs is not None:
        logprobs = log_probabilities(given_BV, ids_B, num_top=needs.logprobs, total_B1=total_B1)
    ids_B = jnp.where(jnp.isfinite(largest_B), ids_B, NO_TOKEN)
    return Sampled(ids_B=ids_B, logprobs=logprobs, is_finite_B=is_finite_B)


def _largest(logits_BV: jax.Array, flags_BV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest logit of each row and its id, a NaN before all others and the first of equals;
    and whether all flags are true. One reduction: of a few rows each is launches and little else.
    """
    shape = logits_BV.shape
    ids_BV = jax.lax.broadcasted_iota(jnp.int32, shape, 1)

    def of_two(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (x, i, holds), (y, j, also) = one, other
        is_nan, other_is_nan = x != x, y != y
        is_like = (x == y) | (is_nan & other_is_nan)
        takes = (x > y) | (is_nan & ~other_is_nan) | (is_like & (i < j))
        return jnp.where(takes, x, y), jnp.where(takes, i, j), holds & also

    none = (logits_BV.dtype.type(-jnp.inf), np.int32(shape[1]), np.bool_(True))
    largest_B, ids_B, holds_B = jax.lax.reduce((logits_BV, ids_BV, flags_BV), none, of_two, (1,))
    return largest_B, ids_B, holds_B


def _drawn(
    logits_BV: jax.Array,
    largest_B1: jax.Array,
    greedy_B: jax.Array,
    keys_B: jax.Array,
    rows: SamplingRows,
    *,
    cuts: bool,
) -> jax.Array:
    """Draws of the rows that are not greedy, among the tokens that their settings keep."""
    is_drawn_B = rows.temperature_B > 0
    # Relative to the largest, so that a small temperature cannot overflow it.
    scaled_BV = (logits_BV - largest_B1) / jnp.where(is_drawn_B, rows.temperature_B, 1.0)[:, None]
    # Noise belongs to ids, not ranks: cutting the tail changes only the draws that were in it.
    noisy_BV = scaled_BV + gumbel_noise(keys_B, scaled_BV.shape[1])
    if cuts:
        # At least the most likely is left: its logarithm is 0.
        is_likely_BV = scaled_BV >= jnp.log(rows.min_p_B)[:, None]
        likely_BV = jnp.where(is_likely_BV, scaled_BV, -jnp.inf)
        is_kept_BV = is_likely_BV & kept_tokens(likely_BV, rows.top_k_B, rows.top_p_B)
        noisy_BV = jnp.where(is_kept_BV, noisy_BV, -jnp.inf)
    drawn_B = jnp.argmax(noisy_BV, axis=-1).astype(jnp.int32)
    return jnp.where(is_drawn_B, drawn_B, greedy_B)


def log_probabilities(
    logits_BV: Float[Array, "B V"],
    ids_B: Int[Array, "B"],
    *,
    num_top: int,
    total_B1: Float[Array, "B 1"] | None = None,
) -> LogProbabilities:
    """Computes log-probabilities of the given ids, and of each row's ``num_top`` likeliest ones.

    Args:
        total_B1: logsumexp of each row's logits, if it is known already.
    """
    if total_B1 is None:
        total_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
    chosen_B1 = jnp.take_along_axis(logits_BV, ids_B[:, None], axis=1) - total_B1
    top_BK, top_ids_BK = _most_likely(logits_BV, num_top)
    return LogProbabilities(
        chosen_B=chosen_B1[:, 0], top_ids_BK=top_ids_BK, top_BK=top_BK - total_B1
    )


def _penalized(logits_BV: jax.Array, rows: SamplingRows, history: TokenHistory) -> jax.Array:
    """Logits after the repetition, frequency and presence penalties."""
    sampled_BV = history.sampled_BV
    repetition_B1 = rows.repetition_B[:, None]
    is_repeated_BV = (sampled_BV > 0) | history.in_prompt_BV
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
    logits_BV = jnp.where(is_repeated_BV, repeated_BV, logits_BV)
    logits_BV = logits_BV - rows.frequency_B[:, None] * sampled_BV.astype(logits_BV.dtype)
    return logits_BV - jnp.where(sampled_BV > 0, rows.presence_B[:, None], 0.0)


def _most_likely(logits_BV: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    """The largest logits and their ids, lower ids first among equals.

    Of each block of ids first: to sort a whole vocabulary takes a GPU many passes over it.
    """
    batch, num_ids = logits_BV.shape
    num_top = min(num_top, num_ids)
    if num_ids <= _BLOCK or num_top == 0:
        return jax.lax.top_k(logits_BV, num_top)
    num_blocks = -(-num_ids // _BLOCK)
    padding = ((0, 0), (0, num_blocks * _BLOCK - num_ids))
    padded_BV = jnp.pad(logits_BV, padding, constant_values=-jnp.inf)
    few_BCK, places_BCK = jax.lax.top_k(padded_BV.reshape(batch, num_blocks, _BLOCK), num_top)
    ids_BCK = places_BCK + _BLOCK * jnp.arange(num_blocks)[None, :, None]
    top_BK, ranks_BK = jax.lax.top_k(few_BCK.reshape(batch, -1), num_top)
    return top_BK, jnp.take_along_axis(ids_BCK.reshape(batch, -1), ranks_BK, axis=1)


def _bits(words_BW: jax.Array, num_ids: int) -> jax.Array:
    """The first V bits of every row's words, bool [B, V]."""
    shifts = jnp.arange(32, dtype=jnp.uint32)[None, None]
    bits_BV = ((words_BW[:, :, None] >> shifts) & 1).reshape(len(words_BW), -1)
    return bits_BV[:, :num_ids] == 1


def gumbel_noise(keys_B: Key[Array, "B"], num_ids: int) -> Float[Array, "B V"]:
    """Returns Gumbel noise, fp32 [B, V], independent for each row and id: a function of key and id.

    Each number uses 64 bits, one block of the keys' own cipher (Salmon et al. 2011), so that only
    arithmetic is between a key and its argmax. ``jax.random.gumbel`` has 23 bits, too few for
    tokens less likely than 1e-7, of which there are many. Its mode "high" has 46 bits from two
    blocks, which XLA for GPUs writes to memory in between.
    """
    words_B2 = jax.random.key_data(keys_B)
    shape = len(words_B2), num_ids
    key = (jnp.broadcast_to(words_B2[:, place, None], shape) for place in range(2))
    ids_BV = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    return gumbel_of_bits(*threefry2x32_p.bind(*key, jnp.zeros_like(ids_BV), ids_BV))


def gumbel_of_bits(
    high: UInt32[Array, "*shape"], low: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Computes ``-log(-log(1 - x))`` of x = (2**32 high + low + 1/2) / 2**64, in fp32.

    The largest noise comes from x near 0, where fp32 is precise; the most is 45.
    """
    unit, half = np.float32(2.0**-32), np.float32(0.5)
    x = high.astype(unit.dtype) * unit + (low.astype(unit.dtype) + half) * unit**2
    # The largest 25 bits would round to 1, whose noise is -inf, as of a token that is excluded.
    return -jnp.log(-jnp.log1p(-jnp.minimum(x, _BELOW_ONE)))
