"""Constructors of config records: what is no value of theirs is a ConfigError that names it."""

import dataclasses

import pytest

import jaxinfra
from jaxinfra.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jaxinfra.DataConfig(heldout_fraction="a"), "DataConfig: heldout_fraction='a' is"),
        (lambda: jaxinfra.MeshConfig(fsdp="4"), "MeshConfig: fsdp='4' is a str, expected int"),
        (lambda: jaxinfra.MeshConfig(fsd=4), "unknown setting 'fsd'; did you mean 'fsdp'"),
        (lambda: jaxinfra.MeshConfig(4), "MeshConfig takes settings by their names"),
        (lambda: jaxinfra.MlpConfig(), "required setting 'hidden_dim' is missing"),
        (lambda: jaxinfra.PreferenceConfig(beta="strong"), r"beta='strong' .* expected float \| N"),
        (
            lambda: dataclasses.replace(jaxinfra.preset("tiny").training, steps=None),
            "steps=None is a NoneType, expected int",
        ),
    ],
)
def test_what_is_no_setting_is_named(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_record_is_as_before():
    mesh = jaxinfra.MeshConfig(fsdp=2)
    assert mesh == dataclasses.replace(mesh)
    assert hash(mesh) == hash(jaxinfra.MeshConfig(fsdp=2))
    assert not hasattr(mesh, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        mesh.fsdp = 4
