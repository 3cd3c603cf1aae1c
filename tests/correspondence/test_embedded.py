"""The embedded matcher: exact practice pairs, resumable training, answers that stand alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from memcorr.bench.straightforward import StraightforwardMatcher
from memcorr.correspondence.cache import auc
from memcorr.correspondence.embedded import train as training
from memcorr.correspondence.embedded.assemblies import SCENERY_TEXTURES
from memcorr.correspondence.embedded.live import Encoded, LiveNetwork
from memcorr.correspondence.embedded.matcher import WEIGHTS, EmbeddedMatcher, load_network
from memcorr.correspondence.embedded.network import MatchNetwork, Pyramid, around_the_peak, sample
from memcorr.correspondence.embedded.practice import SCENERY, Group, build_practice, is_assembly, load_groups
from memcorr.correspondence.embedded.train import MatcherConfig, grid_targets, logistic_regression, make_pair, train
from memcorr.correspondence.lift import BATCH, crop_object, match_frames, prepare_references
from memcorr.correspondence.matcher import Doubt
from memcorr.demos.store import Store
from memcorr.errors import UserError
from memcorr.worlds.gl import mujoco
from memcorr.worlds.pairs import PAIRS
from memcorr.worlds.world import build_model

TINY = MatcherConfig(
    steps=4, batch=2, points=32, scenes=("sawyer_dial",), held_out=("sawyer_box",), assemblies=1, groups=2,
    look_every=2, look=1, calibration=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def practised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, tiny training run in one go."""
    out = tmp_path_factory.mktemp("matcher")
    train(TINY, out, workers=1)
    return out


@pytest.fixture(scope="module")
def groups(practised: Path) -> list[Group]:
    names = ("sawyer_dial", "assembly-000")
    return [group for name in names for group in load_groups(practised / "practice" / f"{name}.safetensors")]


def test_a_view_paired_with_itself_is_the_identity(groups: list[Group]) -> None:
    pair = make_pair(groups[0], 2, 2, 200, 50, np.random.default_rng(0))  # its two crops are cut differently
    assert len(pair.uv_a) == 250 and pair.visible[:200].all()
    here, there = pair.crop_a.to_original(pair.uv_a), pair.crop_b.to_original(pair.uv_b)
    np.testing.assert_allclose(here, there, atol=1e-3)


def test_warps_are_exact(groups: list[Group]) -> None:
    """There and back again: what A sees in B, B sees in A, within the pixel it was rounded to."""
    rng = np.random.default_rng(0)
    for group in groups:
        pair = make_pair(group, 0, 1, 300, 0, rng)
        frame_a, frame_b = group.frames[0], group.frames[1]
        uv = pair.crop_b.to_original(pair.uv_b[pair.visible])
        columns, rows = np.rint(uv).astype(int).T
        p = frame_b.camera.lift(np.rint(uv), frame_b.depth[rows, columns])
        T_ab = group.T_world_object[0] @ np.linalg.inv(group.T_world_object[1])
        back, _ = frame_a.camera.project(p @ T_ab[:3, :3].T + T_ab[:3, 3])
        start = pair.crop_a.to_original(pair.uv_a[pair.visible])
        assert np.median(np.linalg.norm(back - start, axis=-1)) < 1.0


def test_interrupted_training_ends_with_the_same_weights(
    practised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "practice").symlink_to(practised / "practice")
    batch = training.Practice.batch

    def interrupted(self: training.Practice, step: int, held_out: bool = False) -> list[training.Pair]:
        if step == 3:
            raise KeyboardInterrupt
        return batch(self, step, held_out)

    with monkeypatch.context() as patch:
        patch.setattr(training.Practice, "batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(TINY, tmp_path, workers=1, save_every=2)
    assert not (tmp_path / "embedded.safetensors").exists()
    train(TINY, tmp_path, workers=1)
    a, b = (load_file(folder / "embedded.safetensors") for folder in (practised, tmp_path))
    assert all(torch.equal(a[k], b[k]) for k in a)
    rows = [[json.loads(row) for row in (f / "metrics.jsonl").read_text().splitlines()] for f in (practised, tmp_path)]
    assert rows[0] and rows[0] == rows[1], "no row twice, none lost"


def test_finished_and_foreign_folders(practised: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    train(TINY, practised, workers=1)
    assert "nothing to do" in caplog.text
    with pytest.raises(UserError, match="another configuration"):
        train(replace(TINY, steps=5), practised, workers=1)


def test_sampling_names_pixel_centres() -> None:
    """A ramp over crop pixels, average-pooled to each stride, is read back unchanged."""
    x = torch.arange(128.0).expand(1, 1, 128, 128)
    uv = torch.tensor([[[20.0, 64.0], [77.3, 10.0]]])
    for stride in (2, 4, 8):
        pooled = torch.nn.functional.avg_pool2d(x, stride)
        torch.testing.assert_close(sample(pooled, uv, stride)[..., 0], uv[..., 0])


def test_coarse_targets_and_peak_agree() -> None:
    uv = torch.tensor([[[20.0, 64.0], [100.5, 31.25]]])
    target = grid_targets((uv + 0.5) / 8 - 0.5, 16)
    torch.testing.assert_close(target.sum(-1), torch.ones(1, 2))
    torch.testing.assert_close(around_the_peak(target.log()), uv, atol=1e-3, rtol=0)


def test_shipped_weights_are_small() -> None:
    assert WEIGHTS.stat().st_size <= 6e6


def test_live_answers_are_the_networks_up_to_rounding(store: Store) -> None:
    """On the object, at the border and beyond it; on views that are alike and on views that are not."""
    frames = [store.demonstration(0, task).frame(j) for task in ("open", "close") for j in (0, 100)]
    crops = np.stack([crop_object(frame).rgb for frame in frames])
    rng, corners = np.random.default_rng(0), [[0, 0], [127, 0], [0.4, 126.6], [-3, 64], [130, 131]]
    pixels = np.stack([np.concatenate([rng.uniform(0, 127, (43, 2)), corners]) for _ in frames])
    live, plain = EmbeddedMatcher(), StraightforwardMatcher()
    for queries in (crops, crops[::-1], rng.integers(0, 256, crops.shape, np.uint8)):
        answers = [matcher.match(matcher.encode(crops), pixels, queries) for matcher in (live, plain)]
        np.testing.assert_allclose(answers[0][0], answers[1][0], atol=2e-3, rtol=0)  # pixels
        np.testing.assert_allclose(answers[0][1], answers[1][1], atol=1e-4, rtol=0)


def test_live_layout_follows_any_network() -> None:
    """Also one that was never folded, with normalisations and temperature of its own."""
    torch.manual_seed(1)
    network = MatchNetwork()
    for name, value in network.state_dict().items():
        if value.is_floating_point() and not name.endswith("num_batches_tracked"):
            value.add_(0.05 * torch.rand_like(value))
    image, uv = torch.rand(2, 3, 128, 128), 127 * torch.rand(1, 16, 2)
    live = LiveNetwork(network.eval())
    with torch.inference_mode():
        a, b = (Pyramid(*(f[i : i + 1] for f in vars(network.encode(image)).values())) for i in range(2))
        located = network.locate(a, b, uv)
        encoded = [Encoded.join([e]) for e in live.encode(image).each()]
        found, trust = live.locate(encoded[0], encoded[1], uv)
    torch.testing.assert_close(found, located.uv, atol=2e-3, rtol=0)
    torch.testing.assert_close(trust, located.trust, atol=1e-3, rtol=0)


def test_confidence_in_a_point_is_that_in_its_location_unless_depth_varies() -> None:
    matcher, nothing = EmbeddedMatcher(), np.zeros(2)
    sure = np.array([0.2, 0.9])
    flat, steep = (Doubt(np.full((2, 2), span), nothing, nothing) for span in (0.0, 0.2))
    assert (matcher.lifted_confidence(sure, steep) < 0.8 * matcher.lifted_confidence(sure, flat)).all()
    close, loose = (Doubt(np.zeros((2, 2)), nothing, np.full(2, spread)) for spread in (0.002, 0.02))
    assert (matcher.lifted_confidence(sure, loose) < 0.8 * matcher.lifted_confidence(sure, close)).all()
    matcher.network.calibration = MatchNetwork().calibration  # none
    for doubt in (steep, loose):
        np.testing.assert_allclose(matcher.lifted_confidence(sure, doubt), sure, atol=1e-6)


def test_without_trust_there_is_no_answer(store: Store) -> None:
    frame = store.demonstration(0, "open").frame(0)
    matcher = EmbeddedMatcher()
    assert match_frames(matcher, prepare_references(matcher, [frame]), [frame]).valid.sum() >= 12
    matcher.network.get_parameter("trust.2.bias").fill_(-50.0)
    matches = match_frames(matcher, prepare_references(matcher, [frame]), [frame])
    assert not matches.valid.any() and np.isfinite(matches.p_live).all() and not matches.confidence.any()


@pytest.mark.long
def test_nothing_that_is_evaluated_was_practised() -> None:
    """The weights say what they have practised on; no scene, mesh or texture is one of the ten worlds."""
    with safe_open(WEIGHTS, "np") as file:
        told = file.metadata()
    practised = [*json.loads(told["practised"]), *json.loads(told["held_out"])]
    assert len(practised) > 50
    evaluated = [build_model(pair.scene) for pair in PAIRS.values()]
    seen = {scene: build_practice(scene, 0) for scene in practised if not is_assembly(scene)}
    assert seen and not {pair.scene for pair in PAIRS.values()} & seen.keys()
    for scene, model in seen.items():
        for other in evaluated:
            assert not shapes(model) & shapes(other), scene
            assert not pictures(model) & pictures(other), scene


def shapes(model: mujoco.MjModel) -> set[bytes]:
    """Digests of the meshes of everything but robot and furniture."""
    roots = [model.body(model.body_rootid[model.geom_bodyid[g]]).name for g in range(model.ngeom)]
    used = {int(model.geom_dataid[g]) for g in range(model.ngeom) if roots[g] not in SCENERY} - {-1}
    parts = [slice(model.mesh_vertadr[m], model.mesh_vertadr[m] + model.mesh_vertnum[m]) for m in used]
    return {model.mesh_vert[part].tobytes() for part in parts}


def pictures(model: mujoco.MjModel) -> set[bytes]:
    """The textures of everything but the room."""
    names = [(t, model.tex(t).name) for t in range(model.ntex)]
    size = model.tex_width * model.tex_height * model.tex_nchannel
    return {
        model.tex_data[model.tex_adr[t] : model.tex_adr[t] + size[t]].tobytes()
        for t, name in names
        if name and name not in SCENERY_TEXTURES
    }


def test_logistic_regression_recovers_the_odds() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
    w = torch.tensor([0.5, 1.2, -2.0], dtype=torch.float64)
    y = (torch.rand(20_000, generator=generator, dtype=torch.float64) < (x @ w).sigmoid()).double()
    torch.testing.assert_close(logistic_regression(x, y), w, atol=0.1, rtol=0)
    assert logistic_regression(x, torch.ones_like(y)).isfinite().all()


def test_unusable_weights_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(WEIGHTS.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"broken.safetensors"):
        load_network(broken)


def test_an_answer_does_not_depend_on_its_neighbours(store: Store) -> None:
    frames = store.demonstration(0, "close").frames(range(0, 20 * BATCH, 20))
    crops = np.stack([crop_object(f).rgb for f in frames])
    matcher = EmbeddedMatcher()
    pixels = np.random.default_rng(0).uniform(10, 110, (BATCH, 16, 2))
    together, confidence = matcher.match(matcher.encode(crops), pixels, crops[::-1])
    for i in (0, 3, 7):  # in a batch of the same size, whoever else is in it: the same bits
        only = [i] * BATCH
        again, sure = matcher.match(matcher.encode(crops[only]), pixels[only], crops[::-1][only])
        np.testing.assert_array_equal(again[1], together[i])
        np.testing.assert_array_equal(sure[1], confidence[i])


def test_auc_equals_the_count_of_ordered_pairs() -> None:
    rng = np.random.default_rng(0)
    score = rng.integers(0, 10, 200) / 10
    positive = rng.uniform(size=200) < score
    literal = np.mean([(a > b) + 0.5 * (a == b) for a in score[positive] for b in score[~positive]])
    assert auc(score, positive) == pytest.approx(literal)
