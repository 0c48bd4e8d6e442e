"""Makes the goldens beside this script with the reference implementation.

Needs an environment of its own, because PyTorch is no dependency of the project:

    python3.11 -m venv /tmp/hf
    /tmp/hf/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    /tmp/hf/bin/python tests/golden/families/make_families.py [CASE ...]

A case is a tiny model of one family: ``NAME.json`` with the config that ``save_pretrained`` writes
and a hash of all tensors' names and shapes, ``NAME.npz`` with

    ids        int [2, T]
    logits     float32 of those ids [2, T, V]
    gradient   of the mean next-token loss by the table of token embeddings

The weights are those of ``seeded_weights.py``.
"""

import json
import pathlib
import re
import sys
import tempfile

import numpy as np
import torch
import transformers
from cases import CASES
from safetensors import safe_open
from safetensors.numpy import save_file
from seeded_weights import digest, values

HERE = pathlib.Path(__file__).parent
LENGTH = 20
# Names that ``save_pretrained`` writes otherwise than the models' makers do.
PUBLISHED = {"kimi_linear": (r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj")}


def seeded_model(settings: dict, directory: pathlib.Path) -> torch.nn.Module:
    """The architecture with the seeded weights, read from files as anyone reads them."""
    config = transformers.AutoConfig.for_model(**settings)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    (file,) = directory.glob("*.safetensors")
    pattern, name = PUBLISHED.get(settings["model_type"], ("^$", ""))
    shapes = {re.sub(pattern, name, each): shape for each, shape in shapes_of(file).items()}
    tensors = {name: values(name, shape) for name, shape in shapes.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    # Falcon's eager attention adds the slopes twice: to the mask, and to the scores.
    attention = "sdpa" if settings["model_type"] == "falcon" else "eager"
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention
    ).eval()


def shapes_of(file: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all stored tensors."""
    with safe_open(file, framework="np") as opened:
        names = list(opened.keys())
        return {name: tuple(opened.get_slice(name).get_shape()) for name in names}


def loss_gradient(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Gradient of the mean next-token loss by the embedding table."""
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return model.get_input_embeddings().weight.grad


def main(names: list[str]) -> None:
    """Makes the named cases, or all."""
    for name in names or CASES:
        settings = CASES[name]
        with tempfile.TemporaryDirectory() as temporary:
            directory = pathlib.Path(temporary)
            model = seeded_model(settings, directory)
            generator = torch.Generator().manual_seed(1)
            size = model.config.get_text_config().vocab_size
            ids = torch.randint(0, size, (2, LENGTH), generator=generator)
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits
            gradient = loss_gradient(model, ids)
            text = json.dumps(
                {
                    "config": json.loads((directory / "config.json").read_text()),
                    "tensors": digest(shapes_of(directory / "model.safetensors")),
                },
                indent=1,
            )
            (HERE / f"{name}.json").write_text(text + "\n")
            arrays = {"ids": ids, "logits": logits, "gradient": gradient}
            np.savez_compressed(HERE / f"{name}.npz", **{k: v.numpy() for k, v in arrays.items()})
        print(f"{name}: logits of size {float(logits.abs().max()):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
