"""Renderings by ``transformers`` as hashes; writes ``templates.json`` beside.

Arguments of tool calls are given to it as values, parts joined for templates of text alone.
Run in an environment of its own: ``pip install transformers``, then ``python make_templates.py``.
"""

import copy
import hashlib
import json
from pathlib import Path

import jinja2
from template_cases import READ_PARTS, TEMPLATES, TOKENS, conversations
from transformers.utils.chat_template_utils import render_jinja_template

NUM = 200


def rendered(name: str, talk: dict) -> str | None:
    talk = copy.deepcopy(talk)
    for message in talk["messages"]:
        for call in message.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if isinstance(message["content"], list) and name not in READ_PARTS:
            message["content"] = "\n".join(part["text"] for part in message["content"])
    try:
        texts, _ = render_jinja_template(
            conversations=[talk["messages"]],
            tools=talk["tools"],
            chat_template=TEMPLATES[name],
            add_generation_prompt=True,
            **TOKENS,
        )
    except jinja2.TemplateError:
        return None
    return texts[0]


talks = conversations(NUM)
found = {}
for name in TEMPLATES:
    said = [rendered(name, talk) for talk in talks]
    hashes = [None if s is None else hashlib.sha256(s.encode()).hexdigest()[:8] for s in said]
    found[name] = " ".join("-" if each is None else each for each in hashes)
file = Path(__file__).with_name("templates.json")
file.write_text(json.dumps(found, indent=0) + "\n")
