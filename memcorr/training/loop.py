"""`memcorr train`: one run of two stages, interrupted and resumed at will.

config.json         resolved recipe, seed, data, and what it was made with
model.safetensors   EMA weights and normalisation statistics, for `load_policy`
stage-one/          the same two files for the EMA after stage one
state.safetensors   everything needed to resume, in one file that is replaced atomically
metrics.jsonl, tensorboard/

The state after update u is one file, and batch u is a pure function of (seed, u): a run that was
killed at any moment continues from its last saved state and ends with the same bits.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ..correspondence.cache import Cache, read_cache
from ..demos.store import Store
from ..errors import UserError
from ..files import refuse, write_json
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
from ..policy.transformer import parameter_total
from ..runs import choose_device, claimed
from ..runs import threads as torch_threads
from .batches import Batch, Batches
from .dataset import Dataset, load_dataset, measure
from .experiments import Config, Experiment, find_experiment
from .metrics import Metrics, RunningMeans
from .mixture import Mixture
from .optimiser import Weights, gather
from .validation import Validation

log = logging.getLogger(__name__)
STATE, STAGE_ONE = "state.safetensors", "stage-one"
LOG_EVERY, SAVE_EVERY, VALIDATE_EVERY = 50, 250, 1000


def loss_of(network: nn.Module, batch: Batch) -> Tensor:
    """Noise prediction, both objectives: MSE over samples, horizon and action coordinates."""
    return F.mse_loss(network(batch.z_t, batch.t, batch.condition), batch.eps)


class Run:
    """Networks, optimiser and position of one training run in its folder."""

    def __init__(
        self, folder: Path, config: Config, dataset: Dataset, mixture: Mixture | None, device: torch.device
    ) -> None:
        self.folder, self.config, self.device = folder, config, device
        self.config_json = read_config(folder, dict)  # as it was when the run began
        self.experiment: Experiment = config.experiment
        self.normalisation: Normalisation = measure(dataset.windows, dataset.images)
        self.mixture = mixture
        self.batches = (
            Batches(dataset, self.normalisation, self.experiment),
            Batches(dataset, self.normalisation, self.experiment, mixture),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            network = self.experiment.build()
        self.weights = Weights(network, self.experiment.build(), self.experiment, device)
        self.means = RunningMeans()
        self.update = 0  # updates done

    @property
    def end(self) -> int:
        """Where this run stops: after stage one when stage two lacks its cache."""
        lacking = self.mixture is None and not self.experiment.visual
        return self.experiment.updates[0] if lacking else self.experiment.total_updates

    @property
    def stage(self) -> int:
        """Of the next update."""
        return int(self.update >= self.experiment.updates[0])

    def advance(self) -> None:
        """One optimizer update."""
        if self.update == self.experiment.updates[0]:
            self.weights.begin_stage(1)
        batch = self.batches[self.stage].draw(self.config.seed, self.update).to(self.device)
        loss = loss_of(self.weights.network, batch)
        norm = self.weights.step(loss)
        value = loss.item()
        if not math.isfinite(value):
            raise UserError(f"the loss became {value} at update {self.update}; the last saved state is intact")
        kind = "loss_paired" if self.experiment.paired and self.update % 2 else "loss_standard"
        self.means.add(**{kind: value, "gradient_norm": norm.item()})
        self.update += 1

    def save(self) -> None:
        """The state first; the models follow from it and are made good by the next start if need be."""
        metadata = {
            "update": self.update,
            "threads": torch.get_num_threads(),
            "cache": self.mixture.fingerprint() if self.mixture and self.update > self.experiment.updates[0] else "",
        }
        write_tensors(self.folder / STATE, {**self.weights.tensors(), **self.means.tensors()}, metadata)
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
        if metadata.get("cache") and self.mixture and metadata["cache"] != self.mixture.fingerprint():
            raise UserError(f"{self.folder} was trained with another --cache; give that one or another --out")
        if metadata.get("threads") != str(torch.get_num_threads()):
            log.warning(
                f"note: resumed with {torch.get_num_threads()} threads instead of {metadata.get('threads')}: "
                "the same run up to rounding, not bit for bit"
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


def train(
    experiment: str | Experiment,
    data: str | Path,
    seed: int,
    out: str | Path,
    cache: Path | None = None,
    device: str = "auto",
    threads: int = 1,
    stage_one: Path | None = None,
) -> None:
    """Trains one policy into `out`; the same command again continues it.

    Relation policies need `cache` for stage two; without it the run stops after stage one. A recipe
    that differs in stage two alone may begin with another run's `stage_one` folder: same bits. One
    thread is the default because several runs side by side then do not slow each other down.
    """
    recipe = find_experiment(experiment) if isinstance(experiment, str) else experiment
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"--seed {seed}: give a whole number from 0 up, such as 42")
    where, store = choose_device(device), Store.open(data)
    if len(store) < recipe.train_pairs:
        raise UserError(f"{data} holds {len(store)} pairs, {recipe.name} trains on {recipe.train_pairs}; collect more")
    dataset = load_dataset(store, range(recipe.train_pairs), recipe.tie_break, images=recipe.visual)
    mixture = None if cache is None or recipe.visual else mix(recipe, dataset, read_cache(cache, store))
    config = Config(recipe, seed, dataset.fingerprint())
    with torch_threads(threads), claimed(Path(out), STAGE_ONE) as folder:
        check_same_run(folder, config)
        run = Run(folder, config, dataset, mixture, where)
        run.resume()
        if stage_one is not None and run.update == 0:
            run.adopt(stage_one)
        if run.update < run.end:
            drive(run, Validation(store, recipe, run.normalisation, where))
        log.info(outcome(run, store.root))


def mix(recipe: Experiment, dataset: Dataset, cache: Cache) -> Mixture:
    """What stage two of the recipe trains on; the cache must have been lifted its way."""
    if cache.lifting != recipe.lifting:
        needs = f"{recipe.name} needs “{recipe.lifting}”: make one with `memcorr match --lifting {recipe.lifting}`"
        raise UserError(f"--cache holds points lifted “{cache.lifting}”, {needs}")
    return Mixture.join(dataset, cache, recipe.residual_limit_mm)


def resolved(recipe: Experiment, seed: int) -> str:
    """What would be trained, as JSON, with the number of parameters."""
    content = {"experiment": asdict(recipe), "seed": seed, "parameters": parameter_total(recipe.build())}
    return json.dumps(content, indent=2)


def drive(run: Run, validation: Validation) -> None:
    """The loop: advance, report, save. A first Ctrl-C or SIGTERM stops between two updates and saves."""
    metrics = Metrics(run.folder, run.update)
    bar = tqdm(
        desc=f"{run.experiment.name} seed {run.config.seed}",
        total=run.end,
        initial=run.update,
        unit="update",
        smoothing=0.02,
    )
    started, since = time.perf_counter(), run.update
    with stop_requests() as requested, bar:
        while run.update < run.end and not requested:
            stage = run.stage
            run.advance()
            bar.update()
            at_end = run.update in (run.experiment.updates[0], run.end)
            if run.update % LOG_EVERY == 0 or at_end:
                means = run.means.report()
                bar.set_postfix({k.removeprefix("loss_"): f"{v:.4f}" for k, v in means.items() if "loss" in k})
                rate = (run.update - since) / (time.perf_counter() - started)
                lr = run.experiment.learning_rate[stage]
                metrics.write(run.update, stage=stage + 1, learning_rate=lr, updates_per_second=round(rate, 3), **means)
                started, since = time.perf_counter(), run.update
            if run.update % VALIDATE_EVERY == 0 or at_end:
                losses = validation.losses(run.weights.ema_network)
                if losses:
                    metrics.write(run.update, **losses)
            if run.update % SAVE_EVERY == 0 or at_end:
                run.save()
        if requested:
            run.save()
    metrics.close()
    if requested:
        log.info(f"stopped after update {run.update} of {run.end}")
        listener = signal.getsignal(requested[0])
        if callable(listener):  # whoever called may tell SIGTERM from Ctrl-C
            listener(requested[0], None)
        raise KeyboardInterrupt  # so that nobody goes on as if training were done


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
    return f"finished after {run.update} updates: {run.folder / MODEL}; next: memcorr evaluate {run.folder}"


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
