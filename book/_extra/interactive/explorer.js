// The explorer page: sliders, four plots, a line in words. The equations are in toy-dynamics.js.
"use strict";

(() => {
  const root = document.getElementById("explorer-panel");
  if (!root) return;
  const powers = (from, to) => Array.from({ length: 4 * (to - from) + 1 }, (_, i) => Math.round(2 ** (from + i / 4)));
  const range = (from, to, by) => Array.from({ length: Math.round((to - from) / by) + 1 }, (_, i) => +(from + i * by).toFixed(4));
  const CHOICES = {
    T: powers(4, 12), d: powers(2, 9), B: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64],
    p: range(0, 1, 0.01), epsilon: range(0.5, 0.95, 0.05),
  };
  const INITIAL = { T: 512, d: 64, B: 1, p: 0, epsilon: 0.8 };
  const $ = (id) => document.getElementById(id);
  const number = (x) => (Number.isFinite(x) ? x.toLocaleString("en", { maximumSignificantDigits: 4 }) : "–");
  const nearest = (list, value) => list.reduce((best, x, i) => (Math.abs(x - value) < Math.abs(list[best] - value) ? i : best), 0);
  const ink = () => {
    const style = getComputedStyle(document.documentElement), dark = document.documentElement.dataset.theme === "dark";
    const of = (name, other) => style.getPropertyValue(name).trim() || other;
    return {
      text: of("--pst-color-text-base", dark ? "#ddd" : "#222"), grid: of("--pst-color-border", "#ccc"), muted: of("--pst-color-text-muted", "#767676"),
      blue: dark ? "#56B4E9" : "#0072B2", orange: dark ? "#F0A35E" : "#D55E00", green: dark ? "#3cc79b" : "#00805E", dark,
    };
  };

  const values = () => {
    const chosen = Object.fromEntries(Object.keys(CHOICES).map((name) => [name, CHOICES[name][+$(`ex-${name}`).value]]));
    return { ...chosen, asked: chosen.B, B: Math.min(chosen.B, chosen.T - 1) };
  };

  // Everything that the page shows for one setting, from the equations alone
  const solve = ({ T, d, B = 1, p = 0, epsilon = 0.8 }, { points = 400 } = {}) => {
    const toy = new ToyDynamics({ T, d, B, p });
    const level = (1 - epsilon) / 2;
    let plateau = NaN, end = Infinity;
    const flow = toy.flow((t, y) => {
      if (Number.isNaN(plateau) && toy.testLoss(y) <= level) { plateau = t; end = 2.6 * t; }
      return t >= Math.min(end, toy.patience);
    });
    if (!Number.isNaN(plateau)) plateau = toy.plateau(epsilon, { flow });
    const last = Number.isNaN(plateau) ? flow.t[flow.t.length - 1] : Math.min(2.5 * plateau, flow.t[flow.t.length - 1]);
    return { toy, flow, plateau, last, escape: toy.escapeTime(epsilon), takeoff: toy.takeoffTime(), level };
  };
  const sample = ({ toy, flow }, times) => times.map((time) => {
    const y = toy.between(flow, time), deltaA = y[y.length - 1], alpha = toy.attention(deltaA);
    return { t: time, w: y[y.length - 2], wTilde: y.length > 2 ? y[0] : NaN, deltaA, alpha, loss: toy.loss(y), testLoss: toy.testLoss(y) };
  });

  // ------------------------------------------------------------------------------------------------ plots
  let plots = {}, colors = ink();
  const axis = (label, more = {}) => ({ label, labelSize: 22, labelFont: "13px sans-serif", font: "12px sans-serif", stroke: colors.text, grid: { stroke: colors.grid, width: 0.5 }, ticks: { stroke: colors.grid }, ...more });
  const short = (x) => (x >= 1e6 ? `${x / 1e6}M` : x >= 1e4 ? `${x / 1e3}k` : `${+x.toPrecision(3)}`);
  const decades = (_, splits) => splits.map((x) => (x && Math.abs(Math.log10(x) % 1) < 1e-9 ? short(x) : ""));
  const size = (id) => ({ width: Math.max(260, $(id).clientWidth || 360), height: 230 });
  const line = (label, stroke, more = {}) => ({ label, stroke, width: 2, points: { show: false }, ...more });
  const dotted = (label) => line(label, colors.muted, { width: 1.2, dash: [2, 4] });

  const build = () => {
    colors = ink();
    for (const plot of Object.values(plots)) plot.destroy?.();
    const log = $("ex-log").checked, time = log ? { time: false, distr: 3, range: (_, least, most) => [least, most] } : { time: false };
    const timeAxis = axis("time (steps of gradient descent at rate 1)", { values: log ? decades : (_, s) => s.map(short) });
    const common = { cursor: { drag: { setScale: false } }, legend: { live: false, markers: { width: 2, dash: (plot, i) => (plot.series[i].dash ? (plot.series[i].dash[0] < 4 ? "dotted" : "dashed") : "solid") } } };
    plots = {
      loss: new uPlot({ ...size("ex-loss"), ...common, scales: { x: time, y: { range: [0, 0.55] } }, axes: [timeAxis, axis("loss")],
        series: [{}, line("test loss", colors.blue), line("training loss", colors.orange, { dash: [6, 4] }), dotted("nothing learnt"), dotted("end of the plateau")] }, [[1], [1], [1], [1], [1]], $("ex-loss")),
      state: new uPlot({ ...size("ex-state"), ...common, scales: { x: time, y: { range: (_, least, most) => [0, Math.max(1.25, 1.05 * most)] } }, axes: [timeAxis, axis("share of the limit")],
        series: [{}, line("w / its limit", colors.blue), line("Bα, attention", colors.orange), line("w̃ / its limit", colors.green, { dash: [6, 4] })] }, [[1], [1], [1], [1]], $("ex-state")),
      plateau: new uPlot({ ...size("ex-plateau"), ...common, scales: { x: { time: false, distr: 3 }, y: { distr: 3 } }, axes: [axis("T", { values: decades }), axis("plateau (steps)", { values: decades, size: 56 })],
        series: [{}, line("solved", colors.blue), line("you", colors.blue, { width: 0, points: { show: true, size: 11, fill: colors.blue } }), line("linear theory", colors.muted, { dash: [7, 5] }), line("take-off", colors.muted, { dash: [2, 4] })] }, [[1], [1], [1], [1], [1]], $("ex-plateau")),
    };
    const canvas = document.createElement("canvas");
    $("ex-landscape").replaceChildren(canvas);
    plots.landscape = { canvas, destroy() {} };
  };

  // Loss over (w, Δa), in bands as a map has heights; the flow on it, a dot each eighth of the plateau
  const landscape = (solved, path) => {
    const { toy } = solved, { canvas } = plots.landscape, ratio = window.devicePixelRatio || 1;
    const { width, height } = size("ex-landscape"), pad = { left: 46, right: 8, top: 8, bottom: 40 };
    canvas.width = width * ratio; canvas.height = (height + 26) * ratio;
    canvas.style.width = `${width}px`; canvas.style.height = `${height + 26}px`;
    const g = canvas.getContext("2d"), W = width - pad.left - pad.right, H = height + 26 - pad.top - pad.bottom;
    g.scale(ratio, ratio);
    const c = toy.target[toy.target.length - 1] || 1, wMax = 1.25 * Math.max(c, ...path.map((s) => s.w)), aMax = 1.15 * Math.max(2, ...path.map((s) => s.deltaA));
    const columns = 90, rows = 60, image = new ImageData(columns, rows);
    for (let j = 0; j < rows; j++) {
      const deltaA = (aMax * (rows - 0.5 - j)) / rows, wTilde = toy.p > 0 ? [toy.wInf(toy.attention(deltaA), 0)] : [];
      for (let i = 0; i < columns; i++) {
        const loss = toy.loss([...wTilde, (wMax * (i + 0.5)) / columns, deltaA]);
        const band = Math.min(1, Math.max(0, (Math.round(5 * Math.log10(Math.max(loss, 1e-3))) + 15) / 15)), at = 4 * (j * columns + i);
        const shade = colors.dark ? [20 + 55 * band, 28 + 70 * band, 40 + 85 * band] : [120 + 130 * band, 150 + 102 * band, 175 + 80 * band];
        image.data.set([...shade, 255], at);
      }
    }
    const small = document.createElement("canvas");
    small.width = columns; small.height = rows;
    small.getContext("2d").putImageData(image, 0, 0);
    g.imageSmoothingEnabled = true;
    g.drawImage(small, pad.left, pad.top, W, H);
    const x = (w) => pad.left + (W * w) / wMax, y = (deltaA) => pad.top + H - (H * deltaA) / aMax;
    g.strokeStyle = g.fillStyle = colors.orange; g.lineWidth = 2; g.beginPath();
    path.forEach((s, i) => (i ? g.lineTo(x(s.w), y(s.deltaA)) : g.moveTo(x(s.w), y(s.deltaA))));
    g.stroke();
    const until = Number.isFinite(solved.plateau) ? solved.plateau : solved.last;
    for (const s of sample(solved, Array.from({ length: 9 }, (_, i) => (until * i) / 8))) { g.beginPath(); g.arc(x(s.w), y(s.deltaA), 3.6, 0, 7); g.fill(); }
    g.fillStyle = colors.text; g.font = "12px sans-serif"; g.textAlign = "center";
    const tick = (most) => { const step = 10 ** Math.floor(Math.log10(most / 2)); return step * (most / step > 10 ? 5 : most / step > 4 ? 2 : 1); };
    for (let v = 0; v <= wMax; v += tick(wMax)) g.fillText(short(v), x(v), pad.top + H + 15);
    g.fillText("weights w", pad.left + W / 2, pad.top + H + 33);
    g.textAlign = "right";
    for (let v = 0; v <= aMax; v += tick(aMax)) g.fillText(short(v), pad.left - 5, y(v) + 4);
    g.save(); g.translate(13, pad.top + H / 2); g.rotate(-Math.PI / 2); g.textAlign = "center"; g.fillText("score difference Δa", 0, 0); g.restore();
    $("ex-slice").textContent = toy.p > 0 ? "Here w̃ is at its best for each attention." : "";
  };

  let nextFrame;
  const otherLengths = (chosen, { toy, plateau }) => {
    const lengths = [...new Set([16, 32, 64, 128, 256, 512, 1024, 2048, 4096, chosen.T])].filter((T) => T > chosen.B).sort((a, b) => a - b);
    const others = lengths.map((T) => (T === chosen.T ? toy : new ToyDynamics({ ...chosen, T })));
    plots.plateau.setData([lengths, others.map((o) => (o === toy ? plateau : o.plateau(chosen.epsilon, { tolerance: 1e-4, most: 3000 })) || null),
      lengths.map((T) => (T === chosen.T && plateau ? plateau : null)), others.map((o) => o.escapeTime(chosen.epsilon)), others.map((o) => o.takeoffTime())]);
  };

  const update = () => {
    const chosen = values(), solved = solve(chosen), { toy, plateau, escape, takeoff, last, level } = solved, log = $("ex-log").checked;
    for (const name of Object.keys(CHOICES)) {
      const text = name === "p" || name === "epsilon" ? chosen[name].toFixed(2) : number(name === "B" ? chosen.B : chosen[name]);
      $(`ex-${name}-out`).textContent = text;
      $(`ex-${name}`).setAttribute("aria-valuetext", text);
    }
    const first = last / 300, steps = solved.flow.t.filter((t) => t <= last && t >= (log ? first : 0));  // the solver's own are dense where it matters
    const even = Array.from({ length: 60 }, (_, i) => (log ? first * (last / first) ** (i / 59) : (last * i) / 59));
    const times = [...new Set([...steps.filter((_, i) => i % Math.ceil(steps.length / 400) === 0), ...even])].sort((a, b) => a - b), path = sample(solved, times);
    const all = (f) => path.map(f), flat = (v) => times.map(() => v), none = times.map(() => null), many = toy.target.length;
    plots.loss.setData([times, all((s) => s.testLoss), toy.p > 0 ? all((s) => s.loss) : none, flat(0.5), flat(level)]);
    plots.state.setData([times, all((s) => s.w / (toy.target[many - 1] || 1)), all((s) => toy.B * s.alpha), many > 1 ? all((s) => s.wTilde / toy.target[0]) : none]);
    root.classList.toggle("explorer-plain", !(toy.p > 0)); // then two lines are absent, and so are their names
    landscape(solved, path);
    cancelAnimationFrame(nextFrame); // while a slider moves, plateaus at other T are solved once a frame, for the last setting
    nextFrame = requestAnimationFrame(() => otherLengths(chosen, solved));
    const cut = chosen.asked > chosen.B ? ` B is kept below T, at ${chosen.B}.` : "";
    $("ex-summary").textContent = Number.isFinite(plateau)
      ? `The plateau lasts ${number(plateau)} steps: until then the test loss stays above ${level.toFixed(3)}, from 0.5. The linearised equations say ${number(escape)}, ${number(escape / plateau)} times as long; the take-off time is ${number(takeoff)}.${cut}`
      : `The test loss does not fall to ${level.toFixed(3)} within ${number(last)} steps. The linearised equations would say ${number(escape)}.${cut}`;
    const said = { loss: $("ex-summary").textContent, state: `At the end of the plot w is at ${number(path[path.length - 1].w / (toy.target[many - 1] || 1))} of its limit and attention at ${number(toy.B * path[path.length - 1].alpha)}.`,
      landscape: "The flow starts where the landscape is flat, at w = 0 and Δa = 0, and ends in its valley.", plateau: `Plateau length for T from 16 to 4,096 at d = ${chosen.d}, B = ${chosen.B}, p = ${chosen.p}.` };
    for (const [name, text] of Object.entries(said)) $(`ex-${name}`).setAttribute("aria-label", text);
    window.explorer.shown = { ...chosen, plateau, escape, takeoff };
  };

  // ------------------------------------------------------------------------------------------------ controls
  const set = (wanted) => {
    for (const [name, value] of Object.entries(wanted)) $(`ex-${name}`).value = nearest(CHOICES[name], value);
    update();
  };
  for (const [name, list] of Object.entries(CHOICES)) {
    Object.assign($(`ex-${name}`), { min: 0, max: list.length - 1, step: 1 });
    $(`ex-${name}`).value = nearest(list, INITIAL[name]);
    $(`ex-${name}`).addEventListener("input", update);
  }
  root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  for (const button of root.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const now = values(), by = JSON.parse(button.dataset.scale ?? "{}");
      set({ ...JSON.parse(button.dataset.set ?? "{}"), ...Object.fromEntries(Object.entries(by).map(([name, factor]) => [name, now[name] * factor])) });
    });
  }
  window.explorer = { solve, sample, set, choices: CHOICES, plots: () => plots };
  const redraw = () => { build(); update(); };
  root.hidden = false;
  redraw();
  $("ex-log").addEventListener("change", redraw);
  new MutationObserver(redraw).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  let waiting;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 150); });
})();
