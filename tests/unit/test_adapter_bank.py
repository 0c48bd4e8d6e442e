"""Several adapters over one model: each row gets its own, and what it computes is nobody else's."""

import asyncio
import dataclasses
import pathlib

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_models import CONFIG, OPTIONS, PROMPTS, definition, parameters
from flax import nnx

from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.peft_files import host_adapters
from jaxinfra.config.finetune import AdapterKind, BaseWeights, LoraConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import ConfigError
from jaxinfra.model.adapters import with_chosen
from jaxinfra.model.definition import by_path, define_model, is_weight, merged
from jaxinfra.model.quantized_base import base_shapes, quantized_weight
from jaxinfra.serving.adapter_bank import AdapterBank, load_bank
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.http import service as service_module
from jaxinfra.serving.http.app import application
from jaxinfra.serving.http.service import Service, ServiceLimits
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import GREEDY
from tests.generation import recomputed

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
LORAS = {
    "small": LoraConfig(rank=1, alpha=2.0, targets=("query", "down")),
    "lengths": LoraConfig(rank=3, alpha=4.0, targets=("value", "down"), kind=AdapterKind.DORA),
}


def trained(lora, seed):
    """The model with adapters as after some training, bound to be run alone, and these."""
    whole = define_model(CONFIG, definition().execution, lora=lora).freeze(definition().shapes)
    rng = np.random.default_rng(seed)
    tree = whole.initialize(jax.random.key(seed), beside=parameters())
    tree = jax.tree.map(
        lambda x: x + jnp.asarray(0.4 * rng.standard_normal(x.shape).astype(np.float32)), tree
    )
    alone = define_model(CONFIG, definition().execution, lora=lora).bind(merged(parameters(), tree))
    return alone, host_adapters(lora, by_path(tree))


@pytest.fixture(scope="module")
def adapted():
    return {name: trained(lora, place) for place, (name, lora) in enumerate(LORAS.items())}


@pytest.fixture(scope="module")
def bank(adapted):
    """Both, and a place for one more."""
    adapters = tuple(each for _, each in adapted.values())
    return AdapterBank(names=tuple(adapted), adapters=adapters, num_free=1, max_rank=3)


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(
        definition=definition(),
        parameters=parameters(),
        tokenizer=bytes_tokenizer(),
        config=None,
        step=None,
    )


@pytest.fixture(scope="module")
def engine(loaded, bank):
    return Engine.of(loaded, options=OPTIONS, bank=bank)


def asked(adapter, prompt=PROMPTS[1], new=6):
    return GenerationRequest(prompt_ids=prompt, max_new_tokens=new, adapter=adapter)


def drawn(progresses):
    return [token for each in progresses for token in each.tokens]


def alone(model, prompt=PROMPTS[1], new=6):
    num_ids = min(257, model.config.vocab_size)
    tokens = recomputed(model, [prompt], max_new_tokens=new, sampling=GREEDY, num_ids=num_ids)
    return [each.token for each in tokens]


def test_rows_of_a_batch_have_each_their_adapter(engine, adapted, loaded):
    """The same prompt three times in a batch, each time another model."""
    names = (None, "small", "lengths")
    got = [drawn(each) for each in engine.run([asked(name) for name in names])]
    for model, tokens in zip((loaded.decoder, *(m for m, _ in adapted.values())), got, strict=True):
        text = np.array([[*PROMPTS[1], *tokens[:-1]]], np.int32)
        likeliest = np.argmax(model(text)[0, len(PROMPTS[1]) - 1 :, :257], axis=-1)
        assert tokens == likeliest.tolist()
    assert len({tuple(each) for each in got}) == 3


def test_a_page_serves_the_adapter_that_computed_it_and_no_other(engine):
    """Prompts that pages hold are found again under their own adapter only."""
    prompt = tuple(range(20, 36))
    seen = {}
    for name in (None, "small", "lengths", None, "small", "lengths"):
        (progress,) = engine.run([asked(name, prompt)])
        cached, before = progress[0].num_cached, seen.get(name)
        if before is None:
            assert cached == 0
            seen[name] = drawn(progress)
        else:
            assert cached == 15  # all but the last token, which is computed to draw
            assert drawn(progress) == before
    assert len(set(map(tuple, seen.values()))) == 3


def test_no_program_is_compiled_for_an_adapter(engine):
    prompts = [tuple(range(first, first + 10)) for first in (100, 120)]

    def run(*adapters):
        engine.run([asked(*each) for each in zip(adapters, prompts, strict=False)])
        return engine.runner.programs.num_compiled

    run(None)
    before = run(None, None)
    assert run("small", "lengths") == run("lengths", None) == run("lengths") == before


@pytest.mark.parametrize("name", ["mistral_lora", "phi3_dora_rslora", "qwen2_dora"])
@pytest.mark.slow
def test_directories_of_peft_are_served(name):
    """Greedy tokens of the bank are those of the adapters alone, beside the model."""
    path = GOLDEN / "hf" / name.split("_")[0]
    pretrained = load_pretrained(path, policy=PolicyName.FP32)
    model = LoadedModel(
        definition=pretrained.definition,
        parameters=pretrained.parameters,
        tokenizer=bytes_tokenizer(),
        config=None,
        step=None,
        placement=pretrained.placement,
    )
    bank = load_bank(model, path, {"one": GOLDEN / "peft" / name})
    engine = Engine(bank.added_to(model), options=OPTIONS, adapters=bank.names)
    prompts = [(5, 9, 1), (1, 2, 3, 4, 5, 6, 7)]
    got = engine.run([asked("one", prompt) for prompt in prompts])
    lora = bank.adapters[0].lora
    whole = define_model(model.definition.config, model.definition.execution, lora=lora)
    tree = model.parameters
    for path, value in bank.adapters[0].arrays.items():
        node: dict = {}
        inner = node
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = jnp.asarray(value)
        tree = merged(tree, node)
    by_itself = whole.bind(tree)
    for progress, prompt in zip(got, prompts, strict=True):
        assert drawn(progress) == alone(by_itself, prompt)
    with pytest.raises(ConfigError, match=r"rank \d, more than 1: all adapters are filled up"):
        load_bank(
            model, GOLDEN / "hf" / name.split("_")[0], {"one": GOLDEN / "peft" / name}, max_rank=1
        )


def test_what_is_refused(engine, loaded, tmp_path):
    with pytest.raises(ConfigError, match="adapter 'large' is not loaded; loaded: small, lengths"):
        engine.submit(asked("large"))
    with pytest.raises(ConfigError, match="holds no adapters: neither adapter_config"):
        load_bank(loaded, tmp_path, {"one": tmp_path})
    with pytest.raises(ConfigError, match="no adapters are named"):
        load_bank(loaded, tmp_path, {})


@pytest.mark.slow
def test_adapters_of_a_model_in_few_bits(bank, loaded):
    """Logits of each row are those over the plain model that the bits stand for."""
    kept = base_shapes(definition(), BaseWeights.INT8)
    few = jax.tree.map(
        lambda leaf, weight: (
            quantized_weight(weight, BaseWeights.INT8, num_inputs=len(leaf.inputs))
            if is_weight(leaf)
            else weight
        ),
        kept,
        parameters(),
        is_leaf=is_weight,
    )
    plain = jax.tree.map(
        lambda leaf: leaf.dequantize(np.float32) if is_weight(leaf) else leaf,
        few,
        is_leaf=is_weight,
    )
    ids, chosen = np.tile(np.arange(20, dtype=np.int32), (3, 1)), jnp.arange(3)
    got, want = (
        nnx.merge(graphdef, with_chosen(state, chosen))(ids)
        for graphdef, state in (
            nnx.split(bank.added_to(dataclasses.replace(loaded, parameters=each)))
            for each in (few, plain)
        )
    )
    np.testing.assert_allclose(got, want, atol=2e-5 * float(np.abs(want).max()))
    assert float(np.abs(want[1] - want[0]).max()) > 0.01


def test_an_adapter_is_loaded_and_unloaded_between_requests(engine, bank, loaded, adapted):
    """Beside those from the start, in its place after it, and without what another one cached."""
    assert engine.adapters == ("small", "lengths")
    with pytest.raises(ConfigError, match="not loaded"):
        engine.check(asked("later"))
    for name in ("lengths", "small", "lengths"):
        model, arrays = adapted[name]
        engine.load_adapter("later", bank.rows(loaded, arrays))
        with pytest.raises(ConfigError, match="loaded already"):
            engine.load_adapter("later", {})
        with pytest.raises(ConfigError, match="all 3 places"):
            engine.load_adapter("third", {})
        got = engine.run([asked("later"), asked("small"), asked(None)])
        assert drawn(got[0]) == alone(model)
        assert drawn(got[1]) == alone(adapted["small"][0])
        assert drawn(got[2]) == alone(loaded.decoder)
        engine.submit(asked("later"))
        with pytest.raises(ConfigError, match="1 requests of adapter 'later' are open"):
            engine.unload_adapter("later")
        while engine.is_busy:
            engine.step()
        engine.unload_adapter("later")
    with pytest.raises(ConfigError, match="rank 3, more than 2"):
        dataclasses.replace(bank, max_rank=2).rows(loaded, adapted["lengths"][1])


@pytest.mark.slow
def test_clients_load_and_unload_adapters(loaded, adapted, tmp_path, monkeypatch):
    arrays = adapted["lengths"][1]
    bank = AdapterBank(names=(), adapters=(), num_free=1, max_rank=4)
    monkeypatch.setattr(service_module, "read_adapters", lambda *_: arrays)
    running = EngineThread(Engine.of(loaded, options=OPTIONS, bank=bank), max_open=4)
    limits = ServiceLimits()
    service = Service(loaded, running, path=tmp_path, name="m", limits=limits, bank=bank)
    running.start()

    async def run():
        transport = httpx2.ASGITransport(app=application(service, api_key=None))
        async with httpx2.AsyncClient(transport=transport, base_url="http://m") as http:

            async def post(path, **body):
                answer = await http.post(f"/v1/{path}", json=body)
                return answer.status_code, answer.text

            answers = [
                await post("load_lora_adapter", lora_name="later", lora_path="/adapter"),
                await post("completions", model="later", prompt=[1, 2], max_tokens=2),
                await post("load_lora_adapter", lora_name="later", lora_path="/adapter"),
                await post("unload_lora_adapter", lora_name="later"),
                await post("unload_lora_adapter", lora_name="later"),
                await post("completions", model="later", prompt=[1, 2], max_tokens=2),
            ]
            return answers, service.names

    try:
        answers, names = asyncio.run(run())
    finally:
        running.close()
    assert [status for status, _ in answers] == [200, 200, 400, 200, 400, 404]
    assert "served already" in answers[2][1]
    assert names == ("m",)
