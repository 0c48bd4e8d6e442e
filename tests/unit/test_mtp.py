"""Multi-token prediction: its loss, and the drafts that an engine takes from it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.presets.runs import tiny
from jaxinfra.config.validate import validate
from jaxinfra.data.batch import Batch
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import define_model
from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.plan import RowSample
from jaxinfra.serving.engine.requests import GenerationRequest, TokenScore
from jaxinfra.serving.sampling import SamplingConfig
from jaxinfra.training.gradients import batch_loss
from tests.small_models import dense

CONFIG = dense(mtp=True, vocab_size=24, mtp_weight=0.5)
NUM_DRAFTS = 3
NUM_IDS = 4  # that may be sampled: so few that drafts of random weights hold now and then


@functools.cache
def definition():
    return define_model(CONFIG, execution_on())


@functools.cache
def parameters():
    rng = np.random.default_rng(10)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, 0.5, leaf.shape), leaf.dtype), definition().shapes
    )


def accepted(tokens, first, last):
    """Number of drafts that steps accept, computed without a cache.

    Args:
        tokens: the whole text.
        first: position of the first token that is drafted after.
        last: position of the last token of the text that is sampled.
    """
    model, length = definition().bind(parameters()), len(tokens)

    @jax.jit
    def drafts(tokens_T):
        """The drafts after each position, [drafts, T], each of its own row."""
        ids_RT = jnp.broadcast_to(tokens_T[None], (length, length))
        x_RTD = model.run(ids_RT).x
        next_RT = jnp.roll(ids_RT, -1, axis=1)
        rows, found = jnp.arange(length), []
        for offset in range(NUM_DRAFTS):
            at = jnp.minimum(rows - 1 + offset, length - 1)
            y_RTD = model.predict(x_RTD, next_RT).x
            found.append(jnp.argmax(model.logits(y_RTD)[rows, at, :NUM_IDS], axis=-1))
            behind = jnp.minimum(at + 1, length - 1)
            x_RTD = x_RTD.at[rows, behind].set(y_RTD[rows, at])
            next_RT = next_RT.at[rows, behind].set(found[-1])
        return jnp.stack(found)

    table = np.asarray(drafts(jnp.asarray(tokens)))
    total, at = 0, first
    while at < last:
        room = min(NUM_DRAFTS, last - at - 1)
        held = 0
        while held < room and table[held, at] == tokens[at + held + 1]:
            held += 1
        total, at = total + held, at + held + 1
    return total


def test_the_loss_is_of_the_token_after_next_in_the_same_document():
    model, rng = definition().bind(parameters()), np.random.default_rng(1)
    ids = rng.integers(0, CONFIG.vocab_size, (1, 8))
    tokens = jnp.asarray(ids[:, :-1])
    segments = jnp.array([[0, 0, 0, 1, 1, 1, -1]])
    batch = Batch(
        tokens=tokens,
        targets=jnp.asarray(ids[:, 1:]),
        segment_ids=segments,
        positions=jnp.array([[0, 1, 2, 0, 1, 2, 0]]),
        weights=jnp.array([[1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]]),
    )
    kept = {"segment_ids": segments, "positions": batch.positions}

    @jax.jit
    def both():
        hidden = model.hidden(tokens, **kept)
        out = model.predict(hidden, jnp.roll(tokens, -1, axis=1), **kept)
        sums = batch_loss(definition(), parameters(), batch, z_loss=0.0)
        return sums, jax.nn.log_softmax(model.logits(out.x)[0])

    sums, logs = both()
    # Of the documents' tokens 0 1 2 and 3 4 5 those after next that count: 2 from 0, 5 from 3.
    wanted = -sum(logs[at, ids[0, at + 2]] for at in (0, 3))
    np.testing.assert_allclose(sums.layers[-1].losses["mtp"], [0.5 * wanted], rtol=1e-5)
    np.testing.assert_allclose(sums.objective - sums.nll, 0.5 * wanted, rtol=1e-4)


def test_flops_of_training_are_those_of_a_layer_more_with_two_projections_and_logits():
    plain = dataclasses.replace(CONFIG, mtp=False)
    deeper = dataclasses.replace(plain, stacks=(dataclasses.replace(plain.stacks[0], repeats=3),))
    each = [
        training_flops_per_token(define_model(config, execution_on()), 16)
        for config in (CONFIG, deeper)
    ]
    added = 2 * CONFIG.model_dim**2 + CONFIG.vocab_size * CONFIG.model_dim
    assert each[0] - each[1] == 6 * added


OPTIONS = EngineOptions(
    max_running=1,
    page_size=4,
    max_step_tokens=16,
    chunk_sizes=(8,),
    max_piece_rows=1,
    num_drafts=NUM_DRAFTS,
)


def test_the_engine_drafts_what_the_module_predicts_and_keeps_the_text():
    model = definition().bind(parameters())
    engine = Engine(model, num_ids=NUM_IDS, options=OPTIONS)
    prompt, new = (3, 1, 4, 1, 5), 40
    (came,) = engine.run([GenerationRequest(prompt_ids=prompt, max_new_tokens=new)])
    text = [*prompt, *(token for each in came for token in each.tokens)]
    greedy = np.argmax(model(np.array([text[:-1]]))[0, :, :NUM_IDS], axis=-1)
    assert text[len(prompt) :] == greedy[len(prompt) - 1 :].tolist()
    wanted = accepted(text, len(prompt), len(text) - 1)
    assert engine.counts.accepted_tokens == wanted > 4
    assert engine.counts.steps == 1 + new - 1 - wanted


def test_scores_of_a_prompt_come_with_accepted_drafts(monkeypatch):
    """The last token of this prompt is a step of its own, beside drafts."""
    engine = Engine(definition().bind(parameters()), num_ids=NUM_IDS, options=OPTIONS)

    def read(plan):
        """Accepts every draft; a token's score is its id."""
        return [
            RowSample(
                row=row,
                tokens=(0,) * (1 + row.num_drafts) if row.is_sampled else (),
                num_accepted=row.num_drafts,
                is_bad=False,
                scores=(TokenScore(logprob=-1.0, top=()),) * (1 + row.num_drafts),
                prompt_scores=tuple(TokenScore(logprob=each, top=()) for each in row.targets),
            )
            for row in plan.rows
        ]

    monkeypatch.setattr(engine.runner, "dispatch", lambda plan, masks: plan)
    monkeypatch.setattr(engine.runner, "read", read)
    prompt = (3, 1, 2, 0, 1, 3, 2, 1, 2)
    (came,) = engine.run(
        [
            GenerationRequest(
                prompt_ids=prompt,
                max_new_tokens=6,
                sampling=SamplingConfig(temperature=0.0, logprobs=0),
                scores_prompt=True,
            )
        ]
    )
    assert [len(each.tokens) for each in came] == [1 + NUM_DRAFTS, 2]
    scores = [[score.logprob for score in each.prompt_scores] for each in came]
    assert scores == [list(prompt[1:]), []]


@pytest.mark.parametrize("mesh", [MeshConfig(pipe=3), MeshConfig(context=2)])
def test_axes_that_part_layers_or_sequences_are_refused(mesh):
    run = tiny()
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, mtp=True), mesh=mesh)
    with pytest.raises(ConfigError, match=r"model\.mtp"):
        validate(run)
