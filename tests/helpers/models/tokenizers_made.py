"""Small tokenizers of the two common kinds, trained here and saved as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "It is a truth universally acknowledged, that a single man in possession of a fortune, must be in want of a wife.",
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth",
    "  def f(x):\n    return x + 1\n\n\tif x == 10: print('ten', 1234567890)\n",
    "Größe, naïve, café, œuvre; «guillemets» … “quotes” — dashes",
    "她说你好世界。今日はいい天気ですね。안녕하세요 세계",
]

CHATML = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(directory: Path, *, chat_template: Any = None, **config: Any) -> Path:
    """Byte-level BPE as in Llama 3 and Qwen: <|begin|> before the text, chat markers, no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", **config}
    return save(directory, tokenizer, chat_template=chat_template, **config)


def metaspace(directory: Path, *, chat_template: Any = None, **config: Any) -> Path:
    """SentencePiece as in Llama 2 and Mistral: a space before the text, <0xE4> for a byte of a rare character."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*specials, *(f"<0x{b:02X}>" for b in range(256))], show_progress=False
    )
    # One word at a time, so that no merge spans a space. The rare letters of the last line have no tokens but their
    # bytes.
    tokenizer.train_from_iterator([word for line in CORPUS[:-1] for word in line.split()], trainer)
    content = json.loads(tokenizer.to_str())
    # Byte tokens are not special.
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    return save(directory, tokenizer, chat_template=chat_template, **config)


def save(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json. Config values of None are omitted."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | {k: v for k, v in config.items() if v is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
