"""Cuts the text of a chat model into content, reasoning and tool calls while the model writes it.

deltas     MessageDelta, and the interface and helpers of all parsers
calls      a tool call written as JSON, and the parser of text with marked calls
reasoning  text between <think> and </think>
hermes     tool calls of Hermes and Qwen, <tool_call>{...}</tool_call>, also for chat templates without tools
llama3     tool calls of Llama 3: a bare JSON object
mistral    tool calls of Mistral: [TOOL_CALLS]
harmony    the channels of gpt-oss
lark       pieces of grammars of tool calls
forms      chooses the forms of a model by its chat template
dialogue   Dialogue: parser, grammar and special tokens for one request
"""
