// The notation of notation.py and the tiles of laid.py: the same texts, the same errors, the same offsets.
const LARGEST = 1 << 20, LONGEST = 400, DEEPEST = 16;

function parseLayout(text) {
  if ([...text].length > LONGEST) throw new Error(`layout takes up to ${LONGEST} characters, got ${[...text].length}`);
  let at = 0;
  const fail = (what, where) => {
    throw new Error(`layout takes ${what} where ▸ stands: ${text.slice(0, where)}▸${text.slice(where)}`);
  };
  const skip = () => {
    while (at < text.length && " \t\n".includes(text[at])) at++;
    return at;
  };
  const look = (pattern, where) => {
    const sticky = new RegExp(pattern, "y");
    sticky.lastIndex = where;
    return sticky.exec(text);
  };
  const take = pattern => {
    const found = look(pattern, skip());
    if (found) at += found[0].length;
    return found;
  };
  const need = (pattern, what) => take(pattern) || fail(what, at);
  const number = (what = "a number") => {
    const start = skip(), found = Number(need("_?([0-9]{1,9})(?![0-9])", what)[1]);
    return found > LARGEST ? fail(`numbers up to ${LARGEST}`, start) : found;
  };
  const swizzle = () => {
    need("<", '"<"');
    const start = skip(), b = number();
    need(",", '","');
    const m = number();
    need(",", '","');
    const s = number();
    need(">", '">"');
    if (s < 1 || b + m + s > 32) fail("S from 1 and B + M + S up to 32", start);
    return [b, m, s];
  };
  const tree = (depth = 0) => {
    const start = skip();
    if (!take("\\(")) return { at: start, value: number('a number or "("') };
    if (depth === DEEPEST) fail(`at most ${DEEPEST} brackets within one another`, start);
    const parts = [tree(depth + 1)];
    while (!take("\\)")) {
      need(",", '"," or ")"');
      if (take("\\)")) break;
      parts.push(tree(depth + 1));
    }
    return { at: start, value: parts };
  };
  const bare = node => Array.isArray(node.value) ? node.value.map(bare) : node.value;
  const checkSizes = node => {
    if (Array.isArray(node.value)) node.value.forEach(checkSizes);
    else if (!node.value) fail("sizes from 1", node.at);
  };
  const checkNesting = (shape, stride) => {
    const [one, other] = [shape.value, stride.value];
    if (!Array.isArray(one) && !Array.isArray(other)) return;
    if (!Array.isArray(one) || !Array.isArray(other) || one.length !== other.length)
      fail("strides nested as the shape is", stride.at);
    one.forEach((node, n) => checkNesting(node, other[n]));
  };

  const swizzles = [];
  let offset = 0, bits = null, stride;
  while (take("(Swizzle|Sw|S)(?![A-Za-z])")) {
    swizzles.push(swizzle());
    need("[o∘]", '"o"');
  }
  if (take("smem_ptr")) {
    bits = Number(need("\\[(8|16|32|64)b\\]", "[8b], [16b], [32b] or [64b]")[1]);
    take("\\([A-Za-z0-9_]*\\)");
    need("[o∘]", '"o"');
  }
  if (look("[ \\t\\n]*_?[0-9]+[ \\t\\n]*[o∘]", at)) {
    offset = number();
    need("[o∘]", '"o"');
  }
  const shapeNode = tree(), shape = bare(shapeNode);
  checkSizes(shapeNode);
  if (take(":")) {
    const node = tree();
    checkNesting(shapeNode, node);
    stride = bare(node);
    need("$", "nothing more");
  } else {
    need("$", '":" or nothing more');
    stride = compact(shape);
  }
  const layout = { shape, stride, offset, swizzles, bits };
  if (sizeOf(shape) > LARGEST) fail(`at most ${LARGEST} elements`, shapeNode.at);
  if (offset + inner(sizeOf(shape) - 1, shape, stride) >= LARGEST) fail(`offsets below ${LARGEST}`, shapeNode.at);
  return layout;
}

function sizeOf(shape) {
  return Array.isArray(shape) ? shape.reduce((product, one) => product * sizeOf(one), 1) : shape;
}

// The offset of the index-th coordinate, the first mode fastest.
function inner(index, shape, stride) {
  if (!Array.isArray(shape)) return index * stride;
  let total = 0, rest = index;
  for (let n = 0; n < shape.length - 1; n++) {
    total += inner(rest % sizeOf(shape[n]), shape[n], stride[n]);
    rest = Math.floor(rest / sizeOf(shape[n]));
  }
  return total + inner(rest, shape[shape.length - 1], stride[stride.length - 1]);
}

function compact(shape, start = 1) {
  if (!Array.isArray(shape)) return start;
  return shape.map(one => {
    const own = compact(one, start);
    start *= sizeOf(one);
    return own;
  });
}

function laidTile(config, width) {
  const layout = parseLayout(config.layout), item = DATA.dtypes[config.dtype];
  if (layout.bits !== null && layout.bits !== 8 * item)
    throw new Error(`dtype takes the ${layout.bits} bits of the layout's smem_ptr, got ${config.dtype}`);
  if (config.plain) layout.swizzles = [];
  let modes = Array.isArray(layout.shape) ? layout.shape.map((one, n) => [one, layout.stride[n]]) : [[layout.shape, layout.stride]];
  if (modes.length === 1) modes = [[1, 0], modes[0]];
  if (modes.length > 2) modes = [modes[0], [modes.slice(1).map(mode => mode[0]), modes.slice(1).map(mode => mode[1])]];
  const together = ([shape, stride]) => sizeOf(shape) > 1 && inner(1, shape, stride) === 1;
  const turned = width > item && !together(modes[1]) && together(modes[0]);
  const steps = modes.map(([shape, stride]) => Array.from({ length: sizeOf(shape) }, (_, n) => inner(n, shape, stride)));
  const bytes = config.swizzle_bytes || layout.bits !== null, unit = bytes ? item : 1;
  const moved = (down, across) => {
    const before = (layout.offset + steps[0][down] + steps[1][across]) * unit;
    return layout.swizzles.reduceRight(swizzled, before) * (item / unit);
  };
  const [down, across] = turned ? [1, 0] : [0, 1];
  const rows = steps[down].length, cols = steps[across].length;
  const element = (row, column) => turned ? moved(column, row) : moved(row, column);
  let size = 0;
  for (let row = 0; row < rows; row++) for (let column = 0; column < cols; column++) size = Math.max(size, element(row, column) + item);
  const at = (row, byte) => element(row, Math.floor(byte / item)) + byte % item;
  return { rows, cols, item, size, at, element, turned, layout, bytes };
}
