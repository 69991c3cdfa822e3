"use strict";
// Switches between numbers that stepcredit computed and links cell, curve and picture. It computes no number itself.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const members = data.trained.length, steps = data.trained[0].length;
  const form = document.querySelector(".controls"), said = document.querySelector(".said");
  const dock = document.querySelector(".dock"), root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const looks = all(".look").map((section, index) => ({
    section,
    numbers: data.looks[index],
    table: section.querySelector(".map"),
    cells: all("tbody tr", section).map((row) => all("td", row)),
    pictures: all(".strip", section).map((strip) => all("img", strip)),
    charts: all("svg.curves", section),
    reading: dock.querySelector(`.reading[data-look="${index}"]`),
  }));
  const state = { show: "gain", scheme: data.start.scheme, normalisation: data.start.normalisation };
  let pinned = mostTelling(), under = null;

  // ---- numbers as text

  const minus = (text) => text.replace("-", "\u2212");

  function decimals(largest) {
    if (!(largest > 0)) return 2;
    return Math.min(6, Math.max(largest >= 100 ? 0 : largest >= 10 ? 1 : 2, 1 - Math.floor(Math.log10(largest))));
  }

  function signed(value, digits) {
    if (value === null) return "\u2013";
    const text = value.toFixed(digits);
    return Number(text) === 0 ? "0" : (value > 0 ? "+" : "") + minus(text);
  }

  const plain = (value) => (value === null ? "\u2013" : minus(String(Number(value.toPrecision(4)))));
  const fine = (value) => (value === null ? "\u2013" : (value > 0 ? "+" : "") + plain(value));

  // ---- which numbers

  const credit = (look) => look.numbers.credit[state.scheme];
  const advantage = (look) => look.numbers.advantage[state.scheme][state.normalisation];
  const shown = (look) => ({ gain: look.numbers.gain, credit: credit(look), advantage: advantage(look) })[state.show];

  function mostTelling() {
    let best = { member: 0, step: 0 }, most = -1;
    data.trained.forEach((row, member) => row.forEach((trained, step) => {
      const size = trained ? Math.abs(data.looks[0].gain[member][step]) : -1;
      if (size > most) [best, most] = [{ member, step }, size];
    }));
    return best;
  }

  function turning(look, member, step) {
    return look.numbers.strict[member][step] ? "strict" : look.numbers.loose[member][step] ? "loose" : "";
  }

  // ---- switching

  function render() {
    const scheme = data.schemes[state.scheme];
    if (!scheme.normalisations.includes(state.normalisation)) {
      const own = data.start.normalisation;
      state.normalisation = scheme.normalisations.includes(own) ? own : "centred";
    }
    for (const input of all("input", form)) {
      if (input.name === "normalisation") input.disabled = !scheme.normalisations.includes(input.value);
      input.checked = state[input.name] === input.value;
    }
    form.elements.scheme.value = state.scheme;
    const values = looks.flatMap((look) => shown(look).flat()).filter((value) => value !== null);
    const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    const digits = decimals(largest), title = state.show[0].toUpperCase() + state.show.slice(1);
    for (const look of looks) {
      look.table.setAttribute("aria-label", `${title} of each member at each step, ${look.numbers.name}`);
      look.table.querySelector(".quantity").textContent = title;
      look.table.querySelector(".scale").textContent = largest > 0
        ? `up to \u00b1${signed(largest, digits).slice(1)}` : "all are 0";
      const numbers = shown(look);
      look.cells.forEach((row, member) => row.forEach((cell, step) => {
        const value = numbers[member][step];
        cell.firstElementChild.textContent = signed(value, digits);
        cell.dataset.value = value === null ? "" : String(value);
        cell.classList.toggle("minus", value < 0);
        cell.style.setProperty("--s", largest > 0 ? Math.sqrt(Math.abs(value) / largest).toFixed(2) : "0");
        const turn = turning(look, member, step);
        cell.setAttribute("aria-label", `member ${member}, step ${step}: ${state.show} ${signed(value, digits)}` +
          (turn ? `, ${turn} turning point` : "") + (data.trained[member][step] ? "" : ", not trained"));
      }));
    }
    said.replaceChildren(...explained(scheme));
    point();
  }

  function explained(scheme) {
    if (state.show === "gain") return ["The map shows gains: what each step added to the reward of the clean estimate."];
    const code = document.createElement("code");
    const parts = [`Credit ${scheme.label}: ${scheme.text}. `];
    code.textContent = scheme.keys.replaceAll("\n", ", ");
    if (state.show === "advantage") {
      parts.push(`Advantage ${state.normalisation.replace("_", " ")}: ${data.normalisations[state.normalisation]}. `);
      code.textContent += `, advantage: ${state.normalisation}`;
    }
    return [...parts, "In a recipe: ", code];
  }

  function change(name, value) {
    state[name] = value;
    // what was switched should be seen to switch
    if (name === "scheme" && state.show === "gain") state.show = "credit";
    if (name === "normalisation") state.show = "advantage";
    render();
    remember();
  }

  function remember() {
    const parts = { ...state, at: `${pinned.member}.${pinned.step}` };
    history.replaceState(null, "", "#" + new URLSearchParams(parts));
  }

  function recall() {
    const asked = new URLSearchParams(location.hash.slice(1));
    if (["gain", "credit", "advantage"].includes(asked.get("show"))) state.show = asked.get("show");
    if (Object.hasOwn(data.schemes, asked.get("scheme") ?? "")) state.scheme = asked.get("scheme");
    if (Object.hasOwn(data.normalisations, asked.get("normalisation") ?? "")) {
      state.normalisation = asked.get("normalisation");
    }
    const [member, step] = (asked.get("at") ?? "").split(".").map(Number);
    if (member >= 0 && member < members && step >= 0 && step < steps) pinned = { member, step };
    rove();
    render();
  }

  // ---- linking: one chosen (member, step) in all views

  function point() {
    const { member, step } = under ?? pinned;
    for (const element of all(".here")) element.classList.remove("here");
    for (const look of looks) {
      look.cells[member][step].classList.add("here");
      look.table.querySelector(`tbody th[data-member="${member}"]`).classList.add("here");
      look.table.querySelector(`thead th[data-step="${step}"]`).classList.add("here");
      for (const at of [step, step + 1]) look.pictures[member][at].classList.add("here");
      look.pictures[member][0].parentElement.classList.add("here");
      for (const chart of look.charts) draw(chart, look.numbers.R[member], step);
      read(look, member, step);
    }
    const digits = (time) => Number(time).toFixed(3);
    dock.querySelector(".where").textContent = `Member ${member}, step ${step} \u00b7 time ` +
      `${digits(data.grid[step])} \u2192 ${digits(data.grid[step + 1])} \u00b7 ` +
      (data.trained[member][step] ? `trained, noise ${digits(data.std[step])}` : "not trained, no noise");
  }

  function draw(chart, R, step) {
    const frame = Object.fromEntries(Object.entries(chart.dataset).map(([key, value]) => [key, Number(value)]));
    const place = (i) => {
      const share = (R[i] - frame.low) / (frame.high - frame.low);
      return `${frame.left + i * frame.pitch} ${(frame.bottom - share * (frame.bottom - frame.top)).toFixed(1)}`;
    };
    const path = (from, to) => {
      let drawn = "";
      for (let i = from, open = false; i <= to; i++) {
        if (R[i] !== null) drawn += (open ? "L" : "M") + place(i);
        open = R[i] !== null;
      }
      return drawn;
    };
    const [whole, part] = all(".picked", chart);
    whole.setAttribute("d", path(0, steps));
    part.setAttribute("d", path(step, step + 1));
  }

  function read(look, member, step) {
    const set = (selector, text) => { look.reading.querySelector(selector).textContent = text; };
    const R = look.numbers.R[member];
    [".before", ".after"].forEach((selector, after) => {
      const source = look.pictures[member][step + after], target = look.reading.querySelector(selector);
      target.src = source.src;
      target.alt = source.alt;
    });
    set(".reward", `${plain(R[step])} \u2192 ${plain(R[step + 1])}`);
    set(".gain", fine(look.numbers.gain[member][step]));
    set(".credit", fine(credit(look)[member][step]));
    set(".advantage", fine(advantage(look)[member][step]));
    const turn = turning(look, member, step);
    set(".turning", turn ? `${turn} turning point` : "");
  }

  // ---- pointer

  function found(look, event) {
    const target = event.target.closest("td[data-step], img[data-state], svg.curves");
    if (!target) return null;
    if (target.matches("td")) return { member: +target.dataset.member, step: +target.dataset.step };
    if (target.matches("img")) return { member: +target.dataset.member, step: Math.max(0, target.dataset.state - 1) };
    return nearest(look, target, event);
  }

  function nearest(look, chart, event) {
    const box = chart.getBoundingClientRect(), frame = chart.dataset;
    const at = (event.clientX - box.left - frame.left) / frame.pitch;
    const step = Math.min(steps - 1, Math.max(0, Math.floor(at))), share = Math.min(1, Math.max(0, at - step));
    const y = (frame.bottom - (event.clientY - box.top)) / (frame.bottom - frame.top);
    const reward = Number(frame.low) + y * (frame.high - frame.low);
    const away = look.numbers.R.map((R) => Math.abs(R[step] * (1 - share) + R[step + 1] * share - reward));
    // of members that run together the chosen one stays
    const { member } = under ?? pinned, best = Math.min(...away);
    return { member: away[member] <= best + 1e-9 ? member : away.indexOf(best), step };
  }

  for (const look of looks) {
    look.section.addEventListener("pointermove", (event) => {
      const place = found(look, event);
      if (place?.member === under?.member && place?.step === under?.step) return;
      under = place;
      point();
    });
    look.section.addEventListener("pointerleave", () => { under = null; point(); });
    look.section.addEventListener("click", (event) => {
      const place = found(look, event);
      if (place) pin(look, place, event.target.closest("td") !== null);
    });
    look.table.setAttribute("role", "grid");
    look.table.addEventListener("keydown", (event) => move(look, event));
    look.table.addEventListener("focusin", (event) => {
      const place = found(look, event);
      if (place) pin(look, place, false);
    });
  }

  // one cell of a map is a tab stop
  function rove() {
    for (const look of looks) {
      for (const cell of look.cells.flat()) cell.tabIndex = -1;
      look.cells[pinned.member][pinned.step].tabIndex = 0;
    }
  }

  function pin(look, place, focus) {
    pinned = place;
    under = null;
    rove();
    if (focus) look.cells[place.member][place.step].focus();
    point();
    remember();
  }

  // ---- keyboard: arrows, Home and End, with Control to the corners

  function move(look, event) {
    const { member, step } = pinned, last = members - 1, end = steps - 1;
    const to = {
      ArrowLeft: [member, step - 1], ArrowRight: [member, step + 1],
      ArrowUp: [member - 1, step], ArrowDown: [member + 1, step],
      Home: [event.ctrlKey ? 0 : member, 0], End: [event.ctrlKey ? last : member, end],
    }[event.key];
    if (!to || event.altKey || event.metaKey) return;
    event.preventDefault();
    const place = { member: Math.min(last, Math.max(0, to[0])), step: Math.min(end, Math.max(0, to[1])) };
    pin(look, place, true);
  }

  // ---- controls

  form.addEventListener("change", (event) => change(event.target.name, event.target.value));
  form.addEventListener("submit", (event) => event.preventDefault());
  const theme = form.querySelector(".theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const named = () => { theme.setAttribute("aria-pressed", String(isDark())); };
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; named(); });
  prefersDark.addEventListener("change", named);
  window.addEventListener("hashchange", recall);

  for (const look of looks) for (const cell of look.cells.flat()) cell.setAttribute("role", "gridcell");
  form.hidden = dock.hidden = false;
  if (innerWidth < 640) document.querySelector(".guide").open = false;
  named();
  recall();
})();
