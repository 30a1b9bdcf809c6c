// The run browser: pick a chapter and an experiment, see every run, and the attention of those that were followed.
// The data are scripts, runs/<chapter>.js, each a call of bookRuns: lib/browser.py writes them.
"use strict";

(() => {
  const root = document.getElementById("runs-panel");
  if (!root || !window.bookChapters) return;
  const $ = (id) => document.getElementById(id);
  const loaded = {}, state = { chapter: null, experiment: null, metric: "test_loss", color: "", filters: {}, sort: ["emergence", 1], selected: null, step: 0, map: 0 };
  const words = (name) => name.replaceAll("_", " ");
  const number = (x) => (x === null || x === undefined ? "–" : typeof x === "number" ? x.toLocaleString("en", { maximumSignificantDigits: 4 }) : String(x));
  const dark = () => document.documentElement.dataset.theme === "dark";
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const PALETTE = () => (dark() ? ["#56B4E9", "#F0A35E", "#3cc79b", "#e39bc6", "#E6C229", "#9ad0f5", "#bbbbbb"] : ["#0072B2", "#D55E00", "#00805E", "#b0508a", "#8a6d00", "#2a7fb8", "#555555"]);
  const options = (select, values, chosen, texts = values.map(words)) => {
    select.replaceChildren(...values.map((value, i) => Object.assign(document.createElement("option"), { value, textContent: texts[i], selected: String(value) === String(chosen) })));
  };

  window.bookRuns = (data) => { loaded[data.chapter] = data; choose(data.chapter); };
  const load = (chapter) => {
    state.chapter = chapter;
    if (loaded[chapter]) return choose(chapter);
    $("rb-summary").textContent = `Loading ${words(chapter)} …`;
    const script = Object.assign(document.createElement("script"), { src: `runs/${chapter}.js` });
    script.addEventListener("error", () => { $("rb-summary").textContent = `The runs of ${words(chapter)} cannot be loaded: build the site again.`; });
    document.head.append(script);
  };
  const data = () => loaded[state.chapter];

  const choose = (chapter) => {
    if (chapter !== state.chapter) return;
    const names = Object.keys(data().experiments);
    const followed = ([, { runs }]) => runs.some(([key]) => data().attention[key]);
    if (!names.includes(state.experiment)) state.experiment = (Object.entries(data().experiments).find(followed) ?? [names[0]])[0];
    options($("rb-experiment"), names, state.experiment);
    pick();
  };
  const pick = () => {
    const { varied, runs } = data().experiments[state.experiment], metrics = Object.keys(data().runs[runs[0][0]].curves).filter((name) => name !== "step");
    if (!metrics.includes(state.metric)) state.metric = "test_loss";
    if (!varied.includes(state.color)) state.color = varied[0] ?? "";
    state.filters = {};
    options($("rb-metric"), metrics, state.metric);
    options($("rb-color"), ["", ...varied], state.color, ["seed", ...varied.map(words)]);
    $("rb-filters").replaceChildren(...varied.map((name, i) => {
      const box = document.createElement("div"), select = Object.assign(document.createElement("select"), { id: `rb-filter-${i}` });
      const values = [...new Set(runs.map(([, of]) => of[i]))].sort((a, b) => (a > b ? 1 : -1));
      box.append(Object.assign(document.createElement("label"), { htmlFor: select.id, textContent: words(name) }), select);
      options(select, ["", ...values], "", ["all", ...values.map(number)]);
      select.addEventListener("change", () => { state.filters[name] = select.value; draw(); });
      return box;
    }));
    const followed = runs.find(([key]) => data().attention[key]);
    state.selected = (followed ?? runs[0])[0];
    state.step = Infinity;
    state.map = null;
    draw();
  };
  const shown = () => {
    const { varied, runs } = data().experiments[state.experiment];
    return runs.filter(([, of]) => varied.every((name, i) => !state.filters[name] || String(of[i]) === state.filters[name]))
      .map(([key, of]) => ({ ...data().runs[key], of, values: Object.fromEntries(varied.map((name, i) => [name, of[i]])) }));
  };

  // ------------------------------------------------------------------------------------------------ curves
  let chart;
  const draw = () => {
    const runs = shown(), { varied } = data().experiments[state.experiment], log = $("rb-log").checked;
    if (!runs.some((run) => run.key === state.selected) && runs.length) state.selected = runs[0].key;
    const levels = [...new Set(runs.map((run) => run.values[state.color]))].sort((a, b) => (a > b ? 1 : -1)), palette = PALETTE();
    const colorOf = (run) => palette[(state.color ? levels.indexOf(run.values[state.color]) : run.seed) % palette.length];
    const order = [...runs].sort((a, b) => (a.key === state.selected) - (b.key === state.selected));
    const tables = order.map((run) => {
      const y = run.curves[state.metric] ?? [], keep = run.curves.step.map((step, i) => i).filter((i) => y[i] !== null && y[i] !== undefined && (!log || run.curves.step[i] > 0));
      return [keep.map((i) => run.curves.step[i]), keep.map((i) => y[i])];
    });
    const joined = tables.length ? uPlot.join(tables) : [[1]], loss = state.metric.endsWith("loss") || state.metric.startsWith("row_") || state.metric.startsWith("state_");
    const chance = loss && runs.length ? runs[0].chance : null, text = css("--pst-color-text-base") || "#222", grid = css("--pst-color-border") || "#ccc";
    const axis = (label) => ({ label, labelSize: 22, labelFont: "13px sans-serif", font: "12px sans-serif", stroke: text, grid: { stroke: grid, width: 0.5 }, ticks: { stroke: grid } });
    const short = (x) => (x >= 1e4 ? `${x / 1e3}k` : `${+x.toPrecision(3)}`);
    const marks = (plot) => {
      const g = plot.ctx, selected = runs.find((run) => run.key === state.selected);
      g.save();
      const flat = (y, dash) => { const at = plot.valToPos(y, "y", true); g.setLineDash(dash); g.strokeStyle = css("--pst-color-text-muted") || "#777"; g.lineWidth = 1.4; g.beginPath(); g.moveTo(plot.bbox.left, at); g.lineTo(plot.bbox.left + plot.bbox.width, at); g.stroke(); };
      if (chance !== null && chance < plot.scales.y.max) flat(chance, [2, 4]);
      if (selected && selected.line.metric === state.metric) flat(selected.line.below ?? selected.line.above, [7, 5]);
      for (const run of runs) {
        const i = run.curves.step.indexOf(run.emergence);
        if (i < 0 || (run.curves[state.metric] ?? [])[i] == null) continue;
        g.fillStyle = colorOf(run); g.beginPath(); g.arc(plot.valToPos(run.emergence, "x", true), plot.valToPos(run.curves[state.metric][i], "y", true), run.key === state.selected ? 6 : 3.2, 0, 7); g.fill();
      }
      const maps = data().attention[state.selected];
      if (maps) { const x = plot.valToPos(Math.max(maps.steps[state.step], log ? 1 : 0), "x", true); g.setLineDash([]); g.strokeStyle = text; g.lineWidth = 1.5; g.beginPath(); g.moveTo(x, plot.bbox.top); g.lineTo(x, plot.bbox.top + plot.bbox.height); g.stroke(); }
      g.restore();
    };
    attention(false);
    chart?.destroy();
    chart = new uPlot({
      width: Math.max(280, $("rb-chart").clientWidth), height: 330, cursor: { drag: { setScale: false }, points: { show: false } }, hooks: { draw: [marks] },
      scales: { x: { time: false, distr: log ? 3 : 1 } },
      axes: [{ ...axis("training step"), values: (_, s) => s.map((x) => (x === null ? "" : log && Math.abs(Math.log10(x) % 1) > 1e-9 ? "" : short(x))) }, axis(words(state.metric))],
      series: [{}, ...order.map((run) => ({ label: run.key, stroke: colorOf(run), width: run.key === state.selected ? 3.2 : 1, alpha: run.key === state.selected ? 1 : 0.55, spanGaps: true, points: { show: false } }))],
    }, joined, $("rb-chart"));
    const emerged = runs.filter((run) => run.emergence !== null).map((run) => run.emergence).sort((a, b) => a - b);
    $("rb-summary").textContent = `${words(state.chapter)}, ${words(state.experiment)} (profile ${data().profile}): ${runs.length} runs, ${emerged.length} emerged` +
      (emerged.length ? `, the first at step ${number(emerged[0])}, the median of them at ${number(emerged[emerged.length >> 1])}, the last at ${number(emerged[emerged.length - 1])}` : "") + `; ${runs.length - emerged.length} censored.` +
      (state.color && levels.length > 1 ? ` Colours: ${words(state.color)} ${levels.map(number).join(", ")}.` : "");
    $("rb-chart").setAttribute("aria-label", `${words(state.metric)} against training step. ${$("rb-summary").textContent}`);
    table(runs, varied);
  };

  // ------------------------------------------------------------------------------------------------ table
  const table = (runs, varied) => {
    const last = (run) => { const values = (run.curves.test_loss ?? []).filter((v) => v !== null); return values[values.length - 1] ?? null; };
    const columns = [["seed", (run) => run.seed], ...varied.map((name) => [words(name), (run) => run.values[name]]), ["emergence", (run) => run.emergence ?? Infinity], ["final loss", last], ["steps", (run) => run.steps], ["status", (run) => run.status]];
    const [by, sign] = state.sort, value = (columns.find(([name]) => name === by) ?? columns[0])[1];
    const rows = [...runs].sort((a, b) => (value(a) === value(b) ? 0 : value(a) > value(b) ? sign : -sign));
    const head = document.createElement("tr");
    head.append(...columns.map(([name]) => {
      const cell = document.createElement("th"), button = Object.assign(document.createElement("button"), { type: "button", textContent: name + (name === by ? (sign > 0 ? " ▲" : " ▼") : "") });
      cell.scope = "col"; cell.setAttribute("aria-sort", name === by ? (sign > 0 ? "ascending" : "descending") : "none");
      button.addEventListener("click", () => { state.sort = [name, name === by ? -sign : 1]; table(runs, varied); });
      cell.append(button);
      return cell;
    }));
    root.querySelector(".runs-table thead").replaceChildren(head);
    root.querySelector(".runs-table tbody").replaceChildren(...rows.map((run) => {
      const row = document.createElement("tr");
      row.tabIndex = 0; row.dataset.key = run.key; row.setAttribute("aria-selected", run.key === state.selected);
      row.append(...columns.map(([name, of], i) => Object.assign(document.createElement("td"), {
        textContent: (name === "emergence" && run.emergence === null ? `censored at ${number(run.steps)}` : number(of(run))) + (i === 0 && data().attention[run.key] ? " ■" : "") })));
      const select = () => { Object.assign(state, { selected: run.key, step: Infinity, map: null }); draw(); };
      row.addEventListener("click", select);
      row.addEventListener("keydown", (event) => { if (event.key === "Enter") { select(); root.querySelector(`tr[data-key="${run.key}"]`).focus(); } });
      return row;
    }));
  };

  // ------------------------------------------------------------------------------------------------ attention
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const paint = (canvas, cells, lines, columns) => {
    canvas.width = columns; canvas.height = lines; canvas.style.aspectRatio = `${columns} / ${lines}`;
    const image = new ImageData(columns, lines);
    cells.forEach((v, i) => { const shade = 255 - Math.round(Math.sqrt(v) * 225); image.data.set([shade, shade, shade, 255], 4 * i); });
    canvas.getContext("2d").putImageData(image, 0, 0);
  };
  const attention = (redraw = true) => {
    const kept = data().attention[state.selected];
    $("rb-attention").hidden = !kept;
    if (!kept) return;
    kept.bytes ??= bytes(kept.maps); kept.true ??= bytes(kept.truth);
    const [steps, maps, lines, columns] = kept.shape, run = data().runs[state.selected];
    if (state.step >= steps) state.step = run.emergence === null ? steps - 1 : Math.max(0, kept.steps.findIndex((step) => step >= run.emergence));
    const of = (at, map = state.map) => Array.from(kept.bytes.subarray((at * maps + map) * lines * columns, (at * maps + map + 1) * lines * columns), (v) => v / 255);
    const mass = (cells) => { let sum = 0; const asked = new Set(); kept.true.forEach((yes, i) => { if (yes) { sum += cells[i]; asked.add(Math.floor(i / columns)); } }); return sum / Math.max(1, asked.size); };
    const found = kept.names.map((_, i) => mass(of(steps - 1, i)));
    state.map ??= found.indexOf(Math.max(...found)); // the head that ends with the most on the pattern
    options($("rb-map"), kept.names.map((_, i) => i), state.map, kept.names);
    Object.assign($("rb-step"), { min: 0, max: steps - 1, step: 1 });
    $("rb-step").value = state.step;
    $("rb-step").setAttribute("aria-valuetext", `step ${kept.steps[state.step]}`);
    $("rb-step-out").textContent = number(kept.steps[state.step]);
    for (const [id, at] of [["rb-before", 0], ["rb-now", state.step], ["rb-after", steps - 1]]) {
      paint($(id), of(at), lines, columns);
      $(id).setAttribute("aria-label", `Attention of ${kept.names[state.map]} at step ${kept.steps[at]}: ${(100 * mass(of(at))).toFixed(0)} % on the true pattern`);
    }
    paint($("rb-truth"), Array.from(kept.true), lines, columns);
    $("rb-truth").setAttribute("aria-label", "The true pattern");
    $("rb-now-caption").textContent = `At step ${number(kept.steps[state.step])}`;
    $("rb-attention-title").textContent = `Attention of seed ${run.seed}`;
    $("rb-mass").textContent = `${kept.names[state.map]} puts ${(100 * mass(of(0))).toFixed(0)} % of its attention on the true pattern at the start, ${(100 * mass(of(state.step))).toFixed(0)} % at step ${number(kept.steps[state.step])}, ${(100 * mass(of(steps - 1))).toFixed(0)} % at the end.`;
    if (redraw) chart.redraw(false);
  };
  let playing;
  const stop = () => { clearInterval(playing); playing = undefined; $("rb-play").textContent = "play"; };
  $("rb-play").addEventListener("click", () => {
    if (playing) return stop();
    const last = data().attention[state.selected].steps.length - 1;
    if (state.step >= last) state.step = 0;
    $("rb-play").textContent = "stop";
    playing = setInterval(() => { if (!data().attention[state.selected] || state.step >= last) return stop(); state.step += 1; attention(); }, 160);
  });
  $("rb-step").addEventListener("input", () => { state.step = +$("rb-step").value; attention(); });
  $("rb-map").addEventListener("change", () => { state.map = +$("rb-map").value; attention(); });

  $("rb-chapter").addEventListener("change", (event) => { state.experiment = null; stop(); load(event.target.value); });
  $("rb-experiment").addEventListener("change", (event) => { state.experiment = event.target.value; stop(); pick(); });
  $("rb-metric").addEventListener("change", (event) => { state.metric = event.target.value; draw(); });
  $("rb-color").addEventListener("change", (event) => { state.color = event.target.value; draw(); });
  $("rb-log").addEventListener("change", () => draw());
  root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  new MutationObserver(() => data() && draw()).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  let waiting;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => data() && draw(), 150); });

  root.hidden = false;
  const first = window.bookChapters.includes("linear_map") ? "linear_map" : window.bookChapters[0];
  options($("rb-chapter"), window.bookChapters, first);
  window.runBrowser = { state, data };
  load(first);
})();
