"""Adapters that were exported, as PEFT itself reads them.

    jaxinfra convert RUN ADAPTERS --adapters-only
    /tmp/hf/bin/pip install peft==0.21.2
    /tmp/hf/bin/python tests/golden/hf/check_peft.py BASE ADAPTERS IDS_AND_LOGITS.npz

The last file has ``ids`` [B, T] and the ``logits`` that were computed for them; prints how far from
these PEFT's are in float32, with the adapters beside the model and merged into it.
"""

import sys

import numpy as np
import peft
import torch
import transformers


def main(base: str, adapters: str, file: str) -> int:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with np.load(file) as arrays:
        ids, ours = torch.tensor(arrays["ids"]).long(), arrays["logits"]
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(model, adapters).eval()
        beside = adapted(ids, use_cache=False).logits.numpy()
        merged = adapted.merge_and_unload()(ids, use_cache=False).logits.numpy()
    changed = np.abs(plain - beside).max()
    errors = [np.abs(ours - theirs).max() for theirs in (beside, merged)]
    print(f"{adapters}: adapters change logits by {changed:.1e}; ours differ by {errors}")
    return 0 if max(errors) < 1e-4 < changed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
