"""Generation: greedy is argmax, an engine is kept, streams end where and as they should."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.data import DataConfig
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.run import RunConfig, TrainingConfig
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import CheckpointError, DataError
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.requests import EndReason
from jaxinfra.serving.generate import bucket, engine_for, generate, generate_text, request_of
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import GREEDY
from tests.generation import served
from tests.small_models import dense

VOCABULARY, POSITIONS = 300, 32
CONFIG = dense(
    vocab_size=VOCABULARY,
    model_dim=64,
    hidden_dim=32,
    max_positions=POSITIONS,
    attention={"window": 6},
    tie_embeddings=False,
)
DEFINITION = define_model(CONFIG, execution_on())


def parameters(*, scale: float):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, scale, leaf.shape), leaf.dtype), DEFINITION.shapes
    )


@pytest.fixture(scope="module")
def model() -> Decoder:
    return DEFINITION.bind(parameters(scale=0.3))


def successor_model(chain: list[int]) -> LoadedModel:
    """A model whose greedy choice after ``chain[i]`` is ``chain[i + 1]``: blocks that add nothing,
    and for each token the unembedding of its successor equal to its embedding.
    """
    values = jax.tree.map(jnp.zeros_like, parameters(scale=1.0))
    rng = np.random.default_rng(1)
    embedding = rng.choice([-1.0, 1.0], (VOCABULARY, CONFIG.model_dim)).astype(np.float32)
    unembedding = np.zeros_like(embedding)
    for token, following in itertools.pairwise(chain):
        unembedding[following] = embedding[token]
    values["embedding"]["table"] = jnp.asarray(embedding)
    values["unembedding"]["table"] = jnp.asarray(unembedding)
    values["final_norm"]["scale"] = jnp.ones(CONFIG.model_dim)
    return LoadedModel(
        definition=DEFINITION,
        parameters=values,
        tokenizer=bytes_tokenizer(),
        config=RunConfig(
            model=CONFIG,
            data=DataConfig(),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0),
            training=TrainingConfig(steps=1, batch_size=1, sequence_length=8),
        ),
        step=1,
    )


def loaded() -> LoadedModel:
    return dataclasses.replace(successor_model([]), parameters=parameters(scale=0.3))


def rows(tokens) -> dict[int, list[int]]:
    result = {}
    for new in tokens:
        result.setdefault(new.row, []).append(new.token)
    return result


PROMPTS = [[5], [7, 250, 3, 99, 4, 8, 1, 2, 3, 40], [1, 2, 3]]


@pytest.mark.slow  # `test_engine.py` compares each request with the model alone
def test_greedy_is_argmax_without_a_cache(model):
    @jax.jit
    def logits(ids_BT):
        return model(ids_BT)

    got = rows(served(model, PROMPTS, max_new_tokens=12, sampling=GREEDY))
    for row, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for _ in range(12):
            padded = np.zeros((1, POSITIONS), np.int32)  # causality hides the padding
            padded[0, : len(ids)] = ids
            ids.append(int(np.argmax(logits(padded)[0, len(ids) - 1])))
        assert got[row] == ids[len(prompt) :]
    assert len({token for tokens in got.values() for token in tokens}) > 6, "a telling sequence"


def asked(model: LoadedModel, prompts, *, new: int, sampling=GREEDY, seed=0):
    return [
        request_of(model, ids, max_new_tokens=new, sampling=sampling, seed=seed, choice=number)
        for number, ids in enumerate(prompts)
    ]


def test_a_model_keeps_its_engine_and_its_programs():
    model = loaded()

    def tokens():
        return generate(model, asked(model, PROMPTS[1:2], new=4))

    first, second = ([each.tokens for _, each in tokens()] for _ in range(2))
    engine = model.kept["engine"]
    compiled = engine.runner.programs.num_compiled
    halfway = tokens()
    assert next(halfway)[1].tokens == first[0]
    assert model.kept["engine"] is engine
    assert engine.runner.programs.num_compiled == compiled
    # Another call in the midst of one has an engine of its own.
    assert [each.tokens for _, each in tokens()] == first == second
    assert model.kept["engine"] is not engine
    halfway.close()
    assert not engine.is_busy
    assert dataclasses.replace(model).kept == {}


def test_no_prompts_are_refused():
    with pytest.raises(DataError, match="no prompts"):
        generate(loaded(), [])


def test_an_engine_that_shares_prefixes_is_not_for_texts_alone():
    model = successor_model([5, 6, 7])
    requests = [request_of(model, [5], max_new_tokens=2, sampling=GREEDY)]
    sharing = engine_for(model, requests, share_prefixes=True)
    alone = engine_for(model, requests)
    assert not alone.limits.share_prefixes
    assert engine_for(model, requests) is alone is not sharing


def test_few_shapes_serve_all_lengths():
    sizes = {bucket(length, limit=3000) for length in range(1, 3001)}
    assert sizes == {16, 32, 64, 128, 256, 512, 1024, 2048, 3000}
    assert all(bucket(length, limit=3000) >= length for length in range(1, 3001))


TEXT = "é日🙂"  # 2, 3 and 4 bytes, no byte twice


@pytest.mark.slow
def test_text_is_streamed_in_whole_characters():
    model = successor_model([ord("a"), *TEXT.encode(), bytes_tokenizer().eos_id])
    pieces = list(generate_text(model, "a", max_new_tokens=20, sampling=GREEDY))
    assert [piece.text for piece in pieces] == ["", "é", "", "", "日", "", "", "", "🙂", ""]
    assert [piece.end for piece in pieces] == [None] * 9 + [EndReason.EOS]


def test_text_cut_within_a_character_says_so():
    model = successor_model([ord("a"), *TEXT.encode(), bytes_tokenizer().eos_id])
    pieces = list(generate_text(model, "a", max_new_tokens=4, sampling=GREEDY))
    assert [piece.text for piece in pieces] == ["", "é", "", "\ufffd"]
    assert pieces[-1].end is EndReason.LENGTH


def test_text_begins_as_a_document_does():
    model = successor_model([bytes_tokenizer().bos_id, ord("x"), ord("y"), ord("z")])
    pieces = generate_text(model, "", max_new_tokens=3, sampling=GREEDY)
    assert "".join(piece.text for piece in pieces) == "xyz"


@pytest.mark.slow
def test_logits_that_are_no_numbers_end_it_with_an_error():
    """What was drawn before them is given."""
    model = loaded()
    drawn = [
        token for _, each in generate(model, asked(model, [[1, 2]], new=4)) for token in each.tokens
    ]
    poisoned = next(token for token in drawn[1:] if token not in (1, 2, drawn[0]))
    before = drawn[: drawn.index(poisoned) + 1]
    values = parameters(scale=0.3)
    values["embedding"]["table"] = values["embedding"]["table"].at[poisoned].set(jnp.nan)
    model = dataclasses.replace(model, parameters=values)
    tokens = generate(model, asked(model, [[1, 2]], new=4))
    assert [next(tokens)[1].tokens for _ in before] == [(token,) for token in before]
    with pytest.raises(CheckpointError, match=f"new token {len(before) + 1} are not finite"):
        next(tokens)
