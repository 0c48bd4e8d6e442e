"""Rollouts as the batches of a run: completions of its own model, their rewards and advantages.

Dims: R completion of a rollout (those of a prompt are neighbours), P prompt, G completion of a
prompt, T position.
"""

import collections
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final, override

import jax
import numpy as np
from jaxtyping import Int64

from jaxinfra.checkpoint.run_directory import RunDirectory, write_atomically
from jaxinfra.config.data import OWN_SOURCE
from jaxinfra.config.rl import Baseline, Overlong, RlConfig, ZeroVariance
from jaxinfra.config.run import RunConfig
from jaxinfra.data.batch import Batch, Rollout
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.data.train_iterator import sample_ids
from jaxinfra.errors import DataError
from jaxinfra.reinforcement.advantages import (
    Critic,
    advantages,
    has_equal_rewards,
    importance,
    overlong_penalty,
    token_shares,
)
from jaxinfra.reinforcement.episodes import Episodes, Trajectory
from jaxinfra.reinforcement.frozen import FrozenModel
from jaxinfra.reinforcement.rewards import Failure
from jaxinfra.training.job import Job, marks_padding
from jaxinfra.training.own_data import OwnTexts, PolicyBatches, PolicyData, configured_tokenizer
from jaxinfra.training.state import State

_NONE = (
    "no completion of a rollout has a reward, so its steps learn nothing; correct the reward "
    "function, or the rows that it reads"
)
_REMEMBERED = 4  # last steps, which a report of a bad step reads again


@final
class RolloutData(PolicyData):
    """The data of a run of reinforcement learning, for ``train``."""

    @override
    def named_in(self, config: RunConfig) -> RunConfig:
        return dataclasses.replace(
            config, data=dataclasses.replace(config.data, source=OWN_SOURCE, heldout_fraction=0.0)
        )

    @override
    def texts(self, config: RunConfig, tokenizer: Tokenizer | None) -> OwnTexts:
        found = configured_tokenizer(config) if tokenizer is None else tokenizer
        return OwnTexts(tokenizer=found, heldout={})

    @override
    def batches(self, job: Job, run: RunDirectory, say: Callable[[str], None]) -> PolicyBatches:
        file = run.tokenizer_file
        tokenizer = Tokenizer.load(file) if file.exists() else configured_tokenizer(job.config)
        return RolloutBatches(job, run, tokenizer, say=say)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Sampled:
    """A rollout: NumPy arrays of all its rows, and what its record says."""

    batch: Batch[np.ndarray]  # of all rows; each step makes ``share`` and ``weights`` from it
    counts_R: np.ndarray  # which completions count in the loss
    lengths_R: np.ndarray
    record: dict[str, float]
    head_E: np.ndarray | None = None  # value head of ppo before the fit to this rollout

    def rows(self, rows: slice, rl: RlConfig) -> Batch[np.ndarray]:
        """Returns the batch of a step."""
        batch, counts_R = jax.tree.map(lambda x: x[rows], self.batch), self.counts_R[rows]
        shares_R = token_shares(self.lengths_R[rows], counts_R, rl)
        share = (shares_R[:, None] * batch.weights).astype(np.float32)
        # If no completion counts, the loss is 0 times all tokens, not 0 / 0.
        weights = batch.weights * counts_R[:, None] if counts_R.any() else batch.weights
        rollout = dataclasses.replace(batch.rollout, share=share)
        return dataclasses.replace(batch, weights=weights.astype(np.float32), rollout=rollout)

    def as_json(self) -> dict[str, Any]:
        """Returns the arrays as lists; float32 numbers survive JSON to the bit."""
        arrays = {"counts": self.counts_R, "lengths": self.lengths_R, **_named(self.batch)}
        return {name: [str(x.dtype), x.tolist()] for name, x in arrays.items()}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "_Sampled":
        """Reverses ``as_json``; the record is empty, as it is of a step that is written."""
        arrays = {name: np.asarray(x, dtype) for name, (dtype, x) in values.items()}
        counts, lengths = arrays.pop("counts"), arrays.pop("lengths")
        inner = {each.name: arrays.pop(each.name) for each in dataclasses.fields(Rollout)}
        found: dict[str, Any] = {
            "reference": None,
            "segment_ids": None,
            "positions": None,
            **arrays,
        }
        batch = Batch(**found, rollout=Rollout(**inner))
        return cls(batch=batch, counts_R=counts, lengths_R=lengths, record={})


def _named(batch: Batch[np.ndarray]) -> dict[str, np.ndarray]:
    """A batch's arrays by the names of its fields, and of its rollout's."""
    fields = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
    rollout = fields.pop("rollout")
    fields |= {each.name: getattr(rollout, each.name) for each in dataclasses.fields(rollout)}
    return {name: x for name, x in fields.items() if x is not None}


@final
class RolloutBatches(PolicyBatches):
    """Iterator over batches of completions that the run's model samples when they are asked for.

    Prompts and draws are functions of the rollout's number and the weights, so a checkpoint between
    two rollouts keeps nothing of them, but what was sampled ahead. Within ``steps_per_rollout`` it
    keeps the rollout.

    Args:
        say: prints a message.
    """

    def __init__(
        self, job: Job, run: RunDirectory, tokenizer: Tokenizer, *, say: Callable[[str], None]
    ):
        config = job.config
        assert config.rl is not None
        self._job, self._run, self._config, self._rl = job, run, config, config.rl
        self._say = say
        self._state: State | None = None
        self.step = 0
        self._episodes = Episodes(job, tokenizer)
        self._reference = FrozenModel.reference(job)
        self._teacher = FrozenModel.teacher(job, tokenizer)
        self._critic = Critic(job) if config.rl.baseline is Baseline.VALUE else None
        self._said: set[str] = set()
        self._rollouts: collections.OrderedDict[int, _Sampled] = collections.OrderedDict()

    @override
    def follow(self, state: State) -> None:
        self._state = state

    @override
    def __next__(self) -> Batch[np.ndarray]:
        number = self.step // self._rl.steps_per_rollout
        if number not in self._rollouts:
            self._rollouts[number] = self._sample(number)
            while len(self._rollouts) > _REMEMBERED:
                self._rollouts.popitem(last=False)
        self.step += 1
        return self.batch(self.step - 1)

    @override
    def batch(self, step: int) -> Batch[np.ndarray]:
        number, part = divmod(step, self._rl.steps_per_rollout)
        if number not in self._rollouts:
            raise DataError(f"the completions of step {step + 1} are gone; the run goes on")
        size = self._config.training.batch_size
        return self._rollouts[number].rows(slice(part * size, (part + 1) * size), self._rl)

    @override
    def sample_ids(self, step: int) -> Int64[np.ndarray, "B"]:
        return sample_ids(step, batch_size=self._config.training.batch_size)

    @override
    def read(self, step: int) -> dict[str, float]:
        number, part = divmod(step - 1, self._rl.steps_per_rollout)
        return self._rollouts[number].record if part == 0 and number in self._rollouts else {}

    @override
    def state(self, step: int | None = None) -> dict[str, Any]:
        step = self.step if step is None else step
        number, part = divmod(step, self._rl.steps_per_rollout)
        state: dict[str, Any] = {"step": step}
        if self._critic is not None:
            later = self._rollouts.get(number) if part == 0 else None  # is already there at a stop
            head_E = self._critic.weights_E if later is None else later.head_E
            state["critic"] = (np.asarray(head_E) * (step > 0)).tolist()
        if part == 0:
            return state | self._episodes.state(number)
        state["rollout"] = self._rollouts[number].as_json()
        return state | self._episodes.state(number + 1)

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self._rollouts.clear()
        self._episodes.restore(state)
        if self._critic is not None:
            self._critic.weights_E = np.array(state["critic"])
        if "rollout" in state:
            number = self.step // self._rl.steps_per_rollout
            self._rollouts[number] = _Sampled.of_json(state["rollout"])

    @override
    def close(self) -> None:
        self._episodes.close()

    def _sample(self, number: int) -> _Sampled:
        """Makes the rollout of a number with the weights that the trainer has now."""
        state, began = self._state, time.perf_counter()
        assert state is not None, "follow comes before each batch"
        played = self._episodes.play(number, state.tree)
        waited_s = time.perf_counter() - began
        heldout = self._episodes.heldout(number, state.tree)
        self._episodes.begin(number + 1, state.tree)
        self._report(played.episodes)
        began = time.perf_counter()
        found = self._arrays(played.episodes, state)
        tokens = sum(each.num_sampled for each in played.episodes)
        record = found.record | _heldout_record(heldout, self._rl.heldout_samples)
        record["rl/score_s"] = time.perf_counter() - began
        record["rl/waited_s"] = waited_s
        if played.sampled_s:  # in this session
            record["rl/rollout_s"] = played.sampled_s
            record["rl/reward_s"] = played.rewarded_s
            record["rl/rollout_tokens_per_s"] = tokens / played.sampled_s
        if self._rl.overlap:
            record["rl/lag"] = min(number, 1)
        self._keep_samples(number, played.episodes)
        return dataclasses.replace(found, record=record)

    def _arrays(self, played: Sequence[Trajectory], state: State) -> _Sampled:
        """The rollout as arrays, with the probabilities that the trainer and the reference give."""
        rl = self._rl
        batch, engine_RT = _rows(
            played,
            length=self._config.training.sequence_length,
            marks_padding=marks_padding(self._config),
        )
        # The trainer's own probabilities are the old policy's. Their ratio to the engine's corrects
        # what rounding makes different in the two, unless numerics are exact, and the age of the
        # weights that were sampled with.
        old_RT = np.concatenate([self._old(part, state) for part in self._parts(batch)])
        counted_RT = batch.weights > 0.0
        difference_RT = np.where(counted_RT, old_RT - engine_RT, 0.0)
        importance_RT = importance(difference_RT, rl).astype(np.float32)
        lengths_R = np.array([each.num_sampled for each in played])
        is_cut_R = np.array([each.is_cut for each in played])
        given_R, is_valid_R = _rewards(played)
        rewards_R = given_R + overlong_penalty(lengths_R, rl)
        by_group = (-1, rl.group_size)
        groups = rewards_R.reshape(by_group), is_valid_R.reshape(by_group)
        equal_P = has_equal_rewards(*groups)
        counts_R = is_valid_R.copy()
        if rl.zero_variance is ZeroVariance.DROP:
            counts_R &= ~np.repeat(equal_P, rl.group_size)
        if rl.overlong is Overlong.MASK:
            counts_R &= ~is_cut_R
        record = _record(rl, played, rewards_R)
        record |= {
            "rl/zero_variance": float(equal_P.mean()),
            "rl/counted": float(counts_R.mean()),
            "rl/engine_difference": float(np.abs(difference_RT[counted_RT]).mean()),
            "rl/engine_difference_max": float(np.abs(difference_RT[counted_RT]).max()),
            "rl/engine_kl": float(np.mean(0.0 - difference_RT[counted_RT])),
            "rl/truncated": float((importance_RT[counted_RT] >= rl.importance_cap).mean()),
        }
        head_E = None if self._critic is None else self._critic.weights_E
        if self._teacher is not None:
            gains_RT = np.where(counted_RT, self._scores(self._teacher, batch) - old_RT, 0.0)
            record["rl/teacher_kl"] = float(-gains_RT[counted_RT].mean())
        elif self._critic is None:
            gains_RT = advantages(*groups, rl).reshape(-1, 1)
        else:
            parts = list(self._parts(batch))
            gains_RT, figures = self._critic.learn(state, parts, rewards_R, counts_R)
            record |= figures
        reference = self._reference and self._scores(self._reference, batch)
        rollout = Rollout(
            advantages=(gains_RT * batch.weights).astype(np.float32),
            old=np.where(counted_RT, old_RT, 0.0).astype(np.float32),
            importance=importance_RT,
            share=batch.weights,
        )
        whole = dataclasses.replace(batch, reference=reference, rollout=rollout)
        return _Sampled(
            batch=whole, counts_R=counts_R, lengths_R=lengths_R, record=record, head_E=head_E
        )

    def _parts(self, batch: Batch[np.ndarray]) -> Iterator[Batch[np.ndarray]]:
        """Parts of a rollout of as many rows as a micro-batch has."""
        training = self._config.training
        size = training.batch_size // training.accumulation
        for first in range(0, len(batch.tokens), size):
            rows = slice(first, first + size)
            yield jax.tree.map(lambda x, rows=rows: x[rows], batch)

    def _scores(self, model: FrozenModel, batch: Batch[np.ndarray]) -> np.ndarray:
        return np.concatenate([model(self._job.put(part)) for part in self._parts(batch)])

    def _old(self, part: Batch[np.ndarray], state: State) -> np.ndarray:
        return np.asarray(self._job.target_value_step(state.tree, self._job.put(part)))

    def _report(self, played: Sequence[Trajectory]) -> None:
        """Prints each kind of failure once per session; metrics.jsonl counts all of them."""
        if not any(_rewards(played)[1]) and _NONE not in self._said:
            self._said.add(_NONE)
            self._say(f"WARNING: {_NONE}")
        for each in (found.scored for found in played):
            if each is None or each.failure is None or each.failure in self._said:
                continue
            self._said.add(each.failure)
            self._say(
                f"WARNING: a reward {each.failure.replace('_', ' ')}"
                f"{': ' if each.text else ''}{each.text}; its completion does not count "
                "(rl/failed in metrics.jsonl)"
            )

    def _keep_samples(self, number: int, played: Sequence[Trajectory]) -> None:
        """Writes the first group of a rollout to ``samples/``, as often as steps are printed."""
        step = number * self._rl.steps_per_rollout + 1
        if (step - 1) % self._config.training.log_every:
            return
        several = self._rl.max_turns > 1
        rows = [
            {"step": step, "prompt": each.prompt.text}
            | ({"turns": each.texts} if several else {"completion": each.texts[-1]})
            | {"reward": None if each.scored is None else each.scored.reward}
            | {"tokens": each.num_sampled, "is_cut": each.is_cut}
            for each in played[: self._rl.group_size]
        ]
        self._run.samples.mkdir(exist_ok=True)
        file = self._run.samples / f"step-{step:08d}.jsonl"
        write_atomically(file, "".join(json.dumps(each) + "\n" for each in rows))


def _rows(
    played: Sequence[Trajectory], *, length: int, marks_padding: bool
) -> tuple[Batch[np.ndarray], np.ndarray]:
    """Rows of a prompt and what follows it, and the engine's log probabilities of targets. Targets
    that the model has not sampled do not count.

    Args:
        marks_padding: whether the rows have segment ids, 0 of tokens and -1 of padding.
    """
    ids_RT = np.zeros((len(played), length + 1), np.int32)
    weights_RT = np.zeros((len(played), length), np.float32)
    engine_RT = np.zeros((len(played), length), np.float32)
    segments_RT = np.full((len(played), length), -1, np.int32)
    for row, each in enumerate(played):
        ids = each.context
        ids_RT[row, : len(ids)] = ids
        segments_RT[row, : len(ids)] = 0
        new = slice(len(each.prompt.ids) - 1, len(ids) - 1)
        weights_RT[row, new] = each.is_sampled
        engine_RT[row, new] = each.log_probabilities
    batch = Batch(
        tokens=ids_RT[:, :-1],
        targets=ids_RT[:, 1:],
        segment_ids=segments_RT if marks_padding else None,
        positions=None,
        weights=weights_RT,
    )
    return batch, engine_RT


def _rewards(played: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Rewards of trajectories, and which of them have one; both of shape [R]."""
    found = [None if each.scored is None else each.scored.reward for each in played]
    given_R = np.array([0.0 if reward is None else reward for reward in found])
    return given_R, np.array([reward is not None for reward in found])


def _heldout_record(played: Sequence[Trajectory], samples: int) -> dict[str, float]:
    """Figures of held-out prompts, of each of which there are some samples."""
    if not played:
        return {}
    given_R, is_valid_R = _rewards(played)
    record = {"rl/heldout_failed": float((~is_valid_R).sum())}
    if is_valid_R.any():
        best_P = np.where(is_valid_R, given_R, -np.inf).reshape(-1, samples).max(axis=1)
        record["rl/heldout_reward"] = float(given_R[is_valid_R].mean())
        record["rl/heldout_best"] = float(best_P[np.isfinite(best_P)].mean())
    return record


def _record(rl: RlConfig, played: Sequence[Trajectory], rewards_R: np.ndarray) -> dict[str, float]:
    """Figures of rewards and lengths for the record of a rollout's first step.

    Args:
        rewards_R: rewards with the penalty of long completions.
    """
    given_R, is_valid_R = _rewards(played)
    record: dict[str, float] = {
        "rl/length": float(np.mean([each.num_sampled for each in played])),
        "rl/cut": float(np.mean([each.is_cut for each in played])),
        "rl/failed": int((~is_valid_R).sum()),
    }
    if rl.max_turns > 1:
        record["rl/turns"] = float(np.mean([(len(each.texts) + 1) // 2 for each in played]))
    for failure in Failure:
        count = sum(each.scored is not None and each.scored.failure is failure for each in played)
        if count:
            record[f"rl/failed/{failure}"] = count
    if is_valid_R.any():
        record["rl/reward"] = float(given_R[is_valid_R].mean())
        record["rl/reward_std"] = float(given_R[is_valid_R].std())
        best_P = np.where(is_valid_R, given_R, -np.inf).reshape(-1, rl.group_size).max(axis=1)
        record["rl/best_of_group"] = float(best_P[np.isfinite(best_P)].mean())
        if rl.overlong is Overlong.PENALTY:
            record["rl/reward_with_penalty"] = float(rewards_R[is_valid_R].mean())
    return record
