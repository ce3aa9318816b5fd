"""/tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from fastdecode.api.endpoints import ApiModel, read_body
from fastdecode.api.errors import json_response
from fastdecode.api.fields import Fields, invalid
from fastdecode.api.preparation import Preparation
from fastdecode.api.protocol import ChatRequest, is_token_ids, parse_chat
from fastdecode.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The handlers."""

    tokenizer: Tokenizer
    model: ApiModel
    preparation: Preparation
    max_model_len: int

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: the tokens of a `prompt`, or of the prompt that a chat's `messages` become."""
        asked, special, with_texts = await self.preparation.parse(await read_body(request), self._read)
        if isinstance(asked, ChatRequest):
            param, text = "messages", await self.preparation.render(asked)
        else:
            param, text = "prompt", asked
        [tokens] = await self.preparation.encode([text], param, add_special_tokens=special)
        texts = [self.tokenizer.token_text(token) for token in tokens] if with_texts else None
        return json_response(
            {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens, "token_strs": texts}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize: the text of `tokens`, special ones included."""
        return json_response({"prompt": await self.preparation.parse(await read_body(request), self._decode)})

    def _read(self, body: Any) -> tuple[ChatRequest | str, bool, bool]:
        """The chat or the prompt of a /tokenize, whether special tokens are added, and whether the answer has the
        tokens' texts."""
        fields = Fields(body)
        self.model.name(fields.string("model"))
        with_texts = fields.boolean("return_token_strs")
        if isinstance(body, dict) and body.get("messages") is not None:
            chat = parse_chat({name: value for name, value in body.items() if name != "return_token_strs"})
            return chat, chat.generation.add_special_tokens, with_texts
        prompt = fields.string("prompt") or ""
        special = fields.boolean("add_special_tokens", True)
        fields.refuse_others()
        return prompt, special, with_texts

    def _decode(self, body: Any) -> str:
        """The text of a /detokenize."""
        fields = Fields(body)
        self.model.name(fields.string("model"))
        tokens = fields.required("tokens")
        if tokens != [] and not is_token_ids(tokens):
            raise invalid("tokens", "must be a list of token ids")
        fields.refuse_others()
        return self.tokenizer.decode(tokens, skip_special_tokens=False)
