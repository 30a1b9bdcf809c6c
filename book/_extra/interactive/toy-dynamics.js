// The toy model's reduced dynamics, the twin of lib/theory.py (class ToyDynamics, scores = "shared"), in the paper's symbols.
// A state is [w, Δa], or [w̃, w, Δa] if p > 0. Time is in steps of gradient descent at rate 1.
"use strict";

class ToyDynamics {
  constructor({ T, d, B = 1, p = 0 }) {
    if (!(B < T)) throw new RangeError(`B: ${B} copies leave no irrelevant token among T = ${T}`);
    Object.assign(this, { T, d, B, p });
    const q = (1 - p) / d;
    this.sigma = p > 0 ? [p + q, q] : [q];                     // weight of each direction in the training loss
    this.target = p > 0 ? [1, Math.sqrt(d - 1)] : [Math.sqrt(d)]; // length of W* along it
    this.even = this.sigma.map(() => 1 / d);                   // weights on test data, which have p = 0
    this.interference = 1 / (d * (T - B));
    this.start = [...this.sigma.map(() => 0), 0];
  }

  // α = 1 / ((T − B) e^{−Δa} + B)
  attention(deltaA) {
    return 1 / ((this.T - this.B) * Math.exp(-deltaA) + this.B);
  }

  // L = ½ [ (1 − Bα)² Σ w_i² / (d (T − B)) + Σ σ_i (Bα w_i − c_i)² ]
  lossWith(sigma, state) {
    const n = sigma.length, beta = this.B * this.attention(state[n]);
    let noise = 0, signal = 0;
    for (let i = 0; i < n; i++) {
      noise += state[i] ** 2;
      signal += sigma[i] * (beta * state[i] - this.target[i]) ** 2;
    }
    return ((1 - beta) ** 2 * this.interference * noise + signal) / 2;
  }
  loss(state) { return this.lossWith(this.sigma, state); }
  testLoss(state) { return this.lossWith(this.even, state); }

  // ẇ_i = −∂L/∂w_i and Δȧ = −∂L/∂Δa, with d(Bα)/dΔa = Bα (1 − Bα)
  velocity(state) {
    const n = this.sigma.length, beta = this.B * this.attention(state[n]), out = new Array(n + 1);
    let along = 0;
    for (let i = 0; i < n; i++) {
      const x = state[i], error = this.sigma[i] * (beta * x - this.target[i]);
      out[i] = -((1 - beta) ** 2 * this.interference * x + beta * error);
      along += x * (error - (1 - beta) * this.interference * x);
    }
    out[n] = -along * beta * (1 - beta);
    return out;
  }

  // The derivative of the velocity: minus the Hessian of L
  jacobian(state) {
    const n = this.sigma.length, beta = this.B * this.attention(state[n]), slope = beta * (1 - beta), noise = this.interference;
    const J = Array.from({ length: n + 1 }, () => new Array(n + 1).fill(0));
    let along = 0;
    for (let i = 0; i < n; i++) {
      const x = state[i], s = this.sigma[i], c = this.target[i];
      J[i][i] = -((1 - beta) ** 2 * noise + s * beta ** 2);
      J[i][n] = J[n][i] = -(s * (2 * beta * x - c) - 2 * (1 - beta) * noise * x) * slope;
      J[n][n] -= x ** 2 * (noise + s) * slope ** 2;
      along += x * (s * (beta * x - c) - (1 - beta) * noise * x);
    }
    J[n][n] -= along * slope * (1 - 2 * beta);
    return J;
  }

  // The w_i that minimises L at this attention: where w sits after the jump
  wInf(alpha, i = 0) {
    const beta = this.B * alpha, s = this.sigma[i];
    return (s * beta * this.target[i]) / ((1 - beta) ** 2 * this.interference + s * beta ** 2);
  }

  // λ, the growth rate near the start; B / (√d T) without repetition across samples
  get rate() {
    return (this.B / this.T) * Math.hypot(...this.sigma.map((s, i) => s * this.target[i]));
  }
  escapeTime(epsilon) { return Math.asinh(epsilon / this.rate) / (2 * this.rate); }
  takeoffTime() { return Math.sqrt(Math.PI / 2) / this.rate; }

  // After this time nothing is expected any more: many times the growth, and the slowest direction's own time d/(1 − p)
  get patience() { return 400 / this.rate + 60 * Math.sqrt(this.d) * this.T + (30 * this.d) / (1.001 - this.p); }

  // Gradient flow from the start until `until(t, state)` or `horizon`: {t: [...], state: [[...], ...]}.
  // Rosenbrock's method of order 4 with Shampine's coefficients: the slow tail is stiff, and the Jacobian is known.
  flow(until, { horizon = Infinity, tolerance = 1e-6, most = 20000 } = {}) {
    const n = this.start.length, t = [0], states = [this.start];
    const scale = [...this.target.map((c) => Math.max(c, 1)), 1];
    let y = this.start, time = 0, h = 1e-3 / this.rate;
    while (time < horizon && t.length < most && !until(time, y)) {
      h = Math.min(h, horizon - time);
      const f = this.velocity(y), solve = factorise(this.jacobian(y), 2 / h);
      const at = (k, a) => y.map((v, i) => k.reduce((sum, kj, j) => sum + a[j] * kj[i], v));
      const with_ = (g, k, c) => solve(g.map((v, i) => k.reduce((sum, kj, j) => sum + (c[j] / h) * kj[i], v)));
      const k1 = solve(f);
      const k2 = with_(this.velocity(at([k1], [2])), [k1], [-8]);
      const f3 = this.velocity(at([k1, k2], [48 / 25, 6 / 25]));
      const k3 = with_(f3, [k1, k2], [372 / 25, 12 / 5]);
      const k4 = with_(f3, [k1, k2, k3], [-112 / 125, -54 / 125, -2 / 5]);
      const next = at([k1, k2, k3, k4], [19 / 9, 1 / 2, 25 / 108, 125 / 108]);
      let error = 0;
      for (let i = 0; i < n; i++) {
        const apart = (17 / 54) * k1[i] + (7 / 36) * k2[i] + (125 / 108) * k4[i];
        error = Math.max(error, Math.abs(apart) / (scale[i] * tolerance + Math.abs(y[i]) * tolerance));
      }
      if (error <= 1) {
        time = horizon - time - h < 1e-12 * horizon ? horizon : time + h;
        y = next;
        t.push(time);
        states.push(y);
      }
      h *= Math.min(error <= 1 ? 1.6 : 0.9, Math.max(0.2, 0.9 * Math.max(error, 1e-9) ** (error <= 1 ? -0.25 : -1 / 3)));
    }
    return { t, states };
  }

  // The state at a time within a flow: cubic through both ends of the step with their velocities
  between({ t, states }, time) {
    let low = 0, high = t.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (t[middle] <= time) low = middle; else high = middle;
    }
    const h = t[high] - t[low], s = h > 0 ? Math.min(1, Math.max(0, (time - t[low]) / h)) : 0;
    const [a, b] = [states[low], states[high]], [va, vb] = [this.velocity(a), this.velocity(b)];
    return a.map((x, i) => x + s * (h * va[i] * (1 - s) ** 2 + s * ((3 - 2 * s) * (b[i] - x) + (s - 1) * h * vb[i])));
  }

  // Time at which the test loss has fallen to (1 − ε)/2; NaN if it does not get there
  plateau(epsilon, options = {}) {
    const level = (1 - epsilon) / 2, horizon = options.horizon ?? this.patience;
    const flow = options.flow ?? this.flow((_, y) => this.testLoss(y) <= level, { ...options, horizon });
    const after = flow.states.findIndex((y) => this.testLoss(y) <= level);
    if (after < 1) return NaN;
    let [low, high] = [flow.t[after - 1], flow.t[after]];
    for (let i = 0; i < 50; i++) {
      const middle = (low + high) / 2;
      if (this.testLoss(this.between(flow, middle)) <= level) high = middle; else low = middle;
    }
    return high;
  }
}

// x ↦ (shift·1 − J)⁻¹ x by Gaussian elimination, for two or three unknowns
function factorise(J, shift) {
  const n = J.length;
  return (right) => {
    const A = J.map((row, i) => [...row.map((v, j) => (i === j ? shift : 0) - v), right[i]]);
    for (let i = 0; i < n; i++) {
      let pivot = i;
      for (let r = i + 1; r < n; r++) if (Math.abs(A[r][i]) > Math.abs(A[pivot][i])) pivot = r;
      [A[i], A[pivot]] = [A[pivot], A[i]];
      for (let r = i + 1; r < n; r++) {
        const factor = A[r][i] / A[i][i];
        for (let c = i; c <= n; c++) A[r][c] -= factor * A[i][c];
      }
    }
    const x = new Array(n);
    for (let i = n - 1; i >= 0; i--) {
      let sum = A[i][n];
      for (let c = i + 1; c < n; c++) sum -= A[i][c] * x[c];
      x[i] = sum / A[i][i];
    }
    return x;
  };
}

if (typeof window !== "undefined") window.ToyDynamics = ToyDynamics;
if (typeof module !== "undefined") module.exports = { ToyDynamics };
