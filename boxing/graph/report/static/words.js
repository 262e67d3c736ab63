// Words: figures as one reads them, and elements.

const DATA = JSON.parse(document.getElementById("data").textContent);
const APP = document.getElementById("app");

const SVG = "http://www.w3.org/2000/svg";

/** An element: attributes by name, `on...` as listeners, children as elements or text. */
function h(tag, look = {}, ...inside) {
  return dressed(document.createElement(tag), look, inside);
}

/** The same in SVG. */
function s(tag, look = {}, ...inside) {
  return dressed(document.createElementNS(SVG, tag), look, inside);
}

function dressed(made, look, inside) {
  for (const [name, value] of Object.entries(look)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== ""));
  return made;
}

const three = (x) => String(Number(x.toPrecision(3)));

function volume(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; bytes >= 1000 && at < units.length - 1; at += 1) bytes /= 1024;
  return `${three(bytes)} ${units[at]}`;
}

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size < 999.5e-6) return `${three(seconds * 1e6)} us`;
  return size < 0.9995 ? `${three(seconds * 1e3)} ms` : `${three(seconds)} s`;
}

/** Marks of one axis of time, all in the unit of the last. */
function onAxis(seconds) {
  const unit = duration(Math.max(...seconds)).split(" ")[1], size = { us: 1e-6, ms: 1e-3, s: 1 }[unit];
  return seconds.map((each) => `${three(each / size)} ${unit}`);
}

const signed = (seconds) => (seconds > 0 ? "+" : seconds < 0 ? "−" : "±") + duration(Math.abs(seconds));
const percent = (share) => (share >= 0.01 ? `${Math.round(share * 100)} %` : `${Number((share * 100).toPrecision(1))} %`);
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const some = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const sum = (of) => of.reduce((a, b) => a + b, 0);
