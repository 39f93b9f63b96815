(() => {
  "use strict";
  // Reads the numbers of one column of the charts off: by the slider, or under the pointer.
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const box = $("readout");
  if (!box || !data.known.length) return;
  const exact = (x) => {
    if (x === null) return "not finite";
    const size = Math.abs(x);
    return x !== 0 && (size < 1e-4 || size >= 1e6) ? x.toExponential(3).replace("-", "−").replace("+", "") : String(Number(x.toPrecision(4)));
  };
  const plots = [...document.querySelectorAll("#training ~ figure .plot, #training ~ * .plot")];
  const lines = plots.map((plot) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "cursor");
    line.setAttribute("y1", "0");
    line.setAttribute("y2", "100%");
    plot.append(line);
    return line;
  });
  const show = (place) => {
    const column = data.known[place];
    const x = ((column + 0.5) / data.columns) * 100 + "%";
    for (const line of lines) {
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
    $("at").textContent = data.labels[place];
    $("step").value = place;
    $("step").setAttribute("aria-valuetext", data.labels[place]);
    const pairs = [];
    const add = (name, value) => {
      const pair = document.createElement("div");
      const term = document.createElement("dt"), text = document.createElement("dd");
      term.textContent = name;
      text.textContent = value;
      pair.append(term, text);
      pairs.push(pair);
    };
    for (const one of data.series) {
      const i = one.at.indexOf(column);
      if (i < 0) continue;
      const range = one.low[i] === one.high[i] ? exact(one.high[i]) : exact(one.low[i]) + " to " + exact(one.high[i]);
      add(one.name, one.of ? range + " (" + one.of[i] + ")" : range);
    }
    for (const said of data.told[column] || []) add("", said);
    $("values").replaceChildren(...pairs);
  };
  const nearest = (column) => {
    let low = 0, high = data.known.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.known[middle] < column) low = middle + 1; else high = middle;
    }
    return low > 0 && column - data.known[low - 1] < data.known[low] - column ? low - 1 : low;
  };
  for (const plot of plots) {
    plot.addEventListener("pointermove", (event) => {
      const area = plot.getBoundingClientRect();
      show(nearest(Math.floor(((event.clientX - area.left) / area.width) * data.columns)));
    });
  }
  $("step").max = data.known.length - 1;
  $("step").addEventListener("input", () => show(Number($("step").value)));
  box.hidden = false;
  show(data.known.length - 1);
})();
