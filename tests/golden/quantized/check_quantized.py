"""Logits that transformers gives of a directory that ``jaxinfra quantize`` wrote, on a CPU.

Needs the environment of ``make_quantized.py``:

    /tmp/hf/bin/python tests/golden/quantized/check_quantized.py DIR IDS.npy LOGITS.npy

IDS are token ids [B, T], LOGITS those of ``jaxinfra.load_model(DIR)`` (or of the model with weights
kept packed, where inputs are rounded too). Prints the largest difference.
"""

import sys

import numpy as np
import torch
import transformers

if __name__ == "__main__":
    directory, ids, logits = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.from_numpy(np.load(ids)).long()).logits.numpy()
    ours = np.load(logits)
    print(f"largest difference {np.abs(theirs - ours).max():.2e} of {np.abs(theirs).max():.2e}")
