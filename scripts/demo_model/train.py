"""Train the demo model.

`corpus.py` prepares the text; this script trains the tokenizer and a small
Llama on it and writes a checkpoint directory that `transformers` (and this
server) load unchanged::

    python scripts/demo_model/train.py --corpus austen --out model --steps 4000

The network computes in bfloat16, as the server does, from fp32 master weights.
Muon trains the layers' matrices - on this little text it needs far fewer steps
than AdamW - and AdamW the embedding and the norms.  The checkpoint with the
lowest loss on `dev.txt` is kept; `heldout.txt` is only measured at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import corpus
import torch
from network import Llama
from torch import Tensor, nn
from torch.nn.functional import pad
from tqdm import tqdm

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS, EOS = "<s>", "</s>"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
#: Every message becomes a paragraph.  The model continues the last paragraph if
#: it does not end a sentence, else it starts a new one.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set text = message['content'] | trim %}{{ text }}"
    "{% if not loop.last or (add_generation_prompt and text and text[-1] in '.!?\"') %}{{ '\\n\\n' }}{% endif %}"
    "{% endfor %}"
)


def train_tokenizer(text: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer that puts the begin token before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, CONFIG["bos_token_id"])]
    )
    return tokenizer


def batches(chapters: list[list[int]], seed: int) -> Generator[Tensor, tuple[int, int], None]:
    """Endless batches [rows, 1 + length], each row a begin token and `length` tokens.

    Send (rows, length) to get a batch.  Every epoch shuffles the chapters, joins
    them and cuts them at a new offset, so that no two epochs have equal rows.
    """
    rng = random.Random(seed)
    stream: list[int] = []
    rows, length = yield torch.empty(0)
    while True:
        while len(stream) < rows * length:
            order = rng.sample(chapters, len(chapters))
            epoch = [token for chapter in order for token in chapter]
            stream = epoch[rng.randrange(length) :]
        batch, stream = stream[: rows * length], stream[rows * length :]
        tokens = torch.tensor(batch).view(rows, length)
        rows, length = yield pad(tokens, (1, 0), value=CONFIG["bos_token_id"])


@torch.no_grad()
def evaluate(model: Llama, chapters: list[list[int]], length: int) -> tuple[float, int]:
    """The summed loss in nats and the number of tokens, over whole chapters cut into rows of `length`."""
    model.eval()
    total, count = 0.0, 0
    for chapter in chapters:
        for start in range(0, len(chapter), length):
            tokens = torch.tensor([[CONFIG["bos_token_id"], *chapter[start : start + length]]])
            total += model.loss(tokens, "sum").item()
            count += tokens.shape[1] - 1
    model.train()
    return total, count


def save(model: Llama, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint directory."""
    from safetensors.torch import save_file

    def dump(name: str, value: dict[str, Any]) -> None:
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    out.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    dump("config.json", CONFIG)
    dump(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    ids = {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id")}
    dump("generation_config.json", {**ids, "do_sample": True, "temperature": 0.8, "top_p": 0.95})


def restore(model: Llama, checkpoint: Path) -> None:
    """Load the weights of a checkpoint directory."""
    from safetensors.torch import load_file

    saved = load_file(checkpoint / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value for name, value in saved.items()})


def train(args: argparse.Namespace) -> None:
    """Train the tokenizer and the model, then measure the held-out text."""
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(args.seed)
    text = {part: corpus.load(args.corpus / f"{part}.txt") for part in ("train", "dev", "heldout")}
    tokenizer = train_tokenizer(text["train"])
    ids = {
        part: [[*e.ids, CONFIG["eos_token_id"]] for e in tokenizer.encode_batch(chapters)]
        for part, chapters in text.items()
    }
    # Chapters have no begin token, because every row gets one.
    ids = {part: [chapter[1:] for chapter in chapters] for part, chapters in ids.items()}
    size = sum(map(len, ids["train"]))

    model = Llama(CONFIG, args.dropout).bfloat16()
    if args.init:
        restore(model, args.init)
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in params]
    embedding, *rest = masters
    matrices = [p for p in rest if p.dim() == 2]
    scales = [p for p in rest if p.dim() == 1]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([embedding], lr=args.lr, betas=(0.9, 0.98), weight_decay=args.weight_decay, fused=True),
        torch.optim.AdamW(scales, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    print(f"{sum(p.numel() for p in params):,} parameters, {size:,} training tokens", flush=True)

    feed = batches(ids["train"], args.seed)
    next(feed)
    began, best, seen = time.monotonic(), math.inf, 0
    bar = tqdm(range(args.steps), mininterval=10)
    for step in bar:
        minutes = (time.monotonic() - began) / 60
        progress = max(step / args.steps, minutes / args.minutes)
        long = progress >= 1 - args.long_fraction
        length = CONFIG["max_position_embeddings"] if long else args.length
        loss = model.loss(feed.send((args.batch_tokens // length, length)))
        loss.backward()
        for p, master in zip(params, masters, strict=True):
            assert p.grad is not None, "the loss depends on every parameter"
            master.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        rate = min((step + 1) / args.warmup, 0.02 + 0.98 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * rate
            optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)
        seen += args.batch_tokens
        done = step + 1 == args.steps or progress >= 1
        if (step + 1) % args.eval_every == 0 or done:
            total, count = evaluate(model, ids["dev"], CONFIG["max_position_embeddings"])
            line = f"step {step + 1} epoch {seen / size:.1f} {minutes:.1f} min: "
            bar.write(line + f"train {loss.item():.3f} dev {total / count:.4f}")
            if total / count < best:
                best = total / count
                save(model, tokenizer, args.out)
        bar.set_postfix(loss=f"{loss.item():.3f}", dev=f"{best:.3f}", refresh=False)
        if done:
            break

    restore(model, args.out)
    total, count = evaluate(model, ids["heldout"], CONFIG["max_position_embeddings"])
    size = sum(len(chapter.encode()) for chapter in text["heldout"])
    print(f"held-out: {total / count:.4f} nats per token (perplexity {math.exp(total / count):.2f}), ", end="")
    print(f"{total / math.log(2) / size:.4f} bits per byte; {count:,} tokens, {size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="directory written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--init", type=Path, help="checkpoint directory to go on from (same corpus)")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the schedule by this time, if earlier")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument(
        "--long-fraction", type=float, default=0.15, help="share of the steps, at the end, on full rows"
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=150, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
