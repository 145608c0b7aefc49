"use strict";
(() => {
  const root = document.documentElement;
  const find = (selector) => document.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const data = JSON.parse(find("#numbers").textContent);

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // ---- theme ----

  const themes = ["system", "light", "dark"];
  const redraws = []; // one function per plot

  function showTheme() {
    const name = cogfastTheme.chosen;
    cogfastTheme.show();
    find("#theme").textContent = { system: "Auto", light: "Light", dark: "Dark" }[name];
    find("#theme").setAttribute("aria-label", `Theme: ${name}`);
    // A canvas has its colours from when it was drawn.
    for (const redraw of redraws) redraw();
  }
  showTheme();

  find("#theme").addEventListener("click", () => {
    cogfastTheme.chosen = themes[(themes.indexOf(cogfastTheme.chosen) + 1) % themes.length];
    try {
      localStorage.setItem("cogfast-theme", cogfastTheme.chosen);
    } catch (error) {
      // Without storage the choice holds until the page is loaded again.
    }
    showTheme();
  });
  cogfastTheme.system.addEventListener("change", showTheme);

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const NUM_TONES = 8;

  function colourOf(line) {
    if (line.of) {
      // Bands are ordered, so their colours are, too: from little noise to much.
      const share = line.of === 1 ? 0 : line.tone / (line.of - 1);
      return `hsl(${Math.round(205 - 195 * share)} ${colour("--band-strength")} ${colour("--band-light")})`;
    }
    return colour(`--tone-${line.tone % NUM_TONES}`);
  }

  for (const swatch of all("[data-tone]")) swatch.style.background = `var(--tone-${swatch.dataset.tone % NUM_TONES})`;

  // ---- numbers ----

  function format(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e");
    if (size >= 1e4) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(5)));
  }

  const shortStep = (step) => {
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (Math.abs(step) >= size) return Number((step / (unit === "k" ? 1e3 : size)).toPrecision(4)) + unit;
    }
    return String(step);
  };

  // ---- plots ----

  const HEIGHT = 240;
  const FIRST_HEIGHT = 300; // the loss, over the whole width
  const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  const sync = uPlot.sync("steps");

  function columnsOf(plot) {
    const tables = plot.lines.map((line) => {
      const run = data.runs[line.run];
      const [axis, values] = run.columns[line.key];
      const scaled = plot.factor === 1 ? values : values.map((v) => (v === null ? null : v * plot.factor));
      return [run.axes[axis], scaled];
    });
    const first = tables[0][0];
    if (tables.every((table) => table[0] === first)) return [first, ...tables.map((table) => table[1])];
    return uPlot.join(tables);
  }

  function lastValue(values) {
    for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
    return null;
  }

  const isPositive = (columns) =>
    columns.slice(1).every((values) => values.every((v) => v === null || v === undefined || v > 0));

  function draw(plot, parent, height) {
    const columns = columnsOf(plot);
    const unit = plot.unit ? ` (${plot.unit})` : "";
    const place = element("div", { className: "canvas", tabIndex: 0 });
    const step = element("span", { className: "value step" });
    const legend = element("div", { className: "legend" });
    const logButton = element("button", { type: "button", className: "small", textContent: "log" });
    const allButton = element("button", { type: "button", className: "small", textContent: "show all", hidden: true });
    const title = element("figcaption", {}, element("strong", { textContent: plot.title + unit }), element("span", { className: "spacer" }), step, allButton, logButton);
    const figure = element("figure", { className: "plot" }, title);
    figure.append(place, legend);
    if (plot.about) figure.append(element("p", { className: "hint", textContent: plot.about }));
    figure.dataset.plot = plot.name;
    parent.append(figure);

    const canLog = isPositive(columns);
    logButton.hidden = !canLog;
    let isLog = plot.log && canLog;
    let chart = null;
    const summary = plot.lines
      .map((line, i) => `${line.label}: ${format(lastValue(columns[i + 1]))}`)
      .join(", ");
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", `${plot.title}${unit} over the steps. Last values: ${summary}`);

    const values = plot.lines.map((line) => {
      const swatch = element("span", { className: `swatch ${line.kind}` });
      const value = element("span", { className: "value" });
      const entry = element("button", { type: "button", className: "entry", title: "Hide or show" }, swatch, element("span", { textContent: line.label }), value);
      entry.setAttribute("aria-pressed", "true");
      legend.append(entry);
      return { swatch, value, entry };
    });

    function showValues(index) {
      const hasIndex = index !== null && index !== undefined;
      step.textContent = hasIndex ? `step ${columns[0][index].toLocaleString("en")}` : "last values";
      values.forEach(({ value }, i) => {
        let shown = hasIndex ? columns[i + 1][index] : lastValue(columns[i + 1]);
        // Between two evaluations the earlier one counts.
        for (let k = index; hasIndex && (shown === null || shown === undefined) && k > 0; ) shown = columns[i + 1][--k];
        value.textContent = format(shown);
      });
    }

    function isZoomed() {
      const { min, max } = chart.scales.x;
      // The first range is set after the chart is made.
      if (min === null || min === undefined) return false;
      return min > columns[0][0] || max < columns[0][columns[0].length - 1];
    }

    function showAll() {
      chart.setData(columns);
    }

    function zoom(factor) {
      const { min, max } = chart.scales.x;
      const first = columns[0][0];
      const last = columns[0][columns[0].length - 1];
      const middle = chart.cursor.idx === null || chart.cursor.idx === undefined ? (min + max) / 2 : columns[0][chart.cursor.idx];
      const half = ((max - min) * factor) / 2;
      const low = Math.max(first, middle - half);
      const high = Math.min(last, middle + half);
      if (high > low) chart.setScale("x", { min: low, max: high });
    }

    function build() {
      const visible = chart ? chart.series.slice(1).map((series) => series.show) : plot.lines.map(() => true);
      const range = chart && isZoomed() ? { ...chart.scales.x } : null;
      if (chart) chart.destroy();
      const axis = {
        stroke: colour("--muted"),
        grid: { stroke: colour("--line"), width: 1 },
        ticks: { stroke: colour("--line"), width: 1, size: 4 },
        font: FONT,
      };
      const series = plot.lines.map((line, i) => {
        const stroke = colourOf(line);
        const isThin = line.kind === "thin";
        const isDots = line.kind === "dots";
        values[i].swatch.style.background = stroke;
        return {
          label: line.label,
          show: visible[i],
          stroke: isThin ? colour("--thin") : stroke,
          width: isThin ? 1 : 2,
          spanGaps: true,
          points: { show: isDots ? columns[0].length < 400 || undefined : undefined, size: 6, fill: stroke, stroke },
        };
      });
      plot.lines.forEach((line, i) => {
        if (line.kind === "thin") values[i].swatch.style.background = colour("--thin");
      });
      const options = {
        width: place.clientWidth,
        height,
        legend: { show: false },
        padding: [8, 20, 0, 0],
        cursor: {
          sync: { key: sync.key, setSeries: false },
          drag: { x: true, y: true, uni: 24 },
          focus: { prox: 16 },
          points: { size: 7 },
        },
        focus: { alpha: 0.35 },
        scales: {
          x: { time: false },
          y: { distr: isLog ? 3 : 1, log: 10 },
        },
        axes: [
          { ...axis, size: 32, space: 60, values: (_, splits) => splits.map((v) => (v === null || v % 1 ? "" : shortStep(v))) },
          { ...axis, size: 62, space: 36, values: (_, splits) => splits.map((v) => (v === null ? "" : format(v))) },
        ],
        series: [{}, ...series],
        hooks: {
          setCursor: [(u) => showValues(u.cursor.idx)],
          setScale: [(u, key) => key === "x" && chart && (allButton.hidden = !isZoomed())],
        },
      };
      chart = new uPlot(options, columns, place);
      if (range) chart.setScale("x", range);
      logButton.setAttribute("aria-pressed", String(isLog));
      showValues(null);
    }

    values.forEach(({ entry }, i) => {
      entry.addEventListener("click", () => {
        const isShown = !chart.series[i + 1].show;
        chart.setSeries(i + 1, { show: isShown });
        entry.setAttribute("aria-pressed", String(isShown));
      });
    });
    logButton.addEventListener("click", () => {
      isLog = !isLog;
      build();
    });
    allButton.addEventListener("click", showAll);
    place.addEventListener("keydown", (event) => {
      const last = columns[0].length - 1;
      const stride = event.shiftKey ? Math.max(1, Math.round(last / 50)) : 1;
      const now = chart.cursor.idx;
      const isSet = now !== null && now !== undefined;
      const moves = { ArrowLeft: -stride, ArrowRight: stride, Home: -last, End: last };
      if (event.key in moves) {
        const next = Math.min(last, Math.max(0, isSet ? now + moves[event.key] : last));
        const left = chart.valToPos(columns[0][next], "x");
        chart.setCursor({ left, top: chart.over.clientHeight / 2 });
        showValues(next);
      } else if (event.key === "+" || event.key === "=") zoom(0.5);
      else if (event.key === "-" || event.key === "−") zoom(2);
      else if (event.key === "0" || event.key === "Escape") showAll();
      else return;
      event.preventDefault();
    });
    build();
    redraws.push(build);
    new ResizeObserver(() => {
      if (place.clientWidth && place.clientWidth !== chart.width) chart.setSize({ width: place.clientWidth, height });
    }).observe(place);
  }

  const plots = find("#plots");
  if (plots) {
    const shown = data.plots.filter((plot) => !plot.more);
    const more = data.plots.filter((plot) => plot.more);
    // A page of more curves only shows them at once.
    const atOnce = shown.length ? shown : more;
    atOnce.forEach((plot, i) => draw(plot, plots, i ? HEIGHT : FIRST_HEIGHT));
    if (shown.length && more.length) {
      const details = find("#more-curves");
      details.hidden = false;
      // A plot needs its width, which a closed element does not have.
      details.addEventListener(
        "toggle",
        () => {
          for (const plot of more) draw(plot, find("#more-plots"), HEIGHT);
        },
        { once: true },
      );
    }
  }

  // ---- videos ----

  const grid = find("#grid");
  if (grid) {
    const names = find("#samples .toolbar").dataset.names.split("|");
    const slider = find("#frame");
    const button = find("#play");
    const clips = all(".clip", grid);
    const visible = new Set();
    let isPlaying = !isStill;

    // A promise that is refused says little: pausing a video that loads refuses it, too.
    const start = (video) => video.play().catch(() => {});

    function showPlaying() {
      button.textContent = isPlaying ? "Pause" : "Play";
      button.setAttribute("aria-pressed", String(!isPlaying));
    }

    // Only videos in view are loaded and play.
    const watcher = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          if (isIntersecting) {
            visible.add(target);
            if (target.preload === "none") target.preload = "auto";
            if (isPlaying) start(target);
          } else {
            visible.delete(target);
            target.pause();
          }
        }
      },
      { rootMargin: "120px" },
    );
    for (const clip of clips) {
      const video = clip.firstElementChild;
      // The attribute sets the default only; a page may start videos without a click if they are muted.
      video.muted = true;
      video.addEventListener("error", () => video.closest("td").classList.add("failed"));
      watcher.observe(video);
    }
    button.addEventListener("click", () => {
      isPlaying = !isPlaying;
      for (const video of visible) {
        if (isPlaying) {
          // Together, so that the same moment of all is seen.
          video.currentTime = 0;
          start(video);
        } else video.pause();
      }
      showPlaying();
    });
    showPlaying();

    function showFrame() {
      for (const cell of all("[data-frame]", grid)) cell.classList.toggle("chosen", cell.dataset.frame === slider.value);
      find("#frame-name").textContent = names[slider.value];
    }
    slider.addEventListener("input", showFrame);
    showFrame();
    // The newest evaluations are at the right.
    grid.scrollLeft = grid.scrollWidth;

    // ---- one video, enlarged ----

    const viewer = find("#viewer");
    const large = find("#large");
    let row = [];
    let place = 0;

    function enlarge() {
      const clip = row[place];
      const cell = clip.closest("td");
      const heads = all("thead th", grid);
      large.src = clip.firstElementChild.src;
      large.muted = true;
      if (!isStill) large.play().catch(() => {});
      const head = heads[cell.cellIndex].textContent;
      const frame = names[cell.dataset.frame];
      find("#large-name").textContent = head.startsWith("step") ? head : `${head}, step ${frame}`;
      find("#large-prompt").textContent = promptOf(cell);
      find("#earlier").disabled = place === 0;
      find("#later").disabled = place === row.length - 1;
    }

    const promptOf = (cell) => cell.parentElement.firstElementChild.textContent;

    function move(by) {
      if (place + by >= 0 && place + by < row.length) {
        place += by;
        enlarge();
      }
    }

    for (const clip of clips) {
      clip.addEventListener("click", () => {
        row = all(".clip", clip.closest("tr"));
        place = row.indexOf(clip);
        viewer.showModal();
        // Not an arrow button, which loses the focus when it is disabled.
        find("#close").focus();
        enlarge();
      });
    }
    find("#earlier").addEventListener("click", () => move(-1));
    find("#later").addEventListener("click", () => move(1));
    find("#close").addEventListener("click", () => viewer.close());
    viewer.addEventListener("close", () => large.removeAttribute("src"));
    viewer.addEventListener("click", (event) => event.target === viewer && viewer.close());
    viewer.addEventListener("keydown", (event) => {
      if (event.target === large) return;
      if (event.key === "ArrowLeft") move(-1);
      if (event.key === "ArrowRight") move(1);
    });
  }

  // ---- copy ----

  async function copy(text, source) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      // A web server without TLS has no clipboard: the selected text is copied in the older way.
      const range = document.createRange();
      range.selectNodeContents(source);
      const selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      return document.execCommand("copy");
    }
  }

  for (const button of all(".copy")) {
    button.addEventListener("click", async () => {
      const isCopied = await copy(button.dataset.text, button.previousElementSibling);
      button.textContent = isCopied ? "Copied" : "Press Ctrl+C";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  }

  root.dataset.ready = "true";
})();
