// What the theme leaves out for keyboards and screen readers: names of its search and buttons, focus for what scrolls.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
for (const part of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset table:not([class]), pre > code")) {
  part.tabIndex = 0;
}
// The theme adds copy buttons after this script.
new MutationObserver(() => {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((nav, place) => nav.setAttribute("aria-label", `Code ${place + 1}`));
}).observe(document.body, {childList: true, subtree: true});
