"""A stream that goes on at another engine."""

from __future__ import annotations

import secrets

from engines.toy import until
from fastdecode.engine.state.request import TokenEvent


class ContinuedStream:
    """The choices of a prompt at one engine, as a router sees them."""

    def __init__(self, engine, ids, params, past=((),), sources=()):
        self.engine, self.ids, self.params = engine, ids, params
        self.key = secrets.token_hex(32)
        self.tokens = [None if tokens is None else list(tokens) for tokens in past]
        self.ended = [tokens is None for tokens in past]
        outputs = {f"{self.key} {k}": self._output(k) for k in range(len(past))}
        self.sequences = engine.submit_choices(ids, params, outputs, self.tokens, self.key, sources)

    def _output(self, k):
        def output(event):
            if isinstance(event, TokenEvent):  # else its engine is stopped
                self.tokens[k].append(event.token)
                self.ended[k] = event.finish_reason is not None

        return output

    async def has(self, n):
        await until(lambda: all(ended or len(t) >= n for t, ended in zip(self.tokens, self.ended, strict=True)))

    async def end(self):
        await until(lambda: all(self.ended))
        return self.tokens

    async def goes_on(self, engine, n, params=None):
        """The stream at another engine, from its first `n` tokens on."""
        past = [tokens[:n] for tokens in self.tokens]
        params = params or self.params
        sources = await engine.find_kv(self.ids, params, past, self.key)
        return ContinuedStream(engine, self.ids, params, past, sources)


def adopted(engine):
    """How many sequences an engine has adopted, and how many it could not adopt."""
    totals = engine.stats.totals
    return totals.adopted, totals.not_adopted
