"""The options of the API, and the files that they name: keys, TLS, the chat template, the defaults of sampling."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from fastdecode.api.app import ApiOptions, make_app
from fastdecode.api.defaults import NO_DEFAULTS, SamplingDefaults
from fastdecode.api.stored import STORED_BYTES
from fastdecode.api.tracing import Tracing, check_available
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_files import CHAT_MODEL, is_chat_model
from fastdecode.daemon.option_values import ConfigError
from fastdecode.daemon.tls import server_tls
from fastdecode.gguf.file import ModelSource, model_name
from fastdecode.service.client import EngineClient
from fastdecode.text.tokenizer import Tokenizer

#: Of SmolLM2-135M-Instruct's model card. The model often does not end by itself, so its answers have a bound, too.
_CHAT_DEFAULTS = SamplingDefaults(temperature=0.2, top_p=0.9, max_tokens=1024)


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """All that the API needs besides the engine. It is made before the weights are loaded, so mistakes show at once."""

    config: NodeConfig
    names: tuple[str, ...]
    tokenizer: Tokenizer
    keys: tuple[str, ...]
    tls: ssl.SSLContext | None
    defaults: SamplingDefaults

    @classmethod
    def make(cls, config: NodeConfig, source: ModelSource) -> ApiSettings:
        """Read the files that the options name, and those of the model's tokenizer and defaults.

        Raises ConfigError, TokenizerError, ChatTemplateError, ValueError.
        """
        if config.otlp_traces_endpoint and (missing := check_available()):
            raise ConfigError(f"--otlp-traces-endpoint {missing}")
        names = config.served_model_name or _default_names(config, source.path)
        known = [*names, *(name for name, _ in config.lora)]
        if twice := next((name for name, _ in config.lora if known.count(name) > 1), None):
            raise ConfigError(f"--lora: {twice!r} is the name of another model here")
        for name, directory in config.lora:
            if not directory.is_dir():
                raise ConfigError(f"--lora {name}={directory}: there is no such directory")
        return cls(
            config,
            names,
            Tokenizer.from_dir(source, chat_template=_chat_template(config.chat_template)),
            config.read_api_keys(),
            server_tls(config.ssl_certfile, config.ssl_keyfile),
            _sampling_defaults(config, source.path),
        )

    def app(self, engine: EngineClient) -> web.Application:
        """The application over `engine`."""
        config, endpoint = self.config, self.config.otlp_traces_endpoint
        options = ApiOptions(
            self.names,
            adapters=tuple(name for name, _ in config.lora),
            api_keys=self.keys,
            cors_origins=config.cors_origin,
            access_log=not config.no_access_log,
            tracing=Tracing(endpoint, self.names[0]) if endpoint else None,
            tool_parser=config.tool_parser,
            reasoning_parser=config.reasoning_parser,
            defaults=self.defaults,
            router_secret=config.read_secret(),
            router_only=config.router_only,
            drop_hosted_tools=config.drop_hosted_tools,
            one_of=config.api_processes,
            resume_seconds=config.resume_seconds,
            stored_bytes=config.stored_memory or STORED_BYTES,
        )
        return make_app(engine, self.tokenizer, options)


def _sampling_defaults(config: NodeConfig, path: Path) -> SamplingDefaults:
    own = SamplingDefaults.from_dir(path)  # in any case: the file names the model's end tokens, too
    if config.generation_config == "none":
        return NO_DEFAULTS
    return _CHAT_DEFAULTS if is_chat_model(config.model) else own


def _default_names(config: NodeConfig, path: Path) -> tuple[str, ...]:
    """The model's names in the API: that of its directory or file, and `chat` besides for that model. A model of the
    hub has its name there."""
    if config.model is None:
        return ("fastdecode-demo",)
    name = model_name(path.resolve())
    if is_chat_model(config.model):
        return (name, CHAT_MODEL)
    return (name if path == config.model else str(config.model),)


def _chat_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: {getattr(error, 'strerror', None) or error}") from None
