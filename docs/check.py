"Check the built pages: none of them asks another host for anything, and every link within the site leads somewhere."
from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
import re
import sys

LOADED = {"script": ("src",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset"), "video": ("src", "poster"), "audio": ("src",), "track": ("src",),
          "embed": ("src",), "object": ("data",), "input": ("src",), "image": ("href", "xlink:href"), "use": ("href", "xlink:href")}
FETCHED = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch", "manifest"}  # what a `link` element makes a browser fetch
ELSEWHERE = re.compile(r"^\s*(https?:)?//", re.I)
CSS = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""", re.I)
SCRIPT = re.compile(r"""(?:fetch|import|importScripts|\.src\s*=|\.open)\s*\(?\s*(?:['"]GET['"]\s*,\s*)?['"]((?:https?:)?//[^'"]+)""", re.I)


class Page(HTMLParser):
    "What one page loads, links to, and can be linked to."
    def __init__(self, text: str):
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        has = {k: v or "" for k, v in attrs}
        self.inside = tag
        self.anchors |= {has[k] for k in ("id", "name") if k in has}
        self.loads += [word for k in LOADED.get(tag, ()) if k in has for word in (re.split(r"\s+|,", has[k]) if k == "srcset" else [has[k]])]
        if tag == "link" and FETCHED & set(has.get("rel", "").lower().split()): self.loads.append(has.get("href", ""))
        if tag == "a" and "href" in has: self.links.append(has["href"])
        self.loads += [a or b for a, b in CSS.findall(has.get("style", ""))]

    def handle_data(self, data):
        if self.inside == "style": self.loads += [a or b for a, b in CSS.findall(data)]
        if self.inside == "script": self.loads += SCRIPT.findall(data)

    def handle_endtag(self, tag): self.inside = ""


def requests(file: Path) -> list[str]:
    "What the file would ask another host for."
    text = file.read_text(errors="replace")
    loads = Page(text).loads if file.suffix == ".html" else SCRIPT.findall(text) if file.suffix == ".js" else [a or b for a, b in CSS.findall(text)]
    return [url for url in loads if ELSEWHERE.match(url)]


def dead(site: Path) -> list[str]:
    "Links within the site that lead nowhere."
    pages = {p.resolve(): Page(p.read_text()) for p in site.rglob("*.html")}
    def leads(at: Path, link: str) -> bool:
        url = urlsplit(link)
        if url.scheme or url.netloc: return True
        to = (at.parent / unquote(url.path)).resolve() if url.path else at
        return to.exists() and (not url.fragment or to not in pages or unquote(url.fragment) in pages[to].anchors)
    return [f"{at.relative_to(site.resolve())}: {link}" for at, page in pages.items() for link in page.links if not leads(at, link)]


def main(site: Path) -> int:
    files = [p for p in site.rglob("*") if p.suffix in (".html", ".css", ".js", ".svg")]
    asks = [f"{p.relative_to(site)}: {url}" for p in files for url in requests(p)]
    lost = dead(site)
    for line in asks: print(f"error: asks another host: {line}", file=sys.stderr)
    for line in lost: print(f"error: leads nowhere: {line}", file=sys.stderr)
    print(f"{sum(p.suffix == '.html' for p in files)} pages, {len(asks)} requests to other hosts, {len(lost)} dead links")
    return int(bool(asks or lost) or not files)


if __name__ == "__main__": sys.exit(main(Path(sys.argv[1])))
