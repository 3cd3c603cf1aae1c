"""What a recipe trains on, read from disk and checked against it before the first update."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ..correspondence.cache import Cache, read_cache
from ..demos.store import Store
from ..errors import UserError
from ..following.measured import chosen, read_measured
from .dataset import Dataset, load_dataset
from .experiments import Experiment
from .measured import fitted, load_measured
from .mixture import Mixture, Resampled

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorldRows:
    """What is learned from one world."""

    store: Store
    dataset: Dataset
    mixture: Mixture | None
    resampled: Resampled | None


def load_worlds(recipe: Experiment, data: Path, cache: Path | None, disturbed: Path | None) -> list[WorldRows]:
    several = len(recipe.worlds) > 1
    if recipe.disturbed and disturbed is None:
        raise UserError(f"{recipe.name} also learns to recover: give --disturbed (`memcorr collect --disturbed`)")
    if disturbed is not None and not recipe.disturbed:
        raise UserError(f"--disturbed: {recipe.name} never trains on disturbed recordings")
    if recipe.resampled_errors and cache is None:
        raise UserError(f"{recipe.name} learns from a matcher's errors from the start: give --cache (`memcorr match`)")

    def of_world(folder: Path, world: str) -> Path:
        return folder / world if several else folder

    found = []
    for world in recipe.worlds:  # complains before anything is read
        store = Store.open(of_world(data, world))
        recovering = None if disturbed is None else Store.open(of_world(disturbed, world))
        if several and store.world != world:
            raise UserError(f"{store.root} holds demonstrations of {store.world}, not of {world}")
        if recovering is not None and (recovering.world, recovering.manifest.disturbed) != (store.world, True):
            what = f"{'' if recovering.manifest.disturbed else 'un'}disturbed recordings of {recovering.world}"
            raise UserError(f"--disturbed: {recovering.root} holds {what}, not disturbed ones of {store.world}")
        if len(store) < recipe.train_pairs:
            text = f"{store.root} holds {len(store)} pairs, {recipe.name} trains on {recipe.train_pairs}"
            raise UserError(f"{text}; collect more")
        found.append((world, store, recovering))
    loaded = []
    for world, store, recovering in tqdm(found, "rows", unit="world", leave=False, disable=not several):
        dataset = load_dataset(store, range(recipe.train_pairs), recipe, recipe.visual, recovering)
        mixture, resampled = None, None
        if cache is not None and not recipe.visual:
            measured = read_cache(of_world(cache, world), store)
            if recipe.resampled_errors:
                resampled = Resampled.of(dataset, checked(recipe, measured), recipe.resampled_errors)
            else:
                mixture = Mixture.join(dataset, checked(recipe, measured), recipe.residual_limit_mm)
        loaded.append(WorldRows(store, dataset, mixture, resampled))
    return loaded


def load_own(
    recipe: Experiment, data: Path, cache: Path | None, disturbed: Path | None
) -> tuple[Experiment, list[WorldRows]]:
    """The recipe as the recordings ask for it, and their rows."""
    if cache is None:
        raise UserError(f"{recipe.name} learns from what a matcher saw: give --cache (`memcorr match --data {data}`)")
    if disturbed is not None:
        raise UserError(f"--disturbed: {recipe.name} takes recordings that recover in --data, among the others")
    store = Store.open(data)
    seen = read_measured(cache, store)
    if (seen.settings.lifting, seen.settings.phase) != (recipe.lifting, recipe.phase):
        asked = f"`memcorr match --lifting {recipe.lifting} --phase {recipe.phase}`"
        raise UserError(f"--cache was made for another lifting or phase than {recipe.name} has: make one with {asked}")
    demonstrations = chosen(store, seen.settings.pairs, seen.settings.phase)
    recipe, both, said = fitted(recipe, demonstrations)
    for line in said:
        log.info(line)
    dataset = load_measured(demonstrations, seen, recipe, both)
    resampled = Resampled.measured(dataset, seen.disagreement, recipe.resampled_errors)
    return recipe, [WorldRows(store, dataset, None, resampled)]


def checked(recipe: Experiment, cache: Cache) -> Cache:
    """The cache, if it was lifted the recipe's way."""
    if cache.lifting != recipe.lifting:
        needs = f"{recipe.name} needs “{recipe.lifting}”: make one with `memcorr match --lifting {recipe.lifting}`"
        raise UserError(f"--cache holds points lifted “{cache.lifting}”, {needs}")
    return cache
