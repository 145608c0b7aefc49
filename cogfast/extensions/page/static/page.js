"use strict";
(() => {
  const find = (selector) => document.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const data = JSON.parse(find("#data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // What is chosen stays over a reload. A browser may have no storage for a page from a disk.
  const place = `cogfast ${location.pathname}`;
  let kept = {};
  try {
    kept = JSON.parse(sessionStorage.getItem(place)) || {};
  } catch {}
  function keep(changes) {
    Object.assign(kept, changes);
    try {
      sessionStorage.setItem(place, JSON.stringify(kept));
    } catch {}
  }

  // ---- curves ----

  const HEIGHT = 230;
  const smoothing = find("#smoothing");
  const axis = find("#axis");
  const charts = [];

  function short(value) {
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(5)));
  }
  const shown = (value) => (value === null || value === undefined ? "–" : short(value));
  const lastOf = (values) => values.findLast((value) => value !== null && value !== undefined);

  // Exponential moving average, without a bias towards the first value.
  function smooth(values, share) {
    let [sum, weight] = [0, 0];
    return values.map((value) => {
      if (value === null) return null;
      sum = share * sum + (1 - share) * value;
      weight = share * weight + 1 - share;
      return sum / weight;
    });
  }

  // Pixels beside a plot for the longest of its labels, at 8 a character.
  const widthOf = (_, labels) => Math.max(62, 22 + 8 * Math.max(0, ...(labels ?? []).map((label) => label.length)));

  function optionsOf(lines, table, isTime, numRaw, width) {
    const tone = (line, i) => colour(`--tone-${(line.tone ?? i) % 8}`); // a comparison's runs have one each
    const series = lines.map((line, i) => ({
      label: line.label,
      stroke: tone(line, i),
      width: 2,
      spanGaps: true,
      points: { show: line.isHeldOut && line.values.length < 200, size: 6, fill: tone(line, i) },
      value: (_, value, __, index) => shown(index === null ? lastOf(table[i + 1]) : value),
    }));
    const raw = series.slice(0, numRaw).map((one) => ({ ...one, class: "raw", width: 1, alpha: 0.3, points: { show: false } }));
    const line = { stroke: colour("--line"), width: 1 };
    const x = { stroke: colour("--muted"), grid: line, ticks: line };
    return {
      width,
      height: HEIGHT,
      padding: [8, 16, 0, 0],
      cursor: { sync: { key: "x", setSeries: false } },
      scales: { x: { time: false } },
      axes: [{ ...x, size: 32 }, { ...x, size: widthOf, values: (_, splits) => splits.map(shown) }],
      series: [{ label: isTime ? "hours" : "step", value: (_, value) => shown(value ?? table[0].at(-1)) }, ...series, ...raw],
      // A line that the legend hides takes its unsmoothed one along.
      hooks: { setSeries: [(u, i, { show }) => numRaw && show !== undefined && i <= numRaw && u.setSeries(i + numRaw, { show })] },
    };
  }

  function addPlot(plot) {
    const [figure, caption, canvas] = ["figure", "figcaption", "div"].map((name) => document.createElement(name));
    figure.className = "plot";
    caption.textContent = plot.title;
    figure.append(caption, canvas);
    find("#plots").append(figure);
    const lines = plot.lines.map((line) => {
      const [axis, values] = data.runs[line.run].columns[line.key];
      return { label: line.label, tone: line.tone, isHeldOut: line.key.startsWith("valid_"), axes: data.runs[line.run].axes[axis], values };
    });
    const last = lines.map((line) => `${line.label}: ${short(lastOf(line.values))}`).join(", ");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${plot.title}. Last values: ${last}`);
    const build = () => {
      const [isTime, share] = [axis.value === "time", plot.isSmooth ? Number(smoothing.value) : 0];
      const raw = lines.map((line) => [line.axes[Number(isTime)], line.values]);
      const smoothed = raw.map(([x, y], i) => [x, lines[i].isHeldOut ? y : smooth(y, share)]);
      const tables = share ? [...smoothed, ...raw] : smoothed;
      const table = tables.every(([x]) => x === tables[0][0]) ? [tables[0][0], ...tables.map(([, y]) => y)] : uPlot.join(tables);
      return new uPlot(optionsOf(lines, table, isTime, share ? lines.length : 0, canvas.clientWidth), table, canvas);
    };
    const chart = { build, drawn: build() };
    charts.push(chart);
    new ResizeObserver(() => chart.drawn.setSize({ width: canvas.clientWidth, height: HEIGHT })).observe(canvas);
  }

  function redraw() {
    find("#smoothed").textContent = smoothing.value;
    for (const chart of charts) {
      chart.drawn.destroy();
      chart.drawn = chart.build();
    }
  }

  if (smoothing) {
    smoothing.value = kept.smoothing ?? smoothing.value;
    axis.value = kept.axis ?? "step";
    data.plots.forEach(addPlot);
    find("#smoothed").textContent = smoothing.value;
    for (const input of [smoothing, axis]) {
      input.addEventListener("input", () => {
        keep({ smoothing: smoothing.value, axis: axis.value });
        redraw();
      });
    }
    // A canvas has its colours from when it was drawn.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }
  for (const swatch of all("[data-tone]")) swatch.style.background = `var(--tone-${swatch.dataset.tone % 8})`;

  // ---- samples ----

  const button = find("#play");
  const visible = new Set();
  let isPlaying = kept.isPlaying ?? !matchMedia("(prefers-reduced-motion: reduce)").matches;

  function play(video) {
    // Pausing a video that loads refuses this promise.
    if (isPlaying) video.play().catch(() => {});
    else video.pause();
  }

  // Only videos in view are loaded and play.
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      visible[isIntersecting ? "add" : "delete"](target);
      if (isIntersecting) target.preload = "auto";
      if (isIntersecting) play(target);
      else target.pause();
    }
  });
  for (const video of all(".strip video")) {
    video.muted = true; // the attribute sets the default alone
    for (const name of ["pointerenter", "focus"]) video.addEventListener(name, () => (video.controls = true));
    for (const name of ["pointerleave", "blur"]) video.addEventListener(name, () => (video.controls = false));
    watcher.observe(video);
  }
  if (button) {
    const show = () => (button.textContent = isPlaying ? "Pause all" : "Play all");
    show();
    button.addEventListener("click", () => {
      isPlaying = !isPlaying;
      keep({ isPlaying });
      show();
      for (const video of visible) {
        video.currentTime = 0; // the same moment of all is seen
        play(video);
      }
    });
  }

  const slider = find("#step");
  function choose(steps) {
    find("#chosen").textContent = steps[slider.value].toLocaleString("en");
    for (const strip of all(".strip")) {
      const last = new Map();
      for (const figure of all("[data-step]", strip)) {
        figure.hidden = true;
        if (Number(figure.dataset.step) <= steps[slider.value]) last.set(figure.dataset.run, figure);
      }
      for (const figure of last.values()) figure.hidden = false;
    }
  }
  if (slider) {
    const steps = [...new Set(all("[data-step]").map((figure) => Number(figure.dataset.step)))].sort((a, b) => a - b);
    slider.max = steps.length - 1;
    slider.value = kept.step ?? slider.max;
    choose(steps);
    slider.addEventListener("input", () => {
      keep({ step: slider.value });
      choose(steps);
    });
  }

  // ---- commands ----

  for (const copy of all(".copy")) {
    copy.addEventListener("click", () => {
      // Without a clipboard, as on a web server without TLS, the text is selected at least.
      getSelection().selectAllChildren(copy.previousElementSibling);
      copy.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    });
  }

  // ---- reload while the run is active ----

  if (kept.scroll !== undefined) {
    all("details").forEach((details, i) => (details.open = kept.open[i] ?? details.open));
    scrollTo(0, kept.scroll);
    all(".strip").forEach((strip, i) => (strip.scrollLeft = kept.strips[i] ?? 0));
    keep({ scroll: undefined });
  }
  const MOST_AGE = 7200; // seconds; a run that was killed cannot say so
  const isOld = () => Date.now() / 1000 - data.written > MOST_AGE;
  if (data.reload) {
    setInterval(() => {
      if (document.fullscreenElement || isOld()) return;
      const [open, strips] = [all("details").map((one) => one.open), all(".strip").map((one) => one.scrollLeft)];
      keep({ scroll: scrollY, open, strips });
      location.reload();
    }, data.reload * 1000);
  }
})();
