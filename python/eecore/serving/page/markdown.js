// Markdown into a tree that knows where in the text each piece comes from.
//
// A node is {tag, children, ...} with a tag of a fixed set, or a piece {text, at}: the characters of
// the text from `at` on. Nothing of the text becomes markup, and links lead to http, https or mail.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^( {0,3}#{1,6}\s+)(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +(?=\S)|\s*$)/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const MAX_DEPTH = 16;

// The blocks of a text: nodes with `start`, the place where each begins.
export function blocksOf(text) {
  const lines = [];
  let at = 0;
  for (const line of text.split("\n")) {
    lines.push({ text: line, at });
    at += line.length + 1;
  }
  return blocks(lines, 0);
}

function blocks(lines, depth) {
  const found = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].text.trim()) {
      i += 1;
      continue;
    }
    const [node, next] = block(lines, i, depth);
    found.push({ ...node, start: lines[i].at });
    i = next;
  }
  return found;
}

// The block that begins at line i, and the line after it.
function block(lines, i, depth) {
  const { text, at } = lines[i];
  const fence = FENCE.exec(text);
  if (fence) return code(lines, i, fence);
  const heading = HEADING.exec(text);
  if (heading) {
    const level = heading[1].trim().length;
    const line = { text: heading[2], at: at + heading[1].length };
    return [{ tag: `h${level}`, children: inline([line]) }, i + 1];
  }
  if (RULE.test(text)) return [{ tag: "hr", children: [] }, i + 1];
  if (depth < MAX_DEPTH && QUOTE.test(text)) {
    const inner = [];
    for (; i < lines.length && QUOTE.test(lines[i].text); i += 1) {
      inner.push(without(lines[i], QUOTE.exec(lines[i].text)[0].length));
    }
    return [{ tag: "blockquote", children: blocks(inner, depth + 1) }, i];
  }
  if (depth < MAX_DEPTH && ITEM.test(text)) return list(lines, i, depth);
  if (isTable(lines, i)) return table(lines, i);
  const paragraph = [lines[i]];
  for (i += 1; i < lines.length && lines[i].text.trim() && !interrupts(lines, i); i += 1) {
    paragraph.push(lines[i]);
  }
  return [{ tag: "p", children: inline(paragraph) }, i];
}

function interrupts(lines, i) {
  const { text } = lines[i];
  const item = ITEM.exec(text);
  const begins = item && item[3] && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return (
    begins || FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) ||
    isTable(lines, i)
  );
}

function without(line, count) {
  return { text: line.text.slice(count), at: line.at + count };
}

function code(lines, i, fence) {
  const [, marks, language] = fence;
  const indent = lines[i].text.search(/\S/);
  const children = [];
  for (i += 1; i < lines.length; i += 1) {
    const trimmed = lines[i].text.trim();
    if (trimmed.length >= marks.length && trimmed === marks[0].repeat(trimmed.length)) {
      i += 1;
      break;
    }
    const line = without(lines[i], Math.min(indent, Math.max(lines[i].text.search(/\S|$/), 0)));
    if (children.length) children.push({ text: "\n", at: line.at - 1 });
    if (line.text) children.push(line);
  }
  return [{ tag: "pre", language, children }, i];
}

function list(lines, i, depth) {
  const first = ITEM.exec(lines[i].text);
  const isOrdered = /\d/.test(first[2]);
  const children = [];
  while (i < lines.length) {
    const item = ITEM.exec(lines[i].text);
    if (!item || /\d/.test(item[2]) !== isOrdered || RULE.test(lines[i].text)) break;
    const indent = item[0].length > 6 || !item[3] ? item[1].length + item[2].length + 1 : item[0].length;
    const inner = [without(lines[i], Math.min(indent, lines[i].text.length))];
    for (i += 1; i < lines.length; i += 1) {
      const { text } = lines[i];
      const deep = text.search(/\S/);
      if (deep < 0) {
        const after = lines.slice(i).find((line) => line.text.trim());
        if (!after || after.text.search(/\S/) < 2) break;
      } else if (deep < 2 && (ITEM.test(text) || !inner.at(-1).text.trim() || interrupts(lines, i))) {
        break;
      }
      inner.push(without(lines[i], Math.min(Math.max(deep, 0), indent)));
    }
    children.push({ tag: "li", children: blocks(inner, depth + 1) });
    while (i < lines.length && !lines[i].text.trim() && ITEM.test(lines[i + 1]?.text ?? "")) i += 1;
  }
  const start = isOrdered ? parseInt(first[2], 10) : undefined;
  return [{ tag: isOrdered ? "ol" : "ul", first: start, children }, i];
}

function isTable(lines, i) {
  return lines[i].text.includes("|") && i + 1 < lines.length && DIVIDER.test(lines[i + 1].text);
}

function table(lines, i) {
  const rows = [row(lines[i], "th")];
  for (i += 2; i < lines.length && lines[i].text.includes("|"); i += 1) {
    rows.push(row(lines[i], "td"));
  }
  return [{ tag: "table", children: rows }, i];
}

function row(line, tag) {
  const cells = [];
  for (const cell of line.text.matchAll(/(?:\\.|[^|\\])+/g)) {
    const lead = cell[0].search(/\S/);
    const isEdge = lead < 0 && (cell.index === 0 || cell.index + cell[0].length === line.text.length);
    if (isEdge) continue;
    const from = cell.index + Math.max(lead, 0);
    cells.push({ tag, children: inline([{ text: cell[0].trim(), at: line.at + from }]) });
  }
  return { tag: "tr", children: cells };
}

// The nodes of some lines of running text.
function inline(lines) {
  const text = lines.map((line) => line.text).join("\n");
  const starts = [];
  let at = 0;
  for (const line of lines) {
    starts.push(at);
    at += line.text.length + 1;
  }
  // Pieces that lie together in the text, line by line.
  function pieces(from, to) {
    const found = [];
    for (let k = 0; k < lines.length; k += 1) {
      const begin = Math.max(from, starts[k]);
      const end = Math.min(to, starts[k] + lines[k].text.length + 1);
      if (begin >= end) continue;
      const first = lines[k].at + begin - starts[k];
      found.push({ text: text.slice(begin, end), at: first });
    }
    return found;
  }
  return spans(text, 0, text.length, pieces, 0);
}

const SPECIAL = /\\[!-/:-@[-`{-~]|`+|\*\*|__|~~|[*_]|!?\[|https?:\/\//g;
const PAIRS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

function spans(text, from, to, pieces, depth) {
  const found = [];
  const special = new RegExp(SPECIAL);
  special.lastIndex = from;
  let plain = from;
  for (let match; (match = special.exec(text)) && match.index < to; ) {
    const made = depth < MAX_DEPTH ? span(text, match, to, pieces, depth) : null;
    if (!made) continue;
    found.push(...pieces(plain, match.index), ...made.nodes);
    plain = made.next;
    special.lastIndex = made.next;
  }
  found.push(...pieces(plain, to));
  return found;
}

// What begins at a mark: its nodes and the place after them; null where it is text.
function span(text, match, to, pieces, depth) {
  const [mark] = match;
  const begin = match.index + mark.length;
  if (mark[0] === "\\") return { nodes: pieces(match.index + 1, begin), next: begin };
  if (mark[0] === "`") {
    const close = new RegExp(`(?<!\`)\`{${mark.length}}(?!\`)`, "g");
    close.lastIndex = begin;
    const end = close.exec(text);
    if (!end || end.index + mark.length > to) return null;
    const node = { tag: "code", children: pieces(begin, end.index) };
    return { nodes: [node], next: end.index + mark.length };
  }
  if (mark.startsWith("http")) {
    const url = /^[^\s<>"'`\])]+/.exec(text.slice(match.index, to))[0].replace(/[.,;:!?*_]+$/, "");
    const next = match.index + url.length;
    return { nodes: [{ tag: "a", href: url, children: pieces(match.index, next) }], next };
  }
  if (mark.endsWith("[")) {
    const link = /^([^[\]\n]*)\]\(\s*([^\s()]+(?:\([^\s()]*\))?)(?:\s+"[^"\n]*")?\s*\)/.exec(
      text.slice(begin, to),
    );
    if (!link || !link[1] || !/^(https?:\/\/|mailto:)/i.test(link[2])) return null;
    const children = spans(text, begin, begin + link[1].length, pieces, MAX_DEPTH);
    return { nodes: [{ tag: "a", href: link[2], children }], next: begin + link[0].length };
  }
  const isWord = (place) => /[\p{L}\p{N}]/u.test(text[place] ?? "");
  if (!text[begin] || /\s/.test(text[begin]) || (mark[0] === "_" && isWord(match.index - 1))) {
    return null;
  }
  for (let end = text.indexOf(mark, begin + 1); end >= 0 && end < to; end = text.indexOf(mark, end + 1)) {
    const after = end + mark.length;
    if (mark.length === 1 && (text[after] === mark || text[end - 1] === mark)) continue;
    if (/\s/.test(text[end - 1]) || (mark[0] === "_" && isWord(after))) continue;
    const children = spans(text, begin, end, pieces, depth + 1);
    return { nodes: [{ tag: PAIRS[mark], children }], next: after };
  }
  return null;
}
