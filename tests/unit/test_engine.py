"""The engine gives each request what the model without a cache gives it, whatever runs beside."""

import collections
import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest
from engine_models import OPTIONS, POISON, PROMPTS, alone, model

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.serving.engine import engine as engine_module
from jaxinfra.serving.engine import program_set, runner
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import Preemption
from jaxinfra.serving.engine.plan import PlannedRow
from jaxinfra.serving.engine.requests import EndReason, GenerationRequest, RequestStream
from jaxinfra.serving.engine.token_rules import TokenRules
from jaxinfra.serving.sampling import GREEDY, SamplingConfig
from tests.generation import recomputed

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
PAGE_BYTES = 4 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, their width, float32
DRAWN = SamplingConfig(temperature=1.3, top_k=40, top_p=0.95)


def drawn(progresses):
    """All tokens of a request, and why it ended."""
    assert [each.end is not None for each in progresses] == [False] * (len(progresses) - 1) + [True]
    return [token for each in progresses for token in each.tokens], progresses[-1].end


def served(engine, requests, arrivals, cancelled=()):
    """Submits each request at its step; returns what came of each."""
    results, numbers, step = collections.defaultdict(list), {}, 0
    while engine.is_busy or len(numbers) < len(requests):
        for place, at in enumerate(arrivals):
            if at == step:
                numbers[engine.submit(requests[place])] = place
        for number, place in [*numbers.items()]:
            if place in cancelled and len(results[place]) == 2:
                engine.cancel(number)
        for progress in engine.step():
            results[numbers[progress.request]].append(progress)
        step += 1
    return [results[place] for place in range(len(requests))]


FAST_CASES = ("phi3_longrope",)


@pytest.mark.slow_cases("phi3_longrope")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST_CASES)) for n in CASES],
)
def test_every_family_as_generated_alone(name):
    """Random arrivals and lengths, shared beginnings, and a pool too small for all of them."""
    pretrained = load_pretrained(GOLDEN / name)
    model = pretrained.definition.bind(pretrained.parameters)
    vocabulary, positions = model.config.vocab_size, min(model.config.max_positions, 48)
    rng = np.random.default_rng(0)
    begun = [tuple(rng.integers(0, vocabulary, 12).tolist()) for _ in range(2)]
    prompts = [
        begun[n % 2][: rng.integers(1, 13)]
        + tuple(rng.integers(0, vocabulary, rng.integers(1, 14)))
        for n in range(8)
    ]
    prompts = [tuple(map(int, prompt)) for prompt in (*prompts, prompts[0], begun[0] + begun[1])]
    new = 9
    want = [[] for _ in prompts]
    for each in recomputed(model, prompts, max_new_tokens=new, sampling=GREEDY):
        want[each.row].append(each.token)
    engine = Engine(model, options=dataclasses.replace(OPTIONS, max_context=positions))
    requests = [GenerationRequest(prompt_ids=p, max_new_tokens=new) for p in prompts]
    for _ in range(2):  # the second time, pages of the first are there
        arrivals = rng.integers(0, 12, len(prompts)).tolist()
        got = served(engine, requests, arrivals)
        assert [drawn(each)[0] for each in got] == want
    assert engine.scheduler.num_preemptions > 0
    assert engine.counts.cached_tokens > 0
    assert engine.scheduler.allocator.num_in_use == 0


@functools.cache
def plain_engine():
    """One engine for many tests: it keeps nothing of a request but pages. Requests that give up
    theirs find some of them again in the host's memory, and compute the rest.
    """
    options = dataclasses.replace(OPTIONS, preemption=Preemption.HOST, host_bytes=6 * PAGE_BYTES)
    engine = Engine(model(), tokenizer=bytes_tokenizer(), num_ids=257, options=options)
    engine.warm_up()
    return engine


def request(prompt, *, new=10, **options):
    return GenerationRequest(prompt_ids=tuple(prompt), max_new_tokens=new, **options)


def test_seeded_draws_are_those_of_the_request_alone():
    got = plain_engine().run([request(p, sampling=DRAWN, seed=3) for p in PROMPTS])
    want = [alone(p, sampling=DRAWN, seed=3) for p in PROMPTS[1:3]]  # each length is a program
    assert [drawn(each)[0] for each in got[1:3]] == want
    first, again, other = plain_engine().run(
        [request(PROMPTS[2], sampling=DRAWN, seed=s, choice=c) for s, c in ((3, 0), (4, 0), (3, 1))]
    )
    assert drawn(first)[0] != drawn(again)[0]
    assert drawn(first)[0] != drawn(other)[0]


def test_many_rows_without_temperature_take_a_program_without_noise(monkeypatch):
    for module in (runner, program_set):
        monkeypatch.setattr(module, "LEAST_GREEDY", 2)
    engine = Engine(model(), num_ids=257, options=OPTIONS)
    greedy = [request(p, new=5) for p in PROMPTS[1:3]]
    got = engine.run(greedy)
    assert {key.is_greedy for key in engine.runner.programs._made if key.length == 1} >= {True}
    others = request(PROMPTS[1], new=8, sampling=SamplingConfig(temperature=1.0))
    beside = engine.run([*greedy, others])
    assert [drawn(each)[0] for each in got] == [drawn(each)[0] for each in beside[:2]]
    assert [drawn(each)[0] for each in got] == [alone(p, new=5) for p in PROMPTS[1:3]]


def test_two_steps_ahead_change_no_answer(monkeypatch):
    """Requests come and end at random, and give up their pages for each other."""
    prompts = [(*PROMPTS[n % 4], *[97 + n % 3] * (n % 3)) for n in range(12)]
    requests = [request(p, new=4 + n % 7) for n, p in enumerate(prompts)]
    arrivals, depths = [n // 2 for n in range(12)], []
    want = served(plain_engine(), requests, arrivals)
    monkeypatch.setattr(engine_module, "MANY_ROWS", 1)
    read = runner.ModelRunner.read

    def counted(self, dispatched):
        depths.append(len(plain_engine()._unread))
        return read(self, dispatched)

    monkeypatch.setattr(runner.ModelRunner, "read", counted)
    got = served(plain_engine(), requests, arrivals)
    assert max(depths) == 2
    assert [drawn(each) for each in got] == [drawn(each) for each in want]


def test_poison_ends_its_own_request_only():
    engine = plain_engine()
    prompts = [PROMPTS[1], (7, 250, 3, 99, POISON, 8, 1), PROMPTS[3], (POISON,)]
    got = engine.run([request(p) for p in prompts])
    for poisoned in (got[1], got[3]):
        assert drawn(poisoned) == ([], EndReason.ERROR)
        assert "not finite" in poisoned[-1].error
    # What took their pages next, and what ran beside them, is untouched.
    after = engine.run([request(p) for p in PROMPTS])
    assert [drawn(each)[0] for each in (got[0], got[2])] == [alone(p) for p in prompts[::2]]
    assert [drawn(each)[0] for each in after] == [alone(p) for p in PROMPTS]
    pools = engine.runner._state.pools
    assert all(np.isfinite(np.asarray(x)).all() for pool in pools for x in pool.values())
    # Keys of tokens before the poison are not finite either, in the second layer: masked values
    # are multiplied by 0. Requests that begin alike and come before that is read have their own.
    prefix = tuple(range(20, 27))
    prompts = [(*prefix, POISON), (*prefix, 2, 3, 40), (*prefix, 9, 6, 5)]
    got = served(engine, [request(p) for p in prompts], (0, 1, 2))
    assert [drawn(each)[0] for each in got] == [[], *map(alone, prompts[1:])]


def test_rules_that_leave_no_token_are_named():
    rules = TokenRules(None, num_ids=257, allowed_ids=[5], words=[(5, 5)])
    (got,) = plain_engine().run([request(PROMPTS[1], constraint=rules)])
    assert drawn(got) == ([5], EndReason.ERROR)
    assert "rules leave no token" in got[-1].error


def test_ends():
    free = alone(PROMPTS[1])
    eos, stop, length, context = plain_engine().run(
        [
            request(PROMPTS[1], eos_ids=frozenset(free[4:5])),
            request(PROMPTS[1], stop_ids=frozenset(free[4:5])),
            request(PROMPTS[1], new=3),
            request((1,) * 60, new=50),
        ]
    )
    at = free.index(free[4])
    assert drawn(eos) == (free[: at + 1], EndReason.EOS)
    assert drawn(stop) == (free[: at + 1], EndReason.STOP)
    assert drawn(length) == (free[:3], EndReason.LENGTH)
    assert drawn(context)[1] is EndReason.CONTEXT
    assert len(drawn(context)[0]) == 5


def test_a_cancelled_request_leaves_no_page():
    engine = plain_engine()
    got = served(engine, [request(p, new=30) for p in PROMPTS], [0, 0, 1, 2], cancelled=(0, 3))
    assert [each[-1].end for each in got] == [
        EndReason.CANCELLED,
        EndReason.LENGTH,
        EndReason.LENGTH,
        EndReason.CANCELLED,
    ]
    assert drawn(got[1])[0] == alone(PROMPTS[1], new=30)
    assert engine.scheduler.allocator.num_in_use == 0
    assert not engine.is_busy


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt": ()}, DataError, "the prompt has no tokens"),
        ({"prompt": (1,) * 65}, DataError, "65 tokens, more than the 64 positions"),
        ({"prompt": (300,)}, DataError, r"token ids 300\.\.300"),
        ({"prompt": (1,), "new": 0}, ConfigError, "max_new_tokens=0"),
        ({"prompt": (1,), "stop": ("",)}, ConfigError, "empty stop string"),
        ({"prompt": (1,), "seed": -1}, ConfigError, "seed=-1"),
        ({"prompt": (1,), "seed": 2**80}, ConfigError, "seed="),
    ],
    ids=["empty", "long", "outside", "none_new", "empty_stop", "below", "above"],
)
def test_bad_requests_are_refused_at_once(options, error, message):
    with pytest.raises(error, match=message):
        plain_engine().submit(request(options.pop("prompt"), **options))


def loaded(engine, count, seed=0):
    """Requests of all kinds at random times; how many of them ended how."""
    rng = np.random.default_rng(seed)
    ends, alive = collections.Counter(), {}
    submitted, checked = 0, {}
    while submitted < count or engine.is_busy:
        for _ in range(min(rng.integers(0, 4), count - submitted)):
            submitted += 1
            prompt = (*PROMPTS[rng.integers(4)], *rng.integers(0, 257, rng.integers(0, 20)))
            prompt = tuple(map(int, prompt))
            kind = rng.random()
            if kind < 0.05:
                with pytest.raises(DataError):
                    engine.submit(request((*prompt, 300)))
                ends["malformed"] += 1
                continue
            prompt = (*prompt, POISON) if kind < 0.1 else prompt
            number = engine.submit(request(prompt, new=int(rng.integers(1, 12))))
            alive[number] = []
            if kind > 0.97:
                checked[number] = prompt
        if alive and rng.random() < 0.1:
            engine.cancel(int(rng.choice([*alive])))
        for progress in engine.step():
            alive[progress.request] += progress.tokens
            if progress.end is not None:
                ends[progress.end] += 1
                tokens = alive.pop(progress.request)
                if progress.request in checked and progress.end is EndReason.LENGTH:
                    assert tokens == alone(checked[progress.request], new=12)[: len(tokens)]
    return ends


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_load_loses_no_page_and_compiles_nothing(count):
    engine = plain_engine()
    compiles = []

    def heard(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(duration)

    alone(PROMPTS[0], new=12)
    engine.run([request(PROMPTS[0])])
    ends = loaded(engine, count) if count > 200 else None
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        if ends is None:
            ends = loaded(engine, count)
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    assert sum(ends.values()) == count
    assert all(ends[kind] for kind in ("malformed", *EndReason) if kind in KINDS)
    assert engine.runner.programs.num_late == 0
    allocator = engine.scheduler.allocator
    assert allocator.num_in_use == 0
    assert allocator.num_idle == len(engine.scheduler.tree)


KINDS = ("malformed", EndReason.LENGTH, EndReason.CANCELLED, EndReason.ERROR)


def test_scores_are_those_of_the_uncached_model():
    prompt, told = PROMPTS[1] + PROMPTS[3], dataclasses.replace(GREEDY, logprobs=3)
    engine = plain_engine()
    plain, scored, later = engine.run(
        [
            request(prompt, new=5),
            request(prompt, new=5, sampling=told, scores_prompt=True),
            request(PROMPTS[2], new=4, sampling=dataclasses.replace(DRAWN, logprobs=0), seed=1),
        ]
    )
    tokens, _ = drawn(scored)
    assert tokens == drawn(plain)[0]
    scores = [*scored[0].prompt_scores, *(score for each in scored for score in each.scores)]
    ids = [*prompt, *tokens]
    assert len(scores) == len(ids) - 1
    logits = np.asarray(model()(np.array([ids], np.int32)))[0, :-1, :257]
    true = np.asarray(jax.nn.log_softmax(logits.astype(np.float64)))
    for at, score in enumerate(scores):
        assert score.logprob == pytest.approx(true[at, ids[at + 1]], abs=1e-4)
        best = np.argsort(-true[at], kind="stable")[:3]
        assert [token for token, _ in score.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in score.top], true[at, best], atol=1e-4)
    assert all(score.top == () for each in later for score in each.scores)
    assert sum(len(each.scores) for each in later) == 4
    with pytest.raises(ConfigError, match="scores_prompt needs"):
        engine.submit(request(prompt, scores_prompt=True))


@pytest.mark.slow_cases("bias", "repetition")
@pytest.mark.parametrize(
    "settings",
    [
        SamplingConfig(temperature=0.0, repetition_penalty=1.7),
        SamplingConfig(temperature=1.2, presence_penalty=1.5, frequency_penalty=1.0, min_p=0.01),
        SamplingConfig(temperature=0.0, logit_bias=((7, 3.0), (250, -100.0))),
    ],
    ids=["repetition", "presence_and_frequency", "bias"],
)
def test_settings_hold_whatever_is_shared_and_begun_again(settings):
    """Penalties count tokens whose keys were shared, and those of before a preemption once, whether
    the host kept their keys or they are computed again.
    """
    engine = plain_engine()
    requests = [request(p, new=20, sampling=settings, seed=2) for p in (*PROMPTS, PROMPTS[1])]
    preempted, restored = engine.scheduler.num_preemptions, engine.scheduler.host.num_restored
    got = served(engine, [*requests, request((9,) * 30, new=30)], [0, 0, 0, 0, 3, 0])
    want = [alone(r.prompt_ids, new=20, sampling=settings, seed=2) for r in requests]
    assert [drawn(each)[0] for each in got[:-1]] == want
    assert engine.scheduler.num_preemptions > preempted
    assert engine.scheduler.host.num_restored > restored
    assert engine.scheduler.host.num_used == 0
    assert want[1] != alone(PROMPTS[1], new=20, seed=2), "the settings change something"


def test_a_request_that_comes_back_to_a_slot_has_all_of_its_history():
    """It was elsewhere meanwhile, and drew tokens there; the host gave its keys back."""
    runner = plain_engine().runner
    tokens = [5, 6, 7]
    stream = RequestStream(number=-1, request=request(tokens[:2]), tokens=tokens, limit=0)
    for slot, start, drawn_now in ((0, 2, ()), (1, 3, (8,)), (1, 4, (9,)), (0, 5, (8,))):
        tokens += drawn_now
        row = PlannedRow(
            stream=stream,
            slot=slot,
            pages=(),
            start=start,
            ids=(tokens[start],),
            count=1,
            is_sampled=True,
            context=start + 1,
        )
        runner._is_counted(row)
    told = np.asarray(runner._state.history.sampled_BV[0])
    assert {token: int(told[token]) for token in np.flatnonzero(told)} == {7: 1, 8: 2, 9: 1}
