"""The report's style sheet: one palette for light, one for dark."""

STYLE = (
    """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--fg:#1d2126;--soft:#5c6670;--rule:#dde1e5;
--bad:#b42318;--badbg:#fdeceb;--ok:#1a7f4b;--okbg:#e9f6ef;--fault:#d92d2026;--faint:#8a94a01c;
--c0:#d1242f;--c1:#1f6feb;--c2:#1a7f4b;--c3:#b35900;--c4:#8250df;--c5:#0e8a8a;--c6:#bf3989;
--c7:#6e7781;--rest:#aab3bc;--all:#1f6feb1f;--half:#1f6feb40;--median:#1f4e9e}
@media (prefers-color-scheme:dark){:root{--bg:#15181c;--card:#1c2025;--fg:#e4e7eb;--soft:#9aa4ae;
--rule:#333a42;--bad:#ff8a80;--badbg:#3a1d1d;--ok:#6fd39b;--okbg:#17301f;--fault:#ff6b6130;
--faint:#aab3bc1f;--c0:#ff6b61;--c1:#6cb0ff;--c2:#57c98a;--c3:#f0a04b;--c4:#b794f6;--c5:#4fd1d1;
--c6:#f58bc2;--c7:#a0a9b3;--rest:#56606a;--all:#6cb0ff26;--half:#6cb0ff4d;--median:#a9cdff}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
header,main,footer{max-width:1240px;margin:0 auto;padding:0 20px}
h1{font-size:24px;margin:22px 0 6px}h2{font-size:17px;margin:0 0 10px}
dl{display:flex;flex-wrap:wrap;gap:4px 28px;margin:0 0 14px}dl div{display:flex;gap:8px}
dt{color:var(--soft)}dd{margin:0}
section{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px 18px;
margin:0 0 16px}
#verdict p{margin:0 0 4px}#verdict.bad{background:var(--badbg);border-color:var(--bad)}
#verdict.bad p{font-weight:600}#verdict.calm{background:var(--okbg);border-color:var(--ok)}
#verdict p.note{font-weight:400;color:var(--soft)}
.note,footer{color:var(--soft);font-size:13px}footer{padding-bottom:28px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}
th{text-align:left;color:var(--soft);font-weight:500}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{white-space:nowrap}td{overflow-wrap:break-word;max-width:380px}
td:nth-child(-n+3){white-space:nowrap}
figure{margin:0}figcaption{font-size:13px;margin:0 0 2px}figcaption code{color:var(--soft)}
.grid-of-plots{display:grid;gap:18px 24px;
grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr))}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;margin:0 0 12px}
p.legend{position:sticky;top:0;background:var(--card);padding:8px 0;z-index:1;
border-bottom:1px solid var(--rule)}
.legend span{display:inline-flex;align-items:center;gap:6px}
.legend i{display:inline-block;width:18px;height:12px;flex:none;border-radius:2px}
.legend i.swatch{height:3px}
svg{display:block;width:100%;height:auto}.plot svg{max-width:760px}svg text{fill:var(--soft);font-size:11px}
svg text.name{fill:var(--fg);font-size:12px}
.grid{stroke:var(--rule);stroke-width:1;fill:none}
.line{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
.line.rest{stroke:var(--rest);stroke-width:1.1}i.rest{background:var(--rest)}
.line.median{stroke:var(--median);stroke-width:1.2;stroke-dasharray:4 3}
i.median{background:var(--median)}
path.all{fill:var(--all)}path.half{fill:var(--half)}
i.all{background:var(--all)}i.half{background:var(--half)}
rect.fault{fill:var(--fault)}rect.faint{fill:var(--faint)}
i.fault{background:var(--fault)}i.faint{background:var(--faint)}
"""
    + "".join(f".line.c{n}{{stroke:var(--c{n})}}i.c{n}{{background:var(--c{n})}}" for n in range(8))
    + "".join(
        f"rect.k{n}{{fill:var(--c{c})}}i.k{n}{{background:var(--c{c})}}"
        for n, c in enumerate((1, 5, 2, 3, 4, 6, 0, 7, 7, 7))
    )
)
