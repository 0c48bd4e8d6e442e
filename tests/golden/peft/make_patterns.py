"""Makes two files beside this script, of what PEFT decides about modules by their names.

patterns.json has which alpha PEFT takes of a pattern for each module, modules.json which of them
the settings of an adapter choose.

/tmp/hf/bin/python tests/golden/peft/make_patterns.py      # an environment with PEFT
"""

import json
import pathlib

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
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

NAMES = ["q_proj", "v_proj"]
CHOICES = [
    dict(target_modules=NAMES),
    dict(target_modules=["proj"]),
    dict(target_modules=["self_attn.q_proj", "model.layers.0.mlp.down_proj"]),
    dict(target_modules=r".*layers\.(0|1)\..*[qv]_proj"),
    dict(target_modules=r"layers\.0.*"),
    dict(target_modules=r"model\.layers\.\d\.mlp.down_proj"),
    dict(
        target_modules=r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))"
    ),
    dict(target_modules=NAMES, exclude_modules=["layers.1.self_attn.q_proj", "v_proj"]),
    dict(target_modules=NAMES, exclude_modules=r".*\.0\..*"),
    dict(target_modules=["down_proj"], exclude_modules=["proj"]),
    dict(target_modules=NAMES, layers_to_transform=0),
    dict(target_modules=NAMES, layers_to_transform=[1, 10]),
    dict(target_modules=NAMES, layers_to_transform=[1], layers_pattern="layers"),
    dict(target_modules=NAMES, layers_to_transform=[1], layers_pattern=["blocks", "h"]),
    dict(target_modules=NAMES, layers_to_transform=[10], layers_pattern=["h", "layer[s]"]),
    dict(
        target_modules=["model.layers.0.self_attn.q_proj", "v_proj"],
        layers_to_transform=[1],
    ),
]
found = []
for choice in CHOICES:
    config = LoraConfig(**choice)
    named = [module for module in MODULES if check_target_module_exists(config, module)]
    found.append([choice, named])
pathlib.Path(__file__).with_name("modules.json").write_text(json.dumps(found) + "\n")
