"""The config of a run small enough to be compiled by one test."""

import jaxinfra
from jaxinfra.config import codec

SMALL = [
    "model.vocab_size=300",
    "model.model_dim=16",
    "model.stacks.0.repeats=2",
    "model.stacks.0.pattern.0.mixer.num_q_heads=4",
    "model.stacks.0.pattern.0.mixer.num_kv_heads=2",
    "model.stacks.0.pattern.0.mixer.head_dim=4",
    "model.stacks.0.pattern.0.feed_forward.hidden_dim=32",
    "optimizer.warmup_steps=0",
    "optimizer.muon=none",
    "training.steps=4",
    "training.batch_size=4",
    "training.sequence_length=8",
    "data.heldout_fraction=0.3",
    "data.tokenizer.kind=bytes",
]


def config_of(*changes):
    """It, with these settings changed."""
    return codec.override(jaxinfra.preset("tiny"), [*SMALL, *changes])
