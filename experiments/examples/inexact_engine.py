"""Does it spoil learning from a reward if the engine rounds otherwise than the trainer?

    python -m experiments.examples.inexact_engine --out runs/rounded --seeds 0 --uncorrected

Learns the rule of ``reinforcement`` from completions of an engine whose weights are rounded to
``--bits`` of mantissa; ``--uncorrected`` leaves out the ratios that correct for it. What to
conclude: the reward of two-token answers stays near that of equal weights.
"""

import argparse

import jax
import numpy as np

from experiments.examples import reinforcement
from jaxinfra.reinforcement import rollouts
from jaxinfra.reinforcement.handover import Handover


def sample_with_rounded_weights(bits: int) -> None:
    """Adds an inexact engine's rounding, which the product has not."""
    handed = Handover.trained

    @jax.jit
    def rounded(tree):
        return jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, bits), tree)

    Handover.trained = lambda self, tree, **how: rounded(handed(self, tree, **how))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--bits", type=int, default=0, help="mantissa bits of the engine's weights")
    parser.add_argument("--uncorrected", action="store_true", help="with importance weights of 1")
    args, words = parser.parse_known_args()
    sample_with_rounded_weights(args.bits)
    if args.uncorrected:
        rollouts.importance = lambda differences_RT, config: np.ones_like(differences_RT)
    reinforcement.main(words)


if __name__ == "__main__":
    main()
