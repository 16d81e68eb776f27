// Pictures: a tile over the banks as SVG, a layout's elements on a canvas, and what is under the pointer in words.
const COLORS = ["var(--p0)", "var(--p1)", "var(--p2)", "var(--p3)"];
const NARROW = window.matchMedia("(max-width: 600px)");
const $ = id => document.getElementById(id);
const IDLE = { hover: "Point at a word to see its lane and the banks of that lane.",
  element: "Point at an element to see its offset, byte and bank." };

function made(name, attributes, text) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== undefined) found.textContent = text;
  return found;
}

function drawPanel(svg, counted, number) {
  const one = counted.instructions[number], touched = new Map();
  one.phases.forEach((phase, index) => phase.owner.forEach((lane, word) =>
    touched.set(word, { lane, index, crowded: phase.banks.get(word % BANKS).length > 1 })));
  let lines = [...Array(Math.ceil(counted.tile.size / LINE)).keys()];
  if (lines.length > 40) lines = [...new Set([...touched.keys()].map(word => Math.floor(word / BANKS)))].sort((a, b) => a - b);
  const size = 16, left = NARROW.matches ? 58 : 46, below = lines.length * size + 26;
  const label = (x, y, text) => svg.append(made("text", { x, y }, text));
  svg.replaceChildren();
  svg.classList.remove("picking");
  svg.classList.toggle("narrow", NARROW.matches);
  svg.setAttribute("viewBox", `0 0 ${left + BANKS * size + 2} ${below + one.phases.length * size + 18}`);
  lines.forEach((line, y) => {
    if (lines.length <= 16 || y % 4 === 0) label(left / 2, y * size + size / 2, `line ${line}`);
    for (let bank = 0; bank < BANKS; bank++) {
      const word = line * BANKS + bank, hit = touched.get(word), x = left + bank * size;
      const box = made("rect", { x: x + 1, y: y * size + 1, width: size - 2, height: size - 2, rx: 2, class: "word" });
      svg.append(box);
      if (!hit) continue;
      box.classList.add("touched");
      box.dataset.lane = hit.lane;
      if (hit.crowded) box.classList.add("crowded");
      box.style.fill = COLORS[hit.index % 4];
      const before = touched.get(word - 1);
      if (bank === 0 || !before || before.lane !== hit.lane)
        svg.append(made("text", { x: x + size / 2, y: y * size + size / 2, class: "lane" }, hit.lane));
      box.addEventListener("pointerenter", () => pick(hit.lane));
    }
  });
  label(left / 2, below - 10, "bank");
  for (let bank = 0; bank < BANKS; bank += 4) label(left + bank * size + size / 2, below - 10, bank);
  one.phases.forEach((phase, index) => {
    const y = below + index * size, first = phase.lanes[0], last = phase.lanes[phase.lanes.length - 1];
    label(left / 2, y + size / 2, `${first}-${last}: ${phase.wavefronts}`);
    for (let bank = 0; bank < BANKS; bank++) {
      const words = (phase.banks.get(bank) || []).length, x = left + bank * size;
      const box = made("rect", { x: x + 1, y: y + 1, width: size - 2, height: size - 2, rx: 2, class: "word" });
      if (words) box.style.fill = COLORS[index % 4];
      if (words > 1) box.classList.add("crowded");
      svg.append(box);
      if (words) svg.append(made("text", { x: x + size / 2, y: y + size / 2, class: "lane" }, words));
    }
  });
  label(left + BANKS * size / 2, below + one.phases.length * size + 9, "distinct words in each bank, by phase");
  svg.onpointerleave = () => pick(null);
}

let shown = [];
function pick(lane) {
  for (const [svg] of shown) {
    svg.classList.toggle("picking", lane !== null);
    for (const box of svg.querySelectorAll("rect.touched")) box.classList.toggle("picked", Number(box.dataset.lane) === lane);
  }
  $("hover").textContent = lane === null ? IDLE.hover : shown.map(([, name, one, access]) => {
    const address = one.lanes[lane], words = [];
    for (let word = address >>> 2; word <= (address + access.width - 1) >>> 2; word++) words.push(word % BANKS);
    const phase = one.phases.find(candidate => candidate.lanes.includes(lane));
    const worst = Math.max(...words.map(bank => phase.banks.get(bank).length));
    const where = words.length > 1 ? `banks ${words[0]} to ${words[words.length - 1]}` : `bank ${words[0]}`;
    return `${name}: lane ${lane} at byte ${address}, ${where}, ${worst === 1 ? "no conflict" : `${worst} words in one bank`}`;
  }).join(". ") + ".";
}

// Every element at its coordinate, coloured by its bank; its offset in it where there is room.
function drawMap(tile) {
  const canvas = $("canvas"), width = canvas.clientWidth, cols = Math.min(tile.cols, 256), rows = Math.min(tile.rows, 128);
  const across = width / cols, down = Math.max(4, Math.min(24, across, 480 / rows)), ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${rows * down}px`;
  canvas.width = width * ratio;
  canvas.height = rows * down * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.font = "11px system-ui, sans-serif";
  const digits = String(Math.floor((tile.size - 1) / tile.item)).length, room = across >= 7 * digits + 2 && down >= 14;
  for (let row = 0; row < rows; row++) for (let column = 0; column < cols; column++) {
    const byte = tile.element(row, column), bank = (byte >>> 2) % BANKS;
    pen.fillStyle = `hsl(${bank * 360 / BANKS} 62% ${bank % 2 ? 66 : 76}%)`;
    pen.fillRect(column * across, row * down, across + .5, down - (down < 10 ? -.5 : .5));
    if (!room) continue;
    pen.fillStyle = "#14202a";
    pen.fillText(byte / tile.item, (column + .5) * across, (row + .5) * down);
  }
  const part = rows < tile.rows || cols < tile.cols ? `, the first ${rows}×${cols}` : "";
  $("map-title").textContent = `${tile.rows}×${tile.cols} elements, the first mode down, coloured by bank${part}`;
  canvas.onpointermove = canvas.onpointerdown = event => {
    const row = Math.floor(event.offsetY / down), column = Math.floor(event.offsetX / across);
    if (row < 0 || row >= rows || column < 0 || column >= cols) return;
    const byte = tile.element(row, column), at = tile.turned ? `${column}, ${row}` : `${row}, ${column}`;
    $("element").textContent = `(${at}) lies at offset ${byte / tile.item}, byte ${byte}, bank ${(byte >>> 2) % BANKS}.`;
  };
  canvas.onpointerleave = () => { $("element").textContent = IDLE.element; };
}
