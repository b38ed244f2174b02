"""The kernels against torch's own operations: all cases on a GPU, one on a CPU, in Triton's interpreter."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from massl.methods.base import StepHyper
from massl.nn.ema import move_towards
from massl.ops.kernels import update as update_kernels
from massl.training import optimizers as optimizer_module
from massl.training.optimizers import OptimizerSettings, build_optimizer, clip_each_gradient

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(), (1,), (3, 7), (0,), (8192,), (8193,), (3, 4095), (64, 3, 5, 5), (1, 1)]
BETAS, EPSILON = (0.9, 0.95), 1e-8
pytestmark = pytest.mark.kernel


def noise(shapes: Sequence[tuple[int, ...]], seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(DEVICE) for shape in shapes]


def number(value: float, dtype: torch.dtype | None) -> float | Tensor:
    return value if dtype is None else torch.tensor(value, dtype=dtype, device=DEVICE)


class State:
    """What clipped_adamw_ works on, and torch's own optimiser on copies of the same weights."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], betas: tuple[float, float] = BETAS) -> None:
        self.betas = betas
        self.weights = noise(shapes, seed=0)
        self.decays = [number % 2 == 0 for number in range(len(shapes))]
        self.exp_avgs, self.exp_avg_sqs = ([torch.zeros_like(weight) for weight in self.weights] for _ in range(2))
        self.steps = [torch.zeros((), device=DEVICE) for _ in shapes]
        self.truth = [nn.Parameter(weight.cpu().clone()) for weight in self.weights]
        groups = [
            {"params": [weight], "decays": decays} for weight, decays in zip(self.truth, self.decays, strict=True)
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=EPSILON, foreach=False)

    def step(
        self,
        gradients: list[Tensor],
        *,
        learning_rate: float | Tensor,
        weight_decay: float | Tensor,
        max_norm: float,
        first: int = 0,
    ) -> None:
        """By the kernel and by torch; the tensors before `first` have no gradient."""
        for parameter, gradient in zip(self.truth[first:], gradients[first:], strict=True):
            parameter.grad = gradient.cpu().clone()
        clip_each_gradient(self.truth, max_norm)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = float(learning_rate), float(weight_decay) * group["decays"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.kernel(gradients, learning_rate=learning_rate, weight_decay=weight_decay, max_norm=max_norm, first=first)

    def kernel(
        self,
        gradients: list[Tensor],
        *,
        learning_rate: float | Tensor,
        weight_decay: float | Tensor,
        max_norm: float,
        first: int = 0,
    ) -> None:
        torch._foreach_add_(self.steps[first:], 1.0)
        update_kernels.clipped_adamw_(
            self.weights[first:],
            gradients[first:],
            self.exp_avgs[first:],
            self.exp_avg_sqs[first:],
            self.steps[first:],
            torch.stack(torch._foreach_norm(gradients[first:])) if max_norm > 0.0 else None,
            self.decays[first:],
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            betas=self.betas,
            epsilon=EPSILON,
            max_norm=max_norm,
        )

    def assert_close(self) -> None:
        for ours, truth in zip(self.weights, self.truth, strict=True):
            torch.testing.assert_close(ours.cpu(), truth.detach(), rtol=1e-6, atol=1e-6)
        for ours, parameter in zip(self.exp_avgs, self.truth, strict=True):
            torch.testing.assert_close(ours.cpu(), self.optimizer.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-6)
        for ours, parameter in zip(self.exp_avg_sqs, self.truth, strict=True):
            torch.testing.assert_close(ours.cpu(), self.optimizer.state[parameter]["exp_avg_sq"], rtol=5e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, None])
@pytest.mark.parametrize("max_norm", [3.0, 0.0])
def test_steps_are_those_of_a_clip_and_torchs_adamw(max_norm: float, dtype: torch.dtype | None) -> None:
    state = State(SHAPES)
    for step in range(4):
        gradients = noise(SHAPES, seed=step + 1, scale=10.0 ** (step - 2))  # some clipped, some not
        before = copy.deepcopy(gradients)
        rate, decay = number(0.01 * (step + 1), dtype), number(0.3 / (step + 1), dtype)
        state.step(gradients, learning_rate=rate, weight_decay=decay, max_norm=max_norm)
        assert all(torch.equal(ours, old) for ours, old in zip(gradients, before, strict=True))
    state.assert_close()


def test_a_tensor_that_missed_a_step_keeps_its_own_count() -> None:
    state = State(SHAPES[2:])
    for step, first in enumerate([0, 2, 0]):
        state.step(noise(SHAPES[2:], seed=step), learning_rate=0.01, weight_decay=0.1, max_norm=1.0, first=first)
    assert [int(step) for step in state.steps] == [2, 2] + [3] * (len(SHAPES) - 4)
    state.assert_close()


def test_each_tensor_may_have_its_own_factor_on_the_learning_rate() -> None:
    shapes = [(3, 7), (5,), (2, 2)]
    scales, all_of = [1.0, 0.25, 0.01], State(shapes)
    alone = [State([shape]) for shape in shapes]
    for state, weight in zip(alone, all_of.weights, strict=True):
        state.weights = [weight.clone()]
        state.decays = [True]
    all_of.decays = [True] * 3
    gradients = noise(shapes, seed=1)
    norms = torch.stack(torch._foreach_norm(gradients))
    options = {"weight_decay": 0.3, "betas": BETAS, "epsilon": EPSILON, "max_norm": 1.0}
    torch._foreach_add_(all_of.steps, 1.0)
    moments = (all_of.exp_avgs, all_of.exp_avg_sqs, all_of.steps)
    update_kernels.clipped_adamw_(
        all_of.weights, gradients, *moments, norms, all_of.decays, rate_scales=scales, learning_rate=0.1, **options
    )
    for state, gradient, scale, ours in zip(alone, gradients, scales, all_of.weights, strict=True):
        state.kernel([gradient], learning_rate=0.1 * scale, weight_decay=0.3, max_norm=1.0)
        torch.testing.assert_close(ours, state.weights[0])


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)])
def test_extreme_averages_and_late_steps(betas: tuple[float, float]) -> None:
    state = State([(5, 3)], betas)
    state.step(noise([(5, 3)], seed=1), learning_rate=0.01, weight_decay=0.1, max_norm=0.0)
    for steps in (state.steps[0], state.optimizer.state[state.truth[0]]["step"]):
        steps.fill_(300_000.0)
    state.step(noise([(5, 3)], seed=2), learning_rate=0.01, weight_decay=0.1, max_norm=0.0)
    state.assert_close()


def test_tensors_that_begin_anywhere_are_updated_and_their_neighbours_are_not() -> None:
    """Slices of one buffer, as gradients of data-parallel training may be: aligned to 4 bytes only."""
    buffer, students = noise([(20_001,), (20_001,)], seed=3)
    expected = buffer.clone()
    places = [slice(1, 5000), slice(5003, 5004), slice(5005, 20_000)]
    for place in places:
        expected[place] = 0.25 * expected[place] + 0.75 * students[place]
    update_kernels.move_towards_([buffer[place] for place in places], [students[place] for place in places], 0.25)
    torch.testing.assert_close(buffer, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(buffer[[0, 5000, 5001, 5002, 5004, 20_000]], expected[[0, 5000, 5001, 5002, 5004, 20_000]])


def test_a_gradient_that_is_no_number_makes_its_whole_tensor_none() -> None:
    """As the clip by torch does: nothing may hide it."""
    state = State([(3,), (3,)])
    gradients = noise([(3,), (3,)], seed=1)
    gradients[0][1] = float("nan")
    state.step(gradients, learning_rate=0.1, weight_decay=0.0, max_norm=1.0)
    assert state.weights[0].isnan().all()
    assert state.truth[0].isnan().all()
    assert state.weights[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, None])
@pytest.mark.parametrize("momentum", [0.992, 0.0, 0.999987, 1.0])
def test_teachers_move_by_one_minus_momentum(momentum: float, dtype: torch.dtype | None) -> None:
    teachers, students = noise(SHAPES, seed=0), noise(SHAPES, seed=1)
    expected = [nn.ParameterList(tensor.cpu().clone() for tensor in tensors) for tensors in (teachers, students)]
    exact = number(momentum, dtype)
    move_towards(*expected, momentum=exact.cpu() if isinstance(exact, Tensor) else exact)
    before = copy.deepcopy(students)
    update_kernels.move_towards_(teachers, students, exact)
    for ours, truth in zip(teachers, expected[0], strict=True):
        torch.testing.assert_close(ours.cpu(), truth.detach(), rtol=2e-7, atol=1e-7)
    assert all(torch.equal(ours, old) for ours, old in zip(students, before, strict=True))


def test_nothing_to_update_is_no_error() -> None:
    update_kernels.move_towards_([torch.zeros(0, device=DEVICE)], [torch.zeros(0, device=DEVICE)], 0.5)


def steps_by_torch_and_by_device(
    layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch | None
) -> tuple[nn.Module, nn.Module]:
    """Six steps of two optimisers, on the CPU and on the device; halfway each goes on from the other's checkpoint."""
    torch.manual_seed(0)
    settings = OptimizerSettings(clip_norm=3.0)
    on_cpu = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(40, 300)).to(memory_format=layout)
    modules = (on_cpu, copy.deepcopy(on_cpu).to(DEVICE))
    optimizers = [build_optimizer(module, settings) for module in modules]
    for step in range(6):
        if step == 3:
            stored = [optimizer.portable_state() for optimizer in optimizers]
            optimizers = [build_optimizer(module, settings) for module in modules]
            optimizers[0].load_portable_state(stored[1])
            optimizers[1].load_portable_state(stored[0])
        gradients = [torch.randn(parameter.shape) * 0.5 for parameter in on_cpu.parameters()]
        hyper = StepHyper(
            step=step, epoch=0, learning_rate=0.01, weight_decay=0.1, own={"momentum": 0.9, "teacher_temperature": 0.07}
        )
        for module, optimizer in zip(modules, optimizers, strict=True):
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = torch.empty_like(parameter).copy_(gradient)  # laid out as the parameter is
            if monkeypatch is not None:
                monkeypatch.setattr(
                    optimizer_module, "fits_update_kernels", lambda _, by_kernel=module is not on_cpu: by_kernel
                )
            optimizer.set_hyper(hyper)
            optimizer.step()
            optimizer.zero_grad()
    return modules


def test_the_optimizer_by_kernel_steps_as_torchs_and_they_continue_each_others_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_torch, by_kernel = steps_by_torch_and_by_device(torch.contiguous_format, monkeypatch)
    for ours, truth in zip(by_kernel.parameters(), by_torch.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), truth, rtol=1e-6, atol=1e-6)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_recorded_update_is_replayed_with_new_numbers_and_gradients() -> None:
    shapes = [shape for shape in SHAPES if shape != (0,)]
    state, teachers = State(shapes), noise(shapes, seed=5)
    truth = nn.ParameterList(teacher.cpu().clone() for teacher in teachers)
    rate, decay, momentum = (
        torch.zeros((), dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.float64, torch.float64)
    )
    gradients = noise(shapes, seed=6)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def set_numbers(step: int) -> None:
        rate.fill_(0.01 / (step + 1))
        decay.fill_(0.1 * step)
        momentum.fill_(1.0 - 0.1 / (step + 1))

    def move_truth(step: int) -> None:
        move_towards(truth, nn.ParameterList(state.truth), momentum=1.0 - 0.1 / (step + 1))

    set_numbers(0)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        state.step(gradients, learning_rate=rate, weight_decay=decay, max_norm=3.0)
        update_kernels.move_towards_(teachers, state.weights, momentum)
        move_truth(0)
    with torch.cuda.graph(graph, stream=stream):
        # in the graph's own memory, as gradients of a recorded backward pass are
        recorded = [gradient * 1.0 for gradient in gradients]
        state.kernel(recorded, learning_rate=rate, weight_decay=decay, max_norm=3.0)
        update_kernels.move_towards_(teachers, state.weights, momentum)
    kernel, state.kernel = state.kernel, lambda *_, **__: None  # type: ignore[method-assign]
    for step in range(1, 5):
        set_numbers(step)
        for gradient, value in zip(gradients, noise(shapes, seed=10 + step, scale=step), strict=True):
            gradient.copy_(value)
        graph.replay()
        state.step(gradients, learning_rate=rate, weight_decay=decay, max_norm=3.0)
        move_truth(step)
        torch.empty(64, dtype=torch.int64, pin_memory=True).fill_(-1)  # pinned memory that others use meanwhile
    state.kernel = kernel  # type: ignore[method-assign]
    state.assert_close()
    for ours, theirs in zip(teachers, truth, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_a_recording_without_an_ordinary_update_before_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_kernels, "_spare", {})
    teachers, students, graph = noise([(30,)], seed=0), noise([(30,)], seed=1), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        students[0].mul_(2.0)  # torch warns of a graph that holds nothing
        with pytest.raises(RuntimeError, match="run it once"):
            update_kernels.move_towards_(teachers, students, 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_an_optimizer_on_the_gpu_steps_as_on_the_cpu_in_any_layout(layout: torch.memory_format) -> None:
    by_torch, on_gpu = steps_by_torch_and_by_device(layout, None)
    for ours, truth in zip(on_gpu.parameters(), by_torch.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_teacher_on_the_gpu_moves_whatever_its_type(dtype: torch.dtype) -> None:
    teacher, student = (nn.Linear(30, 20, dtype=dtype).to(DEVICE) for _ in range(2))
    expected = [
        (0.9 * mine + 0.1 * its).detach() for mine, its in zip(teacher.parameters(), student.parameters(), strict=True)
    ]
    move_towards(teacher, student, momentum=torch.tensor(0.9, dtype=torch.float64, device=DEVICE))
    torch.testing.assert_close([parameter.detach() for parameter in teacher.parameters()], expected)
    with pytest.raises(RuntimeError):
        move_towards(teacher, nn.Linear(31, 20, dtype=dtype, device=DEVICE), momentum=0.5)
