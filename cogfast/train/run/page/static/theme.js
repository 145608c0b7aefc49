"use strict";
// In the head, so that the page is never drawn in the other theme first.
try {
  const chosen = localStorage.getItem("cogfast-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch (error) {
  // A page from a disk may have no storage; it follows the system.
}
