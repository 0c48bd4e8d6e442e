"""Runs of reinforcement learning from a trained run: killed, resumed, and of one's own parts."""

import dataclasses
import inspect
import json
import os
import random
import signal
import time
from pathlib import Path

import own_losses
import own_rewards
import pytest
import small_run
from e2e.processes import start as running_process
from e2e.runs import assert_same_run, checkpoints, killed_at_the_second_save, metrics

import jaxinfra
from jaxinfra.config.model import stacked
from jaxinfra.config.rl import RlConfig
from jaxinfra.reinforcement import sampler
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from tests.exact_scores import LATENT, WINDOWED
from tests.small_models import dense

SIZES = {
    "training.steps": 20,
    "training.batch_size": 8,
    "training.sequence_length": 16,
    "optimizer.learning_rate": 3e-3,
    "rl.group_size": 4,
    "rl.max_new_tokens": 6,
    "rl.kl": 0.05,
}


WINDOWS = dense(vocab_size=300, tie_embeddings=False, attention=WINDOWED)
LATENTS = dataclasses.replace(WINDOWS.blocks[0], mixer=LATENT)
MODELS = {
    "windows": WINDOWS,
    "latents": dataclasses.replace(WINDOWS, stacks=stacked(LATENTS, num_layers=2)),
}


@pytest.fixture
def start(bench, monkeypatch) -> Path:
    paths = [str(Path(own_rewards.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    if not (bench / "start").exists():
        assert bench.run(bench.new("start", training__steps=4)).code == 0
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(20)]
    (bench / "p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return bench / "start"


def experts(bench) -> Path:
    """A mixture of experts, trained for some steps."""
    words = [
        "tiny_moe" if word == "tiny" else word
        for word in bench.new("experts", training__steps=4, model__dropout_rate=0.0)
    ]
    assert bench.run(words).code == 0
    return bench / "experts"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lora", [(), ("--lora", "rank=2")], ids=["full", "lora"])
def test_a_killed_run_ends_as_if_nothing_had_happened(bench, start, lora):
    """To the bit; with a checkpoint in the middle of a rollout, which has three steps."""
    sizes = SIZES | {"rl.steps_per_rollout": 3, "checkpoint.every": 4}

    def new(name: str) -> list[object]:
        settings = [f"--set={path}={value}" for path, value in sizes.items()]
        settings += [f"--set=rl.heldout_prompts={bench / 'p.jsonl'}", "--set=rl.heldout_every=3"]
        where = ["--init", start, "--run", bench / name, "--cache", bench.cache]
        learn = ["--prompts", bench / "p.jsonl", "--reward", "own_rewards:by_length"]
        return ["rl", *where, *learn, *lora, *settings]

    ended = bench.run(new("whole"))
    assert ended.code == 0, ended
    killed = bench.run(new("killed"), before=killed_at_the_second_save)
    assert killed.code == -signal.SIGKILL, killed
    assert checkpoints(bench / "killed") == [4]
    resumed = bench.run(["rl", "--resume", bench / "killed", "--cache", bench.cache])
    assert resumed.code == 0, resumed
    assert_same_run(bench / "killed", bench / "whole")
    records = metrics(bench / "whole")
    assert records[0]["rl/kl"] == pytest.approx(0.0, abs=1e-6)
    assert records[0]["rl/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert records[0]["rl/engine_difference"] < 1e-4
    assert records[2]["rl/ratio"] != 1.0
    assert [each["step"] for each in records if "rl/heldout_reward" in each] == [1, 10, 19]
    failed = [each["rl/failed"] for each in records if "rl/failed" in each]
    assert sum(failed) > 0
    assert sum(each.get("rl/failed/raised", 0) for each in records) == sum(failed)
    assert "WARNING: a reward raised: ValueError: unlucky" in ended.stdout + ended.stderr
    lines = (bench / "whole/samples/step-00000001.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert json.loads(lines[0])["prompt"].endswith("=")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_killed_ten_times_ends_as_if_nothing_had_happened(bench, start):
    """At random moments; with a value head, replies, and rollouts of three steps, each sampled
    while the one before it is trained on.
    """
    sizes = SIZES | {"rl.steps_per_rollout": 3, "checkpoint.every": 2, "training.log_every": 1}
    sizes |= {"rl.algorithm": "ppo", "rl.max_turns": 2, "training.sequence_length": 24}
    sizes["rl.overlap"] = "true"
    settings = [f"--set={path}={value}" for path, value in sizes.items()]
    learn = ["--prompts", bench / "p.jsonl", "--reward", "own_rewards:after_a_reply", *settings]

    def next_of(name: str) -> list[object]:
        where = ["rl", "--cache", bench.cache]
        if (bench / name / "config.json").exists():
            return [*where, "--resume", bench / name]
        return [*where, "--init", start, "--run", bench / name, *learn]

    ended = bench.run(next_of("whole"))
    assert ended.code == 0, ended
    records = metrics(bench / "whole")
    assert records[0]["rl/turns"] > 1.0
    assert records[0]["rl/engine_difference_max"] < 1e-4 < records[3]["rl/engine_difference_max"]
    assert [records[step]["rl/lag"] for step in (0, 3, 18)] == [0, 1, 1]
    assert records[3]["rl/explained_variance"] != 0.0
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    for number in range(10):
        lines, delay_s = rng.randrange(12), rng.uniform(0.0, 0.5)
        with running_process(*next_of("killed"), log=bench.log()) as running:
            running.wait_until(lambda said, lines=lines: said.count("\n") >= lines)
            time.sleep(delay_s)
            running.signal(signal.SIGKILL)
            code = running.end().code
        print(f"seed {seed}, kill {number}: {code} {delay_s:.3f} s after {lines} lines")
        assert code in (-signal.SIGKILL, 0)
    resumed = bench.run(next_of("killed"))
    assert resumed.code == 0, resumed
    assert_same_run(bench / "killed", bench / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["full", "lora", "experts", *MODELS])
def test_exact_numerics_leave_no_difference_between_engine_and_trainer(
    bench, start, kind, monkeypatch
):
    """In every step: with prompts in chunks, shared prefixes, and requests that are preempted."""
    monkeypatch.chdir(bench.place)
    preemptions, cached_tokens, release = [], [], Engine.release

    def counted(engine: Engine) -> None:  # before the next rollout counts anew
        preemptions.append(engine.scheduler.num_preemptions)
        cached_tokens.append(engine.counts.cached_tokens)
        release(engine)

    small = EngineOptions(
        page_size=4, num_pages=17, max_step_tokens=20, chunk_sizes=(8,), max_piece_rows=1
    )
    monkeypatch.setattr(sampler, "options_on", lambda platform: small)
    monkeypatch.setattr(Engine, "release", counted)
    rows = [{"prompt": f"a number: {n}=", "answer": str(n)} for n in range(20)]
    (bench / "long.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    learn = jaxinfra.RlConfig(prompts=str(bench / "long.jsonl"), reward="own_rewards:by_length")
    lora = jaxinfra.LoraConfig(rank=2) if kind == "lora" else None
    if kind in MODELS:  # random ones
        config = dataclasses.replace(small_run.config_of(), model=MODELS[kind], rl=learn)
    else:
        begin = experts(bench) if kind == "experts" else start
        config = jaxinfra.start_from(begin, rl=learn, lora=lora)
    sizes = SIZES | {"training.sequence_length": 48, "training.steps": 8, "rl.max_running": 4}
    sizes["rl.max_new_tokens"] = 24
    sizes |= {"rl.steps_per_rollout": 1, "precision.numerics": "exact"}
    config = jaxinfra.override(config, [f"{path}={value}" for path, value in sizes.items()])
    jaxinfra.rl(config, bench / "exact")
    records = metrics(bench / "exact")
    for name, value in {"difference_max": 0.0, "difference": 0.0, "kl": 0.0}.items():
        assert [each[f"rl/engine_{name}"] for each in records] == [value] * 8
    assert [each["rl/ratio"] for each in records] == [1.0] * 8
    assert records[-1]["rl/kl"] > 0.0  # steps have changed the weights
    assert max(cached_tokens) > 0
    assert max(preemptions) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_own_algorithm_of_forty_lines_learns(bench, start, monkeypatch):
    monkeypatch.chdir(bench.place)
    parts = (own_rewards.first_digit, own_rewards.best_of_group, own_losses.unclipped)
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) <= 40
    learn = jaxinfra.RlConfig(prompts=str(bench / "p.jsonl"), reward="", zero_variance="drop")
    config = jaxinfra.start_from(start, rl=learn)
    sizes = SIZES | {"training.steps": 60, "training.batch_size": 32, "rl.max_new_tokens": 2}
    sizes["precision.numerics"] = "exact"  # engine and trainer agree to the last bit
    config = jaxinfra.override(config, [f"{path}={value}" for path, value in sizes.items()])
    reward, advantage, loss = parts
    jaxinfra.rl(config, bench / "own", reward=reward, advantage=advantage, loss=loss)
    records = metrics(bench / "own")
    assert {each["rl/engine_difference_max"] for each in records} == {0.0}
    rewards = [each["rl/reward"] for each in records if "rl/reward" in each]
    assert sum(rewards[-10:]) > 2 * sum(rewards[:10])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_comes_nearer_to_its_teacher(bench, start):
    """A random model to another one, whose probabilities are all that it learns from."""
    learn = RlConfig(
        prompts=str(bench / "p.jsonl"), reward="zero", algorithm="reinforce++", group_size=1,
        max_new_tokens=6,
    )  # fmt: skip
    sizes = ["training.batch_size=16", "training.sequence_length=16", "training.steps=1"]
    teacher = small_run.config_of(*sizes, "model.init_std=0.3", "training.seed=5")
    jaxinfra.rl(dataclasses.replace(teacher, rl=learn), bench / "teacher")
    steps = ["training.steps=60", "optimizer.learning_rate=1e-2", "optimizer.weight_decay=0"]
    student = small_run.config_of(*sizes, *steps)
    distilled = dataclasses.replace(learn, algorithm="distill", teacher=str(bench / "teacher"))
    jaxinfra.rl(dataclasses.replace(student, rl=distilled), bench / "student")
    divergence = [each["rl/teacher_kl"] for each in metrics(bench / "student")]
    assert sum(divergence[-10:]) < 0.8 * sum(divergence[:10])
