"""Train an LSTM or Transformer to predict characters with Horovod, dense or with ScaleCom.

    horovodrun -np 2 python scripts/examples/train_char_lm.py --compression scalecom
    mpirun -np 4 python scripts/examples/train_char_lm.py --model transformer --text-dir ~/books
    torchrun --nproc-per-node 2 scripts/examples/train_char_lm.py             (without Horovod)
    python scripts/examples/train_char_lm.py --steps 200      (one process, to try things out)

Without --text-dir the text is the source of Python's own standard library, which is on every
machine. The metric is bits per character on files that were held out. training_torch.py has the
loop.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch
import training
import training_torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (everyone's name for it)
from training_torch import hvd, start

WINDOW = 64
TEST_WINDOWS = 1000
# One file in this many is held out.
HELD_OUT = 20
# Printable ASCII, tab and newline; every other byte is the one symbol 0.
ALPHABET = bytes([9, 10, *range(32, 127)])
SYMBOLS = len(ALPHABET) + 1


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train as the options say; returns the run's summary."""
    text = load_text(args.text_dir)
    torch.manual_seed(args.seed)
    device = training_torch.device()
    model = MODELS[args.model]().to(device)

    def loss_of(step: int) -> torch.Tensor:
        # Windows start anywhere in the text, so the random choice already deals different windows
        # to the ranks.
        random = training_torch.generator(args.seed, step, hvd.rank())
        starts = torch.randint(len(text.train) - WINDOW, (args.batch_size,), generator=random)
        return cross_entropy(model, windows_at(text.train, starts).to(device))

    def evaluate() -> dict[str, float]:
        """Over windows spread evenly over the held-out text."""
        starts = torch.linspace(0, len(text.held_out) - WINDOW - 1, TEST_WINDOWS).long()
        mine = starts[hvd.rank() :: hvd.size()]
        total = sum(
            float(cross_entropy(model, windows_at(text.held_out, part).to(device))) * len(part)
            for part in mine.split(100)
        )
        name = "bits_per_character"
        return {name: training_torch.ratio_over_ranks(total / math.log(2), len(mine), name)}

    title = f"text {args.model} {args.compression}"
    return training_torch.train(args, title, model, loss_of, evaluate)


def cross_entropy(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean over all characters but each window's first, in nats. windows: (batch, WINDOW + 1)."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


# text


class Text(NamedTuple):
    """Symbols, one byte each."""

    train: torch.Tensor
    held_out: torch.Tensor


def load_text(folder: Path | None) -> Text:
    """All files of a folder, or the standard library's modules.

    One file in twenty, in the order of names, is held out.
    """
    files = standard_library()
    if folder is not None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = [symbols for path in files if len(symbols := _symbols(path.read_bytes())) > WINDOW]
    if len(contents) < 2:
        raise training.WrongInput(
            f"{folder} holds fewer than two files of more than {WINDOW} characters: one to train "
            "on, one held out"
        )
    # The last file of each twenty; of a small folder, its last file.
    last = min(HELD_OUT, len(contents)) - 1
    held_out = [symbols for i, symbols in enumerate(contents) if i % HELD_OUT == last]
    learned = [symbols for i, symbols in enumerate(contents) if i % HELD_OUT != last]
    return Text(_tensor(learned), _tensor(held_out))


def standard_library() -> list[Path]:
    """Python's own modules, in the same order on every machine.

    Tests and installed packages are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    modules = root.rglob("*.py")
    return sorted(path for path in modules if skipped.isdisjoint(path.relative_to(root).parts))


_SYMBOL_OF_BYTE = bytes(ALPHABET.find(byte) + 1 for byte in range(256))


def _symbols(text: bytes) -> bytes:
    return text.translate(_SYMBOL_OF_BYTE)


def _tensor(contents: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)


def windows_at(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """(batch, WINDOW + 1) symbols as int64.

    That is one character more than the model reads: the last one is only predicted.
    """
    return text[starts[:, None] + torch.arange(WINDOW + 1)].long()


# models


class LSTM(nn.Module):
    """Embedding, one LSTM layer, output layer: 209 000 parameters."""

    def __init__(self, embedding: int = 48, hidden: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(symbols))[0])


class Transformer(nn.Module):
    """Two pre-norm layers that see only what came before: 196 000 parameters."""

    def __init__(self, width: int = 96, heads: int = 4, inner: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, width)
        self.position = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, inner, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        length = symbols.shape[1]
        future = nn.Transformer.generate_square_subsequent_mask(length, device=symbols.device)
        x = self.embedding(symbols) + self.position[:length]
        return self.head(self.layers(x, mask=future, is_causal=True))


MODELS = {"lstm": LSTM, "transformer": Transformer}


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        parents=[training_torch.backend_option],
        description="Train a character language model with Horovod, dense or with ScaleCom.",
    )
    parser.add_argument("--text-dir", type=Path, help="text files; or else the standard library's")
    parser.add_argument("--model", choices=tuple(MODELS), default="lstm", help="the network")
    training.add_training_options(parser, lr=0.25, steps=500, batch_size=16, clip_norm=1.0)
    return parser


if __name__ == "__main__":
    training.main(argument_parser(), train, start, hvd)
