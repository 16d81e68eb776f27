// The controls: what is chosen, what is counted for it, and what the page says about it.
const CHOSEN = {};
const EXAMPLES = ["(8,64):(64,1)", "Swizzle<3,3,3> o (64,64):(64,1)", "((8,2),(8,8)):((8,512),(1,64))",
  "Swizzle<3,4,3> o smem_ptr[16b] o ((8,8),64):((64,512),1)", "(32,32):(33,1)"];
const tab = () => document.body.dataset.tab;

function whole(name, lowest) {
  const value = Number($(name).value), { side } = DATA.limits;
  if ($(name).value === "" || !Number.isInteger(value) || value < lowest || value > side)
    throw new Error(`${name} is a whole number from ${lowest} to ${side}`);
  return value;
}

function patterns() {
  const first = patternOf($("access").value, $("order").value);
  if (tab() !== "tile" || !$("access2").value) return [first];
  return [first, patternOf($("access2").value, $("order2").value)];
}

function setOrders(access, order) {
  const chosen = $(access).value, matrix = chosen && DATA.accesses[chosen].matrix, before = $(order).value;
  const names = !chosen ? [] : matrix ? ["matrices"] : DATA.orders;
  $(order).replaceChildren(...names.map(name => new Option(name, name)));
  if (names.includes(before)) $(order).value = before;
  $(order).disabled = names.length < 2;
}

// What one swizzle can do, and padding where it cannot do all.
function search(tile, chosen) {
  const key = JSON.stringify([tile.rows, tile.cols, tile.item, chosen]);
  if (CHOSEN.key === key) return CHOSEN;
  const found = findSwizzle(tile, chosen);
  const padding = found.excess ? findPadding(tile, chosen) : { pad: 0, excess: found.before };
  return Object.assign(CHOSEN, found, { key, padding });
}

function verdict({ before, excess, swizzle, searched, byBits, padding }) {
  if (!before) return "No swizzle is needed: the tile has no conflicts as it is.";
  const bits = Object.entries(byBits).map(([b, least]) => `${b} bit${b === "1" ? "" : "s"} ${least}`).join(", ");
  const tried = `${searched} swizzles tried${bits ? `; the least by bits: ${bits}` : ""}`;
  const padded = padding.pad ? ` ${padding.pad} elements of padding a row leave ${padding.excess}.` : "";
  const more = excess && padding.excess ? " warploom banks --design also tries two swizzles in a row, and padding with a swizzle." : "";
  if (!swizzle) return `No swizzle helps (${tried}).${padded}${more}`;
  const all = excess ? `leaves ${excess} of ${before} excess wavefronts` : `removes all ${before} excess wavefronts`;
  return `Swizzle<${swizzle}> ${all}, with as few bits as can be (${tried}).${padded}${more}`;
}

const excess = (tile, chosen) => chosen.reduce((sum, one) => sum + countTile(one, tile).excess, 0);
const times = count => `${count} excess wavefront${count === 1 ? "" : "s"} over the tile`;

function tileShown() {
  const config = { rows: whole("rows", 1), cols: whole("cols", 1), pad: whole("pad", 0), dtype: $("dtype").value,
    swizzle: $("swizzle").value };
  const chosen = patterns(), plain = rowTile({ ...config, pad: 0, swizzle: "" }), found = search(plain, chosen);
  $("found").textContent = verdict(found);
  const titled = [config.pad ? `Padding ${config.pad}` : "", config.swizzle.trim() ? `Swizzle<${config.swizzle.trim()}>` : ""];
  let title = titled.filter(Boolean).join(", ");
  // Nothing chosen yet: the second panel shows what the search found.
  if (!title && found.swizzle && found.excess <= found.padding.excess) {
    title = `With Swizzle<${found.swizzle}>, found`;
    config.swizzle = found.swizzle.join();
  } else if (!title && found.padding.pad) {
    title = `With padding ${found.padding.pad}, found`;
    config.pad = found.padding.pad;
  } else if (!title && found.swizzle) {
    title = `With Swizzle<${found.swizzle}>, found`;
    config.swizzle = found.swizzle.join();
  }
  return { chosen, plain, laid: title ? rowTile(config) : null, title, name: "Laid out" };
}

function layoutShown() {
  const config = { layout: $("notation").value, dtype: $("dtype").value, swizzle_bytes: $("swizzle_bytes").checked };
  const chosen = patterns(), laid = laidTile(config, chosen[0].access.width), { elements } = DATA.limits;
  if (laid.rows * laid.cols > elements) throw new Error(`the page draws layouts of up to ${elements} elements`);
  drawMap(laidTile(config, 1));
  const plain = laid.layout.swizzles.length ? laidTile({ ...config, plain: true }, chosen[0].access.width) : null;
  const turned = laid.turned ? ", rows along its second mode" : "";
  return { chosen, plain: plain || laid, laid: plain && laid, title: `As typed${turned}`, name: "As typed",
    before: plain ? "Without its swizzle" : `As typed${turned}` };
}

function refresh() {
  setOrders("access", "order");
  setOrders("access2", "order2");
  $("second").hidden = !$("access2").value;
  $("error").textContent = "";
  if (tab() === "hopper") return;
  try {
    const { chosen, plain, laid, title, name, before = "As it is" } = tab() === "tile" ? tileShown() : layoutShown();
    const counts = [plain, laid].map(one => one && countTile(chosen[0], one));
    const [one, other] = counts, main = other || one, last = main.instructions.length - 1;
    $("instruction").max = last;
    const number = Math.min(Number($("instruction").value), last);
    $("which").textContent = `${number + 1} of ${last + 1}`;
    shown = [[$("plain"), before, one.instructions[number], chosen[0].access]];
    drawPanel($("plain"), one, number);
    $("plain-title").textContent = `${before}: ${times(excess(plain, chosen))}`;
    $("laid-panel").hidden = !other;
    if (other) {
      shown.push([$("laid"), name, other.instructions[number], chosen[0].access]);
      drawPanel($("laid"), other, number);
      $("laid-title").textContent = `${title}: ${times(excess(laid, chosen))}`;
    }
    const numbers = [["phases", main.phases], ["wavefronts", main.wavefronts], ["excess", main.excess],
      ...(other ? [[tab() === "tile" ? "excess as it is" : "excess without the swizzle", one.excess]] : [])];
    $("numbers").replaceChildren(...numbers.map(([label, value]) => {
      const box = document.createElement("div"), bold = document.createElement("b");
      bold.id = `n-${label.replaceAll(" ", "-")}`;
      bold.className = label.startsWith("excess") && value ? "conflict" : "";
      bold.textContent = value;
      box.append(bold, label);
      return box;
    }));
  } catch (error) {
    $("error").textContent = error.message;
    $("found").textContent = "";
  }
}

function open(name) {
  document.body.dataset.tab = name;
  for (const one of ["tile", "layout", "hopper"]) $(`tab-${one}`).setAttribute("aria-selected", one === name);
  refresh();
}

function showAtom() {
  const one = DATA.atoms.find(atom => atom.name === $("atom").value);
  for (const box of document.querySelectorAll(".atom")) box.hidden = box.id !== `atom-${one.name}`;
  $("atom-notes").replaceChildren(...one.notes.map(note => Object.assign(document.createElement("li"), { textContent: note })));
  $("atom-layout").textContent = one.layout;
  $("atom-open").hidden = !one.layout.includes("smem_ptr");
}

function openLayout(text, dtype) {
  $("notation").value = text;
  if (dtype) $("dtype").value = dtype;
  $("swizzle_bytes").checked = false;
  open("layout");
}

const fill = (id, names) => $(id).append(...names.map(name => new Option(name, name)));
fill("dtype", Object.keys(DATA.dtypes));
fill("access", Object.keys(DATA.accesses));
$("access2").append(new Option("nothing else", ""));
fill("access2", Object.keys(DATA.accesses));
$("atom").append(...DATA.atoms.map(one => new Option(one.title, one.name)));
$("examples").append(...EXAMPLES.map(text => {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  button.addEventListener("click", () => openLayout(text));
  return button;
}));

const start = { rows: 16, cols: 128, pad: 0, swizzle: "", layout: EXAMPLES[1], access2: "", ...DATA.start };
for (const name of ["rows", "cols", "pad", "swizzle", "dtype", "access", "access2"]) $(name).value = start[name];
$("notation").value = start.layout;
$("swizzle_bytes").checked = Boolean(start.swizzle_bytes);
setOrders("access", "order");
setOrders("access2", "order2");
$("order").value = start.order;
if (start.order2) $("order2").value = start.order2;

const agree = DATA.checks.filter(([config, phases, wavefronts, excess]) => {
  const pattern = patternOf(config.access, config.order);
  const counted = countTile(pattern, config.layout ? laidTile(config, pattern.access.width) : rowTile(config));
  return counted.phases === phases && counted.wavefronts === wavefronts && counted.excess === excess;
}).length;
$("check").textContent = `Model check: ${agree} of ${DATA.checks.length} predictions of the Python model reproduced.`;
$("check").className = agree === DATA.checks.length ? "" : "conflict";

for (const name of ["tile", "layout", "hopper"]) $(`tab-${name}`).addEventListener("click", () => open(name));
$("form").addEventListener("input", refresh);
$("form").addEventListener("submit", event => event.preventDefault());
$("atom").addEventListener("input", showAtom);
$("atom-open").addEventListener("click", () => openLayout($("atom-layout").textContent, $("atom").value.startsWith("tma") ? "f8" : "f16"));
$("find").addEventListener("click", () => {
  if (CHOSEN.swizzle) [$("swizzle").value, $("pad").value] = [CHOSEN.swizzle.join(), 0];
  refresh();
});
$("clear").addEventListener("click", () => {
  [$("swizzle").value, $("pad").value] = ["", 0];
  refresh();
});
NARROW.addEventListener("change", refresh);
window.addEventListener("resize", () => tab() === "layout" && refresh());
showAtom();
const asked = location.hash.slice(1), atom = DATA.atoms.find(one => one.name === asked);
if (atom) $("atom").value = asked, showAtom();
open(atom ? "hopper" : ["tile", "layout", "hopper"].includes(asked) ? asked : DATA.start.layout ? "layout" : "tile");
$("instruction").value = start.instruction || 0;
refresh();
