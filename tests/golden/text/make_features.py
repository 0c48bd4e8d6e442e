"""Renders chat templates by ``transformers`` and writes the texts to ``features.json``.

Run in an environment of its own: ``pip install transformers``, then ``python make_features.py``.
"""

# ruff: noqa: E501 (a template is one line)
import copy
import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "dé <x>",
            "parameters": {
                "type": "object",
                "properties": {
                    "z": {"type": "string"},
                    "a": {"type": "integer", "description": "k"},
                },
                "required": ["z"],
            },
        },
    }
]
MESSAGES = [
    {"role": "user", "content": 'Héllo <world> a "q" & so\non'},
    {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {
                    "name": "f",
                    "arguments": {"a": 1, "b": ["x", None, {"ü": 1.5}], "c": True},
                },
            }
        ],
    },
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "name": "f", "tool_call_id": "c1", "content": "4", "extra": {"k": [1]}},
]
# Content that is null is printed as nothing, and as None there: no case prints it alone.
SOURCES = [
    "{{ messages[0].content | tojson }}",
    "{{ messages | tojson(indent=4) }}",
    "{{ messages | tojson(ensure_ascii=True) }}",
    "{{ tools | tojson(separators=(',',':')) }}",
    "{{ tools | tojson(indent=2, sort_keys=True) }}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set ns = namespace(a=0) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}",
    "{{ messages[::-1][0].role }}",
    "{{ messages | selectattr('role','equalto','user') | list | length }}",
    "{{ messages | map(attribute='role') | join(',') }}",
    "{{ messages[0] | dictsort }}",
    "{{ messages[0].items() | list }}",
    "{% for k, v in tools[0].function.parameters.properties | items %}{{k}}={{v.type}};{% endfor %}",
    "{% for k, v in tools[0].function.parameters.properties | dictsort %}{{k}}={{v}};{% endfor %}",
    "{{ messages[0].content.split(' ')[-1].strip() }}",
    "{{ messages[0].content.startswith('Hé') }}",
    "{% macro f(x, y=2) %}[{{x}}{{y}}]{% endmacro %}{{ f(1) }}{{ f(1, y='z') }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "{% call(x) g() %}{{ x }}{% endcall %}",
    "{% macro g() %}<{{ caller(3) }}>{% endmacro %}{% call(x) g() %}{{ x }}{% endcall %}",
    "{{ 'a' ~ 1 ~ none ~ true }}",
    "{{ messages[0].missing is defined }}{{ messages[0].missing }}|",
    "{{ messages[9] }}|",
    "{{ x.y if x is defined else 'no' }}",
    "{%- if not add_generation_prompt is defined %}{%- set add_generation_prompt = false %}{%- endif %}{{ add_generation_prompt }}",
    "a\n{% if true %}\nb\n  {% endif %}\nc\n",
    "  {% if true %}x{% endif %}  \n  {# c #}\ny\n\n",
    "a\n{{- ' b ' -}}\n c",
    "{{ messages[0].content is string }}{{ messages[0] is mapping }}{{ messages is iterable }}{{ messages is sequence }}{{ 1 is number }}{{ 1.5 is float }}{{ true is boolean }}",
    "{{ '%s-%d' | format('a', 3) }}",
    "{{ '%05.2f' % 3.14159 }}",
    "{{ [1,2,3] | sum }}{{ [3,1] | sort }}{{ [1,2,3] | batch(2) | list }}",
    "{{ messages[0].content | replace('a','b') | upper | trim | length }}",
    "{{ messages[0].content[:3] + '…' }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "x{%- generation -%} y {%- endgeneration -%}z",
    "{{ none }}{{ [none, true, 1.0] }}{{ {'a': none} }}{{ {'a': none} | tojson }}",
    "{{ 1e22 | tojson }}{{ 0.1 + 0.2 }}{{ 10 / 4 }}{{ 10 // 4 }}{{ -7 % 3 }}{{ 2 ** 10 }}",
    "{{ strftime_now('%Y') | length }}",
    "{{ range(3) | list }}{{ lipsum is defined }}{{ dict(a=1) }}{{ cycler('a','b').next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}",
    "{{ messages | tojson | safe }}",
    "{{ '<b>&\"\\'' }}{{ '<b>&\"\\'' | e }}{{ '<b>&\"\\'' | tojson }}",
    "{{ messages[0].content | urlencode }}",
    "{{ ('a,b' | string).split(',') | first }}{{ [] | first is defined }}",
    "{{ tools | length if tools else 0 }}{{ tools is none }}{{ documents is defined }}{{ documents }}",
    "{{ bos_token + eos_token }}{{ unk_token is defined }}{{ pad_token }}",
    "{% set x %}a{{ 1 }}b{% endset %}{{ x }}{{ x | length }}",
    "{% for m in messages recursive %}{{ m.role }}{% if loop.last %}!{% endif %}{% else %}none{% endfor %}{% for a in [] %}{% else %}none{% endfor %}",
    "{{ messages | groupby('role') | map(attribute=0) | list }}",
    "{{ messages[0]['content'] | wordcount }}{{ messages[0].content | truncate(5) }}{{ messages[0].content | indent(2) }}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ ''.__class__ }}",
    "{% include 'x' %}",
    "{{ 5 | abs }}{{ -3 | abs }}{{ 2.567 | round(1) }}{{ '12' | int + 1 }}",
    "{{ messages | reject('equalto', 1) | list | length }}{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='role') | list }}",
    "{{ messages[0].content | list | unique | list | length }}{{ ['b','a'] | max }}{{ 'abc' | reverse }}{{ [1,2] | last }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% if a in [1] and not b == 3 or false %}y{% endif %}{{ 'x' if false }}|",
    "{% with z = 5 %}{{ z }}{% endwith %}{% do messages %}",
    "{{ messages|length }}{#- c -#}   z\n",
    "{% raw %}{{ a }}{% endraw %}",
    "{{ 'é\\n\\t' }}{{ '\\u00e9' }}",
    "{{ messages[0].content.title() }}{{ 'a-b'.partition('-') }}{{ 'x'.join(['1','2']) }}{{ 'abc'.find('c') }}{{ 'a'.isdigit() }}",
    "{{ messages[0].get('role') }}{{ messages[0].get('nope', 'd') }}",
    "{{ messages[3].tool_calls[0].function.arguments | tojson }}",
    "{{ messages[3].tool_calls[0].function.arguments | items | list }}",
    "{{ messages[3].tool_calls[0].function.arguments }}",
    "{{ messages[3].content is none }}{{ messages[3].content or 'empty' }}",
    "{{ messages[3].tool_calls[0].function.arguments is mapping }}{{ messages[3].tool_calls[0].function.arguments is string }}",
    "{{ messages[3].tool_calls[0].function.arguments.keys() | list }}{{ messages[3].tool_calls[0].id }}",
    "{{ 'content' in messages[4] }}{{ messages[4].content is defined }}{{ messages[4].content }}|{{ messages[4]['content'] is none }}{{ messages[4].content is string }}",
    "{{ messages[4] | tojson }}",
    "{{ messages[3] }}",
    "{{ messages[4].get('content') is none }}",
    "{{ messages[3].content == none }}{{ messages[3].content != none }}{{ not messages[3].content }}{{ messages[3].content is mapping }}{{ messages[3].content is iterable }}{{ messages[3].content is sequence }}{{ messages[0].content is iterable }}{{ messages is sequence }}",
    "{{ messages[3].content | default('d', true) }}{{ messages[3].content | length if messages[3].content else 0}}",
    "{{ messages[5].name }}{{ messages[5].extra | tojson }}{{ messages[5].content | tojson }}",
    "{{ messages | map(attribute='content') | list | tojson }}",
    "{{ {'a': messages[3].content, 'b': (1, 2)} | tojson }}",
]


def rendered(source: str) -> str | None:
    try:
        texts, _ = render_jinja_template(
            conversations=[copy.deepcopy(MESSAGES)],
            tools=copy.deepcopy(TOOLS),
            chat_template=source,
            add_generation_prompt=True,
            **TOKENS,
        )
    except Exception:
        return None
    return texts[0]


found = {
    "variables": TOKENS,
    "tools": TOOLS,
    "messages": MESSAGES,
    "cases": [[source, rendered(source)] for source in SOURCES],
}
file = Path(__file__).with_name("features.json")
file.write_text(json.dumps(found, indent=0) + "\n")
