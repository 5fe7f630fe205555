"""What a run shows while it goes on and at its end, on a terminal or in a log."""

import math

import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from k2jax.config import MeshConfig, RunConfig
from k2jax.parallel import mesh
from k2jax.parallel.expert import bytes_per_token
from k2jax.parallel.layout import layout
from k2jax.parallel.schedule import ticks
from k2jax.scaling.flops import count_params, training_flops
from k2jax.train.folder import Result


class Display:
    """A progress bar, one line a validation, and a table at the end; nothing at all if not to be shown."""

    def __init__(self, config: RunConfig, *, show: bool):
        self._config, self._show = config, show
        self.console = Console(highlight=False, soft_wrap=True) if show else None
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}")
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, disable=not show)
        self._task = self._progress.add_task("training", total=config.steps, text="")

    def say(self, text: str) -> None:
        """One line."""
        if self._show:
            self.console.print(text, markup=False)

    def plan(self, sizes: MeshConfig) -> None:
        """What is about to run, on a mesh of these sizes."""
        config = self._config
        count, flops = count_params(config.model), training_flops(config.model, config.seq_len).total * config.tokens
        self.say(
            f"{config.name}: {count.total / 1e6:,.1f}M parameters ({count.active / 1e6:,.1f}M active), {config.steps:,} steps "
            f"of {config.batch * config.seq_len:,} tokens, {flops:.2e} FLOPs, results in {config.out}"
        )
        if mesh.count(sizes) > 1:
            self.say(_division(config, sizes))

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()

    def step(self, row: dict) -> None:
        """A step is done."""
        loss = math.nan if row["loss"] is None else row["loss"]
        text = f"loss {loss:.3f}  {row['tokens_per_second']:,.0f} tokens/s"
        self._progress.update(self._task, completed=row["step"], text=text)
        if "val_loss" in row:
            parts = "  ".join(f"{domain} {x:.4f}" for domain, x in row["val_loss_by_domain"].items())
            self.say(f"step {row['step']:,}  training {loss:.4f}  validation {row['val_loss']:.4f}  ({parts})")

    def table(self, result: Result) -> None:
        """The result, the verdict on loss spikes and the telemetry of the clip."""
        if not self._show:
            return
        table = Table(show_header=False, box=None)
        for name, text in _lines(self._config, result):
            table.add_row(name, text)
        self.console.print(table)
        for sentence in result.warnings:
            self.say(f"note: {sentence}")


def _division(config: RunConfig, sizes: MeshConfig) -> str:
    """How the work of a step is divided, in a line."""
    P, v, M = sizes.pipeline, sizes.chunks, mesh.microbatches(config, sizes)
    parts = [f"on {mesh.count(sizes):,} devices, pipeline {P} x expert {sizes.expert} x data {sizes.data}: {M:,} microbatches"]
    if P * v > 1:
        places = layout(config.model, sizes)
        slots = P * places.slots
        empty = slots - config.model.n_layers - config.model.n_mtp
        # Of the M v + P - 1 times in which a stage has a forward and a backward unit to run, it has none in P - 1.
        parts += [f"{v} chunks a stage", f"{ticks(P, v, M):,} ticks", f"bubble {(P - 1) / (M * v + P - 1):.1%}"]
        parts += [f"{empty} of {slots} slots without a layer"]
    if sizes.expert > 1:
        model = config.model
        moved = bytes_per_token(model.moe, sizes.expert, model.d_model, jnp.dtype(model.dtype).itemsize)
        parts += [f"a token's way to the experts of a layer and back {moved / 1e3:,.2f} kB"]
    return ", ".join(parts)


def _lines(config: RunConfig, result: Result) -> list[tuple[str, str]]:
    heads, spikes = result.heads, result.spikes
    clipped = f"{heads['clipped']} of {heads['total']} heads ({heads['clipped'] / heads['total']:.1%}) were ever clipped"
    clipped += f", the last at step {heads['last_step']:,}" if heads["last_step"] else ""
    clipped += f" (threshold {config.optim.qk_tau:g})" if config.optim.rule == "muonclip" else ": the rule has no clip"
    by_domain = "  ".join(f"{domain} {loss:.4f}" for domain, loss in result.val_loss_by_domain.items())
    spent = "  ".join(f"{part} {seconds:.1f}" for part, seconds in result.seconds.items())
    return [
        ("training loss", f"{result.train_loss:.4f} nats, mean of the last 20 steps"),
        ("validation loss", f"{result.val_loss:.4f}  {by_domain}"),
        ("tokens", f"{result.tokens:,}, {result.tokens_per_second:,.0f} a second"),
        ("seconds", spent),
        ("loss spikes", ", ".join(f"steps {s['start']}-{s['end']}" for s in spikes) if spikes else "none"),
        ("QK-Clip", clipped),
        ("skipped steps", f"{result.skipped_steps}"),
        ("results", f"{config.out}"),
    ]
