"""The toy model of sparse attention in closed form (Zucchet et al. 2025, section 2 and its appendix).

The model is y = W sum_t softmax(a)_t x_t on single-location regression whose relevant positions never move. Gradient
flow from W = 0, a = 0 stays on a line: the scores differ only by Delta a = a_relevant - a_irrelevant, and
W = sum_i w_i U_i moves along a few fixed orthonormal matrices U_i. With sigma_i the weight of direction i in the loss
and c_i the length of W* along it,

    L(w, Delta a) = 1/2 [ (1 - B alpha)^2 sum_i w_i^2 / (d (T - B)) + sum_i sigma_i (B alpha w_i - c_i)^2 ]

    no repetition, or in context   (w)            sigma = 1/d                         c = sqrt(d)
    cross-sample repetition p      (w_tilde, w)   sigma = p + (1-p)/d, (1-p)/d        c = 1, sqrt(d - 1)
    W started at random            (w, v)         sigma = 1/d, 1/d                    c = sqrt(d), 0

All three are one set of equations, written once below.
"""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field, model_validator
from scipy.integrate import solve_ivp
from torch import Tensor

from lib.config import Config, InputError

INITIAL_LOSS = 0.5  # L at w = 0: half the mean squared norm of the target


class ToyDynamics(Config):
    """The toy model reduced to a handful of scalars, in the paper's symbols (section 2).

    T  sequence length        d  token dimension
    B  copies of the relevant token in the sequence (in-context repetition), fewer than T
    p  probability that the relevant token is the fixed vector x~ (cross-sample repetition)
    orthogonal  follow also v, the norm of the part of W orthogonal to W*: zero for ever unless W starts at random
    scores  "shared": the B relevant positions have one score, as in the paper, d(Delta a)/dt = -dL/d(Delta a);
            "free": each position has its own, as in y = W sum_t softmax(a)_t x_t; the same up to T/(T-1) if B = 1

    A state is given as the weights and then Delta a: (w, delta_a), (w_tilde, w, delta_a) if p > 0, (w, v, delta_a) if
    orthogonal; each may be an array. Time is in units of gradient descent steps at rate 1.

    >>> toy = ToyDynamics(T=512, d=64)
    >>> print(toy.loss(0.0, 0.0), round(toy.plateau()))
    0.5 5319
    """

    T: int = Field(ge=2)
    d: int = Field(ge=1)
    B: int = Field(1, ge=1)
    p: float = Field(0.0, ge=0, le=1)
    orthogonal: bool = False
    scores: Literal["shared", "free"] = "shared"

    @model_validator(mode="after")
    def _possible(self):
        if self.B >= self.T:
            raise ValueError(f"B: {self.B} copies leave no irrelevant token among T = {self.T}; lower B or raise T")
        if self.orthogonal and self.p > 0:
            raise ValueError("orthogonal: not worked out together with p > 0; set p = 0 or orthogonal = False")
        return self

    @property
    def names(self) -> list[str]:
        """The scalars that make a state, in order."""
        weights = ["w_tilde", "w"] if self.p > 0 else ["w", "v"] if self.orthogonal else ["w"]
        return [*weights, "delta_a"]

    @property
    def sigma(self) -> np.ndarray:
        """Weight sigma_i of each direction in the training loss: the variance of the relevant token along it."""
        q = (1 - self.p) / self.d
        return np.array([self.p + q, q] if self.p > 0 else [q, q] if self.orthogonal else [q])

    @property
    def target(self) -> np.ndarray:
        """Length c_i of W* along each direction; together ||W*||_F = sqrt(d)."""
        d = self.d
        return np.sqrt([1, d - 1] if self.p > 0 else [d, 0] if self.orthogonal else [d])

    @property
    def mobility(self) -> float:
        """How fast Delta a follows its slope: 1 for a shared score; T / (B (T - B)) for free ones, which split it."""
        return 1.0 if self.scores == "shared" else self.T / (self.B * (self.T - self.B))

    # ------------------------------------------------------------------------------------------- loss and slopes

    def attention(self, delta_a):
        """alpha = 1 / ((T - B) exp(-Delta a) + B): the attention on each of the B relevant positions (section 2)."""
        return 1 / ((self.T - self.B) * np.exp(-delta_a) + self.B)

    def _loss(self, sigma, state):
        *w, delta_a = state
        beta = self.B * self.attention(delta_a)
        noise = (1 - beta) ** 2 / (self.d * (self.T - self.B)) * sum(x**2 for x in w)
        signal = sum(s * (beta * x - c) ** 2 for x, s, c in zip(w, sigma, self.target, strict=True))
        return (noise + signal) / 2

    def loss(self, *state):
        """Training loss L: the interference of irrelevant tokens, plus the missing part of the answer (section 2)."""
        return self._loss(self.sigma, state)

    def test_loss(self, *state):
        """Loss on data with the same B and without cross-sample repetition: L with p = 0 in its weights."""
        return self._loss(np.full(len(self.sigma), 1 / self.d), state)

    def gradient(self, *state) -> np.ndarray:
        """(dL/dw_i ..., dL/d(Delta a)) of the training loss, stacked along the first axis.

        The chain rule is d(B alpha)/d(Delta a) = B alpha (1 - B alpha).
        """
        *w, delta_a = state
        beta, noise = self.B * self.attention(delta_a), 1 / (self.d * (self.T - self.B))
        error = [s * (beta * x - c) for x, s, c in zip(w, self.sigma, self.target, strict=True)]
        along_w = [(1 - beta) ** 2 * noise * x + beta * e for x, e in zip(w, error, strict=True)]
        along_beta = sum(x * (e - (1 - beta) * noise * x) for x, e in zip(w, error, strict=True))
        return np.stack(np.broadcast_arrays(*along_w, along_beta * beta * (1 - beta)))

    def hessian(self, *state) -> np.ndarray:
        """Second derivatives of the training loss in (w_i ..., Delta a): shape (..., n, n) for n scalars."""
        *w, delta_a = np.broadcast_arrays(*state)
        beta, noise = self.B * self.attention(delta_a), 1 / (self.d * (self.T - self.B))
        slope = beta * (1 - beta)  # d(beta)/d(Delta a); its own derivative is (1 - 2 beta) slope
        H = np.zeros((len(w) + 1, len(w) + 1, *np.shape(delta_a)))
        for i, (x, s, c) in enumerate(zip(w, self.sigma, self.target, strict=True)):
            H[i, i] = (1 - beta) ** 2 * noise + s * beta**2
            H[i, -1] = H[-1, i] = (s * (2 * beta * x - c) - 2 * (1 - beta) * noise * x) * slope
            H[-1, -1] += x**2 * (noise + s) * slope**2
        H[-1, -1] += self.gradient(*w, delta_a)[-1] * (1 - 2 * beta)
        return np.moveaxis(H, (0, 1), (-2, -1))

    def curvature(self, *state) -> np.ndarray:
        """Least and greatest eigenvalue of the Hessian, shape (2, ...); the greatest is the sharpness (figure 8)."""
        return np.moveaxis(np.linalg.eigvalsh(self.hessian(*state))[..., [0, -1]], -1, 0)

    def w_inf(self, alpha, direction: int = 0):
        """The w_i that minimises L while the attention stays at alpha: where w sits after the jump (figure 7)."""
        beta, s, c = self.B * alpha, self.sigma[direction], self.target[direction]
        return s * beta * c / ((1 - beta) ** 2 / (self.d * (self.T - self.B)) + s * beta**2)

    # ------------------------------------------------------------------------------------------- gradient flow

    def velocity(self, *state) -> np.ndarray:
        """Gradient flow: dw_i/dt = -dL/dw_i and d(Delta a)/dt = -mobility dL/d(Delta a) (section 2)."""
        slopes = -self.gradient(*state)
        slopes[-1] *= self.mobility
        return slopes

    def _solve(self, until, start, **options):
        start = np.zeros(len(self.names)) if start is None else np.asarray(start, dtype=float)
        if start.shape != (len(self.names),):
            raise InputError(f"start: needs {', '.join(self.names)}; got {start.size} numbers")
        solution = solve_ivp(lambda t, state: self.velocity(*state), (0, until), start, method="LSODA", rtol=1e-9,
                             atol=1e-11, **options)  # LSODA turns stiff by itself in the slow tail
        if solution.status < 0:
            raise RuntimeError(f"gradient flow of {self!r} broke off at t = {solution.t[-1]:.4g}: {solution.message}")
        return solution

    def flow(self, times, start=None) -> pd.DataFrame:
        """Gradient flow from `start` (default 0) at `times`: columns t, the state, alpha, loss, test_loss."""
        times = np.asarray(times, dtype=float)
        state = dict(zip(self.names, self._solve(times[-1], start, t_eval=times).y, strict=True))
        values = state.values()
        return pd.DataFrame({"t": times, **state, "alpha": self.attention(state["delta_a"]),
                             "loss": self.loss(*values), "test_loss": self.test_loss(*values)})

    def plateau(self, epsilon: float = 0.8, start=None, until: float | None = None) -> float:
        """Time at which the *test* loss has fallen to (1 - epsilon)/2 (figures 1c and 2); NaN if not before `until`."""

        def emerged(t, state):
            return self.test_loss(*state) - (1 - epsilon) * INITIAL_LOSS

        emerged.terminal, emerged.direction = True, -1
        until = until or 1e5 * np.sqrt(self.d) * self.T
        events = self._solve(until, start, events=emerged).t_events[0]
        return float(events[0]) if len(events) else float("nan")

    # ------------------------------------------------------------------------------------------- the start, linearised

    @property
    def rate(self) -> float:
        """lambda: growth rate near w = 0, Delta a = 0; B / (sqrt(d) T) for a shared score (section 2).

        In general sqrt(mobility) (B/T) sqrt(sum_i sigma_i^2 c_i^2); with p this sum is exactly (p^2 d + 1 - p^2) / d.
        Holds for d and T large: a decay of w at rate 1/(dT), 1/sqrt(d) of lambda, is left out as in the paper.
        """
        return float(np.sqrt(self.mobility) * self.B / self.T * np.linalg.norm(self.sigma * self.target))

    def linear(self, times) -> pd.DataFrame:
        """Solution linearised at the start: columns t, w (along the growing direction), delta_a, loss (figure 6)."""
        t, lam, mobility = np.asarray(times, dtype=float), self.rate, self.mobility
        return pd.DataFrame({"t": t, "w": np.sinh(lam * t) / np.sqrt(mobility), "delta_a": np.cosh(lam * t) - 1,
                             "loss": INITIAL_LOSS * (1 - lam / mobility * np.sinh(2 * lam * t))})

    def escape_time(self, epsilon: float = 0.8) -> float:
        """T_epsilon = arcsinh(epsilon / lambda) / (2 lambda): when the linearised loss is (1 - epsilon)/2 (section 2).

        arcsinh(x) tends to ln(2x): in the approximate form the 2 is inside the logarithm, ln(2 epsilon sqrt(d) T / B).
        """
        return float(np.arcsinh(epsilon * self.mobility / self.rate) / (2 * self.rate))

    def takeoff_time(self) -> float:
        """sqrt(pi/2) / lambda: when w' = lambda e^(Delta a), (Delta a)' = lambda w e^(Delta a) diverges (ours).

        They keep the softmax's exponential, which the linearisation drops: Delta a = w^2/2 and the time to w is
        int_0^w exp(-u^2/2) du / lambda, which stays finite as w grows.
        """
        return float(np.sqrt(np.pi / 2) / self.rate)


def plateaus(**grid) -> pd.DataFrame:
    """Every combination of the grid's values, such as T=[64, 128], d=16: a row each, with `plateau`, `escape_time` and
    `takeoff_time`; the plateau is NaN where the test loss never falls far enough."""
    choices = [values if isinstance(values, list) else [values] for values in grid.values()]
    rows = []
    for values in itertools.product(*choices):
        row = dict(zip(grid, values, strict=True))
        toy = ToyDynamics(**row)
        times = {"plateau": toy.plateau(), "escape_time": toy.escape_time(), "takeoff_time": toy.takeoff_time()}
        rows.append(row | times)
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------------- the full model


def expected_loss(
    a: Tensor, W: Tensor, W_star: Tensor, *, B: int = 1, p: float = 0.0, x_tilde: Tensor | None = None
) -> Tensor:
    """Exact expected loss of the full toy model y = W sum_t softmax(a)_t x_t; differentiable (section 2).

    a (..., T), W and W_star (..., d, d), the last B positions relevant, x_tilde (..., d) the repeated token if p > 0.
    Returns (...). p = 0 gives the test loss.
    """
    d, attention = W.shape[-1], a.softmax(-1)
    relevant, irrelevant = attention[..., -B:].sum(-1), attention[..., :-B]
    missing = relevant[..., None, None] * W - W_star
    signal = (1 - p) / d * missing.square().sum((-1, -2))
    noise = irrelevant.square().sum(-1) / d * W.square().sum((-1, -2))
    if p > 0:
        signal = signal + p * torch.einsum("...ij,...j->...i", missing, x_tilde).square().sum(-1)
    return (signal + noise) / 2
