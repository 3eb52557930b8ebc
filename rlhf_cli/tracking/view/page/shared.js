// Rendering, repeated requests and formats that all parts of the page share.

import {h} from "preact";
import {useEffect, useRef, useState} from "preact/hooks";
import htm from "htm";
import {request} from "view/data.js";

export const html = htm.bind(h);

export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return String(value ?? "–");
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3) return value.toExponential(2);
  if (size >= 1e5) return value.toLocaleString("en", {notation: "compact", maximumFractionDigits: 1});
  return String(+value.toPrecision(4));
}

export function duration(seconds) {
  if (seconds < 60) return `${+seconds.toPrecision(3)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.round(seconds % 60)} s`;
}

// Requests again when a parameter changes, and while `again(result)` returns milliseconds. Answers that come late, after
// newer parameters, are dropped.
export function useRequest(name, parameters, again = () => null) {
  const [state, setState] = useState({data: null, error: null, of: null});
  const wanted = JSON.stringify([name, parameters]);
  useEffect(() => {
    let timer = null, isOver = false;
    const ask = async () => {
      try {
        const data = await request(name, parameters);
        if (isOver) return;
        setState({data, error: null, of: wanted});
        const wait = again(data);
        if (wait !== null) timer = setTimeout(ask, wait);
      } catch (error) {
        if (isOver) return;
        setState(previous => ({...previous, error: error.message}));
        timer = setTimeout(ask, 2000);
      }
    };
    if (name) ask();
    return () => { isOver = true; clearTimeout(timer); };
  }, [wanted]);
  return {...state, isCurrent: state.of === wanted};
}

// The part of the page and its parameters are in the fragment, so links, Back and reloading work.
function read() {
  const [tab, query = ""] = location.hash.slice(1).split("?");
  return {tab: tab || "curves", parameters: Object.fromEntries(new URLSearchParams(query))};
}

export function go(tab, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  location.hash = given.length ? `${tab}?${new URLSearchParams(given)}` : tab;
}

export function useAddress() {
  const [address, setAddress] = useState(read);
  useEffect(() => {
    const update = () => setAddress(read());
    addEventListener("hashchange", update);
    return () => removeEventListener("hashchange", update);
  }, []);
  return address;
}

// Counts the changes between light and dark: canvases must be drawn again.
export function useTheme() {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)"), update = () => setCount(value => value + 1);
    dark.addEventListener("change", update);
    return () => dark.removeEventListener("change", update);
  }, []);
  return count;
}

export const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colourOf = run => `--c${run.number % 8 + 1}`;

export function useWidth() {
  const node = useRef(null), [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(node.current);
    return () => observer.disconnect();
  }, []);
  return [node, width];
}

// Arrow keys move the focus between the elements that match a selector.
export function onArrows(event, selector, keys = ["ArrowUp", "ArrowDown"]) {
  const move = {[keys[0]]: -1, [keys[1]]: 1}[event.key];
  if (!move) return;
  const items = [...event.currentTarget.querySelectorAll(selector)];
  const next = items[items.indexOf(document.activeElement) + move];
  if (!next) return;
  event.preventDefault();
  next.focus();
  next.click();
}

export function Chip({value, verdict}) {
  const isNumber = typeof value === "number";
  const tones = {correct: "good", wrong: "bad", invalid: "bad", failed: "warn"};
  const tone = tones[verdict] ?? (!isNumber ? "warn" : value > 0 ? "good" : value < 0 ? "bad" : "");
  return html`<span class=${`chip ${tone}`}>${isNumber ? number(value) : verdict || "no score"}</span>`;
}

// Which samples of the run the answer to a request covers.
export const Coverage = ({indexed, exported, all}) => indexed < 1 ? html`
  <p class="coverage" role="status">Indexing new samples: ${Math.floor(indexed * 100)} %.
    <progress max="1" value=${indexed}></progress></p>`
  : exported < all && html`<p class="coverage">This file contains ${exported.toLocaleString("en")} of ${
    all.toLocaleString("en")} samples.</p>`;

export const Failed = ({error}) => error && html`<p class="failed" role="alert">${error}</p>`;
