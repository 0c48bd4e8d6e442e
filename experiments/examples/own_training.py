"""Do own parts train as others do? What to conclude: killed and run again, it prints the same."""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxinfra


class _Mean(nnx.Module):  # of what came before, and a loss that keeps it small
    def __init__(self, config, *, model_dim, std, out_std, execution, rngs):
        self.scale = nnx.Param(jnp.ones(model_dim), axes=("embed",))

    def __call__(self, x, given):
        y = self.scale[...] * jnp.cumsum(x, axis=1) / (1 + given.positions_BT)[..., None]
        losses = {"size": 1e-3 * jnp.sum(jnp.mean(y * y, axis=-1))}
        return jaxinfra.LayerOutput(x=y, sums=jaxinfra.Sums(losses=losses))


@jaxinfra.part
class _MeanConfig(jaxinfra.OwnMixer):
    layer = _Mean


@jaxinfra.part
def adam(learning_rate):
    return optax.adam(learning_rate, b2=0.95)


@jaxinfra.part
def falling(step, *, steps, peak):
    return peak * (1 - step / steps)


class _Rows:  # letters in their order, from any one on
    step = 0

    def __iter__(self):
        while True:
            self.step += 1
            yield jax.random.randint(jax.random.key(self.step), (8, 1), 65, 90) + jnp.arange(33)

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


if __name__ == "__main__":
    toml, run, out, *again = sys.argv[1:]
    own = {"mixer": _MeanConfig(), "optimizer": adam, "schedule": falling}
    config = jaxinfra.customize(jaxinfra.read_run_config(toml), **own, frozen=("embedding/*",))
    data = {"data": _Rows(), "validation": [next(iter(_Rows()))]}
    found = jaxinfra.train(config, run, **data, resume=bool(again)).result["heldout_loss"]
    jaxinfra.save(jaxinfra.load(run), out, layout="ours")
    print(found, jaxinfra.generate(out, ["ABC"], max_new_tokens=9, temperature=0)[0].text)
