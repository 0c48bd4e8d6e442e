"""Twenty templates in the spirit of model families', and conversations drawn at random."""

import json
import random
from typing import Any

_CALLS = (
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}:{{ c.function.arguments | tojson }}"
    "</call>{% endfor %}"
)
_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ (m.content or '') ~ "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama2": "{% for m in messages %}{% if m.role == 'system' %}<<SYS>>{{ m.content | trim }}"
    "<</SYS>>{% elif m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim if m.content is string else '' }} {{ eos_token }}{% endif %}"
    "{% endfor %}",
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}"
    "<|end_header_id|>\n\n{% if 'tool_calls' in m and m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}{% endfor %}"
    "{% elif m.content is string %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}",
    "llama4": "{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}{% if m.content is string %}"
    "{{ m.content }}{% elif m.content is not none %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}<|eot|>"
    "{% endfor %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{{ m.content }} [/INST]{% elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS]"
    + _CALLS
    + "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% elif m.role == 'tool' %}"
    "[RESULT]{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "mixtral, in turns": "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{{ m.content or 'none' }}|"
    "{% endfor %}",
    "qwen2.5": _TOOLS + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}A"
    "{% if m.content %}\n{{ m.content }}{% endif %}"
    + _CALLS
    + "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "<u>{% endif %}<r>{{ m.content }}</r>{% if loop.last %}</u>{% endif %}{% else %}{{ m.role }}:"
    "{{ m.content }}{% endif %}\n{% endfor %}",
    "qwen3": "{% for m in messages %}{% if m.content is string %}{% set c = m.content %}{% else %}"
    "{% set c = '' %}{% endif %}{% if m.role == 'assistant' and '</think>' in c %}"
    "{{ c.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.role }} {{ c }}{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}{% set r = 'model' if m.role == 'assistant' "
    "else m.role %}<start_of_turn>{{ r }}\n{{ m.content | trim if m.content else '' }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "gemma3": "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] | trim }}"
    "{% elif m['content'] is iterable and m['content'] is not none %}{% for p in m['content'] %}"
    "{{ p['text'] | trim }}+{% endfor %}{% endif %}\n{% endfor %}",
    "phi3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content if m.content is not none }}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "phi4": "{% for m in messages %}{% if m.role == 'system' and tools %}{{ m.content }}<|tool|>"
    "{{ tools | tojson }}<|/tool|>{% else %}<|{{ m.role }}|>{{ m.content or '' }}{% endif %}"
    "<|end|>{% endfor %}",
    "deepseek v3": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' and "
    "m.content is none %}{% for c in m.tool_calls or [] %}<c>{{ c.type }}<s>"
    "{{ c['function']['name'] }}{% endfor %}{% elif m.role == 'assistant' and "
    "m.content is not none %}<A>{{ m.content }}<end>{% elif m.role == 'user' %}<U>{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "deepseek r1": "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = ns.system ~ m.content %}{% endif %}{% endfor %}"
    "{{ ns.system }}{% for m in messages if m.role != 'system' %}{{ m.role }}:"
    "{{ m.content.split('</think>') | last if m.content is string else '' }}{% endfor %}",
    "command r": "{% for m in messages %}<|{{ m.role | upper }}|>"
    "{{ m.content | default('', true) }}"
    "{% if m.tool_calls is defined and m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}"
    "{% endif %}{% endfor %}",
    "hermes": "{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.role }}{{ m.content or '' }}"
    "{% endif %}{% if m.tool_calls %}" + _CALLS + "{% endif %}{% endfor %}",
    "gpt-oss": "{% for m in messages %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}"
    "{% if m.name is defined %}={{ m.name }}{% endif %}<|message|>"
    "{{ m.content if m.content else '' }}<|end|>{% endfor %}",
    "olmo": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>\n' ~ "
    "m['content'] ~ '\n' }}{% elif m['role'] == 'assistant' %}{% if not loop.last %}"
    "{{ '<|assistant|>\n' ~ (m['content'] or '') ~ eos_token ~ '\n' }}{% else %}"
    "{{ '<|assistant|>\n' ~ (m['content'] or '') ~ eos_token }}{% endif %}{% endif %}{% endfor %}",
    "granite": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{{ messages[0].content }}{% else %}{% set rest = messages %}default{% endif %}"
    "{% for m in rest %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content or '' }}"
    "{% if loop.last and add_generation_prompt %}<|start_of_role|>assistant{% endif %}{% endfor %}",
    "glm": "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}<k>{{ k }}</k>"
    "{{ v if v is string else v | tojson }}{% endfor %}{% endfor %}{% endfor %}",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
READ_PARTS = ("llama4", "gemma3", "glm")  # templates that take content in parts
_TEXTS = ["hi", " a b ", "é日本🙂", "", "<b>&'\"\\", "x\n\ny", "<think>a</think>\n b", "{{ no }}"]
_VALUES = ["Oslo", 3, 1.5, True, None, [1, "é"], {"deep": {"er": "<"}}]


def conversations(num: int) -> list[dict[str, Any]]:
    """Conversations with systems, tools, calls as JSON or values, nulls, parts and other keys."""
    draw = random.Random(7)
    return [_conversation(draw) for _ in range(num)]


def _conversation(draw: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": draw.choice(["system", "developer"]), "content": _text(draw)})
    has_tools, has_parts = draw.random() < 0.5, draw.random() < 0.3
    for _ in range(draw.randint(1, 3)):
        text = _text(draw)
        parts = [{"type": "text", "text": each} for each in (text, _text(draw))]
        messages.append({"role": "user", "content": parts if has_parts else text})
        if draw.random() < 0.3:
            messages[-1]["name"] = "ann"
        if has_tools:
            given = {key: draw.choice(_VALUES) for key in draw.sample("abc", draw.randint(0, 3))}
            sent = json.dumps(given) if draw.random() < 0.5 else given
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": sent}}
            content = draw.choice([None, "", "let me see"])
            messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "1", "content": _text(draw)})
        messages.append({"role": "assistant", "content": _text(draw), "extra": 1})
    if draw.random() < 0.5:
        messages.pop()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    return {"messages": messages, "tools": [tool] if has_tools else None}


def _text(draw: random.Random) -> str:
    return draw.choice(_TEXTS)
