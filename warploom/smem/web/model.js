// The model of model.py and walk.py: which lane reads what, in how many wavefronts. Tests hold the two to each other.
const BANKS = 32, WARP = 32, LINE = 128;

function parseSwizzles(text) {
  if (!text.trim()) return [];
  return text.split("+").map(part => {
    const found = part.match(/^\s*<?\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*>?\s*$/);
    if (!found) throw new Error("a swizzle is B,M,S, or several joined by +");
    const [b, m, s] = found.slice(1).map(Number);
    if (s < 1 || b + m + s > 32) throw new Error("a swizzle has S from 1 and B + M + S up to 32");
    return [b, m, s];
  });
}

function swizzled(offset, [b, m, s]) {
  if (!b) return offset;
  return (offset ^ ((((offset >>> s) >>> m) & (2 ** b - 1)) << m)) >>> 0;
}

// A tile has its rows, its columns, the bytes of an element, its size in bytes, and at(row, byte): the address of a byte.
function rowTile(config) {
  const item = DATA.dtypes[config.dtype], pitch = (config.cols + config.pad) * item;
  const swizzles = parseSwizzles(config.swizzle);
  const at = (row, byte) => {
    const offset = row * pitch + byte;
    return swizzles.reduce(swizzled, Math.floor(offset / item)) * item + offset % item;
  };
  return { rows: config.rows, cols: config.cols, item, pitch, size: config.rows * pitch, at };
}

function addressOf(tile, row, byte, width) {
  const first = tile.at(row, byte);
  for (let n = tile.item; n < width; n += tile.item)
    if (tile.at(row, byte + n) !== first + n) throw new Error(`the ${width} bytes of one lane at row ${row} do not lie together`);
  if (first % width) throw new Error(`row ${row} lies at byte ${first}, off the ${width}-byte alignment of the access`);
  return first;
}

function places(pattern, tile) {
  const { access, order } = pattern, rows = tile.rows, bytes = tile.cols * tile.item, found = [];
  if (bytes % access.width) throw new Error(`rows of ${bytes} bytes are no multiple of the access's ${access.width} bytes`);
  const across = bytes / access.width;
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
  } else if (order === "columns") {
    for (let piece = 0; piece < across; piece++) for (let row = 0; row < rows; row++) found.push([row, piece]);
  } else if (order === "fragment") {
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
      for (let word = lanes[lane] >>> 2; word <= (lanes[lane] + access.width - 1) >>> 2; word++) {
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

function patternOf(name, order) {
  const access = DATA.accesses[name];
  return { access, order: access.matrix ? "matrices" : order };
}

function countTile(pattern, tile) {
  const { access } = pattern;
  const lanes = places(pattern, tile).map(([row, byte]) => addressOf(tile, row, byte, access.width));
  const instructions = [];
  for (let n = 0; n < lanes.length; n += access.lanes) {
    const group = lanes.slice(n, n + access.lanes);
    while (group.length < access.lanes) group.push(null);
    instructions.push(predict(access, group));
  }
  const sum = key => instructions.reduce((total, one) => total + one[key], 0);
  const phases = instructions.reduce((total, one) => total + one.phases.length, 0);
  return { tile, pattern, instructions, phases, wavefronts: sum("wavefronts"), excess: sum("excess") };
}
