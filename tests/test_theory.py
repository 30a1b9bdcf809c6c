"""The reduced dynamics of the toy model, against autograd, Monte Carlo, closed forms and the full model."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.integrate import solve_ivp

from lib import streams
from lib.config import InputError
from lib.models.toy import Toy
from lib.tasks.single_location import SingleLocation
from lib.theory import ToyDynamics, expected_loss, plateaus

SYSTEMS = [
    ToyDynamics(T=7, d=5),
    ToyDynamics(T=9, d=4, B=3),
    ToyDynamics(T=6, d=5, p=0.3),
    ToyDynamics(T=8, d=3, B=2, p=0.1),
    ToyDynamics(T=7, d=4, B=2, orthogonal=True),
]


def full_model(toy: ToyDynamics, seed: int = 0):
    """W* (orthogonal), x~ and the orthonormal directions U_i that the reduced weights stand for."""
    generator = torch.Generator().manual_seed(seed)
    W_star, _ = torch.linalg.qr(torch.randn(toy.d, toy.d, generator=generator, dtype=torch.float64))
    x_tilde = torch.nn.functional.normalize(torch.randn(toy.d, generator=generator, dtype=torch.float64), dim=0)
    if toy.p > 0:
        along = W_star @ torch.outer(x_tilde, x_tilde)
        return W_star, x_tilde, torch.stack([along, (W_star - along) / np.sqrt(toy.d - 1)])
    U = W_star / np.sqrt(toy.d)
    if not toy.orthogonal:
        return W_star, x_tilde, U[None]
    V = torch.randn(toy.d, toy.d, generator=generator, dtype=torch.float64)
    V = V - (V * U).sum() * U
    return W_star, x_tilde, torch.stack([U, V / V.norm()])


def loss_of_state(toy: ToyDynamics, p: float):
    """The full model's expected loss as a function of the reduced state."""
    W_star, x_tilde, directions = full_model(toy)

    def loss(state):
        a = torch.cat([torch.zeros(toy.T - toy.B, dtype=torch.float64), state[-1].expand(toy.B)])
        W = torch.einsum("i,iab->ab", state[:-1], directions)
        return expected_loss(a, W, W_star, B=toy.B, p=p, x_tilde=x_tilde)

    return loss


def states(toy: ToyDynamics, seed: int):
    return np.random.default_rng(seed).normal(size=len(toy.names)) * 1.5


@pytest.mark.parametrize("toy", SYSTEMS, ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_gradient_and_hessian_are_those_of_the_full_model(toy, seed):
    state = torch.tensor(states(toy, seed), requires_grad=True)
    loss = loss_of_state(toy, toy.p)
    assert_allclose(toy.loss(*state.tolist()), loss(state).item(), rtol=1e-12)
    assert_allclose(toy.test_loss(*state.tolist()), loss_of_state(toy, 0.0)(state).item(), rtol=1e-12)
    assert_allclose(toy.gradient(*state.tolist()), torch.autograd.grad(loss(state), state)[0], rtol=1e-10, atol=1e-14)
    hessian = torch.autograd.functional.hessian(loss, state.detach())
    assert_allclose(toy.hessian(*state.tolist()), hessian, rtol=1e-10, atol=1e-14)
    extremes = torch.linalg.eigvalsh(hessian)[[0, -1]]
    assert_allclose(toy.curvature(*state.tolist()), extremes, rtol=1e-9, atol=1e-13)


def test_everything_takes_arrays():
    toy = ToyDynamics(T=9, d=4, B=3)
    w, delta_a = np.meshgrid(np.linspace(0, 2, 3), np.linspace(-1, 4, 5))
    assert toy.loss(w, delta_a).shape == (5, 3)
    assert toy.gradient(w, delta_a).shape == (2, 5, 3)
    assert toy.hessian(w, delta_a).shape == (5, 3, 2, 2)
    assert_allclose(toy.curvature(w, delta_a)[:, 4, 2], toy.curvature(w[4, 2], delta_a[4, 2]))


@pytest.mark.parametrize("B, p", [(1, 0.0), (3, 0.0), (1, 0.4), (2, 0.4)])
def test_expected_loss_matches_monte_carlo_on_the_task(B, p):
    task = SingleLocation(T=6, d=4, B=B, p=p, feature=False, position="fixed")
    seeds, samples = torch.tensor([5]), 40_000
    constants = task.constants(seeds)
    generator = torch.Generator().manual_seed(1)
    a, W = torch.randn(6, generator=generator), torch.randn(4, 4, generator=generator)
    for train, share in ((True, p), (False, 0.0)):
        batch = task.batch(constants, streams.key(seeds, "monte carlo"), samples, train=train)
        outputs = torch.einsum("ij,t,mbtj->mbi", W, a.softmax(0), batch.inputs)
        losses = task.loss(outputs[:, :, None], batch.targets).double()
        x_tilde = torch.nn.functional.normalize(constants["x~"][0].double(), dim=0)
        exact = expected_loss(a.double(), W.double(), constants["W*"][0], B=B, p=share, x_tilde=x_tilde)
        error = losses.std().item() / samples**0.5
        assert abs(losses.mean().item() - exact.item()) < 4 * error
        assert error < 0.01 * exact.item()  # tight enough to notice a wrong factor


def test_the_loss_is_the_papers_formula():
    T, d, B, w, delta_a = 50, 9, 4, 1.3, 2.1
    alpha = 1 / ((T - B) * np.exp(-delta_a) + B)
    assert_allclose(ToyDynamics(T=T, d=d, B=B).loss(w, delta_a),
                    0.5 * ((1 - B * alpha) ** 2 * w**2 / (d * (T - B)) + (B * alpha * w - np.sqrt(d)) ** 2 / d))
    p, w_tilde, alpha = 0.2, 0.4, 1 / ((T - 1) * np.exp(-delta_a) + 1)
    sigma_tilde, sigma = p + (1 - p) / d, (1 - p) / d
    assert_allclose(ToyDynamics(T=T, d=d, p=p).loss(w_tilde, w, delta_a),
                    0.5 * ((1 - alpha) ** 2 * (w**2 + w_tilde**2) / (d * (T - 1))
                           + sigma_tilde * (alpha * w_tilde - 1) ** 2 + sigma * (alpha * w - np.sqrt(d - 1)) ** 2))


@pytest.mark.parametrize("toy", SYSTEMS, ids=str)
def test_attention_is_a_softmax_and_learning_starts_at_one_half(toy):
    a = torch.tensor([0.0] * (toy.T - toy.B) + [1.7] * toy.B, dtype=torch.float64)
    assert_allclose(toy.attention(1.7), a.softmax(0)[-1])
    assert_allclose([toy.loss(*[0.0] * len(toy.names)), toy.test_loss(*[0.0] * len(toy.names))], 0.5)


def test_limit_of_no_repetition():
    plain, nearly = ToyDynamics(T=256, d=32), ToyDynamics(T=256, d=32, p=1e-9)
    assert_allclose(nearly.plateau(), plain.plateau(), rtol=1e-6)
    assert_allclose(nearly.rate, plain.rate, rtol=1e-6)
    times = np.linspace(0, 1.2 * plain.plateau(), 50)
    one, two = plain.flow(times), nearly.flow(times)
    assert_allclose(np.hypot(two.w, two.w_tilde), one.w, rtol=1e-5, atol=1e-9)
    assert_allclose(two.delta_a, one.delta_a, rtol=1e-5, atol=1e-9)
    at_rest = ToyDynamics(T=256, d=32, orthogonal=True).flow(times)  # v = 0 stays 0 and changes nothing
    assert_allclose(at_rest.v, 0)
    assert_allclose(at_rest.w, one.w, rtol=1e-6)


def test_shared_and_free_scores_agree_without_repetition_only():
    times = [ToyDynamics(T=1024, d=64, B=B, scores=scores).plateau() for B in (1, 16) for scores in ("shared", "free")]
    assert_allclose(times[0], times[1], rtol=1e-3)
    assert_allclose(times[3] / times[2], 4, rtol=0.1)  # sqrt(B): free scores divide the plateau by sqrt(B), not by B


def descend(loss, parameters, rate, steps):
    """Gradient descent; the parameters after each step."""
    parameters = [x.clone().requires_grad_() for x in parameters]
    path = []
    for _ in range(steps):
        slopes = torch.autograd.grad(loss(*parameters), parameters)
        with torch.no_grad():
            for x, slope in zip(parameters, slopes, strict=True):
                x -= rate * slope
        path.append([x.detach().clone() for x in parameters])
    return path


@pytest.mark.parametrize("B, p", [(1, 0.0), (3, 0.0), (1, 0.3), (2, 0.3)])
def test_the_full_model_stays_on_the_reduced_dynamics(B, p):
    toy = ToyDynamics(T=12, d=5, B=B, p=p, scores="free")
    W_star, x_tilde, directions = full_model(toy)
    rate, steps = 0.05, 1200
    path = descend(lambda a, W: expected_loss(a, W, W_star, B=B, p=p, x_tilde=x_tilde),
                   [torch.zeros(12, dtype=torch.float64), torch.zeros(5, 5, dtype=torch.float64)], rate, steps)
    reduced = toy.flow(rate * np.arange(1, steps + 1))
    a, W = torch.stack([a for a, _ in path]), torch.stack([W for _, W in path])
    delta_a = (a[:, -1] - a[:, 0]).numpy()
    assert_allclose(a, a[:, [0] * (12 - B) + [-1] * B], atol=1e-12)  # irrelevant scores stay equal, relevant ones too
    weights = torch.einsum("iab,sab->si", directions, W)
    assert_allclose(torch.einsum("si,iab->sab", weights, directions), W, atol=1e-12)  # nothing off the directions
    if p == 0:
        assert_allclose(weights[:, 0] ** 2, W.square().sum((1, 2)), atol=1e-12)  # W is parallel to W*
    for i, name in enumerate(toy.names[:-1]):
        assert_allclose(weights[:, i], reduced[name], atol=0.02 * np.sqrt(toy.d))
    assert_allclose(delta_a, reduced.delta_a, atol=0.1)
    assert reduced.test_loss.iloc[-1] < 0.1 < reduced.test_loss.iloc[0]  # the jump lies within what was compared
    if B > 1:  # the paper's equations are the gradient flow of another model, in which the copies share one score
        shared = toy.model_copy(update={"scores": "shared"}).flow(reduced.t)
        assert np.abs(delta_a - shared.delta_a).max() > 0.3


def test_a_shared_score_is_the_papers_flow_under_repetition():
    toy = ToyDynamics(T=12, d=5, B=3)
    W_star, _, _ = full_model(toy)
    pad = torch.zeros(9, dtype=torch.float64)
    path = descend(lambda s, W: expected_loss(torch.cat([pad, s.expand(3)]), W, W_star, B=3),
                   [torch.zeros(1, dtype=torch.float64), torch.zeros(5, 5, dtype=torch.float64)], 0.05, 800)
    reduced = toy.flow(0.05 * np.arange(1, 801))
    assert_allclose([s.item() for s, _ in path], reduced.delta_a, atol=0.1)


def test_a_random_start_needs_the_orthogonal_part():
    toy = ToyDynamics(T=12, d=5, orthogonal=True, scores="free")
    W_star, _, _ = full_model(toy)
    W = torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / np.sqrt(5)
    U = W_star / np.sqrt(5)
    w = (W * U).sum()
    path = descend(lambda a, W: expected_loss(a, W, W_star), [torch.zeros(12, dtype=torch.float64), W], 0.05, 1500)
    reduced = toy.flow(0.05 * np.arange(1, 1501), start=[w, (W - w * U).norm(), 0])
    full = np.array([expected_loss(a, W, W_star).item() for a, W in path])
    assert_allclose(full, reduced.loss, atol=0.004)
    without = ToyDynamics(T=12, d=5, scores="free").flow(reduced.t, start=[w, 0])
    assert np.abs(full - without.loss).max() > 0.02


VARIANTS = [{}, {"B": 8}, {"p": 0.1}, {"B": 8, "scores": "free"}]


@pytest.mark.parametrize("toy", [ToyDynamics(T=512, d=64, **changes) for changes in VARIANTS], ids=str)
@pytest.mark.parametrize("epsilon", [0.1, 0.8])
def test_escape_time_against_the_linear_equations(toy, epsilon):
    b, mobility = toy.B / toy.T * np.sqrt((toy.sigma**2 * toy.target**2).sum()), toy.mobility

    def escaped(t, y):
        return 0.5 - b * y[0] * (1 + y[1]) - (1 - epsilon) / 2

    escaped.terminal = True
    solution = solve_ivp(lambda t, y: [b * (1 + y[1]), mobility * b * y[0]], (0, 1e7), [0, 0], events=escaped,
                         rtol=1e-11, atol=1e-13)
    assert_allclose(toy.escape_time(epsilon), solution.t_events[0][0], rtol=1e-7)
    times = np.linspace(0, toy.escape_time(epsilon), 5)
    linear = toy.linear(times)
    assert_allclose(linear.loss.iloc[-1], (1 - epsilon) / 2)
    assert_allclose(linear[["w", "delta_a"]].iloc[-1], solution.y_events[0][0], rtol=1e-6)


def test_the_two_belongs_inside_the_logarithm():
    T, d, epsilon = 512, 64, 0.8
    exact, x = ToyDynamics(T=T, d=d).escape_time(epsilon), np.sqrt(d) * T
    assert_allclose(exact, x / 2 * np.arcsinh(epsilon * x))
    assert_allclose(exact, x / 2 * np.log(2 * epsilon * x), rtol=1e-7)
    assert_allclose(exact - x / 2 * np.log(epsilon * x), x / 2 * np.log(2), rtol=1e-5)


@pytest.mark.parametrize("toy", [ToyDynamics(T=10_000, d=1024, **changes) for changes in VARIANTS], ids=str)
def test_the_flow_starts_as_the_linear_solution(toy):
    times = np.linspace(0, 0.05 / toy.rate, 6)
    flow, linear = toy.flow(times), toy.linear(times)
    w = np.sqrt(sum(flow[name] ** 2 for name in toy.names[:-1]))
    assert_allclose(w, linear.w, rtol=2e-3)
    assert_allclose(flow.delta_a, linear.delta_a, rtol=5e-3)
    assert_allclose(flow.loss, linear.loss, rtol=1e-6)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_takeoff_time_is_the_plateau_of_large_problems(changes):
    toy = ToyDynamics(T=200_000, d=512, **changes)
    assert_allclose(toy.plateau(), toy.takeoff_time(), rtol=0.02)
    assert toy.escape_time() > 4 * toy.plateau()  # the linear theory scales rightly, with a prefactor far too large


def test_plateau_ends_when_the_test_loss_says_so():
    toy = ToyDynamics(T=128, d=32, p=0.2)
    end = toy.flow([0, toy.plateau()]).iloc[-1]
    assert_allclose(end.test_loss, 0.1, rtol=1e-6)
    assert abs(end.loss - 0.1) > 1e-3  # and not the training loss
    assert_allclose(toy.flow([0, toy.plateau(epsilon=0.5)]).test_loss.iloc[-1], 0.25, rtol=1e-6)
    assert np.isnan(toy.plateau(until=0.5 * toy.plateau()))
    assert np.isnan(ToyDynamics(T=128, d=32, p=1.0).plateau())  # nothing but x~ is ever seen, the rest is never learnt


def test_a_grid_of_plateaus_has_a_row_for_every_combination():
    table = plateaus(T=[64, 128], d=16, B=[1, 4])
    assert list(zip(table["T"], table["B"], strict=True)) == [(64, 1), (64, 4), (128, 1), (128, 4)]
    assert_allclose(table.plateau[3], ToyDynamics(T=128, d=16, B=4).plateau())


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_the_tail_forgets_everything(changes):
    toy = ToyDynamics(T=64, d=16, **changes)
    end = toy.flow([0, 1e4 * toy.plateau()]).iloc[-1]
    assert_allclose(end.test_loss, 1 / (4 * toy.mobility * end.t), rtol=0.05)


@pytest.mark.parametrize("toy", SYSTEMS, ids=str)
def test_w_inf_is_the_best_w_for_its_attention(toy):
    delta_a = 1.3
    best = [toy.w_inf(toy.attention(delta_a), i) for i in range(len(toy.names) - 1)]
    assert_allclose(toy.gradient(*best, delta_a)[:-1], 0, atol=1e-14)
    if not toy.orthogonal:
        assert min(best) > 0


@pytest.mark.parametrize("values, names", [
    ({"T": 0, "d": 4}, "T"),
    ({"T": 8, "d": 0}, "d"),
    ({"T": 8, "d": 4, "B": 8}, "B"),
    ({"T": 8, "d": 4, "p": 1.5}, "p"),
    ({"T": 8, "d": 4, "p": 0.1, "orthogonal": True}, "orthogonal"),
    ({"T": 8, "d": 4, "scores": "own"}, "scores"),
])
def test_bad_input_is_named_in_one_line(values, names):
    with pytest.raises(InputError, match=f"^{names}: .+") as error:
        ToyDynamics(**values)
    assert "\n" not in str(error.value)


def test_a_start_must_have_every_scalar():
    with pytest.raises(InputError, match="start: needs w_tilde, w, delta_a; got 2"):
        ToyDynamics(T=8, d=4, p=0.1).plateau(start=[0.1, 0.0])


@pytest.mark.parametrize("B", [1, 2])
def test_the_trained_toy_model_is_watched_in_the_same_quantities(B):
    task, seeds = SingleLocation(T=6, d=4, B=B, feature=False, position="fixed"), torch.tensor([3])
    constants, parameters = task.constants(seeds), Toy(start="normal").init(task, seeds)
    parameters["a"][:, -B:] = 1.5
    seen = Toy().observe(task, parameters, constants)
    exact = expected_loss(parameters["a"].double(), parameters["W"].double(), constants["W*"], B=B)
    assert_allclose(seen["expected_loss"], exact, rtol=1e-6)
    toy = ToyDynamics(T=6, d=4, B=B, orthogonal=True)
    v = np.sqrt(parameters["W"].square().sum().item() - seen["w"].item() ** 2)
    assert_allclose(toy.loss(seen["w"].item(), v, seen["delta_a"].item()), exact[0], rtol=1e-6)
    assert_allclose(seen["alpha"], toy.attention(1.5), rtol=1e-6)
