"""The training loop: one drafter (an "arm") on one device.

`run(TrainConfig(...))` trains, logs, evaluates on held-out sequences and exports a Hugging Face
folder. Arms that share data, seed and batch options see the same batches, anchors and labels.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import DominoConfig, default_target_layer_ids
from ..drafter import DominoDrafter
from ..files import replacing
from .data import Batch, BatchSampler, TokenDataset, concatenate, load_any, trim_tails
from .metrics import Meter
from .objective import DeviceBatch, TargetFeatures, domino_loss, lambda_at
from .optimizer import MasterAdamW, Swapped, initialise, learning_rate

ARMS = ("domino", "dflash", "dflash-matched")


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on.

    target: folder of a `transformers` causal LM; data: files (see `data.load_any`); output: folder
    that receives metrics.jsonl, checkpoint.pt, the exported drafter (config.json,
    model.safetensors) and training.json. Exactly one of max_steps and max_seconds is set: seconds
    are wall clock of the loop itself, from the first step after the warm-up that compiles the
    kernels, and drive the schedules by the elapsed share (such a run cannot be repeated bit for
    bit).
    """

    target: str
    data: tuple[str, ...]
    output: str
    mask_token_id: int
    arm: str = "domino"
    num_layers: int = 4
    intermediate_size: int | None = None  # None: the target's
    num_features: int = 5
    gru_hidden_dim: int = 256
    emb_dim: int = 96
    block_size: int = 16
    shift_label: bool = True
    pure_draft_prefix_len: int = 1
    seq_len: int = 512
    batch_size: int = 48
    num_anchors: int = 64
    gamma: float = 7.0
    lambda_start: float = 1.0
    lambda_ratio: float = 1.0
    lr: float = 1e-3
    min_lr_ratio: float = 0.1
    warmup: float = 0.04
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.0  # decay; 0: the last weights are exported
    max_steps: int | None = None
    max_seconds: float | None = None
    seed: int = 0
    held_out: int = 512
    eval_every: int = 0  # 0: at the end only
    log_every: int = 20
    save_every: int = 0  # 0: no checkpoint.pt
    resume: bool = False
    trim_tails: bool = False
    device: str = "cuda"
    dtype: str = "bfloat16"
    attention: str = "flex"
    compile: bool = True
    chunk_rows: int = 8192
    profile: bool = False  # write profile.txt: time by kernel over three steps

    def __post_init__(self) -> None:
        def fail(field: str, expected: str) -> None:
            raise ValueError(f"train: {field}: got {getattr(self, field)!r}, expected {expected}")

        if self.arm not in ARMS:
            fail("arm", f"one of {ARMS}")
        if (self.max_steps is None) == (self.max_seconds is None):
            fail("max_steps", "exactly one of max_steps and max_seconds")
        if self.max_steps is not None and self.max_steps < 1:
            fail("max_steps", "at least 1")
        if self.max_seconds is not None and not self.max_seconds > 0:
            fail("max_seconds", "more than 0")
        if self.attention not in ("flex", "dense"):
            fail("attention", "'flex' or 'dense'")
        if self.dtype not in ("bfloat16", "float32"):
            fail("dtype", "'bfloat16' or 'float32'")
        if not self.data:
            fail("data", "at least one file")
        for field in ("ema", "warmup", "min_lr_ratio", "lambda_start"):
            if not 0.0 <= getattr(self, field) <= 1.0:
                fail(field, "a value in [0, 1]")
        for field in ("lr", "gamma", "clip"):
            if not getattr(self, field) > 0:
                fail(field, "more than 0")
        for field in ("log_every", "chunk_rows", "num_layers", "num_features"):
            if getattr(self, field) < 1:
                fail(field, "at least 1")

    def resume_contract(self) -> dict[str, Any]:
        """The fields that a resumed run may not change."""
        free = {
            "output",
            "log_every",
            "save_every",
            "eval_every",
            "resume",
            "device",
            "compile",
            "profile",
        }
        fields = dataclasses.asdict(self)
        return json.loads(json.dumps({k: v for k, v in fields.items() if k not in free}))


def drafter_config(config: TrainConfig, target: Any) -> DominoConfig:
    """The drafter's shape: the target's width, heads and rotary base.

    The arm "dflash-matched" spends the head's parameters on the backbone: one more layer, and the
    feed-forward width that brings the parameter count next to that of the "domino" arm.
    """
    heads = target.num_attention_heads
    rope = getattr(target, "rope_parameters", None) or {}
    made = DominoConfig(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_hidden_layers,
        target_layer_ids=default_target_layer_ids(target.num_hidden_layers, config.num_features),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        projector_type="domino" if config.arm == "domino" else "dflash",
        emb_dim=config.emb_dim,
        gru_hidden_dim=config.gru_hidden_dim,
        pure_draft_prefix_len=config.pure_draft_prefix_len,
        shift_label=config.shift_label,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", getattr(target, "rope_theta", 10000.0))),
        max_position_embeddings=target.max_position_embeddings,
    )
    if config.arm != "dflash-matched":
        return made
    width, state, rank = made.hidden_size, made.gru_hidden_dim, made.emb_dim
    head = 3 * state * (width + state) + rank * (width + state) + rank * made.vocab_size
    attention = 2 * width * made.head_dim * (heads + made.num_key_value_heads)
    layers = made.num_hidden_layers + 1
    ffn = made.num_hidden_layers * 3 * width * made.intermediate_size + head - attention
    multiple = 16
    ffn = round(ffn / (3 * width * layers) / multiple) * multiple
    if ffn < multiple:
        raise ValueError(
            f"train: arm: got 'dflash-matched' with a head of {head} parameters, expected one "
            "large enough to pay for the attention of another layer"
        )
    return dataclasses.replace(
        made, num_hidden_layers=layers, intermediate_size=ffn, layer_types=()
    )


class Trainer:
    """State of a run; `step()` does one optimizer update."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: nn.Module | None = None,
        data: TokenDataset | None = None,
        tokenizer: Any = None,
    ):
        """model, data, tokenizer: used instead of loading config.target and config.data."""
        self.config = config
        self.device = _device(config.device)
        dtype = getattr(torch, config.dtype)
        if model is None:
            from transformers import AutoModelForCausalLM

            if not (Path(config.target) / "config.json").is_file():
                raise ValueError(f"train: target: got {config.target!r}, expected a model's folder")
            model = AutoModelForCausalLM.from_pretrained(
                config.target, dtype=dtype, attn_implementation="sdpa"
            )
        model = model.to(device=self.device, dtype=dtype)
        shape = drafter_config(config, model.config)
        if data is None:
            data = load_data(config, tokenizer)
        if len(data) == 0:
            raise ValueError(
                f"train: data: got no sequence with two supervised tokens in a row in {config.data}"
            )
        for token in (int(data.tokens.max(initial=0)), int(data.tokens.min(initial=0))):
            if not 0 <= token < shape.vocab_size:
                raise ValueError(
                    f"train: data: got token {token}, expected ids below the target's vocabulary "
                    f"of {shape.vocab_size}"
                )
        train, held_out = data.split(config.held_out, config.seed)
        self.sampler = self._sampler(train)
        self.held_out = self._sampler(held_out, shuffle=False) if config.held_out else None
        self.embedding = model.get_input_embeddings().weight.detach()
        self.lm_head = model.get_output_embeddings().weight.detach()
        self.features = TargetFeatures(model, shape.target_layer_ids)
        drafter = initialise(DominoDrafter(shape), config.seed)
        self.drafter = drafter.to(device=self.device, dtype=dtype).train()
        self.optimizer = MasterAdamW(self.drafter, config)
        if config.compile:
            self.features.compile()
            # One graph for all layers; attributes of the instance, so that the state dict is
            # untouched.
            for layer in self.drafter.layers:
                layer.forward = torch.compile(layer.forward, dynamic=False)
            # Moves the angles to the device now: a change under the compiler means a second graph.
            self.drafter.rope(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
            self.drafter.context_kv = torch.compile(self.drafter.context_kv, dynamic=False)
        self.meter = Meter(shape, self.device)
        self.steps_done, self.seconds = 0, 0.0
        self.last: dict[str, float] = {}

    def _sampler(self, data: TokenDataset, shuffle: bool = True) -> BatchSampler:
        c = self.config
        return BatchSampler(
            data, batch_size=c.batch_size, seq_len=c.seq_len, num_anchors=c.num_anchors,
            block_size=c.block_size, gamma=c.gamma, shift_label=c.shift_label, seed=c.seed,
            shuffle=shuffle,
        )  # fmt: skip

    @property
    def progress(self) -> float:
        """Share of the run that is done, in [0, 1]."""
        if self.config.max_steps is not None:
            return min(self.steps_done / self.config.max_steps, 1.0)
        return min(self.seconds / self.config.max_seconds, 1.0)

    @property
    def lam(self) -> float:
        return lambda_at(self.progress, self.config.lambda_start, self.config.lambda_ratio)

    def loss(
        self, batch: Batch, lam: float, meter: Meter | None = None, backward: bool = True
    ) -> Tensor:
        moved = DeviceBatch.of(batch, self.device)
        features = self.features(moved.tokens)
        out = domino_loss(
            self.drafter, features, moved, self.embedding, self.lm_head, lam,
            attention=self.config.attention, chunk_rows=self.config.chunk_rows,
            backward=backward,
        )  # fmt: skip
        if meter is not None:
            meter.add(moved, out)
        return out.loss

    def warm_up(self, passes: int = 2) -> None:
        """Compile and load the kernels of forward and backward without changing the run."""
        for _ in range(passes):
            self.optimizer.zero_grad()
            self.loss(self.sampler.batch(0), 0.5).backward()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def profile(self, path: Path) -> None:
        """Write where the time of three forward + backward passes goes, kernel by kernel."""
        from torch.profiler import ProfilerActivity, profile

        cuda = self.device.type == "cuda"
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        with profile(activities=kinds) as recorded:
            self.warm_up(3)
        key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=90)
        path.write_text(table + "\n", encoding="utf-8")

    def step(self, batch: Batch) -> None:
        """One update on a batch (the batch of `steps_done`)."""
        progress, lam = self.progress, self.lam
        if self.config.max_steps is not None:
            progress = (self.steps_done + 1) / self.config.max_steps
        lr = learning_rate(self.config, progress)
        self.optimizer.zero_grad()
        self.loss(batch, lam, self.meter).backward()
        norm = self.optimizer.step(lr)
        self.steps_done += 1
        self.last = {"lr": lr, "lambda_base": lam, "grad_norm": norm}

    def evaluate(self) -> dict[str, Any]:
        """Metrics on the held-out sequences (the averaged weights when there is an EMA)."""
        if self.held_out is None:
            return {}
        meter = Meter(self.drafter.config, self.device)
        batches = math.ceil(len(self.held_out.data) / self.config.batch_size)
        with self._averaged():
            for step in range(batches):
                self.loss(self.held_out.batch(step), self.lam, meter, backward=False)
        return meter.read()

    def _averaged(self):
        if self.optimizer.ema is None:
            return nullcontext()
        return Swapped(self.optimizer.params, self.optimizer.ema)

    def check_finite(self) -> None:
        """Refuse weights that a step has spoilt: what is on disk may be the last good ones.

        A gradient that is not finite leaves weights under which no later one is.
        """
        norm = float(self.last.get("grad_norm", 0.0))
        if not math.isfinite(norm):
            raise RuntimeError(
                f"train: grad_norm: got {norm} after {self.steps_done} steps, expected a finite "
                "value"
            )

    def save(self, path: str | os.PathLike) -> None:
        """Write a checkpoint (temporary name, then renamed)."""
        self.check_finite()
        state = {
            "contract": self.config.resume_contract(),
            "steps_done": self.steps_done,
            "seconds": self.seconds,
            "optimizer": self.optimizer.state_dict(),
        }
        with replacing(path) as temporary:
            torch.save(state, temporary)

    def load(self, path: str | os.PathLike) -> None:
        """Continue from a checkpoint of the same run."""
        if not Path(path).is_file():
            raise ValueError(
                f"train: resume: got {str(path)!r}, expected a checkpoint to resume from"
            )
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            saved = state["contract"]
        except Exception as error:  # what a damaged pickle raises is anybody's guess
            raise ValueError(
                f"train: resume: got {str(path)!r} ({error}), expected a checkpoint of this trainer"
            ) from error
        mine = self.config.resume_contract()
        for field in mine:
            if mine[field] != saved.get(field):
                raise ValueError(
                    f"train: resume: {field}: got {mine[field]!r}, expected {saved.get(field)!r} "
                    f"as in {path}"
                )
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_done, self.seconds = state["steps_done"], state["seconds"]

    def export(self, folder: str | os.PathLike, extra: dict[str, Any]) -> None:
        """Write the drafter (bf16) as a Hugging Face folder, and training.json beside it."""
        self.check_finite()
        weights = self.optimizer.ema or self.optimizer.masters
        out = DominoDrafter(self.drafter.config)
        with torch.no_grad():
            for mine, trained in zip(out.parameters(), weights, strict=True):
                mine.copy_(trained)
        out.to(torch.bfloat16).save_pretrained(folder)
        record = {"config": dataclasses.asdict(self.config), **extra}
        with replacing(Path(folder) / "training.json") as temporary:
            temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"train: device: got {name!r}, expected a device ({error})") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"train: device: got {name!r}, but Torch finds no CUDA device; --device cpu --dtype "
            "float32 --attention dense trains without one"
        )
    return device


def load_data(config: TrainConfig, tokenizer: Any = None) -> TokenDataset:
    """The configured files as one dataset, cut to seq_len; unusable sequences are dropped."""
    if tokenizer is None and any(
        not str(p).endswith((".npz", ".safetensors")) for p in config.data
    ):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.target)
    data = concatenate([load_any(path, tokenizer, config.seq_len) for path in config.data])
    data = data.truncated(config.seq_len)
    if config.trim_tails:
        data = trim_tails(data)
    keep = data.usable()
    return data if keep.all() else data.take(keep)


def _prefetch(
    sampler: BatchSampler, first: int, last: int | None, depth: int = 4
) -> Iterator[Batch]:
    """Batches first, first + 1, ... (to `last`, exclusive), made ahead on a thread."""
    ready: queue.Queue = queue.Queue(depth)
    stop = threading.Event()

    def work() -> None:
        step = first
        while not stop.is_set() and (last is None or step < last):
            try:
                item: Any = sampler.batch(step)
            except BaseException as error:  # handed to the consumer, which raises it
                item = error
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            step += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        step = first
        while last is None or step < last:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            step += 1
    finally:
        stop.set()
        thread.join()


def run(config: TrainConfig, **loaded: Any) -> dict[str, Any]:
    """Train one arm and export it to `config.output`; returns the final metrics.

    loaded: `model`, `data`, `tokenizer` already in memory, see `Trainer`.
    """
    begin = time.monotonic()
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, **loaded)
    checkpoint = folder / "checkpoint.pt"
    if config.resume:
        trainer.load(checkpoint)
    loaded_at = time.monotonic()
    trainer.warm_up()
    warm_at = time.monotonic()
    if config.profile:
        trainer.profile(folder / "profile.txt")
    times = {"load_seconds": loaded_at - begin, "warm_up_seconds": warm_at - loaded_at}
    mode = "a" if config.resume else "w"
    with open(folder / "metrics.jsonl", mode, encoding="utf-8") as log, _progress() as progress:
        task = progress.add_task(config.arm, total=1.0, note="")

        def write(kind: str, record: dict[str, Any]) -> None:
            line = {"kind": kind, "step": trainer.steps_done, **record}
            log.write(json.dumps(line) + "\n")
            log.flush()

        parameters = sum(p.numel() for p in trainer.drafter.parameters())
        write("start", {"arm": config.arm, "parameters": parameters, **times,
                        "sequences": len(trainer.sampler.data),
                        "tokens": len(trainer.sampler.data.tokens)})  # fmt: skip
        _loop(trainer, checkpoint, write, progress, task)
        final = trainer.evaluate()
        summary = {
            "arm": config.arm, "parameters": parameters, "steps": trainer.steps_done,
            "seconds": trainer.seconds, **times, "held_out": final,
        }  # fmt: skip
        if trainer.device.type == "cuda":
            summary["peak_memory_gib"] = torch.cuda.max_memory_allocated(trainer.device) / 2**30
        write("final", summary)
        trainer.export(folder, summary)
    return summary


def _loop(trainer: Trainer, checkpoint: Path, write, progress, task) -> None:
    config = trainer.config
    cuda = trainer.device.type == "cuda"
    before = trainer.seconds
    start = mark = time.monotonic()
    tokens, counted = 0, trainer.steps_done
    previous = None
    for batch in _prefetch(trainer.sampler, trainer.steps_done, config.max_steps):
        if trainer.progress >= 1.0:
            break
        trainer.step(batch)
        tokens += batch.tokens_used
        if cuda:
            # One step of look-ahead hides the host; more would let the clock run away from the GPU.
            if previous is not None:
                previous.synchronize()
            previous = torch.cuda.Event()
            previous.record()
        trainer.seconds = before + time.monotonic() - start
        done = trainer.steps_done
        if done % config.log_every == 0 or done == config.max_steps:
            record = trainer.meter.read()
            if not math.isfinite(record["loss_base"] + record["loss_final"]):
                raise RuntimeError(
                    f"train: loss: got {record['loss_final']} after {done} steps, expected "
                    "a finite value"
                )
            trainer.meter.reset()
            now = time.monotonic()
            rate = (done - counted) / (now - mark)
            record |= {k: float(v) for k, v in trainer.last.items()}
            record |= {"steps_per_second": rate, "tokens_per_second": tokens / (now - mark)}
            record["seconds"] = trainer.seconds
            write("train", record)
            mark, tokens, counted = now, 0, done
            note = f"step {done}  loss {record['loss_final']:.3f}  {rate:.1f} steps/s  accepted "
            note += f"{record['accepted_final']:.2f} (base {record['accepted_base']:.2f})"
            progress.update(task, completed=trainer.progress, note=note)
        if config.eval_every and done % config.eval_every == 0:
            write("held_out", trainer.evaluate())
        if config.save_every and done % config.save_every == 0:
            trainer.save(checkpoint)
    if cuda:
        torch.cuda.synchronize(trainer.device)
    trainer.seconds = before + time.monotonic() - start
    if config.save_every:
        trainer.save(checkpoint)


def _progress():
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        console=Console(file=sys.stderr), redirect_stdout=False,
    )  # fmt: skip
