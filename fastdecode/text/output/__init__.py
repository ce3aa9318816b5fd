"""What a chat model writes, cut into content, reasoning and tool calls while it is being written.

deltas     MessageDelta, and what all parsers have in common
calls      a tool call written as JSON
prose      text between tool calls
reasoning  text between <think> and </think>
hermes     tool calls of Hermes and Qwen: <tool_call>{...}</tool_call>
llama3     tool calls of Llama 3: a bare JSON object
mistral    tool calls of Mistral: [TOOL_CALLS]
harmony    the channels of gpt-oss
lark       pieces of grammars of tool calls
forms      which of these a model uses
dialogue   Dialogue: parser, grammar and special tokens for one request
"""
