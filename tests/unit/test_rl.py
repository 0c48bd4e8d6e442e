"""Advantages, losses and rewards of reinforcement learning, beside the formulas of the papers."""

import dataclasses
import json
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import own_losses
import own_rewards
import pytest
import small_run

from jaxinfra.config.data import DataFormat
from jaxinfra.config.parts import part_name
from jaxinfra.config.preferences import PreferenceConfig
from jaxinfra.config.rl import Algorithm, Mean, Overlong, RlConfig
from jaxinfra.config.validate import validate
from jaxinfra.data.batch import Batch, Rollout
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.reinforcement.advantages import (
    advantages,
    has_equal_rewards,
    overlong_penalty,
    token_shares,
)
from jaxinfra.reinforcement.prompts import prompts_of, read_prompts
from jaxinfra.reinforcement.ready import exact_match, pattern, unit_tests
from jaxinfra.reinforcement.rewards import Failure, RewardPool
from jaxinfra.reinforcement.rollouts import _Sampled
from jaxinfra.training.policy import policy_record, policy_sums

EPSILON = float(np.finfo(np.float32).eps)


def learn(**settings) -> RlConfig:
    return RlConfig(**{"prompts": "p.jsonl", "reward": "exact_match"} | settings)


def plain_advantages(algorithm: Algorithm, groups: list[list[float | None]]) -> list[list[float]]:
    """The papers' formulas; None is a completion without reward."""
    every = [r for group in groups for r in group if r is not None]
    found = []
    for group in groups:
        there = [r for r in group if r is not None]
        row = []
        for r in group:
            if r is None:
                row.append(0.0)
            elif algorithm is Algorithm.RLOO:
                others = sum(there) - r
                row.append(r - others / (len(there) - 1))
            elif algorithm is Algorithm.DR_GRPO:
                row.append(r - statistics.fmean(there))
            elif algorithm is Algorithm.REINFORCE_PLUS_PLUS:
                row.append((r - statistics.fmean(every)) / (statistics.pstdev(every) + 1e-6))
            else:
                row.append((r - statistics.fmean(there)) / (statistics.pstdev(there) + 1e-6))
        found.append(row)
    return found


@pytest.mark.parametrize("algorithm", Algorithm)
def test_advantages_are_the_papers(algorithm):
    groups = [[1.0, 0.0, 0.25, 1.0], [None, 0.5, 2.0, None], [3.0, 3.0, 3.0, 3.0]]
    is_valid = np.array([[r is not None for r in group] for group in groups])
    rewards = np.array([[99.0 if r is None else r for r in group] for group in groups])
    got = advantages(rewards, is_valid, learn(algorithm=algorithm))
    np.testing.assert_allclose(got, plain_advantages(algorithm, groups), rtol=1e-12, atol=1e-12)
    assert has_equal_rewards(rewards, is_valid).tolist() == [False, False, True]
    nothing = advantages(rewards, np.zeros_like(is_valid), learn(algorithm=algorithm))
    assert not nothing.any()


def test_advantages_and_losses_may_be_ones_own():
    config = learn(advantage=part_name(own_rewards.best_of_group))
    got = advantages(np.array([[1.0, 3.0, 5.0]]), np.array([[True, True, False]]), config)
    assert got.tolist() == [[0.0, 1.0, 0.0]]
    broken = learn(advantage=part_name(own_rewards.unfit))
    with pytest.raises(ConfigError, match="returns numbers of"):
        advantages(np.ones((1, 2)), np.ones((1, 2), bool), broken)


def test_a_long_completion_is_punished_up_to_the_limit():
    """DAPO, equation 13, with L_max = 10 and L_cache = 4."""
    config = learn(max_new_tokens=10, overlong=Overlong.PENALTY, overlong_tokens=4)
    got = overlong_penalty(np.array([1, 6, 7, 9, 10]), config)
    assert got.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0]
    assert not overlong_penalty(np.array([10]), learn()).any()


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Four completions of 3, 1, 4 and 2 tokens, of which the third does not count."""

    lengths = np.array([3, 1, 4, 2])
    counts = np.array([True, True, False, True])
    gains = np.array([1.5, -0.7, 9.0, -2.0])
    rng = np.random.default_rng(5)
    mask = (np.arange(5)[None] >= 1) & (np.arange(5)[None] < 1 + lengths[:, None])
    old = rng.normal(-1.0, 0.3, (4, 5)).astype(np.float32)
    # Of a GSPO ratio within its narrow range too.
    new = (old + rng.normal(0.0, [[0.3], [1e-5], [0.3], [0.2]], (4, 5))).astype(np.float32)
    reference = (old + rng.normal(0.0, 0.2, (4, 5))).astype(np.float32)
    importance = rng.uniform(0.5, 2.0, (4, 5)).astype(np.float32)

    def batch(self, config: RlConfig) -> Batch:
        weights = (self.mask * self.counts[:, None]).astype(np.float32)
        shares = token_shares(self.lengths, self.counts, config)[:, None] * weights
        gains = (self.gains[:, None] * weights).astype(np.float32)
        rollout = Rollout(
            advantages=gains,
            old=self.old,
            importance=self.importance,
            share=shares.astype(np.float32),
        )
        zeros = np.zeros((4, 5), np.int32)
        batch = Batch(
            tokens=zeros,
            targets=zeros,
            segment_ids=None,
            positions=None,
            weights=weights,
            reference=self.reference if config.kl else None,
            rollout=rollout,
        )
        return jax.tree.map(jnp.asarray, batch)

    def loss(self, new: np.ndarray, config: RlConfig) -> float:
        """The objective as the papers print it, completion by completion, in float64."""
        name, (low, high) = config.algorithm.value, config.clip_range
        sums, lengths = [], []
        for i in np.flatnonzero(self.counts):
            at = self.mask[i]
            x, old, ref = (a[i, at].astype(np.float64) for a in (new, self.old, self.reference))
            ratio = np.exp(x - old)
            if name == "gspo":
                ratio = np.full_like(ratio, np.exp(np.mean(x - old)))
            gain = self.gains[i]
            each = np.minimum(ratio * gain, np.clip(ratio, 1 - low, 1 + high) * gain)
            each = each * self.importance[i, at]
            each = each - config.kl * (np.exp(ref - x) - (ref - x) - 1)
            sums.append(each.sum())
            lengths.append(len(x))
        means = {
            "grpo": np.mean([s / n for s, n in zip(sums, lengths, strict=True)]),
            "gspo": np.mean([s / n for s, n in zip(sums, lengths, strict=True)]),
            "dr_grpo": np.mean(sums) / config.max_new_tokens,
            "dapo": np.sum(sums) / np.sum(lengths),
            "reinforce++": np.sum(sums) / np.sum(lengths),
            "rloo": np.mean(sums),
        }
        return -means[name]


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("algorithm", Algorithm)
def test_losses_and_gradients_are_the_papers(algorithm, kl):
    config = learn(algorithm=algorithm, kl=kl, max_new_tokens=8)
    sampled = Sampled()
    batch = sampled.batch(config)

    def loss(new):
        return policy_sums(new, batch, config).loss / batch.weights.sum()

    got, gradient = jax.value_and_grad(loss)(sampled.new)
    want = sampled.loss(sampled.new, config)
    # A dozen roundings of each of at most 6 terms of at most 8 each.
    bound = 12 * 6 * 8 * EPSILON
    np.testing.assert_allclose(float(got), want, atol=bound)
    step, slopes = 1e-6, np.zeros((4, 5))
    for place in np.ndindex(4, 5):
        at = [sampled.new.astype(np.float64) for _ in range(2)]
        at[0][place] += step
        at[1][place] -= step
        slopes[place] = (sampled.loss(at[0], config) - sampled.loss(at[1], config)) / (2 * step)
    np.testing.assert_allclose(np.asarray(gradient), slopes, atol=bound)
    assert np.abs(slopes).max() > 100 * bound


def test_figures_are_means_over_the_counted_tokens():
    config, sampled = learn(kl=0.1), Sampled()
    record = policy_record(
        policy_sums(jnp.asarray(sampled.new), sampled.batch(config), config).figures
    )
    counted = sampled.mask & sampled.counts[:, None]
    ratio = np.exp(sampled.new - sampled.old)
    gains = np.broadcast_to(sampled.gains[:, None], ratio.shape)
    assert record["rl/entropy"] == pytest.approx(-sampled.new[counted].mean(), rel=1e-5)
    assert record["rl/ratio"] == pytest.approx(ratio[counted].mean(), rel=1e-5)
    low, high = (ratio < 0.8) & (gains < 0), (ratio > 1.2) & (gains > 0)
    assert record["rl/clipped_low"] == pytest.approx(low[counted].mean())
    assert record["rl/clipped_high"] == pytest.approx(high[counted].mean())
    assert record["rl/clipped_low"] + record["rl/clipped_high"] > 0.0


def test_an_own_loss_takes_the_place_of_the_clipped_one():
    config, sampled = learn(loss=part_name(own_losses.unclipped)), Sampled()
    batch = sampled.batch(config)
    got = float(policy_sums(jnp.asarray(sampled.new), batch, config).loss)
    assert batch.rollout is not None
    each = -np.exp(sampled.new - sampled.old) * batch.rollout.advantages
    want = (each * sampled.importance * batch.rollout.share).sum()
    assert got == pytest.approx(float(want), rel=1e-5)


def test_a_reward_that_misbehaves_is_counted_and_others_go_on():
    config = learn(
        reward=part_name(own_rewards.misbehaving), reward_workers=1, reward_timeout_s=2.0
    )
    asked = ["raise", "nan", "memory", "exit", "text", "hang", "fine"]
    with RewardPool(config) as pool:
        waiting = [pool.submit(each, prompt="", row={"reward": 0.75}) for each in asked]
        found = [each.result() for each in waiting]
    failures = [each.failure for each in found]
    raised = Failure.RAISED
    assert failures == [
        raised, Failure.NOT_FINITE, raised, Failure.DIED, raised, Failure.TIMED_OUT, None,
    ]  # fmt: skip
    assert found[0].text == "ValueError: no such answer"
    assert [each.reward for each in found] == [None] * 6 + [0.75]
    with pytest.raises(ConfigError, match="marks no part of that name"):
        RewardPool(learn(reward="own_rewards:absent"))


def test_ready_rewards():
    assert exact_match(" 7\n", prompt="", row={"answer": 7}) == 1.0
    assert exact_match("77", prompt="", row={"answer": "7"}) == 0.0
    assert pattern("so it is 42.", prompt="", row={"pattern": r"\b42\b"}) == 1.0
    assert pattern("so it is 421", prompt="", row={"pattern": r"\b42\b"}) == 0.0
    with pytest.raises(DataError, match="has no 'answer'; it has text"):
        exact_match("7", prompt="", row={"text": "7"})
    tests = "assert add(2, 3) == 5"
    right = "I think:\n```python\ndef add(a, b):\n    return a + b\n```"
    for text, limit_s, reward in [
        (right, 20.0, 1.0),
        (right.replace("+", "-"), 20.0, 0.0),
        ("import os; os._exit(0)", 20.0, 0.0),  # before the tests have run
        ("while True: pass", 0.3, 0.0),
        (right.replace("def", "x = bytearray(2 << 30)\ndef"), 20.0, 0.0),
    ]:
        row = {"tests": tests, "timeout_s": limit_s}
        assert unit_tests(text, prompt="", row=row) == reward


def test_prompts_come_in_an_order_that_their_number_alone_decides(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(5)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    rl = learn(prompts=str(tmp_path), max_new_tokens=4, group_size=2)
    config = dataclasses.replace(small_run.config_of("training.batch_size=4"), rl=rl)
    prompts = read_prompts(config, bytes_tokenizer())
    assert prompts[3].ids == (256, *b"3?")
    assert (prompts[3].text, prompts[3].row["answer"]) == ("3?", 3)
    whole = [each.text for each in prompts_of(prompts, first=0, count=15, seed=2)]
    assert [sorted(whole[n : n + 5]) for n in (0, 5, 10)] == [[f"{n}?" for n in range(5)]] * 3
    parts = [prompts_of(prompts, first=n, count=3, seed=2) for n in range(0, 15, 3)]
    assert [each.text for part in parts for each in part] == whole
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "too long"}) + "\n")
    with pytest.raises(DataError, match="a prompt of 9 tokens, and training"):
        read_prompts(config, bytes_tokenizer())
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "1"}) + "\n")
    with pytest.raises(DataError, match="neither a text nor a list of messages"):
        read_prompts(config, bytes_tokenizer())


def test_a_rollout_survives_a_checkpoint_to_the_bit():
    batch = Sampled().batch(learn(kl=0.1))
    sampled = _Sampled(batch=batch, counts_R=Sampled.counts, lengths_R=Sampled.lengths, record={})
    again = _Sampled.of_json(json.loads(json.dumps(sampled.as_json())))
    jax.tree.map(np.testing.assert_array_equal, again.batch, batch)
    assert all(
        a.dtype == b.dtype for a, b in zip(*map(jax.tree.leaves, (again.batch, batch)), strict=True)
    )
    np.testing.assert_array_equal(again.counts_R, sampled.counts_R)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group_size": 1}, "it compares completions of one prompt"),
        ({"kl": -1.0}, "rl.kl=-1.0 must be 0 or more"),
        ({"clip_low": 2.0}, "must be at most 1"),
        ({"loss": "a:b", "clip_high": 0.3}, "your own loss clips by itself"),
        ({"overlong": Overlong.PENALTY}, "goes with overlong=penalty"),
        ({"overlong_tokens": 4}, "goes with overlong=penalty"),
        ({"importance_cap": 0.0}, "must be positive and finite"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        learn(**settings)


def test_runs_that_cannot_learn_are_refused():
    config = dataclasses.replace(
        small_run.config_of("training.batch_size=8"), rl=learn(max_new_tokens=4)
    )
    validate(config)
    assert learn(mean=Mean.TOKEN).loss_mean is Mean.TOKEN
    rows = dataclasses.replace(config.training, batch_size=4)
    text = dataclasses.replace(config.data, format=DataFormat.COMPLETIONS)
    model = dataclasses.replace(config.model, dropout_rate=0.1)
    for change, words in [
        ({"training": rows}, "is not a multiple of rl.group_size=8"),
        ({"rl": learn()}, "leaves no room for a prompt"),
        ({"data": text}, "prompts are read from rl.prompts"),
        ({"preferences": PreferenceConfig()}, "format=text with preferences|rl with preferences"),
        ({"model": model}, "rl with model.dropout_rate=0.1"),
        ({"training": dataclasses.replace(config.training, z_loss=0.1)}, "training.z_loss"),
    ]:
        with pytest.raises(ConfigError, match=words):
            validate(dataclasses.replace(config, **change))
