"""Own model, attention and loss on 8 devices: 50 steps, in two goes."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxinfra


@jaxinfra.part
def attention(q, k, v, *, mask, distance):
    """Keys without positions: nearer ones score higher (ALiBi, Press et al. 2022)."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    slope = 2.0 ** -jnp.arange(1, q.shape[2] + 1)[None, :, None, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    scores -= slope * distance[:, None].astype(scores.dtype)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, where=mask[:, None]), v)


@jaxinfra.part
def loss(logits, targets, *, weights):
    """Cross entropy that counts less where the model is sure (Lin et al. 2017)."""
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return (1.0 - jnp.exp(-nll)) ** 2 * nll


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # without GPUs, eight shares of the CPU
    data, run = sys.argv[1:]
    config = jaxinfra.read_run_config(Path(__file__).with_suffix(".toml"))
    config = jaxinfra.override(config, [f"data.source={data}"])
    config = jaxinfra.customize(config, attention=attention, loss=loss)
    first = dataclasses.replace(config.training, steps=25)
    jaxinfra.train(dataclasses.replace(config, training=first), run)
    print(jaxinfra.train(config, run, resume=True).result)
