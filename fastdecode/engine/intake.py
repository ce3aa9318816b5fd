"""Intake: makes the sequences of requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from fastdecode.engine.checks import adapter_index, check_generated, check_prompt, check_tokens
from fastdecode.engine.state.constraints import constraints
from fastdecode.engine.state.prefixes import page_hashes
from fastdecode.engine.state.request import OutletChoice, Output, SamplingParams
from fastdecode.engine.state.sequence import KVSource, Sequence
from fastdecode.engine.step_batch import logit_rules

if TYPE_CHECKING:
    from fastdecode.engine.rnode_control import RNodeControl
    from fastdecode.engine.scheduling.cluster import Cluster
    from fastdecode.spart import SPart


class Intake:
    """Checks requests against the model and the R-nodes, and makes a sequence of each choice."""

    def __init__(
        self,
        spart: SPart,
        cluster: Cluster,
        r_nodes: RNodeControl,
        max_model_len: int,
        end_tokens: frozenset[int],
        clock: Callable[[], float],
    ):
        """`max_model_len` bounds the tokens of a sequence. `end_tokens`: the model's own. `clock` gives seconds."""
        self._spart, self._cluster, self._r_nodes = spart, cluster, r_nodes
        self._max_model_len, self._end_tokens, self._clock = max_model_len, end_tokens, clock
        self._arrivals = 0  # sequences made

    @property
    def longest_sequence(self) -> int:
        """Tokens, prompt and output together, of the longest sequence that the context and the R-nodes' pages hold."""
        return min(self._max_model_len, self._cluster.capacity + 1)

    def sequences(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        outputs: Mapping[str, Output],
        generated: Iterable[Iterable[int] | None],
        stream_key: str | None,
        sources: Iterable[KVSource | None],
    ) -> Iterator[Sequence]:
        """Make the sequences of a request's choices, each when it is asked for. Parameters and errors: see
        Engine.submit_choices."""
        past = [None if tokens is None else list(tokens) for tokens in generated] or [[] for _ in outputs]
        make = self._maker(prompt_ids, params, past)
        rules = logit_rules(params, prompt_ids)
        keys = self.keys(prompt_ids, params, stream_key, len(past))
        adopted = list(sources) or [None] * len(past)
        request = self._arrivals if len(outputs) > 1 else None
        for k, ((request_id, output), before) in enumerate(zip(outputs.items(), past, strict=True)):
            if before is None:
                continue
            seed = params.for_choice(k).seed
            seq = make(
                request_id=request_id,
                order=self._arrivals,
                tokens=[*prompt_ids, *before],
                seed=secrets.randbits(64) if seed is None else seed,
                request=request,
                rules=rules and rules.copy(),
                key=keys[k],
                adopts=adopted[k],
                output=output,
                choice=output if isinstance(output, OutletChoice) else None,
                arrived=self._clock(),
            )
            seq.constraints = constraints(params, seq.end_tokens, self._spart.config.vocab_size, before)
            if seq.rules is not None:
                for token in before:
                    seq.rules.generated(token)
            self._arrivals += 1
            yield seq

    def _maker(
        self, prompt_ids: list[int], params: SamplingParams, past: list[list[int] | None]
    ) -> Callable[..., Sequence]:
        """Sequence with the arguments that all choices of a request have in common. Raises as
        Engine.submit_choices does for a request that does not fit."""
        vocabulary = self._spart.config.vocab_size
        check_prompt(prompt_ids, vocabulary, self._max_model_len, self._cluster.capacity)
        check_tokens(params, vocabulary)
        max_new = self._max_new(prompt_ids, params)
        check_generated(past, vocabulary, max_new)
        end_tokens = params.stop_token_ids
        if params.grammar is not None or not params.ignore_eos:
            end_tokens |= self._end_tokens
        long, salt = self._salt(prompt_ids, params)
        # A token whose row is not computed has no log-probability, so a scored prompt shares no prefix.
        shares = self._cluster.prefix_cache and params.prompt_logprobs is None
        return partial(
            Sequence,
            n_prompt=len(prompt_ids),
            max_new=max_new,
            params=params,
            end_tokens=end_tokens,
            hashes=page_hashes(prompt_ids, salt) if shares else [],
            long=long,
            salt=salt,
            adapter=adapter_index(params.adapter, self._spart.adapters),
        )

    def keys(self, prompt_ids: list[int], params: SamplingParams, stream_key: str | None, n: int) -> list[str | None]:
        """The keys of a stream's `n` choices (Adopter.key); None if no S-node may adopt them."""
        return self._r_nodes.keys(stream_key, self._salt(prompt_ids, params)[1], n)

    def _max_new(self, prompt_ids: list[int], params: SamplingParams) -> int:
        """The most tokens that a choice of a prompt may generate."""
        room = self.longest_sequence - len(prompt_ids)
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _salt(self, prompt_ids: list[int], params: SamplingParams) -> tuple[bool, str]:
        """Whether a choice of a prompt is long (SPart.is_long), and its salt (Sequence.salt)."""
        long = self._spart.is_long(len(prompt_ids) + self._max_new(prompt_ids, params))
        return long, f"{long} {params.prefix_salt}"
