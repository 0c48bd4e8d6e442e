"""What a cache in fewer bits costs at length: a needle found again, and perplexity by position.

    python -m experiments.bench.cache_quality --lengths 512 2048
    python -m experiments.bench.cache_quality DIR --text long.txt --lengths 4096 32768 --rows 4

A needle is a run of random tokens somewhere in the text. It stands again at the end: its first
tokens are the cue, and what follows there is to be found. Perplexity is of the second half of each
sequence, where most of what is read was cached.

Without DIR the model is built by hand. It predicts what followed a token before, so all that it
says was read from its cache, and texts of a Markov chain become likelier the longer they are. With
DIR the model is a run or a Hugging Face directory, and texts are of a file.

Dims: B sequence, T position, N needle's token, C chunk of positions, D model width.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.environment import environment
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    Stack,
)
from jaxinfra.config.rope import RopeConfig
from jaxinfra.models.decoder import Decoder
from jaxinfra.models.definition import by_path, define_model, nest
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.load import load
from jaxinfra.serving.quantize.source import calibration_ids

NEEDLE, CUE = 16, 6  # tokens of a needle, and those of them that stand at the end
DEPTHS = (0.1, 0.5, 0.9)  # where a needle stands, of the length
TOKENS, CHANCES = 64, (0.6, 0.2, 0.1, 0.1)  # of the chain, and of what follows each of them
VOCABULARY = 2 * TOKENS
_CHUNK = 512  # positions whose logits are there at a time
_SEED = 0
# Of the built model: rotary base, score of the position before, of a match, logit of a token that
# always followed. A match outweighs 8,192 others, e ** 14 to 1.
_THETA, _PREVIOUS, _MATCH, _CERTAINTY = 4.0, 3.0, 14.0, 12.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, with texts for it."""

    decoder: Callable[[CacheFormat], Decoder]
    needles: Callable[[int], np.ndarray]  # [B, N]
    texts: Callable[[int, int], np.ndarray]  # [B, T]


def scores(decoder: Decoder, ids_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each next token, as the cache gives past ones back: its negative log probability, and the
    likeliest one, [B, T - 1]; a sequence at a time.
    """

    @jax.jit
    def one(ids_1T: jax.Array) -> tuple[jax.Array, jax.Array]:
        length = ids_1T.shape[1] - 1
        cache = decoder.empty_cache(batch=1, num_slots=ids_1T.shape[1])
        x_TD = decoder.run(ids_1T, cache=cache).x[0, :-1]
        chunks = -(-length // _CHUNK)
        spare = chunks * _CHUNK - length
        x_CTD = jnp.pad(x_TD, ((0, spare), (0, 0))).reshape(chunks, 1, _CHUNK, -1)
        next_CT = jnp.pad(ids_1T[0, 1:], (0, spare)).reshape(chunks, _CHUNK)

        def of_chunk(given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits_TV = decoder.logits(given[0])[0]
            nll_T = optax.softmax_cross_entropy_with_integer_labels(logits_TV, given[1])
            return nll_T, jnp.argmax(logits_TV, axis=-1)

        nll_CT, best_CT = jax.lax.map(of_chunk, (x_CTD, next_CT))
        return nll_CT.reshape(-1)[:length], best_CT.reshape(-1)[:length]

    found = [one(jnp.asarray(row[None])) for row in ids_BT]
    nll_BT, best_BT = (np.stack([np.asarray(each[i]) for each in found]) for i in range(2))
    return nll_BT, best_BT


def with_needle(ids_BT: np.ndarray, needles_BN: np.ndarray, depth: float) -> np.ndarray:
    """Texts with a needle each at a depth, which stands again at the end."""
    ids_BT = ids_BT.copy()
    at = int(depth * (ids_BT.shape[1] - 2 * NEEDLE))
    ids_BT[:, at : at + NEEDLE] = needles_BN
    ids_BT[:, -NEEDLE:] = needles_BN
    return ids_BT


def measured(subject: Subject, length: int, rows: int) -> list[dict[str, Any]]:
    """A row for each format: needles found and perplexity, against the plain cache's."""
    texts = subject.texts(rows, length)
    needles = subject.needles(rows)
    hidden = {depth: with_needle(texts, needles, depth) for depth in DEPTHS}
    found, plain = [], None
    for form in CacheFormat:
        decoder = subject.decoder(form)
        nll_BT = scores(decoder, texts)[0][:, length // 2 :]
        plain = nll_BT if plain is None else plain
        row: dict[str, Any] = {
            "length": length,
            "cache": form.value,
            "perplexity": float(np.exp(nll_BT.mean(dtype=np.float64))),
            "nll_shift": float(np.abs(nll_BT - plain).mean(dtype=np.float64)),
        }
        for depth, ids_BT in hidden.items():
            nll_BT, best_BT = scores(decoder, ids_BT)
            asked = slice(CUE - NEEDLE, None)  # what follows the cue
            hits = best_BT[:, asked] == ids_BT[:, asked]
            row[f"needle_tokens_{depth}"] = float(hits.mean())
            row[f"needle_nll_{depth}"] = float(nll_BT[:, asked].mean(dtype=np.float64))
        found.append(row)
    return found


def chain_texts(rows: int, length: int) -> np.ndarray:
    """Texts of a Markov chain over the first half of the vocabulary."""
    rng = np.random.default_rng(_SEED)
    follow = rng.integers(0, TOKENS, (TOKENS, len(CHANCES)))
    ids_BT = np.zeros((rows, length), np.int32)
    ids_BT[:, 0] = rng.integers(0, TOKENS, rows)
    choices_BT = rng.choice(len(CHANCES), (rows, length), p=CHANCES)
    for t in range(1, length):
        ids_BT[:, t] = follow[ids_BT[:, t - 1], choices_BT[:, t]]
    return ids_BT


def rare_needles(rows: int) -> np.ndarray:
    """Different tokens of the half of the vocabulary that texts do not have."""
    rng = np.random.default_rng(_SEED)
    return np.stack([TOKENS + rng.permutation(TOKENS)[:NEEDLE] for _ in range(rows)])


def built(*, outlier: float) -> Subject:
    """A model of two layers, written down and not trained, that predicts what followed a token
    before. The first layer's head looks a position back and copies that token beside the own one;
    the second's looks where the token beside is the current one, and copies the own one there.

    Args:
        outlier: times as large as others are two channels of the second layer's keys, as trained
            models have them; queries are as much smaller there, so nothing else changes.
    """
    config = _built_config()
    place = {name: 1 + i * VOCABULARY for i, name in enumerate(("own", "before", "found"))}
    definition = define_model(config, execution_on())
    shapes = by_path(definition.arrays)
    values = {path: np.zeros(leaf.shape, np.float32) for path, leaf in shapes.items()}
    each, width = np.arange(VOCABULARY), config.model_dim
    turns = [
        np.linalg.qr(np.random.default_rng(i).normal(size=(each.size,) * 2))[0] for i in (1, 2)
    ]
    values["embedding/table"][:, 0] = 1.0
    values["embedding/table"][each, place["own"] + each] = 1.0
    values["unembedding/table"][each, place["found"] + each] = _CERTAINTY
    values["final_norm/scale"][:] = 2.0 / np.sqrt(width)
    for i, read in ((0, 2), (1, 3)):  # unit vectors that a layer reads
        values[f"blocks/{i}/attention_norm/scale"][:] = np.sqrt(read / width)

    def weight(layer: int, name: str) -> np.ndarray:
        return values[f"blocks/{layer}/attention/{name}/weight"][0]

    root = np.sqrt(VOCABULARY)  # scores are divided by it
    half = VOCABULARY // 2
    turned = _THETA ** (-np.arange(half) / half)  # of each pair, in a position
    sharp = np.sqrt(_PREVIOUS * root)
    weight(0, "query")[0, 0] = sharp * np.concatenate([np.cos(turned), -np.sin(turned)])
    weight(0, "key")[0, 0, :half] = sharp
    weight(1, "query")[place["own"] + each, 0] = _MATCH * root * turns[0]
    weight(1, "key")[place["before"] + each, 0] = turns[0]
    weight(1, "query")[..., :2] /= outlier
    weight(1, "key")[..., :2] *= outlier
    for layer, into in ((0, "before"), (1, "found")):
        weight(layer, "value")[place["own"] + each, 0] = turns[1]
        weight(layer, "out")[0, :, place[into] + each] = turns[1]
    keyed = {
        tuple(int(key) if key.isdigit() else key for key in path.split("/")): jnp.asarray(value)
        for path, value in values.items()
    }

    def decoder(form: CacheFormat) -> Decoder:
        return define_model(config, execution_on(cache_format=form)).bind(nest(keyed))

    return Subject(decoder=decoder, needles=rare_needles, texts=chain_texts)


def _built_config() -> ModelConfig:
    feed = MlpConfig(hidden_dim=8)

    def block(rope: RopeConfig | None) -> BlockConfig:
        mixer = GroupedAttentionConfig(
            num_q_heads=1, num_kv_heads=1, head_dim=VOCABULARY, rope=rope
        )
        return BlockConfig(mixer=mixer, feed_forward=feed)

    return ModelConfig(
        vocab_size=VOCABULARY,
        model_dim=1 + 3 * VOCABULARY,
        max_positions=1 << 20,
        stacks=(Stack(pattern=(block(RopeConfig(theta=_THETA)), block(None)), repeats=1),),
        tie_embeddings=False,
    )


def stored(directory: Path, text: Path) -> Subject:
    """A model of a directory, and a file's first tokens."""
    model = load(directory)

    def texts(rows: int, length: int) -> np.ndarray:
        return calibration_ids(text, directory, sequence_length=length, num_sequences=rows)

    def needles(rows: int) -> np.ndarray:
        rng = np.random.default_rng(_SEED)
        return rng.integers(0, model.tokenizer.vocab_size, (rows, NEEDLE))

    return Subject(
        decoder=lambda form: model.with_cache(form).decoder, needles=needles, texts=texts
    )


def main() -> None:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path, help="a model; none: a small one")
    parser.add_argument("--text", type=Path, help="of the directory's model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rows", type=int, default=8, help="sequences of each length")
    parser.add_argument("--outlier", type=float, default=8.0, help="of the built model's keys")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if (args.directory is None) != (args.text is None):
        parser.error("a directory takes a --text, and a small model none")
    start = time.monotonic()
    if args.directory is None:
        subject = built(outlier=args.outlier)
    else:
        subject = stored(args.directory, args.text)
    rows = []
    for length in args.lengths:
        for row in measured(subject, length, args.rows):
            rows.append(row)
            needles = "  ".join(f"{depth}: {row[f'needle_tokens_{depth}']:.1%}" for depth in DEPTHS)
            print(
                f"{length:7,} {row['cache']:6s} perplexity {row['perplexity']:8.4f}  needle tokens "
                f"at {needles}  nats off {row['nll_shift']:.1e}",
                flush=True,
            )
    if args.out is not None:
        found = {"environment": environment(), "wall_s": time.monotonic() - start, "rows": rows}
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
