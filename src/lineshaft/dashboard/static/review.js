// An open approval: who decided is shown at once, and one key leads to the form.
"use strict";

function closeForm() {
  const form = document.querySelector("#decision-form > fieldset");
  if (form && document.getElementById("decided")) form.disabled = true;
}

document.addEventListener("lineshaft:updated", closeForm);

document.addEventListener("keydown", (event) => {
  if (event.key !== "f" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, textarea, select") || document.querySelector("dialog[open]")) return;
  const first = document.querySelector("#decision-form :is(input:not([type=hidden]), textarea, select, button)");
  if (first) { event.preventDefault(); first.focus(); }
});
