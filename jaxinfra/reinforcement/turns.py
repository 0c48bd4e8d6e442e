"""Rollouts of one turn or several: completions, and what the reward function answers to them."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from jaxinfra.config.run import RunConfig
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import DataError
from jaxinfra.reinforcement.prompts import Prompt
from jaxinfra.reinforcement.rewards import Failure, RewardPool, Scored
from jaxinfra.reinforcement.sampler import Completion, Sampler, draw_seed

type Observation = str | Sequence[Mapping[str, Any]]
"""A text, or messages, that the model reads after its completion."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Trajectory:
    """Completions of a prompt, with the replies between them."""

    prompt: Prompt
    ids: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)  # 0 of replies' tokens
    is_sampled: list[bool] = dataclasses.field(default_factory=list)  # by the model, token by token
    texts: list[str] = dataclasses.field(default_factory=list)  # completions and replies in turn
    is_cut: bool = False  # the last completion ended by its length
    scored: Scored | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(self.is_sampled)

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens of the prompt and of all that follows it so far."""
        return (*self.prompt.ids, *self.ids)

    def add(self, completion: Completion) -> None:
        """Appends a completion."""
        self.ids += completion.ids
        self.log_probabilities += completion.log_probabilities
        self.is_sampled += [True] * len(completion.ids)
        self.texts.append(completion.text)
        self.is_cut = completion.is_cut

    def reply_ids(self, reply: Observation, tokenizer: Tokenizer) -> list[int]:
        """Returns the tokens of a reply, as ``Prompt.reply_ids`` does."""
        ids = self.prompt.reply_ids(reply, tokenizer)
        # The model has written the end of its message, with which the template begins.
        is_twice = ids and self.ids[-1] in tokenizer.end_ids and ids[0] in tokenizer.end_ids
        return ids[1:] if is_twice else ids

    def add_reply(self, reply: Observation, ids: Sequence[int]) -> None:
        """Appends a reply, whose tokens do not count in the loss."""
        self.ids += ids
        self.log_probabilities += [0.0] * len(ids)
        self.is_sampled += [False] * len(ids)
        is_text = isinstance(reply, str)
        self.texts.append(reply if is_text else "\n".join(str(m.get("content")) for m in reply))


@final
class Player:
    """Samples completions of prompts, and asks the reward function after each of them.

    All completions of a turn end before the next turn begins, so that what the engine computes
    does not depend on the time that rewards take.

    Args:
        is_over: asked often; sampling ends with a DataError if it returns True.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, *, is_over: Callable[[], bool]):
        assert config.rl is not None
        self._rl, self._config, self._tokenizer = config.rl, config, tokenizer
        self._sampler = Sampler(config, tokenizer)
        self._pool, self._is_over = RewardPool(config.rl), is_over
        self.waited_s = 0.0  # for rewards, after all completions of a turn had ended

    def renew(self, frozen: Any, trained: Any) -> None:
        """Gives the engine the weights that the next rollouts are sampled with."""
        self._sampler.renew(frozen, trained)
        self.waited_s = 0.0

    def copied(self, trained: Any) -> Any:
        """Returns a copy of the weights for ``renew``, which the trainer's next step does not
        free.
        """
        return self._sampler.copied(trained)

    def play(self, prompts: Sequence[Prompt], *, seed: int, number: int) -> list[Trajectory]:
        """Returns a trajectory of each prompt, with its reward or the reason why it has none.

        Args:
            seed, number: of the run, and of the rollout; equal ones give equal draws.
        """
        played = [Trajectory(prompt=each) for each in prompts]
        current = dict(enumerate(played))
        for turn in range(self._rl.max_turns):
            asked: dict[int, concurrent.futures.Future[Scored]] = {}
            contexts = {place: each.context for place, each in current.items()}
            draws = draw_seed(seed, number, turn)
            for found in self._sampler.sample(contexts, seed=draws, is_over=self._is_over):
                current[found.place].add(found)
                asked[found.place] = self._ask(current[found.place])
            if self._is_over():
                raise DataError("the run has ended")
            began = time.perf_counter()
            for place, each in current.items():
                each.scored = asked[place].result()
            self.waited_s += time.perf_counter() - began
            is_last = turn + 1 == self._rl.max_turns
            current = dict(self._continued(current, is_last=is_last))
            if not current:
                break
        self._sampler.release()  # training has the memory
        return played

    def _ask(self, each: Trajectory) -> concurrent.futures.Future[Scored]:
        written = each.texts[-1] if self._rl.max_turns == 1 else each.texts
        return self._pool.submit(written, prompt=each.prompt.text, row=each.prompt.row)

    def _continued(
        self, current: Mapping[int, Trajectory], *, is_last: bool
    ) -> Iterator[tuple[int, Trajectory]]:
        """The trajectories that go on after a reply."""
        room = self._config.training.sequence_length + 1 - self._rl.max_new_tokens
        for place, each in current.items():
            assert each.scored is not None
            if each.scored.reply is None:
                continue
            reply = each.scored.reply
            try:
                ids = each.reply_ids(reply, self._tokenizer)
            except DataError as error:
                each.scored = Scored(reward=None, failure=Failure.RAISED, text=str(error))
                continue
            if is_last or len(each.context) + len(ids) > room:
                each.scored = Scored(reward=None, failure=Failure.UNFINISHED)
            else:
                each.add_reply(reply, ids)
                yield place, each

    def close(self) -> None:
        """Ends the processes that compute rewards."""
        self._pool.close()
