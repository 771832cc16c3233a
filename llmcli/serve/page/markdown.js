"use strict";
// A subset of Markdown, drawn as elements that a model cannot choose: no HTML, no images, links to http and https only.
//
// Every character goes through `paint(parent, start, end)`, which appends the source's characters [start, end): so a
// caller can tint them. Blocks: headings, lists, quotes, code, tables, rules, paragraphs, whose line breaks stay.
const MAX_DEPTH = 12; // of blocks in blocks, and of emphasis; what is deeper stays as it is written
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^ {0,3}(?:[-*+]|\d{1,9}[.)])(?=[ \t]|$)/;
const COLUMNS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const TARGET = /\]\([ \t]*<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500}){0,9})>?(?:[ \t]+"[^"\n]{0,200}")?[ \t]*\)/y;
const BARE = /https?:\/\/[^\s<>"`]{1,2000}/y;
const ANGLED = /<https?:\/\/[^\s<>]{1,2000}>/y;

function add(parent, name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

const isBlank = (line) => line.text.trim() === "";
const indentOf = (line) => line.text.length - line.text.trimStart().length;
const from = (line, skipped) => ({ text: line.text.slice(skipped), at: line.at + skipped });
const endOf = (line) => line.at + line.text.length;
const isDeep = (line, columns) => line.text[0] === "\t" || indentOf(line) >= columns;
const outdented = (line, columns) => from(line, line.text[0] === "\t" ? 1 : Math.min(columns, indentOf(line)));

// The lines of a source from an offset on: `at` is the offset of a line's first character.
function linesOf(source, start) {
  let at = start;
  return source.slice(start).split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
}

// Whether a line ends a paragraph before it. A number other than 1 does not: a sentence may begin a line with one.
function interrupts(line) {
  if ([FENCE, RULE, HEADING, QUOTE].some((kind) => kind.test(line.text))) return true;
  return ITEM.test(line.text) && /^ *(?:[-*+]|1[.)])[ \t]+\S/.test(line.text);
}

// Blocks of lines in order, each with `start` and `end` in the source, and `draw(parent, paint)`.
function blocksOf(lines, depth = 0) {
  const blocks = [];
  for (let first = 0; first < lines.length; ) {
    if (isBlank(lines[first])) {
      first += 1;
      continue;
    }
    const block = (depth < MAX_DEPTH && special(lines, first, depth)) || paragraph(lines, first, depth);
    blocks.push({ start: lines[first].at, end: endOf(lines[block.next - 1]), draw: block.draw });
    first = block.next;
  }
  return blocks;
}

function special(lines, first, depth) {
  const { text } = lines[first];
  if (FENCE.test(text)) return code(lines, first);
  if (RULE.test(text)) return { next: first + 1, draw: (parent) => add(parent, "hr") };
  if (HEADING.test(text)) return heading(lines, first);
  if (QUOTE.test(text)) return quote(lines, first, depth);
  if (ITEM.test(text)) return list(lines, first, depth);
  return table(lines, first);
}

function code(lines, first) {
  const [whole, fence] = FENCE.exec(lines[first].text);
  const indent = whole.length - fence.length;
  const language = lines[first].text.slice(whole.length).trim();
  let next = first + 1;
  const isClosing = ({ text }) => {
    const told = text.trim();
    return told.length >= fence.length && told === fence[0].repeat(told.length) && /^ {0,3}\S/.test(text);
  };
  while (next < lines.length && !isClosing(lines[next])) next += 1;
  const inside = lines.slice(first + 1, next).map((line) => from(line, Math.min(indent, line.text.search(/[^ ]|$/))));
  const draw = (parent, paint) => {
    const box = add(parent, "div", "code");
    const bar = add(box, "div", "bar");
    add(bar, "span", "", language);
    const button = add(bar, "button", "copy", "Copy code");
    button.type = "button";
    const text = add(add(box, "pre"), "code");
    text.parentElement.tabIndex = 0; // a wide one scrolls by keyboard
    inside.forEach((line, index) => {
      paint(text, line.at, endOf(line));
      if (index < inside.length - 1) text.append("\n");
    });
    button.copied = () => text.textContent;
  };
  return { next: Math.min(next + 1, lines.length), draw };
}

function heading(lines, first) {
  const [whole, marks] = HEADING.exec(lines[first].text);
  const line = from(lines[first], whole.length);
  const inner = from(line, indentOf(line));
  let told = inner.text.trimEnd();
  const open = told.replace(/#+$/, "");
  if (open === "" || /[ \t]$/.test(open)) told = open.trimEnd();
  // The speaker's name is an h2.
  const name = `h${Math.min(6, marks.length + 2)}`;
  return { next: first + 1, draw: (parent, paint) => drawInline(add(parent, name), [{ ...inner, text: told }], paint) };
}

function quote(lines, first, depth) {
  const inside = [];
  let next = first;
  for (; next < lines.length; next += 1) {
    const match = QUOTE.exec(lines[next].text);
    const continues = inside.length && !isBlank(inside.at(-1)) && !isBlank(lines[next]) && !interrupts(lines[next]);
    if (!match && !continues) break;
    inside.push(from(lines[next], match ? match[0].length : 0));
  }
  const blocks = blocksOf(inside, depth + 1);
  return { next, draw: (parent, paint) => drawAll(blocks, add(parent, "blockquote"), paint) };
}

// Items may be indented by two columns where CommonMark wants the width of the marker: models write both.
function list(lines, first, depth) {
  const kindOf = (line) => ITEM.exec(line.text)?.[0].trim().at(-1);
  const kind = kindOf(lines[first]);
  const items = [];
  let next = first;
  while (next < lines.length && !RULE.test(lines[next].text) && kindOf(lines[next]) === kind) {
    const opening = lines[next];
    const marker = ITEM.exec(opening.text)[0].length;
    const spaces = indentOf(from(opening, marker));
    const width = marker + (spaces < 1 || spaces > 4 || marker + spaces === opening.text.length ? 1 : spaces);
    const least = Math.min(width, indentOf(opening) + 2);
    const inside = [from(opening, Math.min(width, opening.text.length))];
    for (next += 1; next < lines.length; next += 1) {
      const line = lines[next];
      const isInside = isDeep(line, least);
      const continues = !isBlank(inside.at(-1)) && !interrupts(line) && !ITEM.test(line.text);
      if (!isBlank(line) && !isInside && !continues) break;
      inside.push(outdented(line, width));
    }
    let numBlank = 0;
    while (numBlank < inside.length - 1 && isBlank(inside.at(-1 - numBlank))) numBlank += 1;
    items.push(blocksOf(inside.slice(0, inside.length - numBlank), depth + 1));
    if (next >= lines.length || kindOf(lines[next]) !== kind) {
      next -= numBlank; // they come after the list
      break;
    }
  }
  const isOrdered = kind === "." || kind === ")";
  const draw = (parent, paint) => {
    const element = add(parent, isOrdered ? "ol" : "ul");
    if (isOrdered) element.start = parseInt(lines[first].text, 10);
    for (const blocks of items) drawAll(blocks, add(element, "li"), paint);
  };
  return { next, draw };
}

function cellsOf(line) {
  const cells = [];
  let start = 0;
  const end = line.text.trimEnd().length;
  for (let place = 0; place <= end; place += 1) {
    if (place < end && line.text[place] === "\\") place += 1;
    else if (place === end || line.text[place] === "|") {
      const cell = from(line, start);
      const told = cell.text.slice(0, place - start);
      const indent = told.length - told.trimStart().length;
      const isEdge = told.trim() === "" && (cells.length === 0 ? place < end && start === 0 : place === end);
      if (!isEdge) cells.push({ text: told.trim(), at: cell.at + indent });
      start = place + 1;
    }
  }
  return cells;
}

function table(lines, first) {
  const [top, columns] = [lines[first], lines[first + 1]];
  if (!columns || !top.text.includes("|") || !COLUMNS.test(columns.text)) return null;
  const [heads, marks] = [cellsOf(top), cellsOf(columns).map((cell) => cell.text)];
  if (heads.length !== marks.length) return null;
  let next = first + 2;
  while (next < lines.length && !isBlank(lines[next]) && !interrupts(lines[next])) next += 1;
  const draw = (parent, paint) => {
    const box = add(parent, "div", "table");
    box.tabIndex = 0;
    const element = add(box, "table");
    const row = (section, name, cells) => {
      const drawn = add(section, "tr");
      marks.forEach((mark, index) => {
        const cell = add(drawn, name);
        if (mark.endsWith(":")) cell.style.textAlign = mark.startsWith(":") ? "center" : "right";
        if (cells[index]) drawInline(cell, [cells[index]], paint);
      });
    };
    row(add(element, "thead"), "th", heads);
    const body = add(element, "tbody");
    for (const line of lines.slice(first + 2, next)) row(body, "td", cellsOf(line));
  };
  return { next, draw };
}

function paragraph(lines, first, depth) {
  let next = first + 1;
  const ends = (place) => isBlank(lines[place]) || (depth < MAX_DEPTH && (interrupts(lines[place]) || table(lines, place)));
  while (next < lines.length && !ends(next)) next += 1;
  const inside = lines.slice(first, next);
  return { next, draw: (parent, paint) => drawInline(add(parent, "p"), inside, paint) };
}

function drawAll(blocks, parent, paint) {
  for (const block of blocks) block.draw(parent, paint);
}

// The text within a block: code, emphasis by CommonMark's rules for delimiters, links.
//
// A node is { start, end } in the joined lines, { open } for an element with `nodes`, or a delimiter with `count` left.
function drawInline(parent, lines, paint) {
  const text = lines.map((line) => line.text).join("\n");
  const nodes = inlineNodes(text);
  let line = 0;
  let lineStart = 0;
  const paintJoined = (element, start, end) => {
    while (start < end) {
      while (start > lineStart + lines[line].text.length) {
        lineStart += lines[line].text.length + 1;
        line += 1;
      }
      // Up to the end of the lines that follow each other in the source, too.
      let stop = Math.min(end, lineStart + lines[line].text.length + 1);
      const at = lines[line].at + start - lineStart;
      while (stop < end && lines[line + 1].at === endOf(lines[line]) + 1) {
        lineStart += lines[line].text.length + 1;
        line += 1;
        stop = Math.min(end, lineStart + lines[line].text.length + 1);
      }
      paint(element, at, at + stop - start);
      start = stop;
    }
  };
  const draw = (element, node) => {
    if (!node.nodes) return paintJoined(element, node.start, node.end ?? node.start + node.count);
    const inner = add(element, node.open);
    if (node.href) {
      inner.href = node.href;
      inner.target = "_blank";
      inner.rel = "noopener noreferrer";
    }
    for (const child of node.nodes) draw(inner, child);
    return undefined;
  };
  for (const node of nodes) draw(parent, node);
}

function safeAddress(text) {
  try {
    return /^https?:\/\//i.test(text) ? new URL(text).href : null;
  } catch {
    return null;
  }
}

function inlineNodes(text) {
  const nodes = [];
  const brackets = []; // places in `nodes` of [ and ![
  const unclosed = new Set(); // lengths of runs of ` that nothing closes
  let plain = 0; // where the text began that nothing has claimed
  const close = (start, end, node) => {
    if (plain < start) nodes.push({ start: plain, end: start });
    if (node) nodes.push(node);
    plain = end;
  };
  const match = (pattern, place) => {
    pattern.lastIndex = place;
    return pattern.exec(text);
  };
  for (let place = 0; place < text.length; ) {
    const char = text[place];
    let next = place + 1;
    if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[next] ?? "")) {
      close(place, next);
      next += 1;
    } else if (char === "`") {
      while (text[next] === "`") next += 1;
      const end = unclosed.has(next - place) ? -1 : closingTicks(text, next, next - place);
      if (end < 0) unclosed.add(next - place);
      else {
        close(place, end + next - place, codeNode(text, next, end));
        next = plain;
      }
    } else if (char === "*" || char === "_" || char === "~") {
      while (text[next] === char) next += 1;
      if (char !== "~" || next - place === 2) close(place, next, delimiter(text, place, next));
    } else if (char === "[") {
      const start = text[place - 1] === "!" && plain < place ? place - 1 : place;
      close(start, next, { start, end: next });
      brackets.push(nodes.length - 1);
    } else if (char === "]" && brackets.length) {
      const opening = brackets.pop();
      const target = match(TARGET, place);
      const href = target && safeAddress(target[1]);
      if (href) {
        close(place, place + target[0].length);
        const inner = nodes.splice(opening).slice(1);
        nodes.push({ open: "a", href, nodes: emphasized(inner) });
        brackets.length = 0; // a link holds no link
        next = plain;
      }
    } else if (char === "<" || (char === "h" && !/\w/.test(text[place - 1] ?? ""))) {
      const found = match(char === "<" ? ANGLED : BARE, place)?.[0];
      const [start, end] = found ? bounds(found, char === "<") : [0, 0];
      const href = found && brackets.length === 0 && safeAddress(found.slice(start, end));
      if (href) {
        const inner = { start: place + start, end: place + end };
        next = place + (char === "<" ? found.length : end);
        close(place, next, { open: "a", href, nodes: [inner] });
      }
    }
    place = next;
  }
  close(text.length, text.length);
  return emphasized(nodes);
}

function closingTicks(text, place, count) {
  for (let start = text.indexOf("`", place); start >= 0; start = text.indexOf("`", start)) {
    let end = start;
    while (text[end] === "`") end += 1;
    if (end - start === count) return start;
    start = end;
  }
  return -1;
}

function codeNode(text, start, end) {
  const isPadded = text[start] === " " && text[end - 1] === " " && text.slice(start, end).trim() !== "";
  return { open: "code", nodes: [{ start: start + isPadded, end: end - isPadded }] };
}

// Where an address begins and ends: without angle brackets, and without the punctuation of the sentence around it.
function bounds(found, isAngled) {
  if (isAngled) return [1, found.length - 1];
  let end = found.length;
  while (/[.,:;!?'*_~\])]/.test(found[end - 1])) {
    if (found[end - 1] === ")" && found.slice(0, end).split("(").length >= found.slice(0, end).split(")").length) break;
    end -= 1;
  }
  return [0, end];
}

function delimiter(text, start, end) {
  const [before, after] = [text[start - 1] ?? " ", text[end] ?? " "];
  const isSpace = (char) => /\s/.test(char);
  const isMark = (char) => /[\p{P}\p{S}]/u.test(char);
  const opens = !isSpace(after) && (!isMark(after) || isSpace(before) || isMark(before));
  const closes = !isSpace(before) && (!isMark(before) || isSpace(after) || isMark(after));
  const char = text[start];
  const isWord = char === "_"; // snake_case is not emphasis
  return {
    start,
    char,
    count: end - start,
    length: end - start,
    opens: opens && !(isWord && closes && !isMark(before)),
    closes: closes && !(isWord && opens && !isMark(after)),
  };
}

// CommonMark's "process emphasis": each closing delimiter takes the nearest opening one that fits.
function emphasized(nodes) {
  const done = [];
  const lowest = new Map(); // by kind of closing delimiter: where in `done` no opening one was found below
  for (const node of nodes) {
    if (node.closes) {
      while (node.count > 0) {
        const key = `${node.char}${node.opens}${node.length % 3}`;
        const floor = lowest.get(key) ?? 0;
        let place = done.length - 1;
        while (place >= floor && !fits(done[place], node)) place -= 1;
        if (place < floor) {
          lowest.set(key, done.length);
          break;
        }
        const opening = done[place];
        const inner = done.splice(place + 1);
        const depth = 1 + inner.reduce((most, one) => Math.max(most, one.depth ?? 0), 0);
        if (depth > MAX_DEPTH) {
          for (const one of inner) done.push(one);
          lowest.set(key, done.length);
          break;
        }
        const count = node.char === "~" || (opening.count > 1 && node.count > 1) ? 2 : 1;
        const open = node.char === "~" ? "s" : count === 2 ? "strong" : "em";
        opening.count -= count;
        node.start += count;
        node.count -= count;
        if (opening.count === 0) done.pop();
        done.push({ open, depth, nodes: inner });
        for (const [kind, floorOf] of lowest) lowest.set(kind, Math.min(floorOf, done.length));
      }
    }
    if (node.count !== 0) done.push(node);
  }
  return done;
}

function fits(opening, closing) {
  if (!opening.opens || opening.char !== closing.char) return false;
  const isEither = opening.closes || closing.opens;
  return !(isEither && (opening.length + closing.length) % 3 === 0 && (opening.length % 3 || closing.length % 3));
}
