"""The fused block against timm's own modules: all shapes on a GPU, one on a CPU, in Triton's interpreter."""

from collections.abc import Callable, Sequence

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from massl.nn.drop_path import KeyedDropPath
from massl.ops.kernels.attention import SequenceGroup as Group
from massl.ops.kernels.attention import packed_attention
from massl.ops.kernels.attention_backward import packed_attention_backward
from massl.ops.kernels.fused_block import BlockWeights, Operands, Stream, attend_from_class, settle, transformer_block
from massl.ops.kernels.gelu import bias_gelu, bias_gelu_backward
from massl.ops.kernels.norm import add_norm, add_norm_backward

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHORT = (Group(2, 5), Group(1, 9))
pytestmark = pytest.mark.kernel


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def leaf(*shape: int, seed: int) -> Tensor:
    return noise(*shape, seed=seed).requires_grad_()


def num_tokens_of(groups: Sequence[Group]) -> int:
    return sum(group.num_sequences * group.length for group in groups)


def sequences_of(
    rows: Tensor, groups: Sequence[Group]
) -> list[Tensor]:  # [T, ...] -> each [num_sequences, length, ...]
    parts = torch.split(rows, [group.num_sequences * group.length for group in groups])
    return [part.reshape(*group, *rows.shape[1:]) for part, group in zip(parts, groups, strict=True)]


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


class World:
    """Two of timm's blocks and a norm, tokens of several sequences, and the draws of stochastic depth."""

    def __init__(self, dim: int, num_heads: int, groups: Sequence[Group], *, with_scales: bool = True) -> None:
        self.groups, self.num_heads, self.with_scales = groups, num_heads, with_scales
        self.blocks = [Block(dim, num_heads, qkv_bias=True).to(DEVICE) for _ in range(2)]
        self.norm = nn.LayerNorm(dim).to(DEVICE)
        modules = nn.ModuleList([*self.blocks, self.norm])
        self.parameters = dict(modules.named_parameters())
        with torch.no_grad():
            for seed, parameter in enumerate(modules.parameters()):
                parameter.copy_(noise(*parameter.shape, seed=seed) * (0.2 if parameter.dim() > 1 else 0.4))
        self.tokens = noise(num_tokens_of(groups), dim, seed=100)
        # Two branches in each block; about a third of them dropped.
        num_sequences = sum(group.num_sequences for group in groups)
        self.scales = (noise(4, num_sequences, seed=101) > -0.4) * 1.5
        self.scales[:, 0] = torch.tensor([0.0, 1.5, 1.5, 0.0])

    def truth(self) -> tuple[Tensor, Tensor]:
        """Stream and norm after both blocks, by timm."""
        first, finished = 0, []
        for sequences in sequences_of(self.tokens, self.groups):
            scales = self.scales[:, first : first + len(sequences)]
            for number, block in enumerate(self.blocks):
                for name, branch in (("drop_path1", 2 * number), ("drop_path2", 2 * number + 1)):
                    drop_path = KeyedDropPath(0.5, layer=branch)
                    drop_path.scales = scales[branch] if self.with_scales else None
                    setattr(block, name, drop_path)
                sequences = block(sequences)
            finished.append(sequences.flatten(0, 1))
            first += len(sequences)
        stream = torch.cat(finished)
        return stream, self.norm(stream)

    def fused(self, *, memory_lean: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The same, by the kernels."""
        counts, lengths = zip(*self.groups, strict=True)
        per_sequence = torch.tensor(lengths).repeat_interleave(torch.tensor(counts)).to(DEVICE)
        scales: Sequence[Tensor | None] = (
            list(self.scales.repeat_interleave(per_sequence, dim=1)) if self.with_scales else [None] * 4
        )
        stream = Stream(self.tokens.to(dtype))
        for number, block in enumerate(self.blocks):
            weights = weights_of(block)
            stream = transformer_block(
                stream,
                weights,
                Operands(*(getattr(weights, name).detach().to(dtype) for name in Operands._fields)),
                attention_scale=scales[2 * number],
                branch_scale=scales[2 * number + 1],
                groups=self.groups,
                num_heads=self.num_heads,
                epsilons=(block.norm1.eps, block.norm2.eps),
                memory_lean=memory_lean,
            )
        return settle(stream, self.norm.weight, self.norm.bias, epsilon=self.norm.eps, dtype=dtype)

    def with_gradients(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Both results, and the gradients of everything for a weighted sum of them."""
        self.tokens.requires_grad_()
        results = compute()
        total = sum(
            (result.float() * noise(*result.shape, seed=102 + number)).sum() for number, result in enumerate(results)
        )
        inputs = {"tokens": self.tokens, **self.parameters}
        assert isinstance(total, Tensor)
        gradients = torch.autograd.grad(total, list(inputs.values()))
        return {
            "stream": results[0].detach(),
            "normed": results[1].detach(),
            **dict(zip(inputs, gradients, strict=True)),
        }


def weights_of(block: Block) -> BlockWeights:
    attention, mlp = block.attn, block.mlp
    layers = (block.norm1, attention.qkv, attention.proj, block.norm2, mlp.fc1, mlp.fc2)
    return BlockWeights(*(parameter for layer in layers for parameter in (layer.weight, layer.bias)))


@pytest.mark.usefixtures("norm_gradients_in_large_steps")
@pytest.mark.parametrize(
    ("dim", "num_heads", "groups"),
    [
        (48, 3, (Group(2, 5), Group(1, 65), Group(1, 197))),  # a width that is no power of two
        (32, 1, (Group(1, 37), Group(2, 130), Group(1, 260))),
    ],
    ids=["three heads of 16", "a head of 32"],
)
def test_two_blocks_are_those_of_timm_in_values_and_gradients(
    dim: int, num_heads: int, groups: Sequence[Group]
) -> None:
    world = World(dim, num_heads, groups)
    truth, ours = world.with_gradients(world.truth), world.with_gradients(world.fused)
    assert len(truth) == 3 + 2 * 12 + 2
    for name, value in truth.items():
        assert relative_error(ours[name], value) < 1e-5, name


@pytest.mark.usefixtures("norm_gradients_in_large_steps")
def test_without_stochastic_depth_two_blocks_are_those_of_timm() -> None:
    """Then stream and branch share one gradient tensor; nothing may add to it twice."""
    world = World(32, 2, SHORT, with_scales=False)
    truth, ours = world.with_gradients(world.truth), world.with_gradients(world.fused)
    for name, value in truth.items():
        assert relative_error(ours[name], value) < 1e-5, name


@pytest.mark.usefixtures("norm_gradients_in_large_steps")
def test_the_memory_lean_block_gives_the_same_bits_and_keeps_less() -> None:
    world = World(32, 1, (Group(2, 5), Group(1, 37)))
    results, num_kept = [], []
    for memory_lean in (False, True):
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: (kept.update({tensor.data_ptr(): tensor.numel()}), tensor)[1],
            lambda tensor: tensor,
        ):
            results.append(world.with_gradients(lambda memory_lean=memory_lean: world.fused(memory_lean=memory_lean)))
        num_kept.append(sum(kept.values()))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name
    # Per block and token: one sum instead of two, queries, keys, values, the attention's output and the hidden layer of
    # 4 C.
    assert num_kept[0] - num_kept[1] > 2 * len(world.tokens) * 8 * 32


def test_without_a_gradient_the_block_gives_the_same_bits() -> None:
    world = World(32, 2, SHORT)
    with torch.no_grad():
        without = world.fused()
    world.tokens.requires_grad_()
    for ours, truth in zip(without, world.fused(), strict=True):
        assert not ours.requires_grad
        assert torch.equal(ours, truth)


@pytest.mark.usefixtures("norm_gradients_in_large_steps")
def test_a_sum_that_has_not_been_taken_yet_is_as_good_as_the_sum() -> None:
    """Values, and the gradients of each of its parts."""
    world = World(32, 2, SHORT)
    num_tokens = len(world.tokens)
    parts = [leaf(num_tokens, 32, seed=1), leaf(num_tokens, 32, seed=2), leaf(32, seed=3)]
    x, branch, bias = parts
    scale = (noise(num_tokens, seed=4) > 0) * 2.0
    streams = [Stream(x, branch, bias, scale), Stream(x + scale[:, None] * (branch + bias))]
    weights = weights_of(world.blocks[0])
    operands = Operands(*(getattr(weights, name).detach() for name in Operands._fields))
    results = []
    for stream in streams:
        after = transformer_block(
            stream,
            weights,
            operands,
            attention_scale=None,
            branch_scale=None,
            groups=SHORT,
            num_heads=2,
            epsilons=(1e-6, 1e-6),
        )
        assert after.branch is not None
        assert after.bias is weights.fc2_bias
        loss = (after.x * noise(num_tokens, 32, seed=5)).sum() + (after.branch * noise(num_tokens, 32, seed=6)).sum()
        results.append([after.x.detach(), after.branch.detach(), *torch.autograd.grad(loss, parts)])
    for ours, truth in zip(*results, strict=True):
        assert relative_error(ours, truth) < 1e-5


@pytest.mark.parametrize("with_branch", [True, False])
def test_settling_adds_and_normalises(with_branch: bool) -> None:
    """Here the backward kernel takes one row at a time, as it does on a GPU; 70 rows are two programs of it."""
    num_tokens, dim = 70, 24
    x, branch, bias, weight, shift = (
        leaf(*shape, seed=seed) for seed, shape in enumerate([(num_tokens, dim)] * 2 + [(dim,)] * 3)
    )
    scale = (noise(num_tokens, seed=9) > 0) * 2.0
    if with_branch:
        stream, total = Stream(x, branch, bias, scale), x + scale[:, None] * (branch + bias)
        inputs = [x, branch, bias, weight, shift]
    else:
        stream, total, inputs = Stream(x), x * 1.0, [x, weight, shift]
    # a large epsilon: it must be the one that was given
    expected = (total, layer_norm(total, (dim,), weight, shift, 1e-3))
    ours = settle(stream, weight, shift, epsilon=1e-3, dtype=torch.float32)
    results = []
    for pair in (ours, expected):
        loss = (pair[0] * noise(num_tokens, dim, seed=10)).sum() + (pair[1] * noise(num_tokens, dim, seed=11)).sum()
        results.append([*(value.detach() for value in pair), *torch.autograd.grad(loss, inputs)])
    for value, truth in zip(*results, strict=True):
        assert relative_error(value, truth) < 5e-6


def test_in_16_bits_the_norm_is_that_of_the_rounded_sum() -> None:
    x, branch, bias, weight, shift = (
        noise(*shape, seed=seed) for seed, shape in enumerate([(9, 24)] * 2 + [(24,)] * 3)
    )
    x, branch = x.bfloat16(), branch.bfloat16()
    total, normed, mean, rstd = add_norm(x, branch, bias, None, weight, shift, epsilon=1e-6, dtype=torch.bfloat16)
    assert total.dtype == normed.dtype == torch.bfloat16
    assert relative_error(total, x.double() + branch.double() + bias) < 5e-3
    expected = layer_norm(total.float(), (24,), weight, shift, 1e-6)
    assert relative_error(normed, expected) < 5e-3
    torch.testing.assert_close(mean, total.float().mean(dim=1))
    torch.testing.assert_close(rstd, (total.float().var(dim=1, correction=0) + 1e-6).rsqrt())
    *_, again = add_norm_backward(normed, None, total, mean, rstd, None, weight, shift)
    assert relative_error(again, expected) < 5e-3


def test_gelu_of_a_biased_input_and_its_gradients_are_exact_to_a_millionth_even_far_out() -> None:
    values = (
        torch.cat([torch.linspace(-12.0, 12.0, 2 * 131 - 3), torch.tensor([-90.0, 0.0, 90.0])]).view(2, 131).to(DEVICE)
    )
    x, bias = values.clone().requires_grad_(), leaf(131, seed=1)
    grad = noise(2, 131, seed=2).sign()
    expected = gelu(x.double() + bias.double())
    grad_x, grad_bias = torch.autograd.grad(expected, [x, bias], grad.double())
    torch.testing.assert_close(bias_gelu(values, bias.detach()).double(), expected, rtol=1e-6, atol=1e-6)
    ours_x, again, ours_bias = bias_gelu_backward(values, bias.detach(), grad)
    torch.testing.assert_close(again.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours_x, grad_x, rtol=0, atol=6e-7)
    torch.testing.assert_close(ours_bias, grad_bias, rtol=0, atol=1.2e-6)


def attention_by_torch(qkv: Tensor, groups: Sequence[Group], num_heads: int) -> Tensor:  # [T, 3 * C] -> [T, C]
    finished = []
    for sequences in sequences_of(qkv, groups):
        query, key, value = sequences.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
        finished.append(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(finished)


# A token, whole tiles, one more than a whole tile, and each of the three backward kernels at the ends of its range.
EDGES = (Group(2, 1), Group(1, 64), Group(1, 128), Group(1, 129), Group(1, 256), Group(2, 257))


def test_attention_within_sequences_is_that_of_torch_where_tiles_end_too() -> None:
    qkv = leaf(num_tokens_of(EDGES), 3 * 32, seed=0)
    grad = noise(len(qkv), 32, seed=1)
    expected = attention_by_torch(qkv, EDGES, 2)
    (grad_qkv,) = torch.autograd.grad(expected, qkv, grad)
    out, lse = packed_attention(qkv.detach(), EDGES, 2)
    ours, ours_sum = packed_attention_backward(qkv.detach(), out, lse, grad, EDGES, 2)
    for value, truth in zip(sequences_of(out, EDGES), sequences_of(expected.detach(), EDGES), strict=True):
        assert relative_error(value, truth) < 5e-6
    for value, truth in zip(sequences_of(ours, EDGES), sequences_of(grad_qkv, EDGES), strict=True):
        assert relative_error(value, truth) < 1e-5
    torch.testing.assert_close(ours_sum, grad_qkv.sum(dim=0), rtol=1e-5, atol=2e-4)


# NumPy warns in the interpreter about rows that are masked afterwards.
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_gradients_stay_finite_when_a_query_is_far_from_all_keys() -> None:
    """Logits of -200: a key beyond the end has logit 0 and, divided by the sum over the others, infinite weight."""
    groups = [Group(1, length) for length in (60, 120, 130, 260)]  # for each of the backward kernels
    qkv = noise(num_tokens_of(groups), 3 * 16, seed=0) * 0.1
    qkv[:, :16] += 7.0
    qkv[:, 16:32] -= 7.0
    qkv.requires_grad_()
    grad = noise(len(qkv), 16, seed=1)
    (expected,) = torch.autograd.grad(attention_by_torch(qkv.double(), groups, 1), qkv, grad.double())
    out, lse = packed_attention(qkv.detach(), groups, 1)
    ours, _ = packed_attention_backward(qkv.detach(), out, lse, grad, groups, 1)
    for value, truth in zip(sequences_of(ours, groups), sequences_of(expected, groups), strict=True):
        assert relative_error(value, truth) < 1e-3


@pytest.mark.parametrize("num_heads", [1, 2], ids=["heads of 32", "heads of 16"])
def test_attention_from_the_class_token_is_that_of_torch(num_heads: int) -> None:
    groups = (Group(2, 1), Group(2, 5), Group(1, 37), Group(1, 197), Group(1, 260))
    q, kv = leaf(7, 32, seed=0), leaf(num_tokens_of(groups), 64, seed=1)
    finished, first = [], 0
    for pairs in sequences_of(kv, groups):
        key, value = pairs.unflatten(-1, (2, num_heads, -1)).permute(2, 0, 3, 1, 4)
        query = q[first : first + len(pairs)].view(len(pairs), num_heads, 1, -1)
        finished.append(scaled_dot_product_attention(query, key, value).reshape(len(pairs), 32))
        first += len(pairs)
    expected, ours, grad = torch.cat(finished), attend_from_class(q, kv, groups, num_heads), noise(7, 32, seed=2)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    for value, truth in zip(
        torch.autograd.grad(ours, [q, kv], grad), torch.autograd.grad(expected, [q, kv], grad), strict=True
    ):
        assert relative_error(value, truth) < 1e-5


def test_a_sequence_does_not_influence_the_others() -> None:
    world = World(32, 1, (Group(2, 5), Group(2, 65), Group(1, 9)))
    with torch.no_grad():
        before = world.fused()
        changed = slice(10 + 65, 10 + 130)  # the second sequence of 65 tokens
        world.tokens[changed] = noise(65, 32, seed=7) * 100.0
        after = world.fused()
    same = torch.ones(len(world.tokens), dtype=torch.bool)
    same[changed] = False
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[same], old[same])
        assert (new[~same] != old[~same]).any(dim=1).all()


def test_what_stochastic_depth_drops_leaves_the_stream_as_it_was() -> None:
    world = World(32, 2, SHORT)
    world.scales[:, 1] = 0.0
    with torch.no_grad():
        stream, _ = world.fused()
    assert torch.equal(stream[5:10], world.tokens[5:10])
    assert (stream[:5] != world.tokens[:5]).any(dim=1).all()


def test_attention_gives_the_same_bits_in_whatever_order_the_runs_are_packed() -> None:
    groups = (Group(2, 5), Group(1, 130), Group(1, 257))
    qkv, grad = noise(num_tokens_of(groups), 3 * 16, seed=0), noise(num_tokens_of(groups), 16, seed=1)
    out, lse = packed_attention(qkv, groups, 1)
    grad_qkv, _ = packed_attention_backward(qkv, out, lse, grad, groups, 1)
    order = (2, 0, 1)
    other_groups = [groups[number] for number in order]

    def reordered(rows: Tensor) -> Tensor:
        parts = sequences_of(rows, groups)
        return torch.cat([parts[number].flatten(0, 1) for number in order])

    other_out, other_lse = packed_attention(reordered(qkv), other_groups, 1)
    other_grad_qkv, _ = packed_attention_backward(
        reordered(qkv), other_out, other_lse, reordered(grad), other_groups, 1
    )
    assert torch.equal(other_out, reordered(out))
    assert torch.equal(other_lse[0], reordered(lse[0]))
    assert torch.equal(other_grad_qkv, reordered(grad_qkv))


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "num_heads"), [(64, 4), (64, 2), (192, 3)], ids=["16", "32", "64"])
def test_in_bfloat16_results_and_gradients_are_near_those_of_timm_in_float32(dim: int, num_heads: int) -> None:
    world = World(
        dim, num_heads, (Group(3, 5), Group(5, 37), Group(2, 65), Group(2, 130), Group(4, 197), Group(2, 260))
    )
    truth = world.with_gradients(world.truth)
    ours = world.with_gradients(lambda: world.fused(dtype=torch.bfloat16))
    lean = world.with_gradients(lambda: world.fused(dtype=torch.bfloat16, memory_lean=True))
    for name, value in truth.items():
        assert relative_error(ours[name], value) < 0.05, name
        assert torch.equal(lean[name], ours[name]), name
