"""A page of HTML with everything in it: style, tables and pictures."""

import base64
from collections.abc import Iterable, Sequence
import html
import pathlib
import re

from jasgd.reports import _formats

# A dark page inverts pictures, and turns hues back to what they were.
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1f2328;
  --soft: #656d76; --line: #d8dee4; --mark: #fff4ce; --stripe: #f6f8fa;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --back: #1f1f1f; --text: #e3e3e3; --soft: #a0a6ad; --line: #3a3f45;
    --mark: #4a3f16; --stripe: #272727; --bad: #ff8a80; }
  img { filter: invert(0.88) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; background: var(--back);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 1rem 0 0.25rem; overflow-wrap: anywhere; }
p, figcaption { max-width: 44rem; overflow-wrap: anywhere; }
.bad { border-left: 0.25rem solid var(--bad); padding-left: 0.75rem; }
figure { margin: 1rem 0; }
img { display: block; width: 100%; max-width: 54rem; height: auto; }
figcaption, .note { color: var(--soft); font-size: 0.875rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid var(--line);
  text-align: right; vertical-align: top; }
th:first-child { text-align: left; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 400; white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--stripe); }
tbody tr.differs { background: var(--mark); }
td { max-width: 24rem; overflow-wrap: anywhere; }
summary { cursor: pointer; font-size: 1.2rem; font-weight: 600;
  margin: 2rem 0 0.5rem; }
"""


def make_page(title: str, parts: Iterable[str]) -> str:
  """The whole page, from parts that are HTML."""
  body = '\n'.join(parts)
  return (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f'<title>{_escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n'
    f'<body>\n<h1>{_escape(title)}</h1>\n{body}\n</body>\n</html>\n'
  )


def make_paragraph(text: str, label: str = '', is_bad: bool = False) -> str:
  """A paragraph, under its own small heading if there is a label."""
  heading = f'<h3>{_escape(label)}</h3>\n' if label else ''
  style = ' class="bad"' if is_bad else ''
  return f'{heading}<p{style}>{_escape(text)}</p>'


def make_section(title: str, parts: Sequence[str]) -> str:
  """A heading with its parts; '' if there are none."""
  if not parts:
    return ''
  return '\n'.join([f'<h2>{_escape(title)}</h2>', *parts])


def make_figure(path: pathlib.Path, caption: str) -> str:
  """A PNG with its caption, within the page itself."""
  data = base64.b64encode(path.read_bytes()).decode()
  caption = _escape(caption)
  return (
    f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
    f'<figcaption>{caption}</figcaption></figure>'
  )


def make_table(table: _formats.Table) -> str:
  """A table that scrolls by itself where the screen is narrow."""
  head = ''.join(
    f'<th scope="col">{_break(cell)}</th>' for cell in table.header
  )
  rows = '\n'.join(_make_row(row, row[0] in table.marked) for row in table.rows)
  note = _escape(table.note)
  return (
    f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
    f'<tbody>\n{rows}\n</tbody>\n</table></div>'
    + (f'\n<p class="note">{note}</p>' if note else '')
  )


def make_details(table: _formats.Table) -> str:
  """A table that is folded until a reader opens it."""
  return (
    f'<details>\n<summary>{_escape(table.title)}</summary>\n'
    f'{make_table(table)}\n</details>'
  )


def _escape(text: str) -> str:
  """Text for HTML, with spaces in place of control characters.

  All texts go through here: some come from files, or over a network.
  """
  printable = (letter if letter.isprintable() else ' ' for letter in text)
  return html.escape(''.join(printable))


def _make_row(row: tuple[str, ...], is_marked: bool) -> str:
  name, *cells = map(_escape, row)
  mark, style = ('≠ ', ' class="differs"') if is_marked else ('', '')
  return (
    f'<tr{style}><th scope="row">{mark}{name}</th>'
    + ''.join(f'<td>{cell}</td>' for cell in cells)
    + '</tr>'
  )


def _break(text: str) -> str:
  """Escaped text, with places where a long label may be broken."""
  return re.sub(r'([.=/])', r'\1<wbr>', _escape(text))
