// The picture of a DAG: zoom and pan.
"use strict";

const view = { x: 0, y: 0, scale: 1, fitted: true };
const least = 0.05;
const most = 3;
// Below this size text is too small to read.
const far = 0.35;

function picture() { return document.querySelector("#canvas > svg"); }

function show() {
  const svg = picture();
  if (!svg) return;
  svg.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
  svg.classList.toggle("far", view.scale < far);
}

function fit() {
  const canvas = document.getElementById("canvas");
  const svg = picture();
  if (!svg) return;
  const width = svg.width.baseVal.value;
  const height = svg.height.baseVal.value;
  // As high as the picture needs, up to half of the window.
  const needed = height * Math.min(1, canvas.clientWidth / width) + 24;
  canvas.style.height = `${Math.max(160, Math.min(needed, window.innerHeight * 0.55))}px`;
  view.scale = Math.max(least, Math.min(1, canvas.clientWidth / width, canvas.clientHeight / height));
  view.x = Math.max(0, (canvas.clientWidth - width * view.scale) / 2);
  view.y = Math.max(0, (canvas.clientHeight - height * view.scale) / 2);
  view.fitted = true;
  show();
}

function zoom(factor, x, y) {
  const scale = Math.min(most, Math.max(least, view.scale * factor));
  // The point under the pointer stays where it is.
  view.x = x - (x - view.x) * (scale / view.scale);
  view.y = y - (y - view.y) * (scale / view.scale);
  view.scale = scale;
  view.fitted = false;
  show();
}

function middle() {
  const canvas = document.getElementById("canvas");
  return [canvas.clientWidth / 2, canvas.clientHeight / 2];
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-zoom]");
  if (!button) return;
  if (button.dataset.zoom === "fit") fit();
  else zoom(button.dataset.zoom === "in" ? 1.25 : 0.8, ...middle());
});

document.addEventListener("wheel", (event) => {
  const canvas = event.target.closest("#canvas");
  if (!canvas || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  const box = canvas.getBoundingClientRect();
  zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15, event.clientX - box.left, event.clientY - box.top);
}, { passive: false });

let drag = null;

document.addEventListener("pointerdown", (event) => {
  const canvas = event.target.closest("#canvas");
  if (!canvas || event.button !== 0) return;
  drag = { canvas, x: event.clientX - view.x, y: event.clientY - view.y, moved: false };
});

document.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const x = event.clientX - drag.x;
  const y = event.clientY - drag.y;
  if (!drag.moved && Math.hypot(x - view.x, y - view.y) < 5) return;
  drag.moved = true;
  drag.canvas.classList.add("moving");
  view.x = x;
  view.y = y;
  view.fitted = false;
  show();
});

document.addEventListener("pointerup", () => {
  if (!drag) return;
  drag.canvas.classList.remove("moving");
  const ended = drag;
  drag = null;
  if (ended.moved) {
    // The click that ends a drag opens nothing.
    const stop = (event) => { event.preventDefault(); event.stopPropagation(); };
    window.addEventListener("click", stop, { capture: true, once: true });
    setTimeout(() => window.removeEventListener("click", stop, { capture: true }), 0);
  }
});

document.addEventListener("dragstart", (event) => { if (event.target.closest("#canvas")) event.preventDefault(); });

document.addEventListener("keydown", (event) => {
  if (event.target.id !== "canvas") return;
  const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
  if (moves[event.key]) {
    view.x += moves[event.key][0];
    view.y += moves[event.key][1];
    view.fitted = false;
    show();
  } else if (event.key === "+" || event.key === "=") zoom(1.25, ...middle());
  else if (event.key === "-") zoom(0.8, ...middle());
  else if (event.key === "0") fit();
  else return;
  event.preventDefault();
});

// A box that gets the focus is moved into sight.
document.addEventListener("focusin", (event) => {
  const link = event.target.closest("#canvas a");
  if (!link) return;
  const canvas = document.getElementById("canvas").getBoundingClientRect();
  const box = link.getBoundingClientRect();
  document.getElementById("canvas").scrollTo(0, 0);
  if (box.left < canvas.left) view.x += canvas.left - box.left + 16;
  else if (box.right > canvas.right) view.x -= box.right - canvas.right + 16;
  if (box.top < canvas.top) view.y += canvas.top - box.top + 16;
  else if (box.bottom > canvas.bottom) view.y -= box.bottom - canvas.bottom + 16;
  show();
});

// An update may have replaced the picture by one of another size.
document.addEventListener("lineshaft:updated", () => { if (view.fitted) fit(); else show(); });
window.addEventListener("resize", () => { if (view.fitted) fit(); });
fit();
