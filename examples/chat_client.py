"""Chat with a served model in the terminal; answers are streamed as they are generated.

    python examples/chat_client.py                          # a conversation; an empty line ends it
    python examples/chat_client.py "One message, one answer"

Needs the openai client and a running S-node (`fastdecode-node --role s --model chat`).
"""

from __future__ import annotations

import argparse
import sys

from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam


def answer(client: OpenAI, model: str, messages: list[ChatCompletionMessageParam], max_tokens: int) -> str:
    """Print the answer to `messages` as it comes, and return it."""
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=max_tokens, temperature=0, stream=True
    )
    text = ""
    for chunk in stream:
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a model that fastdecode serves.")
    parser.add_argument("message", nargs="?", help="one message; default: a conversation")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    parser.add_argument("--api-key", default="none", help="the key in the server's --api-key-file, if it has one")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer; default: %(default)s")
    args = parser.parse_args()

    client = OpenAI(base_url=args.url, api_key=args.api_key)
    model = client.models.list().data[0].id  # an S-node serves one model
    messages: list[ChatCompletionMessageParam] = []
    while message := args.message or input("> "):
        messages.append({"role": "user", "content": message})
        text = answer(client, model, messages, args.max_tokens)
        messages.append({"role": "assistant", "content": text})
        if args.message:
            break


if __name__ == "__main__":
    try:
        main()
    except (EOFError, KeyboardInterrupt):
        print()
    except OpenAIError as error:
        sys.exit(f"chat_client: the server at --url cannot be asked: {error}")
