"use strict";
// In the head, so that the page is never drawn in the other theme first.
const cogfastTheme = {
  system: matchMedia("(prefers-color-scheme: dark)"),
  chosen: "system",

  show() {
    const isDark = this.chosen === "dark" || (this.chosen === "system" && this.system.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
  },
};
try {
  const chosen = localStorage.getItem("cogfast-theme");
  if (chosen === "light" || chosen === "dark") cogfastTheme.chosen = chosen;
} catch (error) {
  // A page from a disk may have no storage; it follows the system.
}
cogfastTheme.show();
