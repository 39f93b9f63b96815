(() => {
  "use strict";
  // Shows a quantity in every map, and all statistics of the cell that is pointed at.
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const maps = [...document.querySelectorAll(".map")];

  // A cell is [kind, rms, absmax, min, max, mean, std, NaN, +Inf, -Inf, saturation, update ratio, calls], defaults cut off; 0: none.
  const kind = (cell) => data.kinds[cell[0]];
  const bad = (cell) => (cell[7] || 0) + (cell[8] || 0) + (cell[9] || 0);
  const read = {
    rms: (cell) => cell[1],
    absmax: (cell) => cell[2],
    maximum_share: (cell) => (cell[2] === null || kind(cell)[3] === null ? null : cell[2] / kind(cell)[3]),
    finite_share: (cell) => (kind(cell)[2] > 0 ? 1 - bad(cell) / kind(cell)[2] : null),
    saturation: (cell) => cell[10] ?? null,
    update_ratio: (cell) => cell[11] ?? null,
  };
  const share = (x) => (x === 0 || x === 1 ? String(100 * x) : x > 0.99 ? ">99" : x < 0.01 ? "<1" : String(Math.floor(100 * x)));
  const brief = (x) => {
    if (x === 0 || !isFinite(x)) return x === 0 ? "0" : "over";
    if (x < 0.00995 || x >= 9999.5) return x.toExponential(0).replace("+", "");
    return x >= 99.5 ? String(Math.round(x)) : String(Number(x.toPrecision(2)));
  };
  const exact = (x) => {
    if (x === null || x === undefined) return "none";
    if (!isFinite(x)) return x > 0 ? "overflows" : "-overflows";
    const size = Math.abs(x);
    return x !== 0 && (size < 1e-3 || size >= 1e6) ? x.toExponential(2).replace("+", "") : String(Number(x.toPrecision(3)));
  };
  const statistics = (cell) => {
    const [shape, dtype, count, largest] = kind(cell);
    const facts = { shape, dtype, elements: count.toLocaleString("en"), finite: bad(cell) ? (100 * read.finite_share(cell)).toPrecision(6) + "%" : "all" };
    ["NaN", "+Inf", "-Inf"].forEach((name, i) => { facts[name] = (cell[7 + i] || 0).toLocaleString("en"); });
    [["min", 3], ["max", 4], ["mean", 5], ["std", 6], ["RMS", 1], ["absmax", 2]].forEach(([name, i]) => { facts[name] = exact(cell[i]); });
    if (largest !== null) facts["of the dtype's maximum"] = exact(read.maximum_share(cell));
    if (read.saturation(cell) !== null) facts.saturation = exact(cell[10]);
    if (read.update_ratio(cell) !== null) facts["update ratio"] = exact(cell[11]);
    if (cell[12] > 1) facts.calls = cell[12] + ", the worst is shown";
    return facts;
  };

  const look = (cell, q, scales) => {
    const x = read[q.key](cell);
    if (bad(cell)) return ["b", q.key === "finite_share" ? share(x) : cell[7] ? "NaN" : "Inf"];
    if (x === null || !(q.key in scales)) return ["", q.key === "saturation" || q.key === "update_ratio" ? "" : "–"];
    if (q.log && x === 0) return ["z", "0"];
    const [low, high] = scales[q.key];
    const part = ((q.log ? Math.log10(x) : x) - low) / (high - low);
    return ["c" + Math.max(0, Math.min(data.colours - 1, Math.floor(part * data.colours))), q.log ? brief(x) : share(x)];
  };
  const cellsOf = (map) => [...map.querySelectorAll("td")];
  const of = (map) => {
    const [direction, step] = map.id.split("-");
    return { view: data.directions[direction], step: Number(step) };
  };
  const draw = (map) => {
    const { view, step } = of(map);
    const q = data.quantities.find((each) => each.key === $("quantity").value);
    const first = view.first[step] && view.first[step][0] * view.columns.length + view.first[step][1];
    const [low, high] = view.scales[q.key] || [0, 0];
    const ends = q.key in view.scales ? (q.log ? [brief(10 ** low), brief(10 ** high)] : [share(low) + "%", share(high) + "%"]).join(" to ") : "not measured here";
    map.querySelector("caption").textContent = `${q.label}: ${ends}`;
    cellsOf(map).forEach((td, i) => {
      const cell = view.cells[step][i];
      const [name, text] = cell ? look(cell, q, view.scales) : ["", ""];
      td.className = name + (i === first ? " f" : "");
      td.textContent = text;
      td.tabIndex = i === (first ?? 0) ? 0 : -1;
    });
  };
  const describe = (event) => {
    const td = event.target.closest(".map td");
    if (!td) return;
    const map = td.closest(".map");
    const { view, step } = of(map);
    const line = td.parentElement.rowIndex - 1, column = td.cellIndex - 1;
    const cell = view.cells[step][line * view.columns.length + column];
    const name = document.createElement("strong"), list = document.createElement("dl");
    name.textContent = `${data.steps[step]}, ${map.id.split("-")[0]}, ${view.lines[line][1]}: ${view.columns[column]}`;
    for (const [term, text] of Object.entries(cell ? statistics(cell) : { "": "not recorded" })) {
      const pair = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = term;
      dd.textContent = text;
      pair.append(dt, dd);
      list.append(pair);
    }
    $("cell").replaceChildren(name, list);
  };
  const focus = (td) => {
    td.tabIndex = 0;
    td.focus();
  };

  for (const type of ["mouseover", "focusin"]) document.addEventListener(type, describe);
  document.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const td = event.target.closest(".map td");
    if (!move || !td) return;
    event.preventDefault();
    const row = td.closest("table").rows[td.parentElement.rowIndex + move[0]];
    const next = row && row.cells[td.cellIndex + move[1]];
    if (next && next.tagName === "TD") focus(next);
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-at]"), td = event.target.closest(".map td");
    if (td) focus(td);
    if (!link) return;
    event.preventDefault();
    const map = $(link.hash.slice(1)), [line, column] = link.dataset.at.split(" ").map(Number);
    map.open = true;
    focus(cellsOf(map)[line * of(map).view.columns.length + column]);
  });
  $("quantity").addEventListener("change", () => maps.filter((map) => map.open).forEach(draw));
  for (const map of maps) map.addEventListener("toggle", () => map.open && draw(map));
  $("view").hidden = false;
  maps.filter((map) => map.open).forEach(draw);
})();
