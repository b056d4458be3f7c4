"""The page's style sheet: light or dark, wide or narrow, on paper; nothing is fetched from anywhere."""

from __future__ import annotations

from tieredckpt.goodput.page.kinds import classes, colours

_LIGHT = "--page:#f6f8fa;--card:#fff;--ink:#17212b;--soft:#5a6876;--line:#dfe5eb;--grid:#e9eef2;--curve:#2f6fb2;"
_DARK = "--page:#0f1419;--card:#171e25;--ink:#e6ebf0;--soft:#95a3b1;--line:#2a343e;--grid:#232c35;--curve:#6fa8e6;"
_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 40px}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:4px 14px;margin:0 2px 18px}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 2px}
h3{font-size:13px;font-weight:600;color:var(--soft);margin:16px 0 2px}
header p{margin:0;color:var(--soft)}
.state{border-radius:99px;padding:1px 11px;font-size:13px;font-weight:600;background:var(--line)}
.state.good{background:var(--productive);color:#fff}.state.bad{background:var(--detect);color:#fff}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;margin:0 0 16px}
.note{margin:0 0 8px;color:var(--soft);font-size:13.5px;max-width:110ch}
.hero{display:grid;grid-template-columns:auto 1fr;gap:12px 30px;align-items:center}
.ring{width:212px;height:212px;display:block}
.ring path{stroke:var(--card);stroke-width:1.5}.ring .big{font-size:35px;font-weight:700}.ring .small{font-size:14px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:12px 18px;margin:0}
.tile{border-left:3px solid var(--line);padding:0 0 0 11px}
.tile dt{color:var(--soft);font-size:13px}.tile dd{margin:0}
.tile .value{font-size:24px;font-weight:650;line-height:1.25;white-space:nowrap}
.tile .more{color:var(--soft);font-size:12.5px;line-height:1.35}
.tile.bad{border-color:var(--detect)}.tile.good{border-color:var(--productive)}.tile.warn{border-color:var(--lost)}
.spent{display:flex;height:16px;border-radius:8px;overflow:hidden;margin:20px 0 8px;background:var(--missing)}
.spent i{display:block;min-width:1px}
.legend{display:flex;flex-wrap:wrap;gap:3px 16px;margin:6px 0 2px;font-size:13px;color:var(--soft)}
.legend span{white-space:nowrap}.legend b{color:var(--ink);font-weight:600;margin-left:5px}
.k{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.wide{overflow-x:auto}
.chart{display:block;width:100%;min-width:640px;height:auto;font-size:12px}
.chart text{fill:var(--soft)}.chart .strong{fill:var(--ink);font-weight:600}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--line);fill:none}
.curve{fill:none;stroke:var(--curve);stroke-width:1.6;stroke-linejoin:round}
.area{fill:var(--curve);opacity:.28}.mean{stroke:var(--soft);stroke-dasharray:5 4;fill:none}
.undone{fill:none;stroke:var(--lost);stroke-width:1.6}.dot{fill:var(--lost)}.point{fill:var(--curve)}
.fault{stroke:var(--detect);stroke-width:1;stroke-dasharray:2 3;opacity:.75}.mark{fill:var(--detect)}
.bad{stroke:#d33;stroke-width:2}
.full{stroke:var(--soft);stroke-dasharray:3 4;fill:none;opacity:.7}
.hover{fill:transparent}.hover:hover{fill:var(--ink);opacity:.14}
.bar:hover{opacity:.8}
.unprotected{fill:#d33;stroke:var(--card);stroke-width:.6}.unprotected-key{background:#d33}
.hist{fill:var(--hydrate)}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:600;text-align:left;font-size:12.5px}
td,th{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap}
td{overflow-wrap:anywhere}td .sub{color:var(--soft);font-size:12.5px}.wide table{min-width:580px}
.tag{border:1px solid var(--line);border-radius:6px;padding:0 6px;font-size:12px;color:var(--soft);white-space:nowrap}
.meter{display:inline-block;vertical-align:middle;height:9px;border-radius:3px;min-width:2px}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft);font-size:13.5px}
footer{color:var(--soft);font-size:13px;margin:8px 4px}
@media(max-width:760px){main{padding:16px 10px}.hero{grid-template-columns:1fr;justify-items:center}
.tiles{width:100%}section{padding:14px}}
@media print{body{background:#fff}section{break-inside:avoid;border-color:#ccc}.wide{overflow:visible}}
"""


def style_sheet() -> str:
    light, dark = _LIGHT + colours(dark=False), _DARK + colours(dark=True)
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{_RULES}{classes()}"
    )
