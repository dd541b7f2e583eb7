"""Train a small language model with Hugging Face's Trainer and ScaleCom.

    torchrun --nproc-per-node 2 scripts/examples/train_trainer.py --output /tmp/trained
    torchrun --nproc-per-node 2 scripts/examples/train_trainer.py --output /tmp/trained --resume

The part to copy is `ScaleComCallback`. Trainer wraps the model when training begins, and offers no
hook of its own. Needs torch, transformers and accelerate; the text is the standard library's
source.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
from typing import Any

import torch
import torch.distributed as dist
import transformers

from scalecom_hvd.ddp import ScaleComState, scalecom_hook

LENGTH = 64  # characters of an example


class ScaleComCallback(transformers.TrainerCallback):
    """Registers the hook when training begins; every rank's residues are part of a checkpoint.

    Set its `trainer` once the Trainer is made.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings, self.resume = settings, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.world_size == 1:
            return
        model = self.trainer.model_wrapped
        self.state = ScaleComState(model, **self.settings)
        model.register_comm_hook(self.state, scalecom_hook)
        if state.global_step:  # resumed
            saved = torch.load(self.file(args, state), map_location="cpu", weights_only=True)
            self.state.load_state_dict(saved)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.world_size > 1:
            torch.save(self.state.state_dict(), self.file(args, state))

    @staticmethod
    def file(args: transformers.TrainingArguments, state: transformers.TrainerState) -> str:
        folder = f"{args.output_dir}/checkpoint-{state.global_step}"
        return f"{folder}/residues.{args.process_index}.pt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stop-at", type=int, default=0, help="stop after so many, as if killed")
    parser.add_argument("--output", default="trained", help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last of them")
    options = parser.parse_args()

    transformers.set_seed(1)
    text = (pathlib.Path(argparse.__file__).read_bytes())[: LENGTH * 1000]
    examples = [
        {"input_ids": list(part), "labels": list(part)}
        for part in (text[start : start + LENGTH] for start in range(0, len(text), LENGTH))
    ]
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    )
    callback = ScaleComCallback()
    stop = _StopAt(options.stop_at)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=options.output,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            save_steps=10,
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=20,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=examples[40:],
        eval_dataset=examples[:40],
        callbacks=[callback, stop],
    )
    callback.trainer = trainer
    trainer.train(resume_from_checkpoint=options.resume)


class _StopAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


if __name__ == "__main__":
    main()
    # Over Gloo, torch 2.13 may abort if Python ends while a thread still releases averaged tensors
    # (pytorch/pytorch#190489). Destroying the group waits for its threads, but it waits for ever if
    # a wrapped model still holds the group.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
