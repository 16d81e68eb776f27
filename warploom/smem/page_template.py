"""The interactive page: one HTML document without any outside resource. Its script is the model of `model.py` once more.

`CHECKS` holds predictions of the Python model; the page recomputes them when it opens and says whether all agree.
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Shared-memory banks</title>
<style>
:root { --p0: #4c78a8; --p1: #f2a65a; --p2: #6aa36f; --p3: #b279a2; --idle: #eceff1; --bad: #d62728; --ink: #24313a; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); margin: 1.2rem auto; padding: 0 1rem; max-width: 1200px; }
h1 { font-size: 1.3rem; margin: 0 0 .8rem; }
form { display: flex; flex-wrap: wrap; gap: .7rem 1rem; align-items: end; margin-bottom: 1rem; }
label { display: flex; flex-direction: column; font-size: .8rem; gap: .15rem; }
input, select { font: inherit; padding: .25rem .4rem; border: 1px solid #b0bec5; border-radius: 4px; width: 8.2em;
  height: 2rem; background: white; }
input.short { width: 5.5em; }
input[type=range] { width: 14em; padding: 0; }
#numbers { display: flex; flex-wrap: wrap; gap: 1rem 2rem; margin: .4rem 0 1rem; }
#numbers div { font-size: .8rem; } #numbers b { display: block; font-size: 1.5rem; }
.conflict { color: var(--bad); }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)); gap: 1.2rem; }
h2 { font-size: .95rem; margin: 0 0 .3rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 9px system-ui, sans-serif; text-anchor: middle; dominant-baseline: central; fill: var(--ink);
  pointer-events: none; }
svg text.lane { fill: white; }
svg rect.word { fill: var(--idle); }
svg rect.crowded { stroke: var(--bad); stroke-width: 2; }
svg.picking rect.touched:not(.picked) { opacity: .25; }
#hover { min-height: 3em; margin: .8rem 0; }
#error { color: var(--bad); min-height: 1.4em; }
footer { font-size: .8rem; color: #546e7a; margin-top: 1rem; }
</style>
</head>
<body>
<h1>Shared-memory banks</h1>
<form id="form">
  <label>rows <input id="rows" class="short" type="number" min="1" max="256"></label>
  <label>cols <input id="cols" class="short" type="number" min="1" max="256"></label>
  <label>element <select id="dtype"></select></label>
  <label>access <select id="access"></select></label>
  <label>order of the lanes <select id="order"></select></label>
  <label>padding (elements) <input id="pad" class="short" type="number" min="0" max="256"></label>
  <label>swizzle B,M,S (elements) <input id="swizzle" placeholder="none"></label>
  <label><span>instruction <span id="which"></span></span>
    <input id="instruction" type="range" min="0" max="0" value="0"></label>
</form>
<div id="error" role="alert"></div>
<div id="numbers"></div>
<div class="panels">
  <section><h2 id="plain-title"></h2><svg id="plain"></svg></section>
  <section><h2 id="laid-title"></h2><svg id="laid"></svg></section>
</div>
<p id="hover">Point at a word to see its lane and the banks of that lane.</p>
<footer>Colours are phases: lanes that the hardware serves together. A red frame marks a word that shares its bank with
another word of its phase: a phase takes as many wavefronts as its fullest bank has words.
Below the tile: distinct words in each bank, phase by phase.
<span id="check"></span></footer>
<script>
"use strict";
const START = /*START*/, CHECKS = /*CHECKS*/, ACCESSES = /*ACCESSES*/, DTYPES = /*DTYPES*/, ORDERS = /*ORDERS*/;
const BANKS = 32, WARP = 32, COLORS = ["var(--p0)", "var(--p1)", "var(--p2)", "var(--p3)"];
const $ = id => document.getElementById(id);

function parseSwizzles(text) {
  if (!text.trim()) return [];
  return text.split("+").map(part => {
    const found = part.match(/^\\s*<?\\s*(\\d+)\\s*,\\s*(\\d+)\\s*,\\s*(\\d+)\\s*>?\\s*$/);
    if (!found) throw new Error("a swizzle is B,M,S, or several joined by +");
    const [b, m, s] = found.slice(1).map(Number);
    if (s < 1 || b + m + s > 30) throw new Error("a swizzle has S from 1 and B + M + S up to 30");
    return [b, m, s];
  });
}

function addressOf(tile, row, byte, width) {
  const start = row * tile.pitch + byte;
  if (start % width) throw new Error(`rows of ${tile.pitch} bytes are not aligned to the access's ${width} bytes`);
  const moved = offset => {
    let element = Math.floor(offset / tile.item);
    for (const [b, m, s] of tile.swizzles) element ^= ((element >> (m + s)) & ((1 << b) - 1)) << m;
    return element * tile.item + offset % tile.item;
  };
  const first = moved(start);
  for (let n = tile.item; n < width; n += tile.item)
    if (moved(start + n) !== first + n) throw new Error(`this swizzle takes the ${width} bytes of one lane apart`);
  return first;
}

function places(config, access, tile) {
  if (config.cols * tile.item % access.width)
    throw new Error(`rows of ${config.cols * tile.item} bytes are no multiple of the access's ${access.width} bytes`);
  const across = config.cols * tile.item / access.width, rows = config.rows, found = [];
  if (access.matrix) {
    const count = access.lanes / 8;
    const shapes = count === 4 ? [[2, 2], [1, 4], [4, 1]] : count === 2 ? [[2, 1], [1, 2]] : [[1, 1]];
    const shape = shapes.find(([down, right]) => rows % (8 * down) === 0 && across % right === 0);
    if (!shape) throw new Error(`the tile is no whole number of groups of ${count} matrices of 8 rows by 16 bytes`);
    const [down, right] = shape;
    for (let top = 0; top < rows; top += 8 * down)
      for (let left = 0; left < across; left += right)
        for (let c = 0; c < right; c++) for (let r = 0; r < down; r++) for (let row = 0; row < 8; row++)
          found.push([top + 8 * r + row, left + c]);
  } else if (config.order === "columns") {
    for (let piece = 0; piece < across; piece++) for (let row = 0; row < rows; row++) found.push([row, piece]);
  } else if (config.order === "fragment") {
    if (rows % 8 || across % 4) throw new Error(`fragments take 8 rows by ${4 * access.width} bytes`);
    for (let left = 0; left < across; left += 4) for (let top = 0; top < rows; top += 8)
      for (let lane = 0; lane < WARP; lane++) found.push([top + (lane >> 2), left + lane % 4]);
  } else {
    for (let row = 0; row < rows; row++) for (let piece = 0; piece < across; piece++) found.push([row, piece]);
  }
  return found.map(([row, piece]) => [row, piece * access.width]);
}

function predict(access, lanes) {
  let groups = [];
  for (let n = 0; n < access.lanes; n += access.phase_lanes)
    groups.push([...Array(access.phase_lanes).keys()].map(lane => n + lane));
  if (access.merges) {
    const paired = distance => lanes.every((one, lane) => {
      const other = lanes[lane ^ distance];
      return one === null || other === null || one === other;
    });
    if (paired(1) || paired(2))
      groups = groups.filter((_, n) => n % 2 === 0).map((group, n) => [...group, ...groups[2 * n + 1]]);
  }
  const phases = [];
  for (const group of groups) {
    const banks = new Map(), owner = new Map();
    for (const lane of group) {
      if (lanes[lane] === null) continue;
      for (let word = lanes[lane] >> 2; word <= (lanes[lane] + access.width - 1) >> 2; word++) {
        if (!owner.has(word)) {
          owner.set(word, lane);
          banks.set(word % BANKS, [...(banks.get(word % BANKS) || []), word]);
        }
      }
    }
    if (banks.size) {
      const wavefronts = Math.max(...[...banks.values()].map(words => words.length));
      phases.push({ lanes: group.filter(lane => lanes[lane] !== null), banks, owner, wavefronts });
    }
  }
  const wavefronts = phases.reduce((sum, phase) => sum + phase.wavefronts, 0);
  return { phases, wavefronts, excess: wavefronts - phases.length, lanes };
}

function countTile(config) {
  const access = ACCESSES[config.access], item = DTYPES[config.dtype];
  const tile = { item, pitch: (config.cols + config.pad) * item, swizzles: parseSwizzles(config.swizzle) };
  tile.size = config.rows * tile.pitch;
  const lanes = places(config, access, tile).map(([row, byte]) => addressOf(tile, row, byte, access.width));
  const instructions = [];
  for (let n = 0; n < lanes.length; n += access.lanes) {
    const group = lanes.slice(n, n + access.lanes);
    while (group.length < access.lanes) group.push(null);
    instructions.push(predict(access, group));
  }
  const sum = key => instructions.reduce((total, one) => total + one[key], 0);
  const phases = instructions.reduce((total, one) => total + one.phases.length, 0);
  return { tile, access, instructions, phases, wavefronts: sum("wavefronts"), excess: sum("excess") };
}

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawPanel(svg, counted, number) {
  const one = counted.instructions[number], touched = new Map();
  one.phases.forEach((phase, index) => phase.owner.forEach((lane, word) =>
    touched.set(word, { lane, index, crowded: phase.banks.get(word % BANKS).length > 1 })));
  let lines = [...Array(Math.ceil(counted.tile.size / 128)).keys()];
  if (lines.length > 40) lines = [...new Set([...touched.keys()].map(word => Math.floor(word / BANKS)))].sort((a, b) => a - b);
  const size = 16, left = 46, gap = 14, below = lines.length * size + gap + 12;
  const label = (x, y, text) => svg.append(element("text", { x, y }, text));
  svg.replaceChildren();
  svg.classList.remove("picking");
  svg.setAttribute("viewBox", `0 0 ${left + BANKS * size + 2} ${below + one.phases.length * size + 18}`);
  lines.forEach((line, y) => {
    if (lines.length <= 16 || y % 4 === 0) label(left - 22, y * size + size / 2, `line ${line}`);
    for (let bank = 0; bank < BANKS; bank++) {
      const hit = touched.get(line * BANKS + bank), x = left + bank * size;
      const box = element("rect", { x: x + 1, y: y * size + 1, width: size - 2, height: size - 2, rx: 2, class: "word" });
      svg.append(box);
      if (!hit) continue;
      box.classList.add("touched");
      box.dataset.lane = hit.lane;
      if (hit.crowded) box.classList.add("crowded");
      box.style.fill = COLORS[hit.index % 4];
      const word = line * BANKS + bank, before = touched.get(word - 1);
      if (bank === 0 || !before || before.lane !== hit.lane)
        svg.append(element("text", { x: x + size / 2, y: y * size + size / 2, class: "lane" }, hit.lane));
      box.addEventListener("mouseenter", () => pick(hit.lane));
    }
  });
  label(left - 22, below - 9, "bank");
  for (let bank = 0; bank < BANKS; bank += 4) label(left + bank * size + size / 2, below - 9, bank);
  one.phases.forEach((phase, index) => {
    const y = below + index * size, first = phase.lanes[0], last = phase.lanes[phase.lanes.length - 1];
    label(left - 22, y + size / 2, `${first}-${last}: ${phase.wavefronts}`);
    for (let bank = 0; bank < BANKS; bank++) {
      const words = (phase.banks.get(bank) || []).length, x = left + bank * size;
      const box = element("rect", { x: x + 1, y: y + 1, width: size - 2, height: size - 2, rx: 2, class: "word" });
      if (words) box.style.fill = COLORS[index % 4];
      if (words > 1) box.classList.add("crowded");
      svg.append(box);
      if (words) svg.append(element("text", { x: x + size / 2, y: y + size / 2, class: "lane" }, words));
    }
  });
  label(left + BANKS * size / 2, below + one.phases.length * size + 9, "distinct words in each bank, by phase");
  svg.onmouseleave = () => pick(null);
}

let shown = [];
function pick(lane) {
  for (const [svg] of shown) {
    svg.classList.toggle("picking", lane !== null);
    for (const box of svg.querySelectorAll("rect.touched")) box.classList.toggle("picked", Number(box.dataset.lane) === lane);
  }
  $("hover").textContent = lane === null ? "Point at a word to see its lane and the banks of that lane." :
    shown.map(([, name, one, access]) => {
      const address = one.lanes[lane], words = [];
      for (let word = address >> 2; word <= (address + access.width - 1) >> 2; word++) words.push(word % BANKS);
      const phase = one.phases.find(candidate => candidate.lanes.includes(lane));
      const worst = Math.max(...words.map(bank => phase.banks.get(bank).length));
      const where = words.length > 1 ? `banks ${words[0]} to ${words[words.length - 1]}` : `bank ${words[0]}`;
      const verdict = worst === 1 ? "no conflict" : `${worst} words in one bank`;
      return `${name}: lane ${lane} at byte ${address}, ${where}, ${verdict}`;
    }).join(". ") + ".";
}

function read() {
  const config = { dtype: $("dtype").value, access: $("access").value, swizzle: $("swizzle").value };
  for (const name of ["rows", "cols", "pad"]) {
    config[name] = Number($(name).value);
    const lowest = name === "pad" ? 0 : 1;
    if (!Number.isInteger(config[name]) || config[name] < lowest || config[name] > 256 || $(name).value === "")
      throw new Error(`${name} is a whole number from ${lowest} to 256`);
  }
  config.order = ACCESSES[config.access].matrix ? "matrices" : $("order").value;
  return config;
}

function refresh() {
  $("error").textContent = "";
  $("order").disabled = ACCESSES[$("access").value].matrix;
  try {
    const config = read();
    const plain = countTile({ ...config, pad: 0, swizzle: "" }), laid = countTile(config);
    const last = laid.instructions.length - 1, slider = $("instruction");
    slider.max = last;
    const number = Math.min(Number(slider.value), last);
    $("which").textContent = `${number} of ${last + 1}`;
    drawPanel($("plain"), plain, number);
    drawPanel($("laid"), laid, number);
    shown = [[$("plain"), "As it is", plain.instructions[number], plain.access],
             [$("laid"), "Laid out", laid.instructions[number], laid.access]];
    const change = [config.pad ? `Padding ${config.pad}` : "", config.swizzle.trim() ? `Swizzle ${config.swizzle}` : ""];
    const title = (name, counted) => `${name}: ${counted.excess} excess wavefronts over the tile`;
    $("plain-title").textContent = title("As it is", plain);
    $("laid-title").textContent = title(change.filter(Boolean).join(", ") || "No padding, no swizzle", laid);
    const numbers = [["phases", laid.phases], ["wavefronts", laid.wavefronts], ["excess", laid.excess],
      ["excess as it is", plain.excess]];
    $("numbers").innerHTML = numbers.map(([name, value]) => {
      const color = name.startsWith("excess") && value ? "conflict" : "";
      return `<div><b class="${color}" id="n-${name.replaceAll(" ", "-")}">${value}</b>${name}</div>`;
    }).join("");
  } catch (error) {
    $("error").textContent = error.message;
  }
}

for (const [id, names] of [["dtype", Object.keys(DTYPES)], ["access", Object.keys(ACCESSES)], ["order", ORDERS]])
  for (const name of names) $(id).append(new Option(name, name));
for (const [name, value] of Object.entries(START)) $(name).value = value;
if (!$("order").value) $("order").value = "rows";
$("form").addEventListener("input", refresh);
$("form").addEventListener("submit", event => event.preventDefault());
const agree = CHECKS.filter(([config, phases, wavefronts, excess]) => {
  const counted = countTile(config);
  return counted.phases === phases && counted.wavefronts === wavefronts && counted.excess === excess;
}).length;
$("check").textContent = `Model check: ${agree} of ${CHECKS.length} predictions of the Python model reproduced.`;
$("check").className = agree === CHECKS.length ? "" : "conflict";
refresh();
</script>
</body>
</html>
"""
