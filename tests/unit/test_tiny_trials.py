"""The stored trials of the preset tiny: they can be run again, and are of the preset that ships."""

import json

import jax
import numpy as np
import pytest

from experiments.bench.tiny_trials import STORED, run_group, with_numbers
from jaxinfra.config import codec
from jaxinfra.config.optimizer import MuonConfig, OptimizerConfig
from jaxinfra.config.presets import run_preset
from jaxinfra.config.validate import validate
from tests.e2e.runs import make_text

TRIALS = {group["name"]: group for group in json.loads(STORED.read_text())["trials"]}


def test_every_stored_group_can_be_run_again():
    for group in TRIALS.values():
        config = codec.override(run_preset("tiny"), group["settings"].split())
        validate(config)
        assert len(group["members"]) == len(group["bits_per_byte"])
        with_numbers(config.optimizer, group["members"][0])
        for name in group["members"][0]:
            if name.startswith("muon."):
                assert config.optimizer.muon is not None
            assert name in ("seed", "init_std") or hasattr(
                *((config.optimizer.muon, name[5:]) if "." in name else (config.optimizer, name))
            )


def test_the_seeds_are_those_of_the_preset():
    run, group = run_preset("tiny"), TRIALS["e-seeds"]
    tried = codec.override(run, group["settings"].split())
    assert tried.model == run.model
    assert (tried.training.batch_size, tried.training.sequence_length) == (
        run.training.batch_size,
        run.training.sequence_length,
    )
    assert tried.training.steps == pytest.approx(run.training.steps, rel=0.01)
    numbers = with_numbers(tried.optimizer, group["members"][0])
    assert numbers.learning_rate == run.optimizer.learning_rate
    assert numbers.muon is not None
    assert numbers.muon.momentum == run.optimizer.muon.momentum


def test_numbers_may_be_traced():
    config = OptimizerConfig(learning_rate=1.0, muon=MuonConfig())

    def of(rate, momentum):
        changed = with_numbers(config, {"learning_rate": rate, "muon.momentum": momentum})
        assert changed.muon is not None
        assert changed.beta1 == config.beta1
        return changed.learning_rate + changed.muon.momentum * changed.muon.rate

    assert float(jax.jit(of)(2.0, 0.25)) == 2.25


@pytest.mark.slow
def test_members_train_by_their_own_numbers(tmp_path):
    """Two of the same numbers end the same, whoever is beside them; a third does not."""
    settings = (
        "model.vocab_size=300 model.model_dim=16 model.stacks.0.repeats=1 training.steps=6 "
        "training.batch_size=2 training.sequence_length=32 optimizer.warmup_steps=1 "
        "model.stacks.0.pattern.0.mixer.head_dim=8 "
        "model.stacks.0.pattern.0.feed_forward.hidden_dim=16"
    )
    rates = (0.01, 0.03, 0.01)
    group = {"settings": settings, "members": [{"learning_rate": rate} for rate in rates]}
    text = make_text(tmp_path / "text", num_documents=60)
    got = run_group(group, data=str(text), cache=tmp_path / "cache")
    first, other, again = got["bits_per_byte"]
    assert first == again != other
    assert np.isfinite(got["losses"]).all()
    assert got["losses"][-1][1] < got["losses"][0][1]
