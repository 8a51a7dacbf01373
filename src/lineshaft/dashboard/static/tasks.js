// The page of one task: the beginning of a text artifact is fetched when its preview is opened.
"use strict";

document.addEventListener("toggle", async (event) => {
  const details = event.target;
  if (!(details instanceof HTMLDetailsElement) || !details.open || !details.dataset.preview || details.dataset.loaded) return;
  details.dataset.loaded = "yes";
  const text = details.querySelector("pre");
  try {
    const response = await fetch(details.dataset.preview);
    text.textContent = response.ok ? await response.text() : `The preview can't be loaded (${response.status}).`;
  } catch {
    text.textContent = "The server didn't answer. Close the preview and open it again.";
    delete details.dataset.loaded;
  }
}, true);
