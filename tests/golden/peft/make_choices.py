"""Makes choices.json and choices.npz beside this script: what PEFT makes of each choice of modules.

/tmp/hf/bin/python tests/golden/peft/make_choices.py      # the environment of make_peft.py

The JSON maps a case to its ``base`` in ``tests/golden/hf``, the ``config`` that PEFT wrote and the
shapes of its ``tensors``. For the cases of READ the other file holds, after ``CASE/``, ``ids``
[1, T], the ``logits`` of these with the adapters [1, T, V] and without them, ``plain``, all in
fp32, and the tensors by name.
"""

import json
import pathlib
import tempfile

import numpy as np
import peft
import torch
from make_peft import base
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).parent
LENGTH = 6
READ = {
    "expression": ("llama3", dict(target_modules=r"model\.layers\.\d\.(.*\.[qv]|mlp\.down)_proj")),
    "excluded": (
        "mistral",
        dict(target_modules="all-linear", exclude_modules=["o_proj", "layers.0.mlp.up_proj"]),
    ),
    "excluded_expression": (
        "llama",
        dict(target_modules="all-linear", exclude_modules=r".*layers\.0.*"),
    ),
    "layers": (
        "gpt2",
        dict(target_modules=["c_attn", "c_fc"], layers_to_transform=[1], layers_pattern=["h"]),
    ),
    "anchored": (
        "qwen2",
        dict(
            target_modules=["q_proj", "v_proj", "down_proj"],
            alpha_pattern={"^model.layers.1.self_attn.q_proj": 2, "v_proj": 0.5},
            rank_pattern={"^model.layers.0.self_attn.q_proj": 4, "down_proj": 1},
        ),
    ),
    "anchored_fused": (
        "phi3",
        dict(
            use_rslora=True,
            target_modules=["qkv_proj", "gate_up_proj"],
            alpha_pattern={r"model\.layers\.0\..*": 2},
            rank_pattern={r".*\.1\.mlp\.gate_up_proj": 4},
        ),
    ),
    "tied": ("gemma2", dict(target_modules="all-linear", use_dora=True)),
}
QUERY = dict(target_modules=["q_proj"])
REFUSED = {
    "embeddings": ("llama", dict(target_modules=["q_proj", "embed_tokens"])),
    "head": ("llama", dict(target_modules=["q_proj", "lm_head"])),
    "tied_embeddings": (
        "gemma2",
        dict(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
    ),
    "whole_modules": ("llama", dict(QUERY, modules_to_save=["lm_head", "embed_tokens"])),
    "whole_rows": ("gemma2", dict(QUERY, trainable_token_indices={"embed_tokens": [3, 4]})),
    "adapter_biases": ("qwen2", dict(QUERY, lora_bias=True)),
    "own_biases": ("qwen2", dict(QUERY, bias="lora_only")),
    "stacked_experts": ("mixtral", dict(target_modules="all-linear")),
    "resized": ("llama", QUERY),
}


def made(case, name, options, seed):
    generator = torch.Generator().manual_seed(seed)
    model = base(name)
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH), generator=generator)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits.numpy()
    if case == "resized":
        model.resize_token_embeddings(model.config.vocab_size + 3)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=7, **options)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if "magnitude" in key:
                value.mul_(1 + 0.2 * noise)
            elif "lora_" in key:
                value.copy_(0.15 * noise)
        logits = model(ids, use_cache=False).logits.numpy()
    model.peft_config["default"].base_model_name_or_path = str(HERE.parent / "hf" / name)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        values = json.loads((pathlib.Path(directory) / "adapter_config.json").read_text())
        tensors = load_file(pathlib.Path(directory) / "adapter_model.safetensors")
    values["base_model_name_or_path"] = name
    shapes = {key: list(value.shape) for key, value in sorted(tensors.items())}
    case_of = {"base": name, "config": values, "tensors": shapes}
    return case_of, tensors | {"ids": ids.numpy(), "logits": logits, "plain": plain}


def main():
    cases, kept = {}, {}
    for seed, (case, (name, options)) in enumerate((READ | REFUSED).items()):
        cases[case], arrays = made(case, name, options, seed)
        if case in READ:
            kept |= {f"{case}/{key}": value for key, value in arrays.items()}
            changed = np.abs(arrays["plain"] - arrays["logits"]).max()
            print(f"{case}: {len(cases[case]['tensors'])} tensors change logits by {changed:.2g}")
    (HERE / "choices.json").write_text(json.dumps(cases) + "\n")
    np.savez_compressed(HERE / "choices.npz", **kept)


if __name__ == "__main__":
    main()
