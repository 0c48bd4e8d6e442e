"""The engine on meshes: what a request gets is what one device gives it alone."""

import dataclasses
import pathlib

import pytest

from jaxinfra.checkpoint.model_directory import read_model_directory
from jaxinfra.config.mesh import MeshConfig, parse_mesh
from jaxinfra.config.model import ModelConfig
from jaxinfra.errors import ConfigError
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions, Preemption
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.sampling import GREEDY
from tests.generation import recomputed
from tests.sharded.test_experts_use import CONFIG, PROMPTS, decoder, generated

OPTIONS = EngineOptions(
    max_running=3, page_size=4, num_pages=17, max_step_tokens=24, chunk_sizes=(8,), max_piece_rows=1
)
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
SHARED = MeshConfig(fsdp=2, expert=2)
SHARED_BY_FOUR = MeshConfig(fsdp=2, expert=2, tensor=2)
BEGUN = (7, 25, 3, 29, 4, 8, 1, 2, 31)


def _wide() -> ModelConfig:
    """Heads for eight devices, of which several have a copy of one key/value head."""
    (block,) = CONFIG.blocks
    wide = dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, num_q_heads=8))
    stack = dataclasses.replace(CONFIG.stacks[0], pattern=(wide,))
    return dataclasses.replace(CONFIG, stacks=(stack,))


WIDE = _wide()


def served(model, prompts, *, new: int, options: EngineOptions = OPTIONS) -> list[list[int]]:
    """Twice, the second time with pages of the first; both are equal."""
    engine = Engine(model, options=options)
    requests = [GenerationRequest(prompt_ids=tuple(p), max_new_tokens=new) for p in prompts]
    first, again = (
        [[token for each in came for token in each.tokens] for came in engine.run(requests)]
        for _ in range(2)
    )
    assert first == again
    assert engine.scheduler.allocator.num_in_use == 0
    return first


@pytest.mark.slow
def test_experts_of_two_devices():
    """No rows travel: a sum over the devices that have the experts is all that they exchange."""
    options = dataclasses.replace(OPTIONS, max_running=1, share_prefixes=False)  # two programs
    got = served(decoder(SHARED), PROMPTS, new=6, options=options)
    assert got == [*generated(MeshConfig()).values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "tensor=4",
        "fsdp=8,expert=8",
        "fsdp=2,expert=2,tensor=4",
        "fsdp=4,expert=4,tensor=2",
        "replica=2,fsdp=2,expert=4,tensor=2",
    ],
)
def test_meshes_of_experts_and_tensor(mesh):
    alone = generated(MeshConfig(), WIDE)
    assert len({token for row in alone.values() for token in row}) > 3, "a telling sequence"
    assert served(decoder(parse_mesh(mesh), WIDE), PROMPTS, new=6) == [*alone.values()]


MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_families_with_experts(name):
    """Latents, sinks, shared experts, dense layers among others, biases: beginnings are shared, and
    pages so few that requests are begun again.
    """
    read = read_model_directory(GOLDEN / name).config
    config = dataclasses.replace(read, vocab_size=64)  # theirs is a prime
    prompts = [BEGUN[:n] + tuple(range(1, m)) for n, m in ((9, 3), (9, 5), (2, 9), (7, 2), (9, 4))]
    want = [[] for _ in prompts]
    one = decoder(MeshConfig(), config)
    for each in recomputed(one, prompts, max_new_tokens=9, sampling=GREEDY):
        want[each.row].append(each.token)
    assert served(decoder(SHARED_BY_FOUR, config), prompts, new=9) == want


@pytest.mark.slow  # the same programs on one device: tests/unit/test_engine.py
def test_pages_of_several_devices_go_to_the_host_and_back():
    options = dataclasses.replace(OPTIONS, num_pages=11, preemption=Preemption.HOST)
    prompts = [BEGUN[:n] + tuple(range(1, m)) for n, m in ((9, 3), (9, 5), (2, 9), (7, 2), (9, 4))]
    engine = Engine(decoder(parse_mesh("tensor=4"), WIDE), options=options)
    engine.warm_up()
    came = engine.run([GenerationRequest(prompt_ids=p, max_new_tokens=14) for p in prompts])
    want = [[] for _ in prompts]
    one = decoder(MeshConfig(), WIDE)
    for each in recomputed(one, prompts, max_new_tokens=14, sampling=GREEDY):
        want[each.row].append(each.token)
    assert [[token for each in row for token in each.tokens] for row in came] == want
    assert engine.scheduler.host.num_restored > 0
    assert engine.runner.programs.num_late == 0


def test_heads_that_do_not_divide_are_refused():
    """Devices that share experts share heads too."""
    with pytest.raises(ConfigError, match=r"q_heads=4 does not divide over expert x tensor = 8"):
        decoder(MeshConfig(fsdp=4, expert=4, tensor=2))
