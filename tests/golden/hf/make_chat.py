"""Renders the conversations of chat.json beside this script as the reference implementation does.

/tmp/hf/bin/python tests/golden/hf/make_chat.py      # the environment of make_golden.py

A case has a template in the style of published models (each uses other parts of the language),
messages, and whether an answer is asked for; ``text`` is what this script writes there.
"""

import json
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template


def rendered(case, tokens):
    """The text, or None where the template refuses the messages."""
    try:
        (text,), _ = render_jinja_template(
            conversations=[case["messages"]],
            chat_template=case["template"],
            add_generation_prompt=case["add_generation_prompt"],
            **tokens,
        )
    except Exception as error:  # what a template raises is its refusal
        if "must alternate" not in str(error):
            raise
        return None
    return text


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_name("chat.json")
    contents = json.loads(path.read_text())
    for case in contents["cases"]:
        case["text"] = rendered(case, contents["tokens"])
    path.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n")
