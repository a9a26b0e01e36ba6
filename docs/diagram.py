"Draw the mermaid diagrams of the index, when one has changed: `npm install mermaid`, then `python docs/diagram.py node_modules/mermaid CHROMIUM`."
from pathlib import Path
import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile

ROOT = Path(__file__).resolve().parent.parent
PAGE = """<pre class="mermaid">{}</pre><script src="{}"></script><script>mermaid.initialize({{startOnLoad: true, theme: "neutral", htmlLabels: false, flowchart: {{htmlLabels: false}}}})</script>"""


def draw(source: str, mermaid: Path, chromium: str) -> str:
    "The diagram as SVG, with its labels as text of the SVG."
    with tempfile.TemporaryDirectory() as tmp:
        page = Path(tmp) / "page.html"
        page.write_text(PAGE.format(html.escape(source), (mermaid / "dist/mermaid.min.js").resolve()))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--allow-file-access-from-files"]
        dom = subprocess.run([chromium, *flags, f"--user-data-dir={tmp}/profile", "--virtual-time-budget=10000", "--dump-dom", str(page)], capture_output=True, text=True, check=True)
    found = re.search(r"<svg.*?</svg>", dom.stdout, re.S)
    if not found: raise SystemExit("error: mermaid drew nothing.")
    return re.sub(r"<br\s*/?>", "<br/>", found[0])


if __name__ == "__main__":
    texts = ["".join(c["source"]) for c in json.loads((ROOT / "nbs/index.ipynb").read_text())["cells"]]
    sources = [m for text in texts for m in re.findall(r"^```mermaid\n(.*?)^```", text, flags=re.M | re.S)]
    for old in (ROOT / "docs").glob("diagram-*.svg"): old.unlink()
    for source in sources: (ROOT / f"docs/diagram-{hashlib.sha256(source.encode()).hexdigest()[:8]}.svg").write_text(draw(source, Path(sys.argv[1]), sys.argv[2]) + "\n")
