"""Chat templates written after those of six families of models: what they read, what they reject and what they drop."""

from __future__ import annotations

LLAMA_3 = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set system = "" %}
{%- if messages[0]['role'] == 'system' %}
  {%- set system = messages[0]['content'] | trim %}
  {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
  {%- if messages | length == 0 or messages[0]['role'] != 'user' %}
    {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
  {%- endif %}
  {{- "<|start_header_id|>user<|end_header_id|>\\n\\nRespond in the format " }}
  {{- '{"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
  {%- for tool in tools %}{{- tool | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
  {{- messages[0]['content'] | trim + "<|eot_id|>" }}
  {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
  {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
  {%- elif 'tool_calls' in message %}
    {%- if message.tool_calls | length != 1 %}
      {{- raise_exception("This model only supports single tool-calls at once!") }}
    {%- endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
    {{- call.arguments | tojson + '}<|eot_id|>' }}
  {%- else %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

QWEN_3 = """{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
  {{- "# Tools\\n\\n<tools>" }}
  {%- for tool in tools %}{{- "\\n" + tool | tojson }}{%- endfor %}
  {{- '\\n</tools>\\n\\n<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set content = message.content if message.content is string else '' %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
  {%- elif message.role == 'assistant' %}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
    {%- if not reasoning and '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
      {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}
    {%- for tool_call in message.tool_calls or [] %}
      {%- if loop.first and content or not loop.first %}{{- '\\n' }}{%- endif %}
      {%- set call = tool_call.function %}
      {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
      {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
  {%- set system_message = messages[0]["content"] %}
  {%- set loop_messages = messages[1:] %}
{%- else %}
  {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
  {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
      {{- raise_exception("After the optional system message, conversation roles must alternate!") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
  {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
  {%- if message["role"] == "user" %}
    {%- if tools is not none and message == user_messages[-1] %}
      {{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}
    {%- endif %}
    {%- if loop.last and system_message is defined %}{{- "[INST]" + system_message + "\\n\\n" }}
    {%- else %}{{- "[INST]" }}{%- endif %}
    {{- message["content"] + "[/INST]" }}
  {%- elif message.tool_calls is defined and message.tool_calls is not none %}
    {{- "[TOOL_CALLS][" }}
    {%- for tool_call in message.tool_calls %}
      {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
        {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
      {%- endif %}
      {{- (tool_call.function | tojson)[:-1] + ', "id": "' + tool_call.id + '"}' }}
      {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
    {%- endfor %}
  {%- elif message["role"] == "assistant" %}
    {{- message["content"] + eos_token }}
  {%- elif message["role"] == "tool" %}
    {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
      {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
    {%- endif %}
    {{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
    {{- '"}[/TOOL_RESULTS]' }}
  {%- else %}
    {{- raise_exception("Only user and assistant roles are supported!") }}
  {%- endif %}
{%- endfor %}"""

GEMMA_3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
  {%- if messages[0]['content'] is string -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
  {%- else -%}
    {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
  {%- endif -%}
  {%- set loop_messages = messages[1:] -%}
{%- else -%}
  {%- set first_user_prefix = "" -%}
  {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
  {%- endif -%}
  {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
  {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
  {%- if message['content'] is string -%}
    {{ message['content'] | trim }}
  {%- elif message['content'] is iterable -%}
    {%- for item in message['content'] -%}
      {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
      {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
    {%- endfor -%}
  {%- else -%}
    {{ raise_exception("Invalid content type") }}
  {%- endif -%}
  {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"""

DEEPSEEK = """{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system='') %}
{%- for message in messages %}
  {%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}
    {%- set ns.is_tool = false %}{{- '<｜User｜>' + message['content'] }}
  {%- endif %}
  {%- if message['role'] == 'assistant' and message['content'] is none %}
    {%- set ns.is_tool = false %}
    {%- for tool in message['tool_calls'] %}
      {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
      {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
      {{- tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
    {%- endfor %}
    {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- endif %}
  {%- if message['role'] == 'assistant' and message['content'] is not none %}
    {%- if ns.is_tool %}
      {{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
      {%- set ns.is_tool = false %}
    {%- else %}
      {{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
  {%- endif %}
  {%- if message['role'] == 'tool' %}
    {{- '\\n' if ns.is_tool else '<｜tool▁outputs▁begin｜>' }}
    {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- set ns.is_tool = true %}
  {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

DEEPSEEK_3_1 = """{%- set ns = namespace(is_tool=false, is_first=true) %}
{{- bos_token }}
{%- for message in messages %}
  {%- if message['role'] == 'system' %}{{- message['content'] }}{%- endif %}
  {%- if message['role'] == 'user' %}
    {%- set ns.is_tool = false %}{{- '<｜User｜>' + message['content'] }}
  {%- endif %}
  {%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
    {{- '<｜Assistant｜></think>' if not ns.is_tool else '' }}
    {{- message['content'] + '<｜tool▁calls▁begin｜>' }}
    {%- set ns.is_tool = false %}
    {%- for tool in message['tool_calls'] %}
      {{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] }}
      {{- '<｜tool▁call▁end｜>' }}
    {%- endfor %}
    {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- elif message['role'] == 'assistant' %}
    {{- '<｜Assistant｜></think>' if not ns.is_tool else '' }}
    {%- set ns.is_tool = false %}
    {{- message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
  {%- endif %}
  {%- if message['role'] == 'tool' %}
    {%- set ns.is_tool = true %}
    {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}
  {{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}
{%- endif %}"""

PHI = """{%- for message in messages %}
  {%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
    {{- '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}
  {%- else %}
    {{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}"""

NAMED = """{%- for message in messages %}
  {{- '<' + message.role + (' ' + message.name if message.name is defined else '') + '>' + message.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"""

TEMPLATES = {
    "Llama 3": LLAMA_3,
    "Qwen 3": QWEN_3,
    "Mistral": MISTRAL,
    "Gemma 3": GEMMA_3,
    "DeepSeek R1": DEEPSEEK,
    "DeepSeek V3.1": DEEPSEEK_3_1,
    "Phi": PHI,
    "names": NAMED,
}
"""By family. The last one writes the names of participants, as some templates do."""
