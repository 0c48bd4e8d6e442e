"""EAGLE-3 heads as drafts, by published formulas in NumPy and published names of tensors."""

import functools
import json
import operator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfra.checkpoint.load_pretrained import load_pretrained, pretrained_shapes
from jaxinfra.cli import serve
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.drafted import DraftedConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.errors import CheckpointError, ConfigError, UnsupportedError
from jaxinfra.hf.config import from_hf_config
from jaxinfra.serving.draft_head import is_head_directory, with_head
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.load import LoadedModel, load, serving_placement
from jaxinfra.serving.sampling import GREEDY, SamplingConfig

V, D, F, HEADS, KV_HEADS, H, EPSILON = 24, 16, 20, 4, 2, 8, 1e-5
THETA, LAYERS, READ = 10_000.0, 4, (1, 2, 4)  # layers after which the head reads the model
NUM_DRAFTS, NUM_IDS = 3, 4  # ids that may be sampled: so few that drafts hold now and then
DRAFTED = np.array([0, 1, 2, 3, 5, 8, 13, 21])  # ids of the draft vocabulary
LENGTH = 7

LLAMA = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": H,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
}
FLAT = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": len(DRAFTED),
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [each - 1 for each in READ],
        "use_aux_hidden_state": True,
    },
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.2.0",
    "speculators_config": {"algorithm": "eagle3"},
    "draft_vocab_size": len(DRAFTED),
    "eagle_aux_hidden_state_layer_ids": [*READ],
    "norm_before_residual": True,
    "target_hidden_size": None,
    "transformer_layer_config": LLAMA | {"model_type": "qwen3", "num_hidden_layers": 1},
}


def layer_tensors(rng, prefix, inputs, norms, *, qk_norm=False):
    """Random tensors of a layer, whose attention has a number of inputs."""
    shapes = {
        "self_attn.q_proj": (HEADS * H, inputs),
        "self_attn.k_proj": (KV_HEADS * H, inputs),
        "self_attn.v_proj": (KV_HEADS * H, inputs),
        "self_attn.o_proj": (D, HEADS * H),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    } | dict.fromkeys(norms, (D,))
    if qk_norm:
        shapes |= {"self_attn.q_norm": (H,), "self_attn.k_norm": (H,)}
    return {
        f"{prefix}{name}.weight": rng.normal(len(shape) == 1, 0.4, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@functools.cache
def target_tensors():
    rng = np.random.default_rng(3)
    tensors = {
        "model.embed_tokens.weight": rng.normal(0, 1, (V, D)).astype(np.float32),
        "model.norm.weight": rng.normal(1, 0.2, D).astype(np.float32),
        "lm_head.weight": rng.normal(0, 0.5, (V, D)).astype(np.float32),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    for i in range(LAYERS):
        tensors |= layer_tensors(rng, f"model.layers.{i}.", D, norms)
    return tensors


@functools.cache
def head_tensors(form):
    rng = np.random.default_rng(4)
    prefix, is_own = ("midlayer.", False) if form == "flat" else ("layers.0.", True)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = layer_tensors(rng, prefix, 2 * D, norms, qk_norm=is_own) | {
        "fc.weight": rng.normal(0, 0.2, (D, 3 * D)).astype(np.float32),
        "norm.weight": rng.normal(1, 0.2, D).astype(np.float32),
        "lm_head.weight": rng.normal(0, 0.5, (len(DRAFTED), D)).astype(np.float32),
        "d2t": (DRAFTED - np.arange(len(DRAFTED))).astype(np.int64),
        "t2d": np.isin(np.arange(V), DRAFTED),
    }
    if is_own:
        tensors["embed_tokens.weight"] = rng.normal(0, 1, (V, D)).astype(np.float32)
    return tensors


def written(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), path / "model.safetensors")
    return path


def target(path, read=load_pretrained):
    if not path.exists():
        written(path, LLAMA, target_tensors())
    read = read(path)
    parts = {"definition": read.definition, "parameters": read.parameters}
    return LoadedModel(**parts, tokenizer=None, config=None, step=None, placement=read.placement)


def rms(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * weight


def turned(x_TNH):
    """Heads rotated by their positions, in halves."""
    angles = np.arange(len(x_TNH))[:, None] / THETA ** (np.arange(0, H, 2) / H)
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
    first, second = np.split(x_TNH, 2, axis=-1)
    return x_TNH * cos + np.concatenate([-second, first], axis=-1) * sin


def attended(x, get):
    """Causal attention of rows x, by the tensors of a layer."""

    def heads(name):
        return (x @ get(f"self_attn.{name}_proj").T).reshape(len(x), -1, H)

    q, k, v = map(heads, "qkv")
    if get("self_attn.q_norm") is not None:
        q, k = rms(q, get("self_attn.q_norm")), rms(k, get("self_attn.k_norm"))
    k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (turned(k), v))
    s = np.einsum("tnh,snh->nts", turned(q), k) / np.sqrt(H)
    s = np.where(np.tri(len(x), dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    out = np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), v)
    return out.reshape(len(x), -1) @ get("self_attn.o_proj").T


def fed(x, get):
    gate = x @ get("mlp.gate_proj").T
    return (gate / (1 + np.exp(-gate)) * (x @ get("mlp.up_proj").T)) @ get("mlp.down_proj").T


def getter(tensors, prefix):
    wide = {name: each.astype(np.float64) for name, each in tensors.items()}
    return lambda name: wide.get(f"{prefix}{name}.weight")


def streams(tokens):
    """The target's stream before the first layer and after each."""
    tensors = target_tensors()
    x = tensors["model.embed_tokens.weight"].astype(np.float64)[list(tokens)]
    found = [x]
    for i in range(LAYERS):
        get = getter(tensors, f"model.layers.{i}.")
        x = x + attended(rms(x, get("input_layernorm")), get)
        x = x + fed(rms(x, get("post_attention_layernorm")), get)
        found.append(x)
    return found


def begun(tokens, form):
    read = np.concatenate([streams(tokens)[each] for each in READ], axis=-1)
    return read @ head_tensors(form)["fc.weight"].T.astype(np.float64)


def predicted(hidden, following, form):
    """The head's own hidden states and logits, of the token after each of ``following``."""
    tensors = head_tensors(form)
    get = getter(tensors, "midlayer." if form == "flat" else "layers.0.")
    own = tensors.get("embed_tokens.weight", target_tensors()["model.embed_tokens.weight"])
    embedded, normed = own[list(following)], rms(hidden, get("hidden_norm"))
    both = np.concatenate([rms(embedded, get("input_layernorm")), normed], axis=-1)
    x = (hidden if form == "flat" else normed) + attended(both, get)
    x = x + fed(rms(x, get("post_attention_layernorm")), get)
    outside = getter(tensors, "")
    return x, rms(x, outside("norm")) @ outside("lm_head").T


def accepted(text, first, form):
    """Number of drafts that steps accept, of a text whose prompt has ``first`` tokens."""
    total, at, last = 0, first, len(text) - 1
    while at < last:
        room, hidden, following = min(NUM_DRAFTS, last - at - 1), begun(text[:at], form), text[1:]
        held, ids = 0, [*following[:at]]
        while held < room:
            x, logits = predicted(hidden, ids, form)
            draft = DRAFTED[np.argmax(np.where(DRAFTED < NUM_IDS, logits[-1], -np.inf))]
            if draft != text[at + held + 1]:
                break
            held, hidden, ids = held + 1, np.concatenate([hidden, x[-1:]]), [*ids, draft]
        total, at = total + held, at + held + 1
    return total


FORMS = {"flat": FLAT, "speculators": SPECULATORS}
NOT_FINITE = {"fc.weight": np.full((D, 3 * D), np.nan, np.float32)}


@pytest.mark.parametrize("form", FORMS)
def test_the_logits_are_those_of_the_published_formulas(form, tmp_path):
    path = written(tmp_path / "head", FORMS[form], head_tensors(form))
    assert is_head_directory(path)
    loaded = with_head(target(tmp_path / "target"), path)
    # The first form as GPUs run it: packed projections, unrolled layers.
    model = loaded.serving_decoder(is_unrolled=form == "flat")
    described = with_head(target(tmp_path / "target", pretrained_shapes), path)
    shapes = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each.parameters)
        for each in (loaded, described)
    )
    assert operator.eq(*shapes)
    tokens = np.random.default_rng(5).integers(0, V, LENGTH + 1)

    @jax.jit
    def logits(ids_1T, next_1T):
        out = model.run(ids_1T, cache=model.empty_cache(batch=1, num_slots=LENGTH))
        hidden = model.predict(model.mtp.begun(out), next_1T).x
        return model.mtp.draft_logits(hidden, model.logits)[0]

    got = np.asarray(logits(jnp.asarray(tokens[None, :-1]), jnp.asarray(tokens[None, 1:])))
    _, want = predicted(begun(tokens[:-1], form), tokens[1:], form)
    np.testing.assert_allclose(got[:, DRAFTED], want, atol=1e-4 * np.abs(want).max())
    assert np.all(np.delete(got, DRAFTED, axis=1) == np.finfo(np.float32).min)


def test_a_head_may_have_the_whole_vocabulary(tmp_path):
    """Logits of drafted ids equal those of a head with these ids alone; other ids have some too."""
    part = head_tensors("flat")
    table = np.random.default_rng(6).normal(0, 0.5, (V, D)).astype(np.float32)
    table[DRAFTED] = part["lm_head.weight"]
    tensors = {name: each for name, each in part.items() if name not in ("d2t", "t2d")}
    config = {name: each for name, each in FLAT.items() if name != "draft_vocab_size"}
    heads = {
        "part": written(tmp_path / "part", FLAT, part),
        "whole": written(tmp_path / "whole", config, tensors | {"lm_head.weight": table}),
    }
    ids_1T = jnp.arange(LENGTH)[None]
    found = {}
    for name, path in heads.items():
        model = with_head(target(tmp_path / "target"), path).decoder
        out = model.run(ids_1T, cache=model.empty_cache(batch=1, num_slots=LENGTH))
        hidden = model.predict(model.mtp.begun(out), ids_1T).x
        found[name] = np.asarray(model.mtp.draft_logits(hidden, model.logits))
    np.testing.assert_allclose(found["whole"][..., DRAFTED], found["part"][..., DRAFTED], rtol=1e-5)
    assert found["whole"].shape == found["part"].shape
    assert np.all(np.abs(found["whole"]) < 1e3)


def engine(model, drafts, **more):
    sizes = {"max_running": 1, "page_size": 4, "max_step_tokens": 20, "chunk_sizes": (8,)}
    options = EngineOptions(**sizes | {"max_piece_rows": 1, "num_drafts": drafts} | more)
    return Engine(model.decoder, num_ids=NUM_IDS, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_engine_drafts_what_the_head_predicts_and_keeps_every_draw(form, tmp_path):
    plain = target(tmp_path / "target")
    head = written(tmp_path / "head", FORMS[form], head_tensors(form))
    drafting = engine(with_head(plain, head), NUM_DRAFTS)
    undrafted = engine(plain, 0)
    prompt, new = (3, 1, 4, 1, 5), 40
    for sampling in (GREEDY, SamplingConfig(temperature=0.7, top_k=3)):
        before = drafting.counts.accepted_tokens
        request = GenerationRequest(
            prompt_ids=prompt, max_new_tokens=new, sampling=sampling, seed=2
        )
        got, want = (
            [token for part in each.run([request])[0] for token in part.tokens]
            for each in (drafting, undrafted)
        )
        assert got == want
        held = drafting.counts.accepted_tokens - before
        if sampling is GREEDY:
            assert held == accepted([*prompt, *got], len(prompt), form) > 0
    assert drafting.counts.accepted_tokens > held, "sampled drafts hold too"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["8 bits", "tensor", "few pages"])
def test_drafts_keep_the_texts_of_an_engine_without(case, tmp_path):
    """Text is equal with a cache in 8 bits, on two devices, and where requests are preempted."""
    mesh = MeshConfig(tensor=2 if case == "tensor" else 1)
    place = serving_placement(from_hf_config(LLAMA), mesh)
    plain = target(tmp_path / "target", functools.partial(load_pretrained, placement=place))
    drafting = with_head(plain, written(tmp_path / "head", FLAT, head_tensors("flat")))
    if case == "8 bits":
        plain, drafting = (each.with_cache(CacheFormat.INT8) for each in (plain, drafting))
    more = {"max_running": 3, "num_pages": 16 if case == "few pages" else None}
    engines = engine(drafting, NUM_DRAFTS, **more), engine(plain, 0, max_running=3)
    requests = [
        GenerationRequest(prompt_ids=(3, 1, first), max_new_tokens=30, sampling=sampling, seed=2)
        for first, sampling in enumerate([GREEDY, SamplingConfig(temperature=0.7), GREEDY])
    ]
    texts = [
        [[token for part in parts for token in part.tokens] for parts in each.run(requests)]
        for each in engines
    ]
    assert operator.eq(*texts)
    assert engines[0].counts.accepted_tokens > 0
    assert (engines[0].scheduler.num_preemptions > 0) == (case == "few pages")


def test_a_server_takes_a_head_for_its_draft_model(tmp_path, monkeypatch):
    """The model alone is read as such, first its shapes and then its weights; numbers of the head
    that are not finite are allowed by the option.
    """
    head = written(tmp_path / "head", FLAT, head_tensors("flat") | NOT_FINITE)

    def read_alone(args, *paths, read):
        assert paths == (tmp_path / "target",)
        return [target(*paths, load_pretrained if read is load else pretrained_shapes)]

    monkeypatch.setattr(serve, "load_models", read_alone)
    options = {"adapters": (), "adapter_slots": 0, "allow_nonfinite": True}
    args = SimpleNamespace(draft=head, num_drafts=NUM_DRAFTS, **options)
    served = serve.read_models(args, tmp_path / "target", MeshConfig())
    assert served.draft is served.bank is None
    assert served.model.is_described
    (model,) = served.read()
    assert not model.is_described
    for each in (served.model, model):
        assert isinstance(each.definition.config, DraftedConfig)


REFUSED = {
    "another vocabulary": (FLAT | {"vocab_size": 32}, {}, ConfigError, "vocabulary 32 .* has 24"),
    "another width": (FLAT | {"target_hidden_size": 32}, {}, ConfigError, "width 32, .* and 16"),
    "too many layers": (
        FLAT | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}},
        {},
        ConfigError,
        r"after layers \(2, 3, 10\)",
    ),
    "two layers to read": (
        SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [1, 2]},
        {},
        ConfigError,
        r"after layers \(1, 2\)",
    ),
    "layers that are no numbers": (
        SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [1, 2, "4"]},
        {},
        ConfigError,
        r"=\[1, 2, '4'\] must be three whole numbers",
    ),
    "two layers": (FLAT | {"num_hidden_layers": 2}, {}, ConfigError, "num_hidden_layers=2"),
    "an unknown key": (FLAT | {"gated": True}, {}, ConfigError, "gated=True"),
    "another kind": (
        SPECULATORS | {"speculators_model_type": "dflash"},
        {},
        UnsupportedError,
        "kind dflash",
    ),
    "a norm before fc": (FLAT | {"norm_before_fc": True}, {}, ConfigError, "norm_before_fc=True"),
    "half a config": (
        {name: each for name, each in SPECULATORS.items() if name != "norm_before_residual"},
        {},
        ConfigError,
        "norm_before_residual",
    ),
    "ids of another model": (
        FLAT,
        {"d2t": np.full(len(DRAFTED), 20)},
        CheckpointError,
        "outside the vocabulary",
    ),
    "a damaged tensor": (FLAT, NOT_FINITE, CheckpointError, "not finite"),
    "no map of ids": (FLAT, {"d2t": None}, ConfigError, "has 8 ids .* with d2t"),
    "a missing tensor": (FLAT, {"lm_head.weight": None}, CheckpointError, "lm_head.weight"),
}


def test_a_head_that_does_not_fit_is_refused_by_name(tmp_path):
    model = target(tmp_path / "target")
    assert not is_head_directory(tmp_path / "target")
    (tmp_path / "config.json").write_text(
        '{"model_type": "mamba2", "time_step_limit": [0, Infinity]}'
    )
    assert not is_head_directory(tmp_path)
    for name, (config, changes, kind, said) in REFUSED.items():
        tensors = head_tensors("speculators" if "speculators_config" in config else "flat")
        kept = {n: x for n, x in (tensors | changes).items() if x is not None}
        path = written(tmp_path / name.replace(" ", "_"), config, kept)
        assert is_head_directory(path)
        with pytest.raises(kind, match=said):
            with_head(model, path)
