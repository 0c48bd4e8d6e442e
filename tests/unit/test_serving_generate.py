"""Generation: greedy is argmax, rows are independent, streams end where and as they should."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.data import DataConfig
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.rope import RopeConfig
from jaxinfra.config.run import RunConfig, TrainingConfig
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import CheckpointError, ConfigError, DataError
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving import steps
from jaxinfra.serving.generate import FinishReason, bucket, generate, generate_text
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import GREEDY, SamplingConfig

VOCABULARY, POSITIONS = 300, 32
CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    model_dim=64,
    max_positions=POSITIONS,
    stacks=stacked(
        BlockConfig(
            mixer=GroupedAttentionConfig(
                num_q_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(), window=6
            ),
            feed_forward=MlpConfig(hidden_dim=32),
        ),
        num_layers=2,
    ),
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


def rows(tokens) -> dict[int, list[int]]:
    """Tokens by row; checks that each row's come in order and stop where they say."""
    result, ended = {}, set()
    for new in tokens:
        assert new.row not in ended
        assert new.index == len(result.setdefault(new.row, []))
        result[new.row].append(new.token)
        if new.finish is not None:
            ended.add(new.row)
    assert ended == set(result)
    return result


PROMPTS = [[5], [7, 250, 3, 99, 4, 8, 1, 2, 3, 40], [1, 2, 3]]


def test_greedy_is_argmax_without_a_cache(model):
    @jax.jit
    def logits(ids_BT):
        return model(ids_BT)

    got = rows(generate(model, PROMPTS, max_new_tokens=12, sampling=GREEDY))
    for row, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for _ in range(12):
            padded = np.zeros((1, POSITIONS), np.int32)  # causality hides the padding
            padded[0, : len(ids)] = ids
            ids.append(int(np.argmax(logits(padded)[0, len(ids) - 1])))
        assert got[row] == ids[len(prompt) :]
    assert len({token for tokens in got.values() for token in tokens}) > 6, "a telling sequence"


SAMPLING = SamplingConfig(temperature=1.5, top_k=100, top_p=0.95)


def test_seeded_draws_repeat_and_ignore_the_rest_of_the_batch(model):
    def drawn(prompts, seed):
        tokens = generate(model, prompts, max_new_tokens=10, sampling=SAMPLING, seed=seed)
        return rows(tokens)

    first = drawn(PROMPTS, seed=3)
    assert drawn(PROMPTS, seed=3) == first
    assert drawn(PROMPTS, seed=4) != first
    # Other neighbours, longer ones that need another bucket, or fewer.
    assert drawn([[9] * 20, PROMPTS[1], [8] * 18], seed=3)[1] == first[1]
    assert drawn(PROMPTS[:2], seed=3) == {0: first[0], 1: first[1]}
    # Equal prompts of one batch are drawn separately.
    twins = drawn([PROMPTS[2], PROMPTS[1], PROMPTS[2]], seed=3)
    assert twins[0] != twins[2]


def test_rows_of_one_batch_draw_by_their_own_settings(model):
    settings = [GREEDY, SAMPLING, SamplingConfig(temperature=0.7)]
    mixed = rows(generate(model, PROMPTS, max_new_tokens=10, sampling=settings, seed=3))
    for row, config in enumerate(settings):
        alone = rows(generate(model, PROMPTS, max_new_tokens=10, sampling=config, seed=3))
        assert mixed[row] == alone[row]
    with pytest.raises(ConfigError, match="2 sampling settings for 3 prompts"):
        generate(model, PROMPTS, max_new_tokens=1, sampling=settings[:2])


def test_settings_that_need_the_same_share_a_compiled_program(model):
    def compiled() -> int:
        return steps.prefill._cache_size() + steps.decode._cache_size()

    def drawn(sampling):
        return rows(generate(model, PROMPTS, max_new_tokens=4, sampling=sampling))

    drawn(SAMPLING)
    before = compiled()
    for sampling in (SamplingConfig(top_k=3), [GREEDY, SAMPLING, SamplingConfig()]):
        drawn(sampling)
    assert compiled() == before


def test_a_row_ends_at_the_end_token_and_the_others_go_on(model):
    free = rows(generate(model, PROMPTS, max_new_tokens=12, sampling=GREEDY))
    eos_id = free[1][4]
    tokens = list(generate(model, PROMPTS, max_new_tokens=12, sampling=GREEDY, eos_ids=[eos_id]))
    for row, ids in rows(tokens).items():
        end = free[row].index(eos_id) + 1 if eos_id in free[row] else 12
        assert ids == free[row][:end]
        last = [new for new in tokens if new.row == row][-1]
        assert last.finish is (FinishReason.EOS if end < 12 else FinishReason.LENGTH)


def test_rows_end_where_the_model_has_no_positions_left(model):
    prompts = [[1] * POSITIONS, [2] * (POSITIONS - 2), [3]]
    tokens = list(generate(model, prompts, max_new_tokens=5, sampling=GREEDY))
    assert [len(ids) for ids in rows(tokens).values()] == [1, 3, 5]
    finishes = {new.row: new.finish for new in tokens if new.finish}
    assert finishes == {0: FinishReason.CONTEXT, 1: FinishReason.CONTEXT, 2: FinishReason.LENGTH}
    # The full row's last token is what the uncached model says of the whole context.
    assert tokens[0].token == int(np.argmax(jax.jit(model)(np.array(prompts[:1]))[0, -1]))


def test_ids_without_a_meaning_are_never_drawn(model):
    hot = SamplingConfig(temperature=100.0)
    tokens = generate(model, PROMPTS, max_new_tokens=20, sampling=hot, num_ids=4)
    assert {new.token for new in tokens} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, DataError, "no prompts"),
        ([[1], []], {}, DataError, "prompt 1 has no tokens"),
        ([[1] * 33], {}, DataError, "33 tokens, more than the model's max_positions=32"),
        ([[1, VOCABULARY]], {}, DataError, r"token ids 1\.\.300, the model's vocabulary is 0\.\."),
        ([[-1]], {}, DataError, r"token ids -1\.\.-1"),
        ([[1]], {"max_new_tokens": 0}, ConfigError, "max_new_tokens=0 must be at least 1"),
        ([[1]], {"num_ids": VOCABULARY + 1}, ConfigError, "num_ids=301"),
        ([[1]], {"seed": 2**80}, ConfigError, "seed="),
    ],
)
def test_bad_requests_are_refused_at_once(model, prompts, options, error, message):
    with pytest.raises(error, match=message):
        generate(model, prompts, **({"max_new_tokens": 1, "sampling": GREEDY} | options))


def test_few_shapes_serve_all_lengths():
    sizes = {bucket(length, limit=3000) for length in range(1, 3001)}
    assert sizes == {16, 32, 64, 128, 256, 512, 1024, 2048, 3000}
    assert all(bucket(length, limit=3000) >= length for length in range(1, 3001))


TEXT = "é日🙂"  # 2, 3 and 4 bytes, no byte twice


def test_text_is_streamed_in_whole_characters():
    model = successor_model([ord("a"), *TEXT.encode(), bytes_tokenizer().eos_id])
    pieces = list(generate_text(model, "a", max_new_tokens=20, sampling=GREEDY))
    assert [piece.text for piece in pieces] == ["", "é", "", "", "日", "", "", "", "🙂", ""]
    assert [piece.finish for piece in pieces] == [None] * 9 + [FinishReason.EOS]


def test_text_cut_within_a_character_says_so():
    model = successor_model([ord("a"), *TEXT.encode(), bytes_tokenizer().eos_id])
    pieces = list(generate_text(model, "a", max_new_tokens=4, sampling=GREEDY))
    assert [piece.text for piece in pieces] == ["", "é", "", "\ufffd"]
    assert pieces[-1].finish is FinishReason.LENGTH


def test_text_begins_as_a_document_does():
    model = successor_model([bytes_tokenizer().bos_id, ord("x"), ord("y"), ord("z")])
    pieces = generate_text(model, "", max_new_tokens=3, sampling=GREEDY)
    assert "".join(piece.text for piece in pieces) == "xyz"


def test_text_is_the_decoding_of_the_tokens(model):
    loaded = dataclasses.replace(successor_model([]), parameters=parameters(scale=0.3))
    prompt = "naïve"
    pieces = generate_text(loaded, prompt, max_new_tokens=20, sampling=SAMPLING, seed=1)
    text = "".join(piece.text for piece in pieces)
    tokenizer = loaded.tokenizer
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    options = {"num_ids": 257, "eos_ids": [256], "seed": 1}
    tokens = generate(model, [ids], max_new_tokens=20, sampling=SAMPLING, **options)
    drawn = [new.token for new in tokens if new.token != tokenizer.eos_id]
    whole = tokenizer.decode([*ids, *drawn])
    assert whole == tokenizer.decode(ids) + text


def test_logits_that_are_no_numbers_end_it_with_an_error(model):
    """What was drawn before them is given; no row of the batch goes on as if nothing were."""
    values = parameters(scale=0.3)
    drawn = [each.token for each in generate(model, [[1, 2]], max_new_tokens=4, sampling=GREEDY)]
    poisoned = next(token for token in drawn[1:] if token not in (1, 2, drawn[0]))
    before = drawn[: drawn.index(poisoned) + 1]
    values["embedding"]["table"] = values["embedding"]["table"].at[poisoned].set(jnp.nan)
    tokens = generate(DEFINITION.bind(values), [[1, 2]], max_new_tokens=4, sampling=GREEDY)
    assert [next(tokens).token for _ in before] == before
    with pytest.raises(CheckpointError, match=f"new token {len(before) + 1} are not finite"):
        next(tokens)
