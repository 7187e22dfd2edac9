"""A page as one HTML file: everything escaped, nothing fetched, no script but the two that are in it.

The content security policy names the scripts and the style sheet by their digests, so a script that came in with a
model's name could not run even if it were not escaped. Vega, Vega-Lite and Vega-Embed are one script, taken from
vl-convert, which carries them; putting it together takes two seconds, so it is kept in the cache folder, by version.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from brim import __version__
from brim.errors import RequestError
from brim.reporting.base import Page
from brim.reporting.drawing import draw, vega_lite_version
from brim.reporting.theme import CONFIG
from brim.storage.files import cache_folder, write_atomic

__all__ = ["chart_library", "render"]

_TEMPLATE = Path(__file__).parent / "template"
# The symbols of the charts as the legend draws them, about a point of radius 4.5.
_OUTLINES = {
    "circle": "M4,0A4,4,0,1,1,-4,0A4,4,0,1,1,4,0Z",
    "square": "M-3.6,-3.6H3.6V3.6H-3.6Z",
    "triangle-up": "M0,-4.4L4.6,3.6H-4.6Z",
    "triangle-down": "M0,4.4L4.6,-3.6H-4.6Z",
    "triangle-right": "M4.4,0L-3.6,4.6V-4.6Z",
    "diamond": "M0,-5.4L5.4,0L0,5.4L-5.4,0Z",
}


def render(page: Page) -> str:
    """The whole file."""
    charts = [chart for section in page.sections for chart in section.charts]
    style, script = _file("page.css"), _file("page.js")
    library = chart_library(vega_lite_version())
    html: str = _environment().get_template("page.html").render(
        page=page,
        version=__version__,
        policy=_policy(style, library, script),
        style=Markup(style),
        script=Markup(script),
        library=Markup(library),
        charts={"config": CONFIG, "specs": [draw(chart) for chart in charts]},  # in the order of the template
        outlines=_OUTLINES,
    )  # fmt: skip
    return html.encode("utf-8", "replace").decode()  # a document may hold half of a surrogate pair


def _policy(style: str, *scripts: str) -> str:
    allowed = " ".join(_digest(script) for script in scripts)
    return f"default-src 'none'; script-src {allowed}; style-src {_digest(style)}; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _environment() -> Any:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _file(name: str) -> str:
    return (_TEMPLATE / name).read_text(encoding="utf-8")


@functools.cache
def chart_library(schema_version: str) -> str:
    """The script for the Vega-Lite that Altair writes (`v6.4.1`); it gives the page `vegaEmbed` and nothing else."""
    release = ".".join(schema_version.removeprefix("v").split(".")[:2])
    carrier = metadata.version("vl-convert-python")
    kept = cache_folder() / "report" / f"vega-lite-{release}-vl-convert-{carrier}.js"
    try:
        return kept.read_text(encoding="utf-8")
    except OSError:
        script = _bundle(release, carrier)
    with contextlib.suppress(RequestError):  # a cache that cannot be written costs the next page two seconds, no more
        write_atomic(kept, script)
    return script


def _bundle(release: str, carrier: str) -> str:
    import vl_convert

    try:
        code = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", release)
    except ValueError as error:
        raise RequestError(
            f"vl-convert-python {carrier} does not carry Vega-Lite {release}, which altair writes; "
            f"install versions that go together: pip install --upgrade 'altair[save]'"
        ) from error
    # The bundle declares hundreds of short names: inside a function they stay its own. No tag may end the script.
    return "(() => {" + code.replace("</script", "<\\/script").replace("<!--", "<\\!--") + "\n})();"
