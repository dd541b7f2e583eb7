"""The race's language model: a decoder of a current kind, on source code cut into pieces.

The text is Python's standard library, which every machine has; a byte-pair vocabulary is made from
it once.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # scripts to copy

from train_char_lm import HELD_OUT, standard_library

CONTEXT = 128
# Windows of held-out text that an evaluation reads.
EVALUATED = 32


@dataclass(frozen=True)
class Size:
    """The size of the model and of its text.

    Attributes:
        vocabulary: how many pieces. Each is a row of the embedding, which is the output layer too.
        megabytes: of text.
        batch: how many windows a worker has in a microbatch.
        lr: dense training's learning rate, found by trying.
        bucket_mb: how many megabytes DDP puts into a bucket; None: as it likes.
    """

    vocabulary: int = 4096
    width: int = 256
    heads: int = 4
    layers: int = 5
    megabytes: float = 8.0
    batch: int = 4
    lr: float = 1e-3
    bucket_mb: float | None = None


SIZES = {
    "full": Size(),
    "tiny": Size(vocabulary=512, width=32, heads=2, layers=2, megabytes=2.0),
    # For trials: 0.9 million parameters. A run of 400 steps takes 35 seconds on 2 cores, and there
    # dense training is best with 4e-3, of 1e-3, 2e-3 and 4e-3.
    "small": Size(vocabulary=1024, width=128, layers=4, megabytes=4.0, lr=4e-3),
    # For GPUs: 98 million parameters. The learning rate was not tried.
    "large": Size(
        vocabulary=16384,
        width=768,
        heads=12,
        layers=12,
        megabytes=100.0,
        batch=32,
        lr=6e-4,
        bucket_mb=100.0,
    ),
}


def load_pieces(size: Size, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The text to train on and the held-out text, as numbers of pieces, (N,) int64 each.

    folder: where they are kept.
    """
    file = folder / f"pieces-{size.vocabulary}-{size.megabytes:g}.pt"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        torch.save(_cut(size), partial)
        partial.rename(file)
    train, held_out = torch.load(file)
    return train, held_out


def vocabulary(texts: Sequence[str], size: int) -> Any:
    """A SentencePieceProcessor of byte-pair encoding, made from these texts."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n", "\t"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _cut(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    texts, total = [], 0.0
    for path in standard_library():
        texts.append(path.read_text(encoding="ascii", errors="ignore"))
        total += len(texts[-1]) / 1e6
        if total > size.megabytes:
            break
    pieces = vocabulary(texts, size.vocabulary)
    # One file in HELD_OUT is held out, as in the example.
    parts: list[list[int]] = [[], []]
    for i, text in enumerate(texts):
        parts[i % HELD_OUT == HELD_OUT - 1] += pieces.encode(text)
    train, held_out = (torch.tensor(part) for part in parts)
    return train, held_out


class LanguageModel:
    """A task: a model, its data and its optimizers. race_images.Images is the other one.

    Attributes:
        case: bench_cases.py's name of its step.
        size: what tells two sizes of the task apart.
        lr: dense training's learning rate, found by trying.
        clip_norm: the norm to which gradients are clipped; None: they are not.
        bucket_mb: how many megabytes DDP puts into a bucket; None: as it likes.
    """

    _pieces: torch.Tensor
    _held_out: torch.Tensor

    case = "language-model"
    clip_norm = 1.0

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.lr, self.bucket_mb = size, size.lr, size.bucket_mb
        self._folder = folder

    def load(self) -> None:
        """Read the data. Call this before `loss` and `evaluate`."""
        self._pieces, self._held_out = load_pieces(self.size, self._folder)

    def model(self) -> nn.Module:
        return Decoder(self.size)

    def optimizers(self, model: nn.Module, lr: float, muon: bool) -> list[torch.optim.Optimizer]:
        """The optimizers of all parameters. muon: whether Muon trains the matrices inside."""
        of_muon, matrices, others = [], [], []
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                others.append(parameter)
            elif muon and name.startswith("blocks."):
                of_muon.append(parameter)
            else:
                matrices.append(parameter)
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizers = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))]
        if of_muon:
            muons = torch.optim.Muon(of_muon, lr, 0.1, adjust_lr_fn="match_rms_adamw")
            optimizers.append(muons)
        return optimizers

    def loss(
        self, called: nn.Module, random: torch.Generator, device: torch.device
    ) -> torch.Tensor:
        """The mean loss of a microbatch. called: the model, or its wrapper. random: on the CPU."""
        return called(batch_of(self._pieces, self.size.batch, random).to(device))

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        """The mean loss on held-out data, always the same. The model is in eval mode."""
        windows = batch_of(self._held_out, EVALUATED, torch.Generator().manual_seed(0))
        return float(model(windows.to(device)))


class Decoder(nn.Module):
    """RMSNorm before each part, rotary positions, gated layers, a tied embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)

    def forward(self, pieces: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats a piece, of windows (batch, CONTEXT + 1)."""
        x = self.embedding(pieces[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width, inner = size.width, 8 * size.width // 3
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=0.02)
        for layer in (self.out, self.down):  # so that their sum does not grow with depth
            nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., 2021, arXiv 2104.09864), by halves."""
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * rates
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def batch_of(pieces: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
    """(count, CONTEXT + 1): windows at random places."""
    starts = torch.randint(len(pieces) - CONTEXT - 1, (count,), generator=random)
    return pieces[starts[:, None] + torch.arange(CONTEXT + 1)]
