"""A process that computes rewards: one JSON object per line in, one out.

``python -m jaxinfra.reinforcement.worker CONFIG``; ``rewards.py`` starts it and ends it.
"""

import json
import os
import resource
import sys

from jaxinfra.config import codec
from jaxinfra.config.rl import RlConfig
from jaxinfra.errors import JaxinfraError
from jaxinfra.reinforcement.ready import find_reward


def main() -> None:
    """Answers requests until the standard input ends."""
    config = codec.from_dict(RlConfig, json.loads(sys.argv[1]))
    memory_bytes = int(config.reward_memory_gib * 2**30)
    # What the function prints or reads must not come between requests and answers.
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        reward = find_reward(config)
    except JaxinfraError as error:
        answer(refused=str(error))
        return
    answer(ready=True)
    for line in requests:
        asked = json.loads(line)
        try:
            value = reward(asked["completion"], prompt=asked["prompt"], row=asked["row"])
            if isinstance(value, str | list):
                answer(reply=value)
            else:
                answer(reward=float(value))
        except Exception as error:
            answer(raised=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main()
