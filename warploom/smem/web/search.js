// The searches of swizzle.py for one swizzle and for padding: what the button finds is what `warploom banks --design` finds.

// Phases as XOR differences from their first piece, equal ones as one: swizzles cannot tell them apart.
function phasesOf(patterns, tile) {
  const found = [];
  for (const pattern of patterns) {
    const { width, phase_lanes } = pattern.access, unit = Math.max(4, width), all = places(pattern, tile);
    for (let n = 0; n < all.length; n += phase_lanes) found.push({ unit, places: all.slice(n, n + phase_lanes) });
  }
  return found;
}

function merged(phases, keyOf) {
  const classes = new Map();
  for (const phase of phases) {
    const pieces = keyOf(phase), key = `${phase.unit}:${pieces.join()}`, held = classes.get(key);
    if (held) held.weight++;
    else classes.set(key, { unit: phase.unit, pieces, places: phase.places, weight: 1 });
  }
  return [...classes.values()];
}

function crowd(pieces, unit, moved) {
  const held = new Uint8Array(LINE / unit);
  let most = 0;
  for (const piece of pieces) most = Math.max(most, ++held[(moved(piece) / unit) % (LINE / unit)]);
  return most - 1;
}

function excessOf(classes, moved) {
  return classes.reduce((sum, one) => sum + one.weight * crowd(one.pieces, one.unit, moved), 0);
}

const bitLength = number => number ? 32 - Math.clz32(number) : 0;

// Every swizzle of byte addresses worth trying, fewer bits first, then the smaller shift.
function candidates(tile, patterns) {
  const lowest = bitLength(Math.max(4, tile.item, ...patterns.map(one => one.access.width))) - 1;
  const top = bitLength(tile.size - 1), found = [], end = tile.size % LINE;
  for (let m = lowest; m < 7; m++)
    for (let b = 1; b <= 7 - m; b++) for (let s = b; s < top - m; s++) found.push([b, m, s]);
  const inside = one => {
    for (let start = tile.size - end; start < tile.size; start += 1 << lowest) if (swizzled(start, one) >= tile.size) return false;
    return true;
  };
  return found.filter(inside).sort((one, other) => one[0] - other[0] || one[2] - other[2] || one[1] - other[1]);
}

function findSwizzle(tile, patterns) {
  const classes = merged(phasesOf(patterns, tile), ({ unit, places }) => {
    const pieces = places.map(([row, byte]) => Math.floor((row * tile.pitch + byte) / unit) * unit);
    return [...new Set(pieces.map(piece => piece ^ pieces[0]))].sort((one, other) => one - other);
  });
  const before = excessOf(classes, piece => piece), tried = candidates(tile, patterns), byBits = {};
  let excess = before, best = null;
  for (const one of tried) {
    const left = excessOf(classes, piece => swizzled(piece, one));
    if (!(one[0] in byBits) || left < byBits[one[0]]) byBits[one[0]] = left;
    if (left < excess) [excess, best] = [left, one];
  }
  // A later swizzle of the same bits is no better, one of more bits only where it leaves less: the order of `tried` says so.
  const shift = bitLength(tile.item) - 1;
  return { before, excess, swizzle: best && [best[0], best[1] - shift, best[2]], searched: tried.length, byBits };
}

function findPadding(tile, patterns) {
  const widest = Math.max(...patterns.map(one => one.access.width));
  // Moving a phase by whole words turns the banks round: one of each shape is enough.
  const shapes = merged(phasesOf(patterns, tile), ({ places }) => {
    const top = Math.min(...places.map(one => one[0])), left = Math.min(...places.map(one => one[1]));
    return places.flatMap(([row, byte]) => [row - top + top % 4, byte - left + left % 4]);
  });
  const excessAt = pitch => shapes.reduce((sum, { unit, pieces, weight }) => {
    const held = new Set();
    for (let n = 0; n < pieces.length; n += 2) held.add(Math.floor((pieces[n] * pitch + pieces[n + 1]) / unit) * unit);
    return sum + weight * crowd(held, unit, piece => piece);
  }, 0);
  let best = { pad: 0, excess: excessAt(tile.pitch) };
  for (let pad = 1; pad < LINE / tile.item && best.excess; pad++) {
    const pitch = tile.pitch + pad * tile.item;
    if (pitch % widest) continue;
    const excess = excessAt(pitch);
    if (excess < best.excess) best = { pad, excess };
  }
  return best;
}
