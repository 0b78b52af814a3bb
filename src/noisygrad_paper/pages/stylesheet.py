"""The style of every page: no font, script or image from elsewhere; light or dark as the reader's system is."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #f4f6f8; --card: #fefefe; --ink: #1b2430; --muted: #5f6b78; --line: #dde3e9; --accent: #00639b;
  --mark: #e5f2fa;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0f1319; --card: #171c24; --ink: #e8ecf1; --muted: #a3aebb; --line: #343d49; --accent: #6cc0ee;
    --mark: #16374d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 3rem; }
header { margin-bottom: 2rem; }
h1 { font-size: clamp(1.6rem, 4.5vw, 2.2rem); line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 .6rem; }
p { margin: 0 0 1rem; max-width: 46rem; }
.lead { color: var(--muted); font-size: 1.08rem; }
section {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 1.5rem 1.75rem; margin: 0 0 1.25rem;
}
section > :last-child { margin-bottom: 0; }
.scroll { overflow-x: auto; margin: 0 0 1.25rem; }
.scroll tr > :first-child { position: sticky; left: 0; background: var(--card) padding-box; }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 4px; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); font-size: .9rem; padding-bottom: .5rem; }
caption { padding-right: max(0px, 100% - min(100vw - 4.5rem, 46rem)); }
th, td { padding: .45rem .75rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
thead th { border-bottom: 2px solid var(--line); font-size: .85rem; vertical-align: bottom; color: var(--muted); }
tbody th { font-weight: 500; }
tbody tr:last-child > * { border-bottom: 0; }
th:first-child, td:first-child { padding-left: 0; }
.number { text-align: right; }
.unit { font-weight: 400; white-space: nowrap; }
.unit::before { content: "("; } .unit::after { content: ")"; }
td strong { background: var(--mark); color: var(--accent); border-radius: 5px; padding: .1rem .4rem; margin: 0 -.4rem; }
figure { margin: 0 0 1.5rem; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figure .scroll { margin: 0; }
figure .wide img { min-width: 38rem; }
figcaption { color: var(--muted); font-size: .9rem; margin: .6rem 0 0; max-width: 46rem; }
footer { color: var(--muted); font-size: .85rem; margin-top: 1.5rem; }
@media (max-width: 40rem) {
  main { padding: 1.5rem .75rem 2rem; }
  section { padding: 1.1rem 1rem; border-radius: 10px; }
  th, td { padding: .4rem .5rem; }
}
@media print { section { break-inside: avoid; border: 0; padding: 0; } body { background: none; } }
"""
