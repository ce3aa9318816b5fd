"""/tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from fastdecode.api.endpoints import ServedModel, read_body
from fastdecode.api.errors import json_response
from fastdecode.api.fields import Fields, decode_json, invalid
from fastdecode.api.preparation import Preparation
from fastdecode.api.protocol import is_token_ids, parse_chat
from fastdecode.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The handlers."""

    tokenizer: Tokenizer
    model: ServedModel
    preparation: Preparation
    max_model_len: int

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: the tokens of a `prompt`, or of the prompt that a chat's `messages` become."""
        body = decode_json(await read_body(request))
        fields = Fields(body)
        self.model.name(fields.string("model"))
        with_texts = fields.boolean("return_token_strs")
        if isinstance(body, dict) and body.get("messages") is not None:
            rest = {name: value for name, value in body.items() if name != "return_token_strs"}
            chat = parse_chat(rest)
            text, special = await self.preparation.render(chat), chat.generation.add_special_tokens
            param = "messages"
        else:
            param, text = "prompt", fields.string("prompt") or ""
            special = fields.boolean("add_special_tokens", True)
            fields.refuse_others({})
        [tokens] = await self.preparation.encode([text], param, add_special_tokens=special)
        texts = [self.tokenizer.token_text(token) for token in tokens] if with_texts else None
        return json_response(
            {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens, "token_strs": texts}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize: the text of `tokens`, special ones included."""
        fields = Fields(decode_json(await read_body(request)))
        self.model.name(fields.string("model"))
        tokens = fields.required("tokens")
        if tokens != [] and not is_token_ids(tokens):
            raise invalid("tokens", "must be a list of token ids")
        fields.refuse_others({})
        return json_response({"prompt": self.tokenizer.decode(tokens, skip_special_tokens=False)})
