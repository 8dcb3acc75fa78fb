"""Chat templates of the kinds that models come with, and conversations for them."""

from __future__ import annotations

from typing import Any

# Tools as JSON, checks of the roles, dates, a loop that trims.
HEADERS = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have these functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message ~ "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("expected one tool call at once") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# A namespace that looks back from the end, thoughts that are cut off, a macro, generation.
THOUGHTS = """
{%- macro content_of(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content %}
        {%- for part in content %}{%- if 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = content_of(message.content) %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (tool_call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' ~ content ~ '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Calls as a tag for each parameter, or as JSON where a variable says so; thoughts in a field of
# their own, and a switch that turns them off.
PARAMETERS = """
{%- set system = messages[0].role == 'system' %}
{%- if tools or system %}
    {{- '<|im_start|>system\\n' + (messages[0].content | trim if system else 'You call tools.') }}
    {%- for tool in tools or [] %}
        {{- '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>' }}
        {%- for name, schema in tool.function.parameters.properties | items %}
            {{- '\\n<parameter>' ~ name ~ ': ' ~ (schema | tojson) ~ '</parameter>' }}
        {%- endfor %}
        {{- '\\n</function>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content | trim + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- (message.content or '') | trim }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function %}
            {{- '\\n<tool_call>\\n' }}
            {%- if tool_call_format | default('xml') == 'json' %}
                {{- {'name': call.name, 'arguments': call.arguments} | tojson }}
            {%- else %}
                {{- '<function=' + call.name + '>\\n' }}
                {%- for name, value in call.arguments | items %}
                    {{- '<parameter=' + name + '>\\n' }}
                    {{- value if value is string else value | tojson }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>' }}
            {%- endif %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Filters of lists, roles that must alternate, tools before the last user's message.
ALTERNATING = """
{%- if messages[0].role == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role in ["user", "assistant"] and message.tool_calls is undefined %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("expected user and assistant in turn") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {{- ', "id": "' + tool_call.id|default("0")|string + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] in ("tool", "tool_results") %}
        {%- set inner = message.content.content if message.content is mapping %}
        {%- set content = inner or message.content %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("expected user, assistant or tool") }}
    {%- endif %}
{%- endfor %}
"""

# Tools as a list in the system's message, results as messages of a tool, but no calls.
LISTED = """
{{- bos_token }}
{%- set ns = namespace(system="") %}
{%- if messages[0].role == "system" %}
    {%- set ns.system = messages[0].content + "\\n" %}{%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
    {%- set listed = tools | map("tojson") | join(", ") %}
    {%- set ns.system = ns.system + "List of tools: [" + listed + "]" %}
{%- endif %}
{%- if ns.system %}{{- "<|im_start|>system\\n" + ns.system + "<|im_end|>\\n" }}{%- endif %}
{%- for message in messages %}
    {%- set said = message.content %}
    {%- if message.role == "tool" %}
        {%- set said = "<|tool_response_start|>" + said + "<|tool_response_end|>" %}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\\n" + said + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""

# The same with calls in Python, whose texts are not escaped, and thoughts in a field of their own.
PYTHON = LISTED.replace(
    '{{- "<|im_start|>" + message.role + "\\n" + said + "<|im_end|>\\n" }}',
    """{{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.thinking is defined %}
        {{- "<think>" + message.thinking + "</think>" }}
    {%- endif %}
    {{- said }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- "<|tool_call_start|>[" if loop.first else ", " }}
        {{- tool_call.function.name + "(" }}
        {%- for name, value in tool_call.function.arguments.items() %}
            {{- (", " if not loop.first else "") + name + "=" }}
            {{- "'" + value + "'" if value is string else value | string }}
        {%- endfor %}
        {{- ")" + ("]<|tool_call_end|>" if loop.last else "") }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}""",
)

# No role for the system, whose message begins the first user's; content in parts.
TURNS = """
{{- bos_token }}
{%- set ns = namespace(first="") %}
{%- if messages[0]["role"] == "system" %}
    {%- set given = messages[0]["content"] %}
    {%- set ns.first = (given if given is string else given[0]["text"]) + "\\n\\n" %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("expected user and assistant in turn") }}
    {%- endif %}
    {%- set role = "model" if message["role"] == "assistant" else message["role"] %}
    {{- "<start_of_turn>" + role + "\\n" + (ns.first if loop.first else "") }}
    {%- if message["content"] is string %}{{- message["content"] | trim }}
    {%- elif message["content"] is iterable %}
        {%- for item in message["content"] %}
            {%- if item["type"] == "image" %}{{- "<start_of_image>" }}
            {%- elif item["type"] == "text" %}{{- item["text"] | trim }}{%- endif %}
        {%- endfor %}
    {%- else %}{{- raise_exception("expected text or parts") }}
    {%- endif %}
    {{- "<end_of_turn>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<start_of_turn>model\\n" }}{%- endif %}
"""

# No place for tools, calls or results.
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Calls in answers whose content is null; their arguments are text between fences.
FENCES = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.content is none %}
        {%- for call in message.tool_calls %}
            {{- "<call>" + call.type + ":" + call.function.name + "\\n```json\\n" }}
            {{- call.function.arguments + "\\n```</call>" }}
        {%- endfor %}
    {%- elif message.role == "tool" %}{{- "<result>" + message.content + "</result>" }}
    {%- else %}{{- "<" + message.role + ">" + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<assistant>" }}{%- endif %}
"""

# Arguments as they are, with Python's quotes if they are no text.
BARE = """
{%- for message in messages %}
    {{- "<" + message.role + ">" + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name ~ "(" ~ call.function.arguments ~ ")" }}
    {%- endfor %}
{%- endfor %}
"""

# Arguments one by one, which therefore have to be an object.
TAGS = """
{%- for message in messages %}
    {{- "<" + message.role + ">" + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- "<call=" + call.function.name + ">" }}
        {%- for name, value in call.function.arguments.items() %}
            {{- {name: value} | tojson }}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}
"""

TEMPLATES = {
    "headers": HEADERS,
    "thoughts": THOUGHTS,
    "parameters": PARAMETERS,
    "alternating": ALTERNATING,
    "listed": LISTED,
    "python": PYTHON,
}
# These templates decide about the form of a call in a history.
PARTICULAR = {"fences": FENCES, "bare": BARE, "tags": TAGS}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "What it does, “ü” <&>.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "enum": ["a", "b"]}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "time")
]
CALL = {"function": {"name": "weather", "arguments": {"place": "Zürich", "days": 2}}, "id": "a1"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "1 < 2 & “ü”"}],
    "turns": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi "},
        {"role": "user", "content": "What next?\n"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks"},
    ],
}


# Features that templates may use, one by one.
FEATURES = [
    "{{ {'b': 1, 'a': [1.5, none, true, 'ü<>&']}|tojson }}",
    "{{ {'b': 1, 'a': [1, 2]}|tojson(indent=2, sort_keys=true) }}",
    "{{ {'b': 'ü🎉', 'a': [1, 2]}|tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}"
    "{% endif %}{{ i }}{% else %}none{% endfor %}",
    "{% for a, b in [(1, 2), (3, 4)] if a > 1 %}{{ loop.index }}{{ a }}{{ b }}{{ loop.length }}"
    "{% endfor %}",
    "{% for i in [[1, [2]], 3] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}",
    "{% set x = 1 %}{% generation %}said{% set x = 2 %}{% endgeneration %}{{ x }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ caller() if caller }}{% endmacro %}"
    "{{ m(1) }}{{ m(1, 3, 4) }}{% call m(5) %}inner{% endcall %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.next() }}",
    "{% set j = joiner(', ') %}{% for i in [1, 2] %}{{ j() }}{{ i }}{% endfor %}",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x | trim %} a {% endset %}{{ x }}|",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{% block x %}in{% endblock %}{{ self.x() }}",
    "{{ 'a' ~ 1 ~ none ~ nothing ~ [1, 'a'] }}{{ 'a' if false }}{{ nothing }}{{ 1.0 }}{{ true }}",
    "{{ 1 < 2 < 3 }}{{ 1 in [1] }}{{ 'a' not in {'a': 1} }}"
    "{{ 'b' in 'abc' }}{{ (1, 2) == (1, 2) }}",
    "{{ 7 // 2 }}{{ 7 / 2 }}{{ 2 ** 10 }}{{ -7 % 3 }}{{ 'ab' * 3 }}{{ [1] * 2 }}{{ 'a' + 'b' }}",
    "{{ '%s-%05.1f-%%' % ('a', 1.25) }}{{ '{}{x!r:>6}'.format(1, x='a') }}{{ '%s'|format('a') }}",
    "{{ messages|map(attribute='role')|join(', ') }}"
    "{{ [3, 1, 2]|sort|list }}{{ [1, 1]|unique|list }}",
    "{{ range(7)|batch(3, 0)|list }}{{ range(7)|slice(3)|map('list')|list }}{{ [1, 2]|sum }}",
    "{{ [{'a': 1}, {'a': 2}]|selectattr('a', 'gt', 1)|list }}{{ [1, none]|reject('none')|list }}",
    "{{ [{'a': 1}, {'a': 1}]|groupby('a')|list }}"
    "{{ {'b': 1, 'a': 2}|dictsort }}{{ {'a': 1}|items|list }}",
    "{{ ' a '|trim }}{{ 'ab'|first }}{{ 'ab'|last }}"
    "{{ 'ab'|list }}{{ 'ab'|reverse }}{{ 'a b'|title }}",
    "{{ 'a\\nb'|indent(2, first=true) }}{{ 'a'|center(5) }}|{{ 'aa'|replace('a', 'b', 1) }}",
    "{{ '12'|int + 1 }}{{ 'x'|int(7) }}{{ 'ff'|int(base=16) }}"
    "{{ '1.5'|float }}{{ 2.567|round(1) }}",
    "{{ '<a>'|e }}{{ '<a>'|safe }}{{ ('<'|safe) + '<' }}"
    "{{ 'abc'|length }}{{ 5|abs }}{{ [1, 2]|max }}",
    "{{ nothing|default('d') }}{{ ''|default('d', true) }}{{ 'Ab'|lower|upper|capitalize }}",
    "{{ 'a,b'.split(',') }}{{ 'a'.join(['1', '2']) }}{{ 'x'.ljust(3) }}|{{ 'ab'.startswith('a') }}",
    "{{ 'a b  c'.split() }}{{ 'a b c'.rsplit(' ', 1) }}"
    "{{ 'a\\nb'.splitlines() }}{{ 'a'.zfill(3) }}",
    "{{ {'a': 1}.items()|list }}{{ {'a': 1}.get('b', 2) }}"
    "{{ {'a': 1}.keys()|list }}{{ dict(a=1) }}",
    "{{ messages[0]['content'][1:3] }}{{ messages[-1:] }}{{ 'abc'[::-1] }}{{ [1, 2, 3][:2] }}",
    "{% set ns = namespace(a=1) %}{% for i in [1, 2] %}"
    "{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
    "{{ 1 is defined }}{{ nothing is undefined }}"
    "{{ 'a' is string }}{{ {} is mapping }}{{ 4 is even }}"
    "{{ none is none }}{{ 9 is divisibleby(3) }}"
    "{{ [] is sequence }}{{ 1 is eq(1) }}{{ 1 is sameas(1) }}",
    "    {% if true %}\nx\n    {% endif %}\n\n{#- a comment -#}   y\n",
    "{% raw %}{{ x }}{% endraw %}{{ '\\n' }}{{ \"it's\" }}",
    "{{ messages|tojson }}{{ messages }}{{ bos_token }}"
    "{{ add_generation_prompt }}{{ tools is none }}",
]

# Templates that raise an error, or are none.
REFUSED = {
    "macro calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "self include": "{% include 'self' %}",
    "include of itself": "{% include self %}",
    "import": "{% import 'os' as os %}{{ os.system('true') }}",
    "extends": "{% extends 'base' %}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "classes by attr": "{{ ''|attr('__class__')|attr('mro') }}",
    "classes by map": "{{ ['']|map(attribute='__class__')|map(attribute='mro')|list|first() }}",
    "classes by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "hidden filter": "{{ ['a']|map('@step', 0)|list }}",
    "globals of a function": "{{ raise_exception.__globals__.x }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m._environment }}{{ m._func.x }}",
    "changes messages": "{{ messages.append(1) }}",
    "changes a message": "{{ messages[0].update({'role': 'x'}) }}",
    "calls a number": "{{ 1() }}",
    "undefined deep": "{{ nothing.there.at.all }}",
    "divides by zero": "{{ 1 // 0 }}",
    "no filter": "{{ 1|nothing }}",
    "no test": "{{ 1 is nothing }}",
    "not closed": "{% if 1 %}",
    "not opened": "{% endif %}",
    "stray bytes": "{{ '\ud800' ",
}
