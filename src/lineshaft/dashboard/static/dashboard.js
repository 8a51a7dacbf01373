// The dashboard's script: live updates, dialogs, times and keys. Everything else is plain pages and forms.
"use strict";

const live = document.getElementById("live");
const lost = document.getElementById("lost");
const announcer = document.getElementById("announce");

// Times: relative to now, with the absolute time on hover and focus. One switch for the time zone.

const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

function span(seconds) {
  for (const [index, [unit, size]] of units.entries()) {
    if (seconds >= size || unit === "s") {
      const whole = Math.floor(seconds / size);
      const next = units[index + 1];
      const rest = next && whole < 10 ? Math.floor((seconds % size) / next[1]) : 0;
      return rest ? `${whole} ${unit} ${rest} ${next[0]}` : `${whole} ${unit}`;
    }
  }
}

function absolute(time) {
  const zone = localStorage.getItem("zone") === "utc" ? "UTC" : undefined;
  const options = { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false, timeZoneName: "short", timeZone: zone };
  return new Intl.DateTimeFormat("sv-SE", options).format(time);
}

function showTimes(root) {
  const now = Date.now();
  for (const element of root.querySelectorAll("time[datetime]")) {
    const time = new Date(element.dateTime);
    if (Number.isNaN(time.getTime())) continue;
    const full = absolute(time);
    let text = full;
    if (element.hasAttribute("data-relative")) {
      const seconds = (now - time.getTime()) / 1000;
      text = Math.abs(seconds) < 1 ? "now" : seconds > 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
      if (element.hasAttribute("data-elapsed")) text = span(Math.abs(seconds));
    }
    if (element.title !== full) element.title = full;
    if (element.textContent !== text) element.textContent = text;
  }
}

showTimes(document);
setInterval(() => { if (!document.hidden) showTimes(document); }, 1000);

// Light, dark, or as the system says.

function useTheme() {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

useTheme();

// On a phone the navigation is one line: the current page is in sight.
const current = document.querySelector(".side [aria-current]");
if (current) current.parentElement.scrollLeft = current.offsetLeft - current.parentElement.clientWidth / 2;

// Live updates.

let source = null;
let paused = false;
let waiting = null;
let newest = null;
let retry = 0;
let lastAt = new Date();
let held = 0;

function showLive(text, state) {
  const button = document.getElementById("live-state");
  if (!button) return;
  button.dataset.state = state;
  button.setAttribute("aria-pressed", String(!paused));
  button.querySelector("[data-text]").textContent = text;
}

function isBusy() {
  // Never change what a person is working on.
  if (document.querySelector("dialog[open]:not(#help)")) return true;
  const active = document.activeElement;
  if (active && live.contains(active) && active.matches("input, textarea, select")) return true;
  if (live.querySelector("input[data-select]:checked")) return true;
  const selection = document.getSelection();
  return Boolean(selection && !selection.isCollapsed && live.contains(selection.anchorNode));
}

// Rows that new ones would push off the page: those after the last row that stays.
function pushedOff(update) {
  const fresh = new Set([...new DOMParser().parseFromString(update.live, "text/html").querySelectorAll("[data-hold] tr[data-row]")].map((row) => row.id));
  const shown = [...live.querySelectorAll("[data-hold] tr[data-row]")];
  const hasNew = [...fresh].some((id) => !document.getElementById(id));
  const last = shown.findLastIndex((row) => fresh.has(row.id));
  return new Set(hasNew ? shown.slice(last + 1) : []);
}

function apply(update, withNew) {
  held = 0;
  newest = update;
  const holds = (node) => !withNew && node.nodeType === 1 && node.matches("tr[data-row]") ;
  const staying = withNew ? new Set() : pushedOff(update);
  for (const row of staying) row.classList.add("passed");
  Idiomorph.morph(live, update.live, {
    morphStyle: "innerHTML",
    callbacks: {
      beforeNodeAdded(node) {
        // New rows wait until they are asked for, so that no row moves under the pointer.
        if (holds(node) && live.querySelector("[data-hold] tr[data-row]")) { held += 1; return false; }
        return true;
      },
      // While new rows wait, the list doesn't shrink.
      beforeNodeRemoved(node) { return !staying.has(node); },
      beforeNodeMorphed(node) { return !(node.nodeType === 1 && node.hasAttribute("data-keep")); },
      beforeAttributeUpdated(name, node) {
        // What the person opened or moved stays so.
        if (name === "style") return false;
        return !(name === "open" && node.matches("details, dialog"));
      },
    },
  });
  // The morph mixes them with the others; they belong after these, in their order.
  const active = document.activeElement;
  for (const row of staying) row.parentElement.append(row);
  if (active !== document.activeElement) active.focus({ preventScroll: true });
  const navigation = document.getElementById("navigation");
  if (navigation && update.navigation) {
    const before = needs(navigation);
    Idiomorph.morph(navigation, update.navigation, { morphStyle: "innerHTML" });
    announce(before, needs(navigation));
  }
  const banners = document.getElementById("banners");
  if (banners && update.banners !== undefined) Idiomorph.morph(banners, update.banners, { morphStyle: "innerHTML" });
  const chip = document.getElementById("new-rows");
  if (chip) {
    chip.hidden = !held;
    chip.textContent = held ? `${held} new: show` : "";
  }
  lastAt = new Date();
  showTimes(live);
  document.dispatchEvent(new CustomEvent("lineshaft:updated"));
}

function needs(navigation) {
  return [...navigation.querySelectorAll(".count")].map((count) => `${count.textContent} ${count.title}`).join(", ");
}

let announcedAt = 0;

function announce(before, after) {
  if (before === after || Date.now() - announcedAt < 10000) return;
  announcedAt = Date.now();
  announcer.textContent = after || "Nothing needs a person";
}

function flush() {
  if (waiting && !paused && !isBusy()) {
    const update = waiting;
    waiting = null;
    apply(update, false);
    showLive("Live", "on");
  } else if (waiting && !paused) {
    showLive("Waiting for you", "held");
  }
}

function noteLost(text) {
  lost.hidden = !text;
  lost.textContent = text ? `${text} What you see is as of ${lastAt.toLocaleTimeString("sv-SE")}.` : "";
}

function connect() {
  if (source || paused || document.hidden || !document.body.hasAttribute("data-live")) return;
  source = new EventSource(`/live?page=${encodeURIComponent(document.body.dataset.url)}`);
  source.onopen = () => { retry = 0; noteLost(""); showLive("Live", "on"); };
  source.addEventListener("page", (event) => { noteLost(""); waiting = JSON.parse(event.data); flush(); });
  source.addEventListener("away", (event) => { noteLost(`${JSON.parse(event.data)} The page continues by itself when the database answers.`); showLive("Lost", "off"); });
  source.addEventListener("gone", (event) => { noteLost(JSON.parse(event.data)); });
  source.addEventListener("ended", logInAgain);
  source.onerror = () => {
    noteLost("The connection to the server is lost; trying again.");
    showLive("Lost", "off");
    if (source && source.readyState === EventSource.CLOSED) {
      source = null;
      reconnectLater();
    }
  };
}

// The server refused the stream: the session may have ended while the page was hidden or the server away.
async function reconnect() {
  if (source || paused || document.hidden) return;
  let ended = false;
  try {
    ended = (await fetch(location.href, { method: "HEAD" })).redirected;
  } catch { /* The server is away. */ }
  if (!ended) { connect(); return; }
  logInAgain();
  reconnectLater();
}

// Not at once: leaving a page ends its stream too, and the page that is left has nothing to ask.
function reconnectLater() {
  retry = Math.min(retry + 1, 6);
  setTimeout(reconnect, 500 * 2 ** retry);
}

function logInAgain() {
  // What a person has typed isn't thrown away.
  const typed = [...document.querySelectorAll("main textarea, main input:not([type=hidden])")].some((field) => field.value !== field.defaultValue);
  if (typed || isBusy()) noteLost("Your session has ended. Copy what you need and reload the page to log in again.");
  else location.reload();
}

function disconnect() {
  if (source) source.close();
  source = null;
}

function toggleLive() {
  paused = !paused;
  if (paused) { disconnect(); showLive("Paused", "off"); } else { showLive("Live", "on"); connect(); }
}

document.addEventListener("visibilitychange", () => { if (document.hidden) disconnect(); else { showTimes(document); connect(); } });
document.addEventListener("focusout", () => setTimeout(flush, 50));
document.addEventListener("selectionchange", () => { if (waiting) flush(); });
window.addEventListener("pagehide", disconnect);
window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
setInterval(flush, 1000);
connect();

// Clicks.

document.addEventListener("click", async (event) => {
  const target = event.target.closest("[data-dialog], [data-close], [data-live-toggle], [data-theme-toggle], [data-zone-toggle], [data-copy], #new-rows, [data-select-all]");
  if (!target) return;
  if (target.dataset.dialog) openDialog(event, document.getElementById(target.dataset.dialog));
  else if (target.hasAttribute("data-close")) closeDialog(event, target.closest("dialog"));
  else if (target.hasAttribute("data-live-toggle")) toggleLive();
  else if (target.hasAttribute("data-theme-toggle")) {
    const dark = localStorage.getItem("theme") === "dark" || (!localStorage.getItem("theme") && matchMedia("(prefers-color-scheme: dark)").matches);
    localStorage.setItem("theme", dark ? "light" : "dark");
    useTheme();
  } else if (target.hasAttribute("data-zone-toggle")) {
    localStorage.setItem("zone", localStorage.getItem("zone") === "utc" ? "local" : "utc");
    showTimes(document);
  } else if (target.dataset.copy) copy(target);
  else if (target.id === "new-rows") { waiting = null; apply(newest, true); }
  else if (target.hasAttribute("data-select-all")) {
    for (const box of live.querySelectorAll("input[data-select]")) box.checked = target.checked;
    showSelected();
  }
});

// Without this script the same buttons open and close a dialog as a popover, which is not modal.
function openDialog(event, dialog) {
  event.preventDefault();
  if (dialog.matches(":popover-open")) dialog.hidePopover();
  dialog.showModal();
}

function closeDialog(event, dialog) {
  if (!dialog.open) return;
  event.preventDefault();
  dialog.close();
  flush();
}

// A dialog whose form was refused opens again, with what was entered in it and what is wrong with it.
function keepEntered(form) {
  const dialog = form.closest("dialog");
  const fields = [...form.elements].filter((field) => field.name && field.type !== "hidden");
  const entered = fields.map((field) => [field.name, field.value, field.checked]);
  if (dialog) sessionStorage.setItem("entered", JSON.stringify([dialog.id, entered]));
}

function openRefused() {
  const [id, entered] = JSON.parse(sessionStorage.getItem("entered") || "[]");
  sessionStorage.removeItem("entered");
  const dialog = id && document.getElementById(id);
  const faults = document.querySelector("main .faults");
  if (!dialog || !faults) return;
  const form = dialog.querySelector("form");
  const fields = [...form.elements].filter((field) => field.name && field.type !== "hidden");
  for (const [index, [name, value, checked]] of entered.entries()) {
    const field = fields[index];
    if (!field || field.name !== name) break;
    field.value = value;
    if (checked !== undefined) field.checked = checked;
  }
  form.querySelector("h2").after(faults);
  dialog.showModal();
}

openRefused();

async function copy(button) {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without HTTPS there is no clipboard for scripts, but a selection can be copied.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1200);
}

document.addEventListener("close", flush, true);
document.addEventListener("cancel", () => setTimeout(flush, 50), true);

// A form is sent once, and a select or checkbox that filters sends its form at once.
const sent = new WeakSet();
document.addEventListener("submit", (event) => {
  if (sent.has(event.target)) { event.preventDefault(); return; }
  if (event.target.method === "post") {
    keepEntered(event.target);
    // An action on many tasks takes up to 20 s. After that the person may have stopped the page.
    sent.add(event.target);
    setTimeout(() => { sent.delete(event.target); }, 30_000);
  }
  if (event.target.method === "get") {
    // Empty fields stay out of the address.
    for (const field of event.target.elements) if (field.name && !field.value) field.disabled = true;
    setTimeout(() => { for (const field of event.target.elements) field.disabled = false; }, 100);
  }
});
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-auto]")) event.target.form.requestSubmit();
  if (event.target.matches("[data-select]")) showSelected();
  if (event.target.matches("textarea[data-json]")) checkJson(event.target);
});
document.addEventListener("input", (event) => { if (event.target.matches("textarea[data-json]")) checkJson(event.target); });

function checkJson(area) {
  let fault = "";
  try { if (area.value.trim()) JSON.parse(area.value); } catch (error) { fault = error.message; }
  area.setCustomValidity(fault);
  const note = area.parentElement.querySelector("[data-json-note]");
  if (note) note.textContent = fault || "Valid JSON";
  area.setAttribute("aria-invalid", String(Boolean(fault)));
}

// Selected rows.

let lastBox = null;

function showSelected() {
  const boxes = [...live.querySelectorAll("input[data-select]")];
  const count = boxes.filter((box) => box.checked).length;
  for (const element of document.querySelectorAll("[data-selected-count]")) element.textContent = String(count);
  for (const element of document.querySelectorAll("[data-with-selection]")) element.hidden = !count;
  if (!count) flush();
}

document.addEventListener("click", (event) => {
  const box = event.target.closest("input[data-select]");
  if (!box) return;
  if (event.shiftKey && lastBox && lastBox !== box) {
    const boxes = [...live.querySelectorAll("input[data-select]")];
    const [from, to] = [boxes.indexOf(lastBox), boxes.indexOf(box)].sort((a, b) => a - b);
    for (const each of boxes.slice(from, to + 1)) each.checked = box.checked;
    showSelected();
  }
  lastBox = box;
});

// Keys.

const pages = { o: "/", t: "/tasks", d: "/dags", l: "/dead-letters", p: "/approvals", a: "/agents", u: "/guards", s: "/sources", c: "/costs", n: "/new" };
let going = false;

function rows() { return [...live.querySelectorAll("tr[data-row]")]; }

function moveRow(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.contains(document.activeElement));
  const next = all[Math.min(all.length - 1, Math.max(0, at < 0 ? 0 : at + step))];
  const link = next.querySelector("a");
  if (link) link.focus();
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, textarea, select, [contenteditable]")) {
    if (event.key === "Escape" && !event.target.closest("dialog")) event.target.blur();
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  if (going) {
    going = false;
    if (pages[event.key]) { event.preventDefault(); location.assign(pages[event.key]); }
    return;
  }
  if (event.key === "/") { event.preventDefault(); document.querySelector("[data-search]").focus(); }
  else if (event.key === "?") document.getElementById("help").showModal();
  else if (event.key === "g") { going = true; setTimeout(() => { going = false; }, 1500); }
  else if (event.key === ".") toggleLive();
  else if (event.key === "j") moveRow(1);
  else if (event.key === "k") moveRow(-1);
  else if (event.key === "x") {
    const row = rows().find((each) => each.contains(document.activeElement));
    const box = row && row.querySelector("input[data-select]");
    if (box) { box.checked = !box.checked; showSelected(); }
  }
});
