"""RoMa v2: ours equals the published package; what is missing is said in one line.

Weights are random, of the right shapes: the released file is neither needed nor fetched.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from memcorr.correspondence import romav2
from memcorr.correspondence.matcher import load_matcher
from memcorr.correspondence.romav2 import RomaV2Matcher
from memcorr.errors import UserError

needs_package = pytest.mark.skipif(find_spec("romav2") is None, reason=f"romav2 is not installed: {romav2.INSTALL}")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty torch hub cache, no weights named, no network, and a package that seems to be installed."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.delenv(romav2.VARIABLE, raising=False)
    monkeypatch.setattr(torch.hub, "urlopen", unreachable)
    monkeypatch.setattr(romav2, "find_spec", lambda _: object())
    monkeypatch.setattr(romav2, "roma_package", lambda: None)
    return tmp_path / "hub"


def message(call: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_missing_package_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(romav2, "find_spec", lambda _: None)
    romav2.roma_package.cache_clear()
    for call in (lambda: load_matcher("romav2"), romav2.random_romav2, romav2.status):
        assert "pip install 'memcorr[romav2]'" in message(call)


def test_missing_weights_name_the_file_its_place_and_the_command(hub: Path) -> None:
    place = hub / "checkpoints" / "romav2.0.1.pt"
    for call in (RomaV2Matcher, romav2.status):
        text = message(call)
        assert f"curl -L --create-dirs -o {place} {romav2.URL}" in text
        assert romav2.VARIABLE in text
    assert "no network" in message(RomaV2Matcher)
    assert not list(place.parent.iterdir())


def test_named_weights_come_first_and_are_never_downloaded(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *_, **__: pytest.fail("downloaded"))
    assert "/argument.pt: missing" in message(RomaV2Matcher, Path("/argument.pt"))
    named = hub.parent / "named.pt"
    monkeypatch.setenv(romav2.VARIABLE, str(named))
    assert f"{named}: missing" in message(RomaV2Matcher)
    named.touch()
    assert romav2.status() == f"weights found at {named}"


def test_what_arrives_is_verified(hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    released = hub.parent / "released"
    released.write_bytes(b"weights")
    monkeypatch.setattr(torch.hub, "urlopen", lambda _: urlopen(released.as_uri()))
    place = romav2.hub_weights()
    assert "invalid hash" in message(romav2.download, place)
    assert not list(place.parent.iterdir())
    monkeypatch.setattr(romav2, "SHA256", hashlib.sha256(b"weights").hexdigest())
    romav2.download(place)
    assert place.read_bytes() == b"weights"
    assert "100%" in capsys.readouterr().err  # the progress bar


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", {"weight": torch.zeros(3)}])
def test_another_file_is_refused(hub: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    monkeypatch.setattr(romav2, "build", lambda: nn.Linear(1, 1))
    path = hub.parent / "other.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    assert "not the released file" in message(RomaV2Matcher, path)


def test_identity_field_returns_the_reference_pixels() -> None:
    """RoMa's [-1, 1] spans the outer edges of 320 pixels, ours are centres of 128."""
    n = 320
    axis = torch.linspace(-1 + 1 / n, 1 - 1 / n, n)
    warp = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)[None]
    logit = torch.linspace(-9, 9, n).expand(1, n, n)[..., None]  # grows with the column

    class Identity:
        H_lr = W_lr = n

        def _load_image(self, crop: NDArray[np.uint8]) -> Tensor:
            return torch.from_numpy(crop).permute(2, 0, 1)[None] / 255

        def __call__(self, image_a: Tensor, image_b: Tensor) -> dict[str, Tensor]:
            return {"warp_AB": warp, "confidence_AB": logit}

    matcher = object.__new__(RomaV2Matcher)
    matcher.model = Identity()
    matcher._coarse = matcher._fine = romav2.Recall(nn.Identity())
    pixels = np.array([[[0, 0], [127, 127], [0, 127], [63.25, 17.5], [-0.5, 127.5]]])
    crops = np.zeros((1, 128, 128, 3), np.uint8)
    uv, confidence = matcher.match(matcher.encode(crops), pixels, crops)
    border = np.clip(pixels, -0.5 + 0.2, 127.5 - 0.2)  # half of one of RoMa's pixels inside the outer edge
    np.testing.assert_allclose(uv, border, atol=1e-4)
    assert confidence.shape == (1, 5) and confidence[0, 0] < 0.01 and confidence[0, 1] > 0.99


# ---- with the package


def crop(seed: int) -> NDArray[np.uint8]:
    """A smooth random picture."""
    noise = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    picture = F.interpolate(noise, (128, 128), mode="bicubic").clamp(0, 1)[0].permute(1, 2, 0)
    return (255 * picture).byte().numpy()


A, B, C = crop(1), crop(2), crop(3)


@pytest.fixture(scope="module")
def both() -> SimpleNamespace:
    """What the package answers as published, and then our matcher around the same model.

    Full size once; fewer tokens otherwise.
    """
    model = romav2.random_romav2()
    full = model.match(A, B)
    model.H_lr = model.W_lr = 96
    small = model.match(A, C)
    features = model.f(torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(0)))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return SimpleNamespace(full=full, small=small, features=features, shapes=shapes, ours=RomaV2Matcher(model=model))


PIXELS = np.random.default_rng(0).uniform(0, 127, (1, 200, 2))


def expected(published: dict[str, Tensor]) -> tuple[Any, Any]:
    """The published fields at PIXELS, through torch's own sampler."""
    grid = torch.from_numpy((2 * PIXELS + 1) / 128 - 1).float()[:, None]

    def sampled(field: Tensor) -> Any:
        maps = field.float().cpu().permute(0, 3, 1, 2)
        return F.grid_sample(maps, grid, padding_mode="border", align_corners=False)[:, :, 0].permute(0, 2, 1).numpy()

    return (sampled(published["warp_AB"]) + 1) * 64 - 0.5, sampled(published["overlap_AB"])[..., 0]


def assert_equal(got: tuple[Any, Any], published: dict[str, Tensor]) -> None:
    """Within 0.005 px and 1e-4: only the convolutions' order of summation differs (measured: 0.0005, 4e-6)."""
    uv, confidence = expected(published)
    np.testing.assert_allclose(got[0], uv, atol=5e-3)
    np.testing.assert_allclose(got[1], confidence, atol=1e-4)


@needs_package
@pytest.mark.long
def test_equals_the_published_match_at_full_size(both: SimpleNamespace) -> None:
    both.ours.model.H_lr = both.ours.model.W_lr = 320
    try:
        assert_equal(both.ours.match(both.ours.encode(A[None]), PIXELS, B[None]), both.full)
    finally:
        both.ours.model.H_lr = both.ours.model.W_lr = 96


@needs_package
@pytest.mark.long
def test_a_reference_serves_many_queries(both: SimpleNamespace) -> None:
    """RoMa v2 writes into the features it is given: the kept ones must stay as they were."""
    encodings = both.ours.encode(np.stack([A, B]))
    pixels = np.concatenate([PIXELS, PIXELS])
    uv, confidence = both.ours.match(encodings, pixels, np.stack([C, C]))
    assert_equal((uv[:1], confidence[:1]), both.small)
    again = both.ours.match(encodings[:1], PIXELS, C[None])
    np.testing.assert_array_equal(again[0], uv[:1])
    np.testing.assert_array_equal(again[1], confidence[:1])
    assert np.abs(uv[0] - uv[1]).max() > 1  # the reference matters


@needs_package
def test_skipped_blocks_change_no_bit(both: SimpleNamespace) -> None:
    image = torch.rand(1, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    assert len(both.ours._coarse.extract.blocks) == 18
    for ours, published in zip(both.ours._coarse(image), both.features, strict=True):
        assert torch.equal(ours, published)


@needs_package
def test_shapes_are_those_of_the_release(both: SimpleNamespace) -> None:
    """907 tensors whose bytes fill the released file but for its directory; DINOv3's are bfloat16 in it."""
    sizes = {name: int(np.prod(shape)) for name, shape in both.shapes.items()}
    half = sum(n for name, n in sizes.items() if name.startswith("f.") or name.endswith("rope_embed.periods"))
    counters = sum(name.endswith("num_batches_tracked") for name in sizes)
    stored = 2 * half + 8 * counters + 4 * (sum(sizes.values()) - half - counters)
    assert len(sizes) == 907
    assert 0 < 1_095_883_548 - stored < 907 * 400


@needs_package
def test_dinov3s_own_code_is_used_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / romav2.DINOV3
    folder.mkdir(parents=True)
    (folder / "hubconf.py").write_text(
        "import torch\n"
        "class Stand(torch.nn.Module):\n"
        "    def get_intermediate_layers(self, x, n):\n"
        "        return tuple(torch.full((1, 36, 1024), float(i)) for i in n)\n"
        "def dinov3_vitl16(pretrained): return Stand()\n"
    )
    features = romav2.dinov3()(torch.zeros(1, 3, 96, 96))
    assert [(x.shape, x[0, 0, 0, 0].item()) for x in features] == [((1, 6, 6, 1024), 11), ((1, 6, 6, 1024), 17)]
