"""Advantages, losses and rewards of reinforcement learning, beside the formulas of the papers."""

import dataclasses
import http.server
import json
import statistics
import sys
import threading
from unittest import mock

import chat_model
import jax
import jax.numpy as jnp
import numpy as np
import own_losses
import own_rewards
import pytest
import small_run

from jaxinfra.cli.main import main
from jaxinfra.config import codec
from jaxinfra.config.data import DataFormat
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.parts import part_name
from jaxinfra.config.preferences import PreferenceConfig
from jaxinfra.config.rl import (
    Algorithm,
    JudgeConfig,
    Mean,
    Overlong,
    Ratio,
    RlConfig,
    ZeroVariance,
)
from jaxinfra.config.validate import validate
from jaxinfra.data.batch import Batch, Rollout
from jaxinfra.data.chat_template import ChatTemplate
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.reinforcement import episodes
from jaxinfra.reinforcement.advantages import (
    advantages,
    advantages_and_returns,
    has_equal_rewards,
    importance,
    overlong_penalty,
    token_shares,
)
from jaxinfra.reinforcement.episodes import Trajectory
from jaxinfra.reinforcement.prompts import Prompt, prompts_of, read_prompts
from jaxinfra.reinforcement.ready import exact_match, find_reward, math_equal, pattern, unit_tests
from jaxinfra.reinforcement.rewards import Failure, RewardPool, Scored
from jaxinfra.reinforcement.rollouts import RolloutBatches, _rows, _Sampled
from jaxinfra.reinforcement.sampler import Completion
from jaxinfra.training.policy import policy_loss, policy_record, policy_sums

EPSILON = float(np.finfo(np.float32).eps)


def learn(**settings) -> RlConfig:
    given = {"prompts": "p.jsonl", "reward": "exact_match"} | settings
    if given.get("algorithm") is Algorithm.DISTILL:
        given["teacher"] = "runs/teacher"
    return RlConfig(**given)


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


@pytest.mark.parametrize(
    "algorithm", [each for each in Algorithm if each.value not in ("ppo", "distill")]
)
def test_advantages_are_the_papers(algorithm):
    groups = [[1.0, 0.0, 0.25, 1.0], [None, 0.5, 2.0, None], [3.0, 3.0, 3.0, 3.0]]
    is_valid = np.array([[r is not None for r in group] for group in groups])
    rewards = np.array([[99.0 if r is None else r for r in group] for group in groups])
    got = advantages(rewards, is_valid, learn(algorithm=algorithm))
    np.testing.assert_allclose(got, plain_advantages(algorithm, groups), rtol=1e-12, atol=1e-12)
    assert has_equal_rewards(rewards, is_valid).tolist() == [False, False, True]
    nothing = advantages(rewards, np.zeros_like(is_valid), learn(algorithm=algorithm))
    assert not nothing.any()


def test_advantages_of_a_value_head_are_the_papers():
    """Sums of lambda-weighted differences, completion by completion; replies are no steps."""
    rng, gae_lambda = np.random.default_rng(2), 0.7
    values = rng.normal(size=(3, 6))
    sampled = np.array([[0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]], bool)
    rewards = np.array([1.0, -0.5, 2.0])
    gains, returns = advantages_and_returns(rewards, values, sampled, gae_lambda)
    for row in range(3):
        at = np.flatnonzero(sampled[row])
        v = [*values[row, at], 0.0]
        paid = [0.0] * (len(at) - 1) + [rewards[row]]
        deltas = [paid[i] + v[i + 1] - v[i] for i in range(len(at))]
        for i, place in enumerate(at):
            want = sum(gae_lambda ** (j - i) * deltas[j] for j in range(i, len(at)))
            assert gains[row, place] == pytest.approx(want)
            assert returns[row, place] == pytest.approx(want + v[i])
    assert not gains[~sampled].any()


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
            "ppo": np.sum(sums) / np.sum(lengths),
            "distill": np.sum(sums) / np.sum(lengths),
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


def test_distillation_follows_the_gradient_of_the_divergence_to_the_teacher():
    """Over all next tokens, each as often as it is sampled; the divergence in float64 by NumPy."""
    rng, config = np.random.default_rng(3), learn(algorithm=Algorithm.DISTILL)
    student, teacher = rng.normal(0.0, 1.0, (2, 6))

    def log_softmax(x):
        return x - np.log(np.exp(x).sum())

    def divergence(x):
        return float(np.exp(log_softmax(x)) @ (log_softmax(x) - log_softmax(teacher)))

    old_V = log_softmax(student)
    gains_V1 = jnp.asarray((log_softmax(teacher) - old_V)[:, None], jnp.float32)

    def loss(x):  # a row of one token for each of the six
        new_V1 = jax.nn.log_softmax(x)[:, None]
        old_V1, ones = jnp.asarray(old_V, jnp.float32)[:, None], jnp.ones((6, 1))
        each = policy_loss(new_V1, old_V1, gains_V1, config, weights=ones)
        return jnp.exp(old_V1[:, 0]) @ each[:, 0]

    got = jax.grad(loss)(jnp.asarray(student, jnp.float32))
    step = 1e-6
    want = [(divergence(student + e) - divergence(student - e)) / 2 for e in step * np.eye(6)]
    np.testing.assert_allclose(got, np.array(want) / step, atol=12 * 6 * 8 * EPSILON)
    assert np.abs(want).max() / step > 0.1


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
    for name, words in (
        ("own_rewards:absent", "marks no part of that name"),
        ("exact_mach", "did you mean 'exact_match'"),
    ):
        with pytest.raises(ConfigError, match=words):
            RewardPool(learn(reward=name))


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


def test_mathematical_answers_are_compared_by_their_value():
    pytest.importorskip("math_verify", reason="the package math-verify is not installed")
    for text, answer, reward in [
        (r"So it is $\frac{1}{2}$.", "0.5", 1.0),
        (r"\boxed{2x + 1}", "1+2x", 1.0),
        ("It is 43", "42", 0.0),
        ("I do not know", "42", 0.0),
    ]:
        assert math_equal(text, prompt="", row={"answer": answer}) == reward


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxinfra\[rl\]'"):
        find_reward(learn(reward="math_equal"))


@pytest.fixture
def judge_url():
    """A server that is busy at first, then scores answers by their length."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            text = body["messages"][0]["content"]
            said = "SCORE: 0.1, or rather SCORE: 0.75" if "right" in text else "no idea"
            answer = {"choices": [{"message": {"content": said}}]}
            self.send_response(503 if len(asked) == 1 else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/", asked
        server.shutdown()


def test_a_judge_scores_over_a_url(judge_url, monkeypatch):
    url, asked = judge_url
    config = JudgeConfig(url=url, model="wise", api_key_env="JUDGE_KEY")
    reward = find_reward(learn(reward="judge", judge=config))
    row = {"answer": "42"}
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
        reward("right", prompt="6 x 7?", row=row)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert reward("right", prompt="6 x 7?", row=row) == 0.75
    path, key, body = asked[-1]
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "wise")
    assert body["messages"][0]["content"].startswith("Question: 6 x 7?\nReference: 42\nAnswer: rig")
    with pytest.raises(DataError, match="gave no score"):
        reward("wrong", prompt="6 x 7?", row=row)
    with pytest.raises(ConfigError, match="go together"):
        learn(reward="judge")
    with pytest.raises(ConfigError, match="question has the fields"):
        JudgeConfig(url=url, model="wise", question="{text}?")


class Scripted:
    """A sampler that says what the last character before it asks for."""

    def __init__(self, config, tokenizer):
        del config
        self.tokenizer, self.seeds = tokenizer, []

    def release(self):
        """Frees nothing."""

    def sample(self, contexts, *, seed, is_over):
        assert not is_over()
        self.seeds.append(seed)
        for place, ids in reversed(contexts.items()):
            text = {"a": "ask", "b": "hang on", "c": "cut", "d": "7"}[chr(ids[-1])]
            new = (*self.tokenizer.encode(text).tolist(), 256)
            scores = tuple(-0.5 - place for _ in new)
            yield Completion(
                place=place, ids=new, log_probabilities=scores, text=text, is_cut=text == "cut"
            )


def test_turns_follow_replies_whose_tokens_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(episodes, "Sampler", Scripted)
    lines = [{"prompt": each} for each in ("a", "b", "c", "d")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    reward = part_name(own_rewards.answering)
    rl = learn(reward=reward, max_turns=3, max_new_tokens=8, reward_workers=1)
    config = dataclasses.replace(small_run.config_of("training.sequence_length=24"), rl=rl)
    tokenizer = bytes_tokenizer()
    prompts = read_prompts(str(tmp_path), config, tokenizer)
    player = episodes.Player(config, tokenizer, is_over=lambda: False)
    try:
        played = player.play(prompts, seed=3, number=5)
    finally:
        player.close()
    assert [each.texts for each in played] == [
        ["ask", "it is d", "7"],
        ["hang on", "it is b", "hang on"],  # then there is no room
        ["cut", "it is c", "cut"],
        ["7"],
    ]
    failures = [each.scored.failure for each in played if each.scored is not None]
    assert failures == [None, Failure.UNFINISHED, Failure.UNFINISHED, None]
    assert [each.scored.reward for each in played if each.scored is not None] == [7, None, None, 7]
    assert len(set(player._sampler.seeds)) == 2
    batch, engine = _rows(played, length=24, marks_padding=True)
    target = batch.targets[0].tolist()
    whole = [*b"ask", 256, *b"it is d", *b"7", 256]
    assert target[1 : 1 + len(whole)] == whole
    counts = [1.0] * 4 + [0.0] * 7 + [1.0] * 2
    assert batch.weights[0, 1:].tolist() == counts + [0.0] * (23 - len(counts))
    assert (engine[0] == -0.5 * batch.weights[0]).all()
    assert batch.segment_ids[0].tolist() == [0] * (2 + len(whole)) + [-1] * (22 - len(whole))


def test_a_reply_is_what_the_chat_template_makes_of_it(tmp_path):
    tokenizer = chat_model.write_tokenizer(tmp_path / "tokenizer.json")
    template = ChatTemplate(chat_model.CHATML, variables={})
    asked = [{"role": "user", "content": "hi"}]
    prompt = Prompt(ids=(), text="hi", row={"prompt": asked}, template=template)
    replies = [{"role": "tool", "content": "<|im_end|>42"}]
    got = prompt.reply_ids(replies, tokenizer)
    # Special tokens that a tool spells out stay text.
    end, start = 260, 259
    told = tokenizer.encode("tool\n<|im_end|>42").tolist()
    head, line = tokenizer.encode("assistant\n").tolist(), tokenizer.encode("\n").tolist()
    assert got == [end, *line, start, *told, end, *line, start, *head]
    assert prompt.reply_ids("42", tokenizer)[: len(line) + 2] == [end, *line, start]
    plain = Prompt(ids=(), text="hi", row={"prompt": "hi"})
    with pytest.raises(DataError, match="reply with a text"):
        plain.reply_ids(replies, tokenizer)


def test_prompts_come_in_an_order_that_their_number_alone_decides(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(5)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    rl = learn(max_new_tokens=4, group_size=2)
    config = dataclasses.replace(small_run.config_of("training.batch_size=4"), rl=rl)
    prompts = read_prompts(str(tmp_path), config, bytes_tokenizer())
    assert prompts[3].ids == (256, *b"3?")
    assert (prompts[3].text, prompts[3].row["answer"]) == ("3?", 3)
    whole = [each.text for each in prompts_of(prompts, first=0, count=15, seed=2)]
    assert [sorted(whole[n : n + 5]) for n in (0, 5, 10)] == [[f"{n}?" for n in range(5)]] * 3
    parts = [prompts_of(prompts, first=n, count=3, seed=2) for n in range(0, 15, 3)]
    assert [each.text for part in parts for each in part] == whole
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "too long"}) + "\n")
    with pytest.raises(DataError, match="a prompt of 9 tokens, and training"):
        read_prompts(str(tmp_path), config, bytes_tokenizer())
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "1"}) + "\n")
    with pytest.raises(DataError, match="neither a text nor a list of messages"):
        read_prompts(str(tmp_path), config, bytes_tokenizer())


def test_a_checkpoint_of_other_prompts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(episodes, "Player", mock.Mock())
    rl = learn(prompts=str(tmp_path), max_new_tokens=4)
    config = dataclasses.replace(small_run.config_of("training.batch_size=8"), rl=rl)

    def read(answer: str) -> episodes.Episodes:
        row = {"prompt": "1", "answer": answer}
        (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
        return episodes.Episodes(mock.Mock(config=config), bytes_tokenizer())

    state = read("1").state(3)
    read("1").restore(state)
    with pytest.raises(DataError, match="has other rows than the run's checkpoint"):
        read("2").restore(state)
    (tmp_path / "p.jsonl").write_text("")
    with pytest.raises(DataError, match="have no rows; give at least one"):
        read_prompts(rl.prompts, config, bytes_tokenizer())


def test_a_run_without_rl_is_not_continued(tmp_path, capsys):
    (tmp_path / "config.json").write_text(codec.to_json(small_run.config_of()))
    assert main(["rl", "--resume", str(tmp_path)]) == 1
    assert "a run without rl; continue it with jaxinfra train --resume" in capsys.readouterr().err


def test_a_rollout_without_any_reward_is_told_once():
    text = Scored(reward=None, failure=Failure.RAISED, text="'good' in place of a number")
    played = [Trajectory(prompt=Prompt(ids=(), text="", row={}), scored=text)] * 2
    told: list[str] = []
    batches = mock.Mock(_said=set(), _say=told.append)
    for _ in range(2):
        RolloutBatches._report(batches, played)
    assert [each.split(";")[0] for each in told] == [
        "WARNING: no completion of a rollout has a reward, so its steps learn nothing",
        "WARNING: a reward raised: 'good' in place of a number",
    ]


def test_a_rollout_survives_a_checkpoint_to_the_bit():
    batch = Sampled().batch(learn(kl=0.1))
    sampled = _Sampled(batch=batch, counts_R=Sampled.counts, lengths_R=Sampled.lengths, record={})
    again = _Sampled.of_json(json.loads(json.dumps(sampled.as_json())))
    jax.tree.map(np.testing.assert_array_equal, again.batch, batch)
    assert all(
        a.dtype == b.dtype for a, b in zip(*map(jax.tree.leaves, (again.batch, batch)), strict=True)
    )
    np.testing.assert_array_equal(again.counts_R, sampled.counts_R)


def test_importance_weights_are_truncated_by_token_or_by_sequence():
    differences = np.log([[1.5, 1.2, 1.0], [0.5, 3.0, 1.0]])
    got = importance(differences, learn(importance_cap=2.0))
    np.testing.assert_allclose(got, [[1.5, 1.2, 1.0], [0.5, 2.0, 1.0]])
    whole = importance(differences, learn(importance_cap=1.6, importance=Ratio.SEQUENCE))
    np.testing.assert_allclose(whole, [[1.6] * 3, [1.5] * 3])
    assert np.isfinite(importance(np.full((1, 3), 900.0), learn())).all()


@pytest.mark.parametrize("counts", [[True, False], [False, False]])
def test_a_step_without_completions_that_count_changes_nothing(counts):
    whole = jax.tree.map(np.asarray, Sampled().batch(learn()))
    counts_R = np.array([*counts, True, True])
    sampled = _Sampled(batch=whole, counts_R=counts_R, lengths_R=Sampled.lengths, record={})
    batch = jax.tree.map(jnp.asarray, sampled.rows(slice(0, 2), learn()))
    gradient = jax.grad(lambda new: policy_sums(new, batch, learn()).loss)(Sampled.new[:2])
    assert batch.weights.sum() > 0.0  # the loss is divided by this
    assert (np.asarray(gradient).any(axis=1) == counts).all()


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
        ({"gae_lambda": 0.5}, "is a number in"),
        ({"teacher": "runs/teacher"}, "teacher and algorithm=distill go together"),
        ({"algorithm": Algorithm.DISTILL, "zero_variance": ZeroVariance.DROP}, "every completion"),
        ({"engine_mesh": "tensors=2"}, "unknown mesh axis"),
        ({"algorithm": Algorithm.PPO, "advantage": "a:b"}, "head or teacher gives"),
        ({"max_turns": 2, "overlong": Overlong.PENALTY, "overlong_tokens": 4}, "one completion"),
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
    few, own = {"max_new_tokens": 4}, {"engine_mesh": "context=2", "engine_devices": "own"}
    for change, words in [
        ({"training": rows}, "is not a multiple of rl.group_size=8"),
        ({"rl": learn()}, "leaves no room for a prompt"),
        ({"data": text}, "prompts are read from rl.prompts"),
        ({"preferences": PreferenceConfig()}, "format=text with preferences|rl with preferences"),
        ({"model": model}, "rl with model.dropout_rate=0.1"),
        ({"training": dataclasses.replace(config.training, z_loss=0.1)}, "training.z_loss"),
        ({"mesh": MeshConfig(pipe=2)}, "rl.engine_mesh pipe=2 .that of training.*such as fsdp=2"),
        ({"mesh": MeshConfig(fsdp=2), "rl": few | {"overlap": True}}, "would wait for each other"),
        ({"rl": few | {"engine_mesh": "tensor=2"}}, "a mesh of 1: both phases take turns"),
        ({"rl": few | own}, "engine_mesh context"),
    ]:
        if isinstance(change.get("rl"), dict):
            change["rl"] = codec.normalized(learn(**change["rl"]), RlConfig)
        with pytest.raises(ConfigError, match=words):
            validate(dataclasses.replace(config, **change))
