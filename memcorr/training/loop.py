"""`memcorr train`: one run of two stages, interrupted and resumed at will.

config.json         resolved recipe, seed, data, and what it was made with
model.safetensors   EMA weights and normalisation statistics, for `load_policy`
stage-one/          the same two files for the EMA after stage one
state.safetensors   everything needed to resume, in one file that is replaced atomically
metrics.jsonl, tensorboard/

The state after update u is one file, and batch u is a pure function of (seed, u): a run that was
killed at any moment continues from its last saved state and ends with the same bits. Under torchrun
several processes share each batch (`ranks.py`).
"""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ..demos.store import Store
from ..errors import UserError
from ..files import refuse, write_json
from ..folders import claimed
from ..machine import choose_device
from ..machine import threads as torch_threads
from ..policy.checkpoint import (
    AGAIN,
    CONFIG,
    MODEL,
    forms_of,
    model_update,
    read_checkpoint,
    read_config,
    read_tensors,
    write_model,
    write_tensors,
)
from ..policy.condition import Normalisation
from ..policy.networks.transformer import parameter_total
from ..spec import tasks_of
from .batches import Batch, Batches, draw, is_paired, predicted
from .dataset import measure
from .experiments import Config, Experiment, find_experiment
from .loading import WorldRows, load_own, load_worlds
from .metrics import Metrics, RunningMeans, Validation
from .optimiser import Weights, gather
from .ranks import Ranks, joined

log = logging.getLogger(__name__)
STATE, STAGE_ONE = "state.safetensors", "stage-one"
LOG_EVERY, SAVE_EVERY, VALIDATE_EVERY = 50, 250, 1000


def loss_of(network: nn.Module, batch: Batch) -> Tensor:
    """Noise prediction, both objectives: MSE over samples, horizon and action coordinates."""
    return F.mse_loss(predicted(network, batch), batch.eps)


class Run:
    """Networks, optimiser and position of one training run in its folder."""

    def __init__(self, folder: Path, config: Config, rows: Sequence[WorldRows], ranks: Ranks) -> None:
        self.folder, self.config, self.ranks, self.device = folder, config, ranks, ranks.device
        self.config_json = read_config(folder, dict) if ranks.first else {}  # as it was when the run began
        self.experiment: Experiment = config.experiment
        self.normalisation: Normalisation = measure([r.dataset for r in rows], self.experiment)
        self.mixtures = [r.mixture for r in rows if r.mixture is not None]
        common = self.normalisation, self.experiment
        self.batches = (
            [Batches(r.dataset, *common, resampled=r.resampled) for r in rows],
            [Batches(r.dataset, *common, r.mixture, r.resampled) for r in rows],
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            network = self.experiment.build()
        self.weights = Weights(network, self.experiment.build(), self.experiment, self.device)
        self.means = RunningMeans()
        self.update = 0  # updates done

    @property
    def end(self) -> int:
        """Where this run stops: after stage one when stage two lacks its cache."""
        lacking = not (self.mixtures or self.batches[1][0].resampled or self.experiment.visual)
        return self.experiment.updates[0] if lacking else self.experiment.total_updates

    @property
    def stage(self) -> int:
        """Of the next update."""
        return int(self.update >= self.experiment.updates[0])

    @property
    def cache(self) -> str:
        """What stage two mixes in; empty without a cache."""
        return "".join(mixture.fingerprint() for mixture in self.mixtures)

    def advance(self) -> None:
        """One optimizer update."""
        if self.update == self.experiment.updates[0]:
            self.weights.begin_stage(1)
        batch, share = self.ranks.part(draw(self.batches[self.stage], self.config.seed, self.update))
        loss = loss_of(self.weights.network, batch.to(self.device)) * share
        norm = self.weights.step(loss, self.ranks.add_up)
        value = self.ranks.add_up(loss.detach()).item()
        if not math.isfinite(value):
            raise UserError(f"the loss became {value} at update {self.update}; the last saved state is intact")
        kind = "loss_paired" if is_paired(self.experiment, self.update) else "loss_standard"
        self.means.add(**{kind: value, "gradient_norm": norm.item()})
        self.update += 1

    def save(self) -> None:
        """The state first; the models follow from it and are made good by the next start if need be."""
        if not self.ranks.first:
            return
        metadata = {
            "update": self.update,
            "threads": torch.get_num_threads(),
            "processes": self.ranks.size,
            "cache": self.cache if self.update > self.experiment.updates[0] else "",
        }
        try:
            write_tensors(self.folder / STATE, {**self.weights.tensors(), **self.means.tensors()}, metadata)
        except ValueError as problem:  # the loss of the next update would have told
            raise UserError(f"{problem} after update {self.update}; the last saved state is intact") from None
        self.export()

    def export(self) -> None:
        """EMA checkpoints that belong to the current state."""
        folders = [self.folder]
        if self.update == self.experiment.updates[0]:
            folders.append(self.folder / STAGE_ONE)
        for folder in folders:
            if model_update(folder) != self.update:
                write_model(folder, self.config_json, self.weights.ema_network, self.normalisation, self.update)

    def resume(self) -> None:
        """Continues from the saved state, if there is one."""
        path = self.folder / STATE
        if not path.exists():
            return
        tensors, metadata, _ = read_tensors(path, forms_of({**self.weights.tensors(), **self.means.tensors()}))
        if not metadata.get("update", "").isdecimal():
            refuse(path, f"update {metadata.get('update')!r}", AGAIN)
        self.update = int(metadata["update"])
        if self.update > self.experiment.updates[0]:
            self.weights.begin_stage(1)
        self.weights.restore(tensors)
        self.means.sums.copy_(tensors["running"])
        if metadata.get("cache") and self.mixtures and metadata["cache"] != self.cache:
            raise UserError(f"{self.folder} was trained with another --cache; give that one or another --out")
        for what, now in (("threads", torch.get_num_threads()), ("processes", self.ranks.size)):
            if (then := metadata.get(what, "1")) != str(now):
                log.warning(
                    f"note: resumed with {now} {what} instead of {then}: the same run up to rounding, not bit for bit"
                )
        self.export()

    def adopt(self, stage_one: Path) -> None:
        """Begins with stage two, where another run's finished stage one ended."""
        config, checkpoint = Config.read(stage_one), read_checkpoint(stage_one, self.device)
        if checkpoint.update != self.experiment.updates[0] or not config.experiment.begins_like(self.experiment):
            raise UserError(f"{stage_one} is not the end of a stage one of {self.experiment.name}")
        if (config.seed, config.data) != (self.config.seed, self.config.data):
            raise UserError(f"{stage_one} was trained with another seed or on other demonstrations")
        self.weights.ema.copy_(gather(checkpoint.network, self.device))
        self.update = self.experiment.updates[0]
        self.save()

    def tell(self) -> None:
        """Brings all processes to where the first one stands."""
        update = torch.tensor(self.update, device=self.device)
        self.ranks.tell([update])
        self.update = int(update)
        if self.update > self.experiment.updates[0] and not self.ranks.first:
            self.weights.begin_stage(1)
        self.ranks.tell(list(self.weights.tensors().values()))


def train(
    experiment: str | Experiment,
    data: str | Path,
    seed: int,
    out: str | Path,
    cache: Path | None = None,
    device: str = "auto",
    threads: int = 1,
    stage_one: Path | None = None,
    disturbed: Path | None = None,
    quiet: bool = False,
) -> None:
    """Trains one policy into `out`; the same command again continues it.

    Relation policies need `cache` for stage two; without it the run stops after stage one. A recipe
    that differs in stage two alone may begin with another run's `stage_one` folder: same bits. One
    thread is the default because several runs side by side then do not slow each other down. For a
    recipe of several worlds `data`, `disturbed` and `cache` are folders that hold one of each.
    """
    recipe = find_experiment(experiment) if isinstance(experiment, str) else experiment
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"--seed {seed}: give a whole number from 0 up, such as 42")
    where = choose_device(device)
    if recipe.measured:
        recipe, rows = load_own(recipe, Path(data), cache, disturbed)
    else:
        rows = load_worlds(recipe, Path(data), cache, disturbed)
    config = Config(recipe, seed, "".join(r.dataset.fingerprint() for r in rows))
    with torch_threads(threads), joined(where) as ranks:
        folder = Path(out)
        with claimed(folder, STAGE_ONE) if ranks.first else nullcontext():
            if ranks.first:
                check_same_run(folder, config)
            run = Run(folder, config, rows, ranks)
            if ranks.first:
                run.resume()
                if stage_one is not None and run.update == 0:
                    run.adopt(stage_one)
            run.tell()
            if run.update < run.end:
                judged = ranks.first and not recipe.measured  # without truth nothing is held out
                held_out = [r.store for r in rows] if judged else []
                drive(run, Validation(held_out, recipe, run.normalisation, ranks.device), quiet or not ranks.first)
            if ranks.first:
                log.info(outcome(run, Path(data)))


def resolved(recipe: Experiment, seed: int) -> str:
    """What would be trained, as JSON, with the number of parameters."""
    content = {"experiment": asdict(recipe), "seed": seed, "parameters": parameter_total(recipe.build())}
    return json.dumps(content, indent=2)


def drive(run: Run, validation: Validation, quiet: bool) -> None:
    """The loop: advance, report, save. A first Ctrl-C or SIGTERM stops between two updates and saves."""
    metrics = Metrics(run.folder, run.update) if run.ranks.first else None
    bar = tqdm(
        desc=f"{run.experiment.name} seed {run.config.seed}",
        total=run.end,
        initial=run.update,
        unit="update",
        smoothing=0.02,
        disable=quiet,
    )
    started, since = time.perf_counter(), run.update
    with stop_requests() as requested, bar:
        while run.update < run.end and not run.ranks.any(requested):
            stage = run.stage
            run.advance()
            bar.update()
            at_end = run.update in (run.experiment.updates[0], run.end)
            if run.update % LOG_EVERY == 0 or at_end:
                means = run.means.report()
                bar.set_postfix({k.removeprefix("loss_"): f"{v:.4f}" for k, v in means.items() if "loss" in k})
                rate = (run.update - since) / (time.perf_counter() - started)
                lr = run.experiment.learning_rate[stage]
                speed = {"learning_rate": lr, "updates_per_second": round(rate, 3)}
                if metrics is not None:
                    metrics.write(run.update, stage=stage + 1, **speed, **means)
                started, since = time.perf_counter(), run.update
            if run.update % VALIDATE_EVERY == 0 or at_end:
                losses = validation.losses(run.weights.ema_network)
                if losses and metrics is not None:
                    metrics.write(run.update, **losses)
            if run.update % SAVE_EVERY == 0 or at_end:
                run.save()
        stopped = run.ranks.any(requested)
        if stopped:
            run.save()
    if metrics is not None:
        metrics.close()
    if stopped:
        log.info(f"stopped after update {run.update} of {run.end}")
        listener = signal.getsignal(requested[0]) if requested else None
        if callable(listener):  # the caller may tell SIGTERM from Ctrl-C
            listener(requested[0], None)
        raise KeyboardInterrupt  # so that no caller goes on as if training were done


def outcome(run: Run, data: Path) -> str:
    """One line: what there is now, and what to run next."""
    if run.update < run.experiment.total_updates:
        usual, recipe = Experiment(), run.experiment
        asked = "" if recipe.lifting == usual.lifting else f" --lifting {recipe.lifting}"
        asked += "" if recipe.tie_break == usual.tie_break else f" --tie-break {recipe.tie_break}"
        return (
            f"stage one is finished after {run.update} updates: {run.folder / STAGE_ONE}; for stage two make a cache "
            f"(`memcorr match --data {data} --out CACHE{asked}`) and give the same command with --cache CACHE"
        )
    simulated = not (data / "collection.json").exists() or tasks_of(Store.open(data).world)
    then = f"memcorr evaluate {run.folder}" if simulated else f"memcorr serve {run.folder} --references {data}"
    return f"finished after {run.update} updates: {run.folder / MODEL}; next: {then}"


def check_same_run(out: Path, config: Config) -> None:
    """Refuses a folder that holds another run; a new one is given its config."""
    if (out / CONFIG).exists():
        present = Config.read(out)
        differing = [k for k in ("experiment", "seed", "data") if getattr(present, k) != getattr(config, k)]
        if differing:
            raise UserError(f"{out} holds a run with another {' and '.join(differing)}; choose another --out")
    elif (out / STATE).exists() or (out / MODEL).exists():
        raise UserError(f"{out} holds a training state without its {CONFIG}; choose another --out")
    else:
        write_json(out / CONFIG, config.json())


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list that becomes non-empty on SIGINT or SIGTERM; a second SIGINT interrupts at once."""
    requested: list[int] = []

    def request(number: int, frame: FrameType | None) -> None:
        if requested:
            raise KeyboardInterrupt
        requested.append(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread hears signals
        yield requested
        return
    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
