"""Makes chat.json beside this script: conversations as the reference implementation renders them.

/tmp/hf/bin/python tests/golden/hf/make_chat.py      # the environment of make_golden.py
"""

import json
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template

# In the style of published models; each uses other parts of the language.
TEMPLATES = {
    "llama3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
        "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] "
        "| trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
        "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "chatml": """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
        "(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
        "user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' "
        "%}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
    ),
    "blocks": """{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {% generation %}
{{ message['content'] }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
  {{ message | tojson(indent=1) }}
    {% endif %}
{% endfor %}
{% if tools is none %}
no tools
{% endif %}
{{ {'a': '<é>'} | tojson }}
""",
}
CONVERSATIONS = {
    "question": [{"role": "user", "content": " What is 2 < 3?\n"}],
    "exchange": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, 世界!"},
        {"role": "user", "content": "Bye"},
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
    ],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def main():
    cases = []
    for template, source in TEMPLATES.items():
        for conversation, messages in CONVERSATIONS.items():
            for prompted in (True, False):
                try:
                    (text,), _ = render_jinja_template(
                        conversations=[messages],
                        chat_template=source,
                        add_generation_prompt=prompted,
                        **TOKENS,
                    )
                except Exception as error:  # what a template raises is its refusal
                    if "must alternate" not in str(error):
                        raise
                    text = None
                cases.append(
                    {
                        "name": f"{template}-{conversation}-{prompted}",
                        "template": source,
                        "messages": messages,
                        "add_generation_prompt": prompted,
                        "text": text,
                    }
                )
    contents = {"tokens": TOKENS, "cases": cases}
    path = pathlib.Path(__file__).with_name("chat.json")
    path.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
