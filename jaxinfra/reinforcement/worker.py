"""A process that computes rewards: one JSON object per line in, one out.

``python -m jaxinfra.reinforcement.worker NAME BYTES``; ``rewards.py`` starts it and ends it.
"""

import json
import os
import resource
import sys

from jaxinfra.errors import JaxinfraError
from jaxinfra.reinforcement.ready import find_reward


def main() -> None:
    """Answers requests until the standard input ends."""
    name, memory_bytes = sys.argv[1], int(sys.argv[2])
    # What the function prints or reads must not come between requests and answers.
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        reward = find_reward(name)
    except JaxinfraError as error:
        answer(refused=str(error))
        return
    answer(ready=True)
    for line in requests:
        asked = json.loads(line)
        try:
            value = float(reward(asked["completion"], prompt=asked["prompt"], row=asked["row"]))
        except Exception as error:
            answer(raised=f"{type(error).__name__}: {error}"[:500])
        else:
            answer(reward=value)


if __name__ == "__main__":
    main()
