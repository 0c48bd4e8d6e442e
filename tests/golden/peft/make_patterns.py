"""Makes patterns.json beside this script: which alpha PEFT takes of a pattern for each module.

/tmp/hf/bin/python tests/golden/peft/make_patterns.py      # the environment of make_peft.py
"""

import json
import pathlib

from peft.utils.other import get_pattern_key

MODULES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]
PATTERNS = [
    {"q_proj": 1},
    {"self_attn.q_proj": 1, "q_proj": 2},
    {"q_proj": 2, "self_attn.q_proj": 1},
    {"^model.layers.1.self_attn.q_proj": 1},
    {"^layers.1.self_attn.q_proj": 1},
    {"^model.layers.0.mlp.down_proj": 3, "down_proj": 4},
    {r"layers\.\d+\.mlp\..*": 5},
    {"layers.1.mlp.down_proj": 6},
    {"layers.(0|10).self_attn.(q|v)_proj": 7},
    {".*v_proj": 8, "v_proj": 9},
    {"proj": 10},
    {"[qv]_proj": 11, ".*": 12},
    {"layers.1": 13},
    {"down.proj": 14},
]
found = [[p, {m: p.get(get_pattern_key(p, m), -1) for m in MODULES}] for p in PATTERNS]
pathlib.Path(__file__).with_name("patterns.json").write_text(json.dumps(found) + "\n")
