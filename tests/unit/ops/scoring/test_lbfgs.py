import math
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from massl.ops.scoring import lbfgs
from massl.ops.scoring.lbfgs import Objective, minimise


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_autograd(function: Callable[[Tensor], Tensor]) -> Objective:
    def objective(point: Tensor) -> tuple[Tensor, Tensor]:
        variable = point.detach().requires_grad_()
        value = function(variable)
        (gradient,) = torch.autograd.grad(value, variable)
        return value.detach(), gradient

    return objective


def gradient_below(norm: float) -> Callable[[float, float], bool]:
    return lambda value, gradient_norm: gradient_norm <= norm


def rosenbrock(point: Tensor) -> Tensor:
    return (1.0 - point[0]) ** 2 + 100.0 * (point[1] - point[0] ** 2) ** 2


@given(st.integers(1, 12), st.integers(0, 10_000), st.floats(0.0, 3.0))
@settings(max_examples=40)
def test_the_minimum_of_a_quadratic_is_where_linear_algebra_says(dim: int, seed: int, log_condition: float) -> None:
    basis = torch.linalg.qr(draw(dim, dim, seed=seed))[0]
    matrix = basis @ torch.diag(torch.logspace(-log_condition, 0.0, dim, dtype=torch.float64)) @ basis.T
    offset = draw(dim, seed=seed + 1)
    found = minimise(
        by_autograd(lambda x: 0.5 * x @ matrix @ x - offset @ x),
        draw(dim, seed=seed + 2),
        is_converged=gradient_below(1e-9),
        max_iterations=500,
    )
    assert found.converged
    assert found.num_iterations <= 5 * dim + 10
    torch.testing.assert_close(found.point, torch.linalg.solve(matrix, offset), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_pairs", [0, 1, 4])
def test_the_two_loops_multiply_by_the_matrix_of_bfgs(num_pairs: int) -> None:
    dim = 6
    scales = torch.linspace(0.5, 3.0, dim, dtype=torch.float64)
    curved = draw(dim, dim, seed=3)
    steps = [draw(dim, seed=10 + number) for number in range(num_pairs)]
    changes = [(curved @ curved.T + torch.eye(dim, dtype=torch.float64)) @ step for step in steps]
    inverse = torch.diag(1.0 / scales)
    if num_pairs:
        inverse = inverse * (steps[-1] @ changes[-1]) / (changes[-1] @ (changes[-1] / scales))
    for step, change in zip(steps, changes, strict=True):  # Nocedal & Wright (2006), equation 7.16
        turn = torch.eye(dim, dtype=torch.float64) - torch.outer(change, step) / (step @ change)
        inverse = turn.T @ inverse @ turn + torch.outer(step, step) / (step @ change)
    pairs = deque(lbfgs._Pair(step, change, float(step @ change)) for step, change in zip(steps, changes, strict=True))
    gradient = draw(dim, seed=4)
    torch.testing.assert_close(
        lbfgs._times_inverse_hessian(gradient, pairs, lambda tensor: tensor / scales), inverse @ gradient
    )


def test_the_next_trial_is_at_the_lowest_point_of_the_cubic() -> None:
    def at(step: float) -> lbfgs._Trial:  # (t - 2)² (t + 4), lowest at 2
        slope = 2.0 * (step - 2.0) * (step + 4.0) + (step - 2.0) ** 2
        return lbfgs._Trial(step, (step - 2.0) ** 2 * (step + 4.0), slope, torch.empty(0), torch.empty(0))

    assert lbfgs._between(at(0.5), at(3.5)) == pytest.approx(2.0)
    assert lbfgs._between(at(1.0), at(11.0)) == pytest.approx(2.0)
    assert lbfgs._between(at(1.9), at(11.9)) == pytest.approx(2.9)  # kept away from the ends
    infinite = lbfgs._Trial(4.0, math.inf, math.nan, torch.empty(0), torch.empty(0))
    assert lbfgs._between(at(0.0), infinite) == 2.0


def test_the_end_of_a_curved_valley_is_found() -> None:
    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    found = minimise(by_autograd(rosenbrock), start, is_converged=gradient_below(1e-10), max_iterations=200)
    assert found.converged
    assert found.num_iterations < 60
    torch.testing.assert_close(found.point, torch.ones(2, dtype=torch.float64))


def test_it_ends_where_scipy_does() -> None:
    matrix, offset = draw(30, 8, seed=1), draw(30, seed=2)

    def function(point: Tensor) -> Tensor:  # of a 2 x 4 tensor: points may have any shape
        return torch.logsumexp(matrix @ point.flatten() + offset, dim=0) + 0.01 * point.square().sum()

    found = minimise(
        by_autograd(function),
        torch.zeros(2, 4, dtype=torch.float64),
        is_converged=gradient_below(1e-8),
        max_iterations=200,
    )
    truth = scipy.optimize.minimize(lambda point: float(function(torch.from_numpy(point))), np.zeros(8), tol=1e-10)
    assert found.converged
    assert found.value == pytest.approx(truth.fun, rel=1e-9)
    assert found.point.shape == (2, 4)
    torch.testing.assert_close(found.point.flatten(), torch.from_numpy(truth.x), rtol=0.0, atol=1e-4)


def test_with_the_exact_inverse_hessian_one_step_is_enough() -> None:
    scales = torch.logspace(-8.0, 0.0, 9, dtype=torch.float64)
    found = minimise(
        by_autograd(lambda x: 0.5 * (scales * (x - 3.0) ** 2).sum()),
        torch.zeros(9, dtype=torch.float64),
        is_converged=gradient_below(1e-12),
        max_iterations=50,
        preconditioner_at=lambda point: lambda gradient: gradient / scales,
    )
    assert (found.converged, found.num_iterations, found.num_evaluations) == (True, 1, 2)


def test_the_preconditioner_is_asked_for_anew_at_the_current_point() -> None:
    asked: list[Tensor] = []

    def preconditioner_at(point: Tensor) -> Callable[[Tensor], Tensor]:
        asked.append(point)
        return lambda gradient: 0.01 * gradient

    found = minimise(
        by_autograd(rosenbrock),
        torch.tensor([-1.2, 1.0], dtype=torch.float64),
        is_converged=gradient_below(1e-10),
        max_iterations=12,
        preconditioner_at=preconditioner_at,
        refresh_every=5,
    )
    assert found.num_iterations == 12
    assert len(asked) == 3
    assert [float(rosenbrock(point)) for point in asked] == sorted(
        (float(rosenbrock(point)) for point in asked), reverse=True
    )


def test_running_out_of_iterations_is_reported() -> None:
    found = minimise(
        by_autograd(rosenbrock),
        torch.tensor([-1.2, 1.0], dtype=torch.float64),
        is_converged=gradient_below(1e-10),
        max_iterations=3,
    )
    assert (found.converged, found.num_iterations) == (False, 3)
    assert found.value < float(rosenbrock(torch.tensor([-1.2, 1.0])))


def test_at_the_minimum_nothing_is_done() -> None:
    found = minimise(
        by_autograd(lambda x: x.square().sum()),
        torch.zeros(3, dtype=torch.float64),
        is_converged=lambda *_: False,
        max_iterations=9,
    )
    assert (found.converged, found.num_iterations, found.num_evaluations, found.value) == (True, 0, 1, 0.0)


def test_steps_into_places_where_the_objective_is_no_number_are_shortened() -> None:
    def function(point: Tensor) -> Tensor:  # defined below 1 only; the first step leads to 1.9
        return (-10.0 * point - torch.log(1.0 - point)).sum()

    found = minimise(
        by_autograd(function),
        torch.tensor([0.9 - 1e-3], dtype=torch.float64),
        is_converged=gradient_below(1e-8),
        max_iterations=50,
    )
    assert found.converged
    assert float(found.point) == pytest.approx(0.9)
    found = minimise(
        by_autograd(function), torch.zeros(1, dtype=torch.float64), is_converged=gradient_below(1e-8), max_iterations=50
    )
    assert float(found.point) == pytest.approx(0.9)


def test_a_far_minimum_of_a_flat_function_is_reached() -> None:
    def function(point: Tensor) -> Tensor:
        return 1e-9 * (point - 1e6).square().sum()

    found = minimise(
        by_autograd(function),
        torch.zeros(4, dtype=torch.float64),
        is_converged=gradient_below(1e-12),
        max_iterations=20,
    )
    assert found.converged
    torch.testing.assert_close(found.point, torch.full((4,), 1e6, dtype=torch.float64))


def test_a_start_where_the_function_curves_downwards_does_no_harm() -> None:
    # at 3 the slope is 0.03, at 2 it is 0.27: a step of length 1 must not be the end of the search
    def function(point: Tensor) -> Tensor:
        return -torch.exp(-0.5 * point.square().sum())

    found = minimise(
        by_autograd(function),
        torch.tensor([3.0, 0.1], dtype=torch.float64),
        is_converged=gradient_below(1e-8),
        max_iterations=30,
    )
    assert found.converged
    assert found.value == pytest.approx(-1.0)


def test_gradients_become_small_even_where_differences_of_values_drown_in_rounding() -> None:
    scales = torch.logspace(-1.0, 0.0, 20, dtype=torch.float64)

    def function(point: Tensor) -> Tensor:  # values of points closer than about 1e-4 differ by less than their noise
        noise = 1e-9 * math.sin(1e9 * float(point.detach().sum()))
        return 10.0 + noise + torch.cosh(scales * (point - 1.0)).sum()

    found = minimise(
        by_autograd(function),
        torch.zeros(20, dtype=torch.float64),
        is_converged=gradient_below(1e-7),
        max_iterations=100,
    )
    assert found.converged


def test_a_function_without_a_lower_bound_ends_without_converging() -> None:
    found = minimise(
        by_autograd(lambda x: x.sum()),
        torch.zeros(2, dtype=torch.float64),
        is_converged=lambda *_: False,
        max_iterations=9,
    )
    assert not found.converged


def test_every_evaluation_is_counted() -> None:
    calls = []

    def objective(point: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(point)
        return by_autograd(rosenbrock)(point)

    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    found = minimise(objective, start, is_converged=gradient_below(1e-10), max_iterations=100)
    assert found.num_evaluations == len(calls) > found.num_iterations
    assert math.isclose(found.value, float(rosenbrock(found.point)))
    assert start.tolist() == [-1.2, 1.0]  # left as it was
