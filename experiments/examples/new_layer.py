"""Is a running mean enough of a mixer?

    python -m experiments.examples.new_layer --steps 200 --out runs/new-layer

A layer of one's own takes the place of attention: a mean of what came before, with a learned decay
per channel. What to conclude: the difference is what attention brings, with its parameters.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import jaxinfra


class Decay(nnx.Module):
    """y_t = a y_(t-1) + (1 - a) x_t, ``a`` of each channel; 0 where a document begins."""

    def __init__(self, config, *, model_dim, std, out_std, execution, rngs):
        start = jnp.linspace(-config.spread, config.spread, model_dim, dtype=execution.policy.param)
        self.logit = nnx.Param(start, axes=("embed",))

    def __call__(self, x, given):
        kept = jax.nn.sigmoid(self.logit[...])[None, None] * (given.positions_BT > 0)[..., None]

        def after(first, second):
            return first[0] * second[0], first[1] * second[0] + second[1]

        pair = kept.astype(x.dtype), (1 - kept).astype(x.dtype) * x
        return jaxinfra.LayerOutput(x=jax.lax.associative_scan(after, pair, axis=1)[1])


@jaxinfra.part
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayConfig(jaxinfra.OwnMixer):
    """``Decay``'s settings."""

    spread: float = 4.0  # range of the initial decays' logits
    layer = Decay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="runs/new-layer")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    sizes = [f"training.steps={args.steps}", f"optimizer.warmup_steps={args.steps // 10}"]
    base = jaxinfra.override(jaxinfra.preset("tiny"), [*sizes, *args.set])
    own = jaxinfra.customize(base, mixer=DecayConfig())
    for name, config in {"attention": base, "decay": own}.items():
        summary = jaxinfra.train(config, f"{args.out}/{name}").result
        print(f"{name}: held-out loss {summary['heldout_loss']:.4f}")


if __name__ == "__main__":
    main()
