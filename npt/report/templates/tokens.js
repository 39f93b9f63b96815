(() => {
  "use strict";
  // Colours the tokens by the chosen quantity and layer, and shows all values of the one that is pointed at.
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const views = [...document.querySelectorAll(".view")].map((root, i) => ({
    ...data.views[i],
    spans: [...root.querySelectorAll(".tokens .token")],
    rows: [...root.querySelectorAll(".map tbody tr")],
  }));
  const known = (x) => x !== null && x !== undefined;
  const brief = (x) => {
    if (!known(x)) return "–";
    if (x === 0) return "0";
    if (x < 0.00995 || x >= 9999.5) return x.toExponential(0).replace("+", "");
    return x >= 99.5 ? x.toFixed(0) : x >= 0.995 ? x.toFixed(1) : x.toFixed(2);
  };
  const exact = (x) => (!known(x) ? "–" : x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3))));
  const chosen = () => data.quantities.find((q) => q.key === $("quantity").value);
  const one = (key) => key === "kl";
  const level = (x, q, scale = q.scale) => {
    if (!known(x)) return "n";
    const at = q.log ? Math.log : (value) => value, [low, high] = scale.map(at);
    return Math.max(0, Math.min(data.colours - 1, Math.floor((data.colours * (at(q.log ? Math.max(x, 1e-30) : x) - low)) / (high - low))));
  };
  const letter = (q) => (one(q.key) ? "k" : "h");
  const mean = (values) => {
    const found = values.filter(known);
    return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null;
  };
  const paint = (element, kind) => {
    element.className = [...element.classList].filter((name) => !/^[hk](\d+|n)$/.test(name)).concat(kind).join(" ");
  };

  const draw = () => {
    const q = chosen(), layer = $("layer").value, inGrid = one(q.key) ? data.quantities[0] : q;
    const inText = layer === "" || one(q.key) ? q.means : q.scale;
    ["low", "high"].forEach((id, i) => {
      const grid = one(q.key) ? "" : `, ${exact(q.scale[i])} in the grid`;
      $(id).textContent = `${exact(inText[i])} in the text${grid}${q.log && i ? ", logarithmic" : ""}`;
    });
    [...$("ramp").children].forEach((each, i) => paint(each, letter(q) + i));
    $("layer").disabled = one(q.key);
    for (const view of views) {
      const column = view.layers.indexOf(layer);
      view.spans.forEach((span, t) => {
        const values = view.by[q.key] ? view.by[q.key][t] : null;
        const x = one(q.key) ? values : !known(values) ? null : column < 0 ? mean(values) : values[column];
        paint(span, letter(q) + (one(q.key) && t === 0 ? "n" : level(x, q, inText)));
      });
      view.rows.forEach((row, t) => {
        view.layers.forEach((_, l) => {
          const x = view.by[inGrid.key] ? view.by[inGrid.key][t][l] : null, td = row.cells[l + 2];
          paint(td, "h" + level(x, inGrid));
          td.textContent = view.layers.length <= data.named ? brief(x) : "";
        });
      });
    }
  };

  const make = (name, text, parent) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const describe = (view, t, l) => {
    const box = document.createDocumentFragment();
    make("strong", view.tokens[t], box);
    box.append(` token ${t + 1} of ${view.tokens.length}${t < view.start ? ", of the prompt" : ""}${l === null ? "" : `, layer ${view.layers[l]}`}`);
    const list = make("dl", undefined, box);
    const say = (term, text) => {
      const pair = make("div", undefined, list);
      make("dt", term, pair);
      make("dd", text, pair);
    };
    if (t > 0) {
      say("KL", `${exact(view.by.kl && view.by.kl[t])} nats`);
      for (const model of ["teacher", "student"]) {
        const first = view[model + "_first"] && view[model + "_first"][t];
        say(model, `${exact(view[model + "_p"][t])} likely${first ? `, first choice ${first}` : ""}`);
      }
    }
    const wrap = make("div", undefined, box), table = make("table", undefined, wrap);
    wrap.className = "values";
    const head = make("tr", undefined, make("thead", undefined, table));
    make("th", "layer", head).scope = "row";
    for (const name of view.layers) make("th", name, head).scope = "col";
    const body = make("tbody", undefined, table);
    for (const q of data.quantities.filter((each) => !one(each.key) && view.by[each.key])) {
      const row = make("tr", undefined, body);
      make("th", { change: "change", of_stream: "over stream", distance: "from teacher" }[q.key] || q.key, row).scope = "row";
      view.by[q.key][t].forEach((x, i) => {
        const td = make("td", exact(x), row);
        if (i === l) td.style.fontWeight = "700";
      });
    }
    $("cell").replaceChildren(box);
    for (const each of document.querySelectorAll(".on")) each.classList.remove("on");
    view.spans[t].classList.add("on");
    view.rows[t].classList.add("on");
    if (l !== null) view.rows[t].cells[l + 2].classList.add("on");
  };
  // The view, the token and the layer of an element; undefined outside of all.
  const placeOf = (element) => {
    const span = element.closest(".tokens .token"), row = element.closest(".map tbody tr");
    if (!span && !row) return undefined;
    const view = views.find((each) => (span ? each.spans : each.rows).includes(span || row));
    const cell = span ? null : element.closest("td"), l = cell ? cell.cellIndex - 2 : -1;
    return view && { view, t: (span ? view.spans : view.rows).indexOf(span || row), l: l < 0 ? null : l, cell, span };
  };
  const show = (event) => {
    const place = event.target.closest && placeOf(event.target);
    if (place) describe(place.view, place.t, place.l);
  };
  const focus = (element) => {
    if (!element) return;
    element.tabIndex = 0;
    element.focus();
  };
  for (const type of ["mouseover", "focusin"]) document.addEventListener(type, show);
  document.addEventListener("click", (event) => {
    const place = placeOf(event.target);
    if (place) focus(place.span || place.cell);
  });
  document.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const place = move && placeOf(event.target);
    if (!place || (!place.span && !place.cell)) return;
    event.preventDefault();
    const { view, t, span, cell } = place;
    if (span) return focus(view.spans[t + move[0] + move[1]]);
    const row = view.rows[t + move[0]], next = row && row.cells[cell.cellIndex + move[1]];
    if (next && next.tagName === "TD") focus(next);
  });
  for (const view of views) {
    if (view.spans[0]) view.spans[0].tabIndex = 0;
    if (view.rows[0]) view.rows[0].cells[1].tabIndex = 0;
  }
  for (const id of ["quantity", "layer"]) $(id).addEventListener("change", draw);
  $("choice").hidden = false;
})();
