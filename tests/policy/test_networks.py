"""The three networks: exact sizes, masking bit for bit, equality with the straightforward form."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcorr.bench.networks import random_condition
from memcorr.bench.straightforward import from_ours
from memcorr.policy.condition import Condition
from memcorr.policy.networks.transformer import ActionTransformer, VisualTransformer, linear, parameter_total
from memcorr.policy.networks.unet import VisualUNet


def some_input(size: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, 16, 4, generator=g), torch.randint(0, 100, (size,), generator=g)


@pytest.mark.parametrize(
    ("network", "total"), [(ActionTransformer, 1_612_804), (VisualTransformer, 1_618_636), (VisualUNet, 1_556_228)]
)
def test_parameter_totals_are_the_papers(network: type[nn.Module], total: int) -> None:
    assert parameter_total(network()) == total


def test_visual_tokenizer_has_5832_parameters_before_the_same_core() -> None:
    own = dict(VisualTransformer().named_parameters())
    core = dict(ActionTransformer().named_parameters())
    assert {name: p.shape for name, p in own.items() if name in core} == {name: p.shape for name, p in core.items()}
    assert sum(p.numel() for name, p in own.items() if name not in core) == 5_832


@pytest.mark.parametrize("everything", [False, True])
def test_tokens_that_do_not_count_cannot_reach_the_output(everything: bool) -> None:
    """Bit for bit, for invalid tokens and for a wholly dropped condition."""
    network, condition, z = ActionTransformer(), random_condition(4), some_input(4)
    if everything:
        condition = condition.drop()
    assert condition.tokens is not None
    hidden = ~condition.keep[..., None]
    assert hidden.any()
    other = dataclasses.replace(condition, tokens=torch.where(hidden, 50 * torch.randn(4, 64, 18), condition.tokens))
    with torch.no_grad():
        assert torch.equal(network(*z, condition), network(*z, other))
        context = network.encode(condition.tokens, condition.keep)
        assert context.isfinite().all()  # also of samples without a token
        a = network.denoise(*z, condition.state, context, condition.keep)
        b = network.denoise(
            *z, condition.state, torch.where(hidden, torch.randn_like(context), context), condition.keep
        )
        assert torch.equal(a, b)


def test_dropped_conditions_send_no_gradient() -> None:
    network, z = ActionTransformer(), some_input(4)
    network(*z, random_condition(4).drop()).square().mean().backward()
    encoder = [p.grad for p in network.encoder.parameters()]
    assert all(g is None or not g.any() for g in encoder)
    state = network.get_parameter("state_mlp.0.weight").grad
    assert state is not None and state.any()


def test_condition_matters_when_it_is_there() -> None:
    network, condition, z = ActionTransformer(), random_condition(4), some_input(4)
    with torch.no_grad():
        assert (network(*z, condition) - network(*z, condition.drop())).abs().amax(dim=(1, 2)).min() > 1e-4


def test_a_mixed_batch_equals_its_parts() -> None:
    """Dropped samples take another path through the batch; everybody's result stays."""
    network, condition, (z_t, t) = ActionTransformer(), random_condition(6), some_input(6)
    dropped = torch.tensor([False, True, False, False, True, False])
    mixed = condition.drop(dropped)
    with torch.no_grad():
        together = network(z_t, t, mixed)
        alone = torch.cat([network(z_t[i : i + 1], t[i : i + 1], mixed[i : i + 1]) for i in range(6)])
    assert torch.allclose(together, alone, atol=1e-5)


def test_ours_equals_the_straightforward_network_and_its_gradients() -> None:
    network, condition, z = ActionTransformer(), random_condition(6).drop(torch.arange(6) == 2), some_input(6)
    theirs = from_ours(network)
    for model in (network, theirs):
        model(*z, condition).square().mean().backward()
    with torch.no_grad():
        assert torch.allclose(network(*z, condition), theirs(*z, condition), atol=1e-5)
    for block, other in zip(network.blocks, theirs.blocks, strict=True):
        ours = block.get_parameter("cross_attention.kv.weight").grad
        packed = other.get_parameter("cross_attention.in_proj_weight").grad
        assert ours is not None and packed is not None and torch.allclose(ours, packed[128:], atol=1e-6)
        ours, packed = (m.get_parameter(n).grad for m, n in ((block, "mlp.expand.weight"), (other, "mlp.0.weight")))
        assert ours is not None and packed is not None and torch.allclose(ours, packed, atol=1e-6)


@pytest.mark.parametrize("network", [VisualTransformer, VisualUNet])
def test_visual_networks_see_image_task_and_state(network: type[nn.Module]) -> None:
    model, condition, z = network().eval(), random_condition(2), some_input(2)
    condition = dataclasses.replace(condition, keep=torch.ones(2, 64, dtype=torch.bool))
    assert condition.image is not None and condition.task is not None
    changes = {"image": condition.image + 0.5, "task": condition.task.flip(0), "state": condition.state + 0.5}
    with torch.no_grad():
        before = model(*z, condition)
        assert before.shape == (2, 16, 4)
        for name, value in changes.items():
            changed = dataclasses.replace(condition, **{name: value})
            assert not torch.allclose(model(*z, changed), before, atol=1e-6), name


@pytest.mark.parametrize("network", [VisualTransformer, VisualUNet])
def test_a_visual_network_learns_to_use_its_task(network: type[nn.Module]) -> None:
    """Same image, state, noisy chunk and step, opposite targets: only the task code can tell them apart."""
    torch.manual_seed(0)
    model, (z_t, t) = network(), some_input(1)
    one = dataclasses.replace(random_condition(1), keep=torch.ones(1, 64, dtype=torch.bool))
    both = [dataclasses.replace(one, task=torch.eye(2)[[task]]) for task in (0, 1)]
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(40):
        chunks = [model(z_t, t, condition) for condition in both]
        loss = (chunks[0] - 1).square().mean() + (chunks[1] + 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.3, "2 is the best without the task"


def test_guidance_removes_image_and_task_but_not_the_state() -> None:
    model, condition, z = VisualTransformer(), random_condition(2).drop(), some_input(2)
    assert condition.image is not None and condition.task is not None
    other = dataclasses.replace(condition, image=-condition.image, task=condition.task.flip(0))
    with torch.no_grad():
        assert torch.equal(model(*z, condition), model(*z, other))
        assert not torch.equal(model(*z, condition), model(*z, dataclasses.replace(condition, state=-condition.state)))


def test_conditions_slice() -> None:
    condition = random_condition(3)
    for f in dataclasses.fields(Condition):
        assert torch.equal(getattr(condition, f.name)[1:], getattr(condition[1:], f.name))


@pytest.mark.parametrize(("d_in", "d_out"), [(128, 512), (512, 128)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_of_training_and_their_gradients_are_pytorchs(d_in: int, d_out: int, with_bias: bool) -> None:
    g = torch.Generator().manual_seed(3)
    h, weight, bias = (torch.randn(shape, generator=g) for shape in ((7, 5, d_in), (d_out, d_in), (d_out,)))
    plus, back = torch.randn(7, 5, d_out, generator=g), torch.randn(7, 5, d_out, generator=g)

    def outcome(dtype: torch.dtype, ours: bool) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (h, weight, plus, *([bias] if with_bias else []))]
        b = leaves[3] if with_bias else None
        x, w, added = leaves[:3]
        y = linear(x, w, b, added) if ours else F.linear(x, w, b) + added
        y.backward(back.to(dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    exact = outcome(torch.float64, ours=False)
    assert len(exact) == 5 if with_bias else 4
    for ours, theirs, true in zip(outcome(torch.float32, True), outcome(torch.float32, False), exact, strict=True):
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max()


def test_products_leave_frozen_weights_without_a_gradient() -> None:
    h, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    linear(h, weight).sum().backward()
    assert weight.grad is None
    assert torch.allclose(h.grad, weight.sum(0).expand(3, 8), atol=1e-6)  # type: ignore[arg-type]
